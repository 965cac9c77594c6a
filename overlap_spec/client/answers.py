"""The answers to one call, as they come and as they are taken.

A reader that is slower than they come gets what has come meanwhile as one delta, so its work for a token shrinks the
further it is behind. A delta that tells what its step verified stays the delta of one step.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from functools import reduce

import msgspec
from msgspec.structs import replace

from overlap_spec.client.link import pack_ids
from overlap_spec.client.log_probs import NONE, TokenLogProb, extended
from overlap_spec.errors import ActorDied, OverlapSpecError
from overlap_spec.messages import (
    AuditReply,
    Continued,
    Detokenize,
    Detokenized,
    DraftUpdated,
    Finish,
    Flush,
    FlushDone,
    Generate,
    GetAudit,
    GetStats,
    Phases,
    Pong,
    StatsReply,
    Tokenize,
    Tokenized,
    UpdateDraft,
    Usage,
    Verified,
)


class Delta(msgspec.Struct, frozen=True):
    """What one step added to a request, or several steps that had come by then.

    The delta with a `finish` is the last; `usage` counts so far. `log_probs`, of `token_ids`, and `prompt_log_probs`,
    all of them in the first delta, where they are asked for. `verified`: what the step verified, if the request reports
    it; `verified.origin(i)` is where token i came from. `phases`: with the last delta of a request that is traced.
    """

    text: str
    token_ids: list[int]
    finish: Finish | None
    usage: Usage
    verified: Verified | None = None
    log_probs: Sequence[TokenLogProb] = NONE
    prompt_log_probs: Sequence[TokenLogProb] = NONE
    phases: Phases | None = None


Question = Generate | Tokenize | Detokenize | Flush | GetStats | GetAudit | UpdateDraft
Reply = Tokenized | Detokenized | FlushDone | StatsReply | AuditReply | DraftUpdated | Pong
Answer = Delta | Reply | OverlapSpecError


MOST_DEATHS = 2  # of frontends that had a call: then it is not sent to another one


class Kept:
    """A question, for another frontend to answer if this one dies."""

    __slots__ = ("_num_deaths", "_question")

    def __init__(self, question: Question) -> None:
        self._question = question
        self._num_deaths = 0

    def died(self) -> bool:
        """Note that a frontend has died that had the call. Returns whether that was one too many."""
        self._num_deaths += 1
        return self._num_deaths >= MOST_DEATHS

    def again(self) -> Question:
        """What is to be sent to another one."""
        return self._question


class KeptRequest(Kept):
    """A request, and what its caller has been given of it: enough for another frontend to go on behind that."""

    __slots__ = ("_num_chars", "_output", "_request", "_sent_at", "_usage")

    def __init__(self, request: Generate) -> None:
        super().__init__(request)
        self._request = request
        self._sent_at = time.monotonic()
        self._output = array("i")
        self._num_chars = 0
        self._usage = Usage(0, 0, 0, 0)

    def gained(self, text: str, token_ids: list[int], usage: Usage) -> None:
        """A row of it has come."""
        self._output.extend(token_ids)
        self._num_chars += len(text)
        self._usage = usage

    def again(self) -> Generate:
        """The request, to go on at its next token. Its time limits count from when it was first sent.

        One that no frontend has had yet is a new one.
        """
        terms, usage, has_begun = self._request.terms, self._usage, bool(self._output)
        terms = replace(
            terms,
            age_s=terms.age_s + time.monotonic() - self._sent_at,
            has_begun=terms.has_begun or has_begun,
        )
        continued = None
        if has_begun or self._num_chars or self._num_deaths:
            packed = pack_ids(self._output)
            continued = Continued(packed, self._num_chars, usage.cached_tokens, usage.spec_verify_ct)
        return replace(self._request, terms=terms, continued=continued)


class Answers:
    """What has come for one call and was not taken yet. Any number of `put`, one reader."""

    def __init__(self) -> None:
        self.kept: Kept | None = None
        self.has_ended = False  # its last answer has come, be it taken or not
        self._waiting: deque[Answer] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, answer: Answer) -> None:
        """Add an answer and wake the reader."""
        self.has_ended = not isinstance(answer, Delta) or answer.finish is not None
        self._waiting.append(answer)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def take(self) -> Answer:
        """The next answer; deltas that wait already come as one. Cancellation: loses nothing."""
        while not self._waiting:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._next()

    def take_all(self) -> Iterator[Answer]:
        """What has come, deltas that can be joined as one."""
        while self._waiting:
            yield self._next()

    def _next(self) -> Answer:
        first = self._waiting.popleft()
        if self._waiting and isinstance(first, Delta):
            return _joined([first, *self._following(first)])
        return first

    def _following(self, last: Delta) -> list[Delta]:
        """Take the deltas that can be joined to one."""
        deltas: list[Delta] = []
        while last.verified is None and self._waiting:
            answer = self._waiting[0]
            if not isinstance(answer, Delta) or answer.verified is not None:
                break
            deltas.append(answer)
            self._waiting.popleft()
        return deltas


class Arrivals:
    """What has come for several calls; one reader takes all of it."""

    def __init__(self) -> None:
        self._come: dict[str, Answers] = {}  # by request id, since they were taken last
        self._reader: asyncio.Future[None] | None = None

    def answers(self, request_id: str) -> Answers:
        """Those of one more call."""
        return _SharedAnswers(request_id, self)

    def note(self, request_id: str, answers: Answers) -> None:
        """These have one more; wakes the reader."""
        self._come[request_id] = answers
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def take(self) -> list[tuple[str, Answer]]:
        """What has come, at least one answer, each with its request id. Cancellation: loses nothing."""
        while not self._come:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        come, self._come = self._come, {}
        return [(request_id, answer) for request_id, answers in come.items() for answer in answers.take_all()]


class _SharedAnswers(Answers):
    """Those of one call, which are taken with those of others."""

    def __init__(self, request_id: str, arrivals: Arrivals) -> None:
        super().__init__()
        self._request_id = request_id
        self._arrivals = arrivals

    def put(self, answer: Answer) -> None:
        super().put(answer)
        self._arrivals.note(self._request_id, self)


def error_in(answer: Answer) -> OverlapSpecError:
    """What an answer that was not asked for means. One error may end many calls: each has a traceback of its own."""
    if isinstance(answer, OverlapSpecError):
        return answer.with_traceback(None)
    return ActorDied("frontend", f"answered with {type(answer).__name__}, which was not asked for")


def _joined(deltas: Sequence[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return Delta(
        "".join([delta.text for delta in deltas]),
        [token for delta in deltas for token in delta.token_ids],
        last.finish,
        last.usage,
        None,
        reduce(extended, (delta.log_probs for delta in deltas), NONE),
        reduce(extended, (delta.prompt_log_probs for delta in deltas), NONE),
        last.phases,
    )
