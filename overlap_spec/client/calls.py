"""The open calls of one client, and the conversion of their answers.

Requests that one reader follows reach the engine together, and what has come for any of them is taken at once:

    async with client.together() as running:
        await running.start([Generate("a", ..), Generate("b", ..)])
        for request_id, answer in await running.take(): ..

Leaving the block ends those that still run: their Cancels leave at once. What they share travels once:

    Generate(a, p, s) Generate(b, p, s) Generate(c, q, s)   ->   Shared([p], [s])  (a, 0, 0)  (b, 0, 0)  (c, q, 0)

A request that shares nothing is sent as it is.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Self, assert_never

import msgspec

from overlap_spec.client.answers import Answer, Answers, Arrivals, Delta, Kept, KeptRequest, Question, error_in
from overlap_spec.client.link import ClientDealer, pack_ids
from overlap_spec.client.log_probs import NONE, TokenLogProb, extended, read_log_probs
from overlap_spec.errors import (
    OverlapSpecError,
    Overloaded,
    RequestAborted,
    RequestError,
    RequestFailed,
    RequestTimeout,
)
from overlap_spec.messages import (
    ChatPrompt,
    ErrorCode,
    Finish,
    Generate,
    GenerateShared,
    LogProbs,
    Origin,
    Prompt,
    Rejected,
    SamplingParams,
    Shared,
    TextDeltas,
    TextPrompt,
    ToFrontendFromClient,
    TokenPrompt,
    Usage,
    Verified,
)

TOGETHER = 256  # requests that are sent to another frontend at once


def with_shared_parts(requests: Sequence[Generate]) -> list[ToFrontendFromClient]:
    """The messages of these requests, which are to be sent together. Objects that are the same are shared.

    Raises: RequestError if a sampling cannot be sent.
    """
    samplings = _several([request.sampling for request in requests])
    if not samplings:
        return list(requests)
    prompts = _several([request.prompt for request in requests])
    place_of_sampling = {id(sampling): place for place, sampling in enumerate(samplings)}
    place_of_prompt = {id(prompt): place for place, prompt in enumerate(prompts)}

    def sent(request: Generate) -> Generate | GenerateShared:
        place = place_of_sampling.get(id(request.sampling))
        if place is None:
            return request
        prompt: Prompt | int = place_of_prompt.get(id(request.prompt), request.prompt)
        return GenerateShared(request.request_id, prompt, place, request.terms, request.seed, request.continued)

    return [Shared(prompts, [_raw(sampling) for sampling in samplings]), *map(sent, requests)]


def _several(objects: Sequence[Prompt | SamplingParams]) -> list[Any]:
    """Those that are there more than once, in their order."""
    counts = Counter(map(id, objects))
    return list({id(each): each for each in objects if counts[id(each)] > 1}.values())


def _raw(sampling: SamplingParams) -> msgspec.Raw:
    try:
        return msgspec.Raw(msgspec.msgpack.encode(sampling))
    except (OverflowError, ValueError) as error:
        raise RequestError("sampling", f"sampling cannot be sent: {error}") from error


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `token_ids` include the token that ended it, `text` does not.

    If the request reports it: `provenance` has the step of each token and where it came from, `steps` what each step
    verified.
    """

    text: str
    token_ids: list[int]
    finish: Finish
    usage: Usage
    provenance: tuple[tuple[int, Origin], ...] = ()
    steps: tuple[Verified, ...] = ()
    log_probs: Sequence[TokenLogProb] = field(default_factory=list)
    prompt_log_probs: Sequence[TokenLogProb] = field(default_factory=list)


def completion_of(deltas: Sequence[Delta]) -> Completion:
    """The whole answer of which these are the parts."""
    last = deltas[-1]
    assert last.finish is not None
    steps = [(delta.verified, len(delta.token_ids)) for delta in deltas if delta.verified is not None]
    return Completion(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        last.finish,
        last.usage,
        tuple((verified.step_id, verified.origin(i)) for verified, count in steps for i in range(count)),
        tuple(verified for verified, _ in steps),
        reduce(extended, (delta.log_probs for delta in deltas), NONE),
        reduce(extended, (delta.prompt_log_probs for delta in deltas), NONE),
    )


class Calls:
    """Open calls by request id, each with its answers; an error is a call's last one.

    A request that was left before its last row keeps its id until that row has come: else a new request of
    the same id would be given it. What a call's request was given is kept until its end: should the frontend die, the
    next one goes on behind it.
    """

    def __init__(self) -> None:
        self._open: dict[str, Answers] = {}
        self._of_prompts: dict[str, Sequence[TokenLogProb]] = {}  # parts, until the first delta takes them along
        self._names: dict[int, bytes] = {}  # of tokens whose log-probs have come
        self._left: dict[str, asyncio.Event] = {}

    def keep(self, asked: Question) -> None:
        """Keep what an open call asks, for another frontend to go on with."""
        kept = KeptRequest(asked) if isinstance(asked, Generate) else Kept(asked)
        self._open[asked.request_id].kept = kept

    def frontend_died(self, error: OverlapSpecError) -> None:
        """End every open call that cannot go on at another frontend; of those that were left nothing more comes."""
        for answers in self._open.values():
            if answers.kept is None or answers.kept.died():
                answers.kept = None
                answers.put(error)
        self._free_left()

    def again(self) -> list[Question]:
        """What open calls ask, each request to go on behind what has come of it."""
        return [answers.kept.again() for answers in self._open.values() if answers.kept is not None]

    def send_again(self, link: ClientDealer) -> None:
        """Send what `again` gives to another frontend. A request that has become too large ends; the others go on."""
        requests = []
        for asked in self.again():
            if isinstance(asked, Generate):
                requests.append(asked)
            else:
                link.send(asked)
        for start in range(0, len(requests), TOGETHER):
            self._send_together(link, requests[start : start + TOGETHER])

    def _send_together(self, link: ClientDealer, requests: Sequence[Generate]) -> None:
        try:
            link.send_all(with_shared_parts(requests))
        except RequestError as error:
            if len(requests) == 1:
                self.answer(requests[0].request_id, error)
                return
            for request in requests:
                self._send_together(link, [request])

    def open(self, request_id: str, answers: Answers | None = None) -> Answers:
        """Returns where its answers come: `answers`, or new ones. Raises: RequestError if a call of that id is open."""
        if request_id in self._open:
            raise RequestError("request_id", f"request_id {request_id!r} is already in use by an open request")
        opened = self._open[request_id] = Answers() if answers is None else answers
        return opened

    def ids(self) -> list[str]:
        """The ids of open calls."""
        return list(self._open)

    def close(self, request_id: str) -> None:
        """Forget a call that has had its last answer, or a query: its late answers are dropped."""
        self._open.pop(request_id, None)
        self._of_prompts.pop(request_id, None)

    def leave(self, request_id: str) -> None:
        """Forget a request. If it still runs, its last row will free the id."""
        answers = self._open.get(request_id)
        self.close(request_id)
        if answers is not None and not answers.has_ended:
            self._left[request_id] = asyncio.Event()

    async def until_free(self, request_id: str) -> None:
        """Wait for the last row of a request that was left. Cancellation: safe."""
        while request_id in self._left:
            await self._left[request_id].wait()

    def deliver(self, message: TextDeltas) -> None:
        """Give each row to its request."""
        rows = zip(message.request_ids, message.texts, message.token_ids, message.finishes, message.usages, strict=True)
        reports = bool(message.verified or message.log_probs or message.prompt_log_probs or message.phases)
        for request_id, text, token_ids, finish, usage in rows:
            answers = self._open.get(request_id)
            if answers is None:
                if finish is not None and request_id in self._left:
                    self._left.pop(request_id).set()
                continue
            if isinstance(kept := answers.kept, KeptRequest):
                kept.gained(text, token_ids, usage)
            told: tuple[Any, ...] = ()
            if reports:
                if request_id in message.prompt_log_probs:
                    self._keep_of_prompt(request_id, message.prompt_log_probs[request_id])
                    if not token_ids and finish is None:
                        continue
                told = self._told(request_id, message)
            answers.put(Delta(text, token_ids, finish, usage, *told))

    def _keep_of_prompt(self, request_id: str, part: LogProbs) -> None:
        earlier = self._of_prompts.get(request_id, NONE) if part.first else NONE
        self._of_prompts[request_id] = extended(earlier, read_log_probs(part, self._names))

    def _told(self, request_id: str, message: TextDeltas) -> tuple[Any, ...]:
        """What a row's message tells beside it."""
        log_probs = read_log_probs(message.log_probs.get(request_id), self._names)
        of_prompt = self._of_prompts.pop(request_id, NONE)
        return message.verified.get(request_id), log_probs, of_prompt, message.phases.get(request_id)

    def reject(self, message: Rejected) -> None:
        """The engine gives this call no (further) answer."""
        left = self._left.pop(message.request_id, None)
        if left is not None:
            left.set()
        else:
            self.answer(message.request_id, error_of(message))

    def answer(self, request_id: str, answer: Answer) -> None:
        """Give one answer to its call, if it is still open."""
        answers = self._open.get(request_id)
        if answers is not None:
            answers.put(answer)

    def fail(self, error: OverlapSpecError) -> None:
        """End every open call with an error; of those that were left nothing more is expected."""
        for answers in self._open.values():
            answers.kept = None
            answers.put(error)
        self._free_left()

    def _free_left(self) -> None:
        for left in self._left.values():
            left.set()
        self._left.clear()


def error_of(message: Rejected) -> OverlapSpecError:
    """The exception for a refusal."""
    match message.code:
        case ErrorCode.BAD_REQUEST:
            return RequestError(message.field, message.message)
        case ErrorCode.OVERLOADED | ErrorCode.STARTING | ErrorCode.SHUTTING_DOWN:
            return Overloaded(message.message)
        case ErrorCode.TIMEOUT:
            return RequestTimeout(message.field, message.message)
        case ErrorCode.NOT_FINITE | ErrorCode.FAILED:
            return RequestFailed(message.code.value, message.message)
        case _:
            assert_never(message.code)


def aborted(finish: Finish) -> RequestAborted:
    """The exception that follows the last delta of an aborted request."""
    return RequestAborted(finish.message or "the request was aborted")


def prompt_of(prompt: str | Sequence[dict[str, Any]] | Sequence[int] | Prompt) -> Prompt:
    """A user's prompt as a message. Raises: RequestError if it is neither text, messages nor token ids."""
    if isinstance(prompt, TextPrompt | ChatPrompt | TokenPrompt):
        return prompt
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, dict) for item in items):
        return ChatPrompt(items)
    return TokenPrompt(pack_ids(items, "prompt"))


Send = Callable[[Sequence[Generate]], None]


class Together:
    """Made by `Client.together`. `leave`: cancels requests, of which nothing more is wanted."""

    def __init__(self, calls: Calls, send: Send, leave: Callable[[Collection[str]], None]) -> None:
        self._calls = calls
        self._send = send
        self._leave = leave
        self._arrivals = Arrivals()
        self._running: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._leave(self._running)

    async def start(self, requests: Sequence[Generate]) -> None:
        """Send requests, which are computed together. Raises: as `Client.generate`; then none of them was sent.

        Cancellation: nothing was sent.
        """
        for request in requests:
            await self._calls.until_free(request.request_id)
        opened: list[str] = []
        try:
            for request in requests:
                self._calls.open(request.request_id, self._arrivals.answers(request.request_id))
                self._calls.keep(request)
                opened.append(request.request_id)
            self._send(requests)
        except BaseException:
            for request_id in opened:
                self._calls.close(request_id)
            raise
        self._running.update(opened)

    async def take(self) -> list[tuple[str, Delta | OverlapSpecError]]:
        """What has come, at least one answer: the last one of a request is a delta with a finish, or an error.

        Cancellation: loses nothing.
        """
        found: list[tuple[str, Delta | OverlapSpecError]] = []
        for request_id, answer in await self._arrivals.take():
            if request_id not in self._running:
                continue  # what follows its last answer
            taken = answer if isinstance(answer, Delta) else error_in(answer)
            if not isinstance(taken, Delta) or taken.finish is not None:
                self._running.remove(request_id)
                self._calls.close(request_id)
            found.append((request_id, taken))
        return found
