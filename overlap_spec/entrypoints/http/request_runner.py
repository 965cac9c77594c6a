"""Runs the engine requests of one HTTP request, and aborts them when the HTTP client stops listening.

    Group of EngineRequests --Runner.run--> lists of (index in the group, delta) --> collect | a stream

A list holds all deltas that had arrived. Leaving `Runner.run` early, for whatever reason, aborts the unfinished
requests of the group.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from starlette.requests import Request

from overlap_spec.client.link import unpack_ids
from overlap_spec.client.log_probs import NONE, TokenLogProb, extended
from overlap_spec.entrypoints.http.auth import identity_of
from overlap_spec.entrypoints.http.body_fields import check_log_probs
from overlap_spec.entrypoints.http.engine_client import DeltaLike, EngineClient, RequestsLike
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_spans import NO_SPANS, RequestSpan, RequestSpans
from overlap_spec.entrypoints.http.speculation import SpeculationReport
from overlap_spec.entrypoints.http.streams import Turn
from overlap_spec.errors import OverlapSpecError, RequestAborted, RequestError
from overlap_spec.messages import (
    ChatPrompt,
    Finish,
    FinishKind,
    Generate,
    Phases,
    Prompt,
    SamplingParams,
    Speculative,
    Terms,
    TextPrompt,
    TokenPrompt,
    Usage,
    Verified,
    id_on_link,
)
from overlap_spec.metrics.prometheus import RequestTimer, ServerMetrics
from overlap_spec.runtime.turns import Turns

Steps = AsyncGenerator[list[tuple[int, DeltaLike]], None]
RequestId = Annotated[str, msgspec.Meta(max_length=256)]  # one that a user chooses
NOTHING = Usage(0, 0, 0, 0)
MOST_LEN = 1 << 31
PART = 256  # requests that are sent together: some milliseconds of work


class EngineRequest(msgspec.Struct, frozen=True):
    """One request for the engine. `names`: by our names, those of its fields in the API that it came through.

    `after`: another request of the group; this one starts when that one's first token has come. `seed`: instead of that
    of `sampling`, which the requests of a group share, as they share prompts. `cache_salt`: in the same way, instead of
    that of the group's terms, if it is not "".
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    names: Mapping[str, str]
    after: str = ""
    seed: int | None = None
    cache_salt: str = ""

    @property
    def own_sampling(self) -> SamplingParams:
        """The sampling with this request's seed."""
        return msgspec.structs.replace(self.sampling, seed=self.seed) if self.seed is not None else self.sampling


class Group(msgspec.Struct, frozen=True):
    """The requests of one HTTP request, abortable by the group's id or each by its own. `terms`: of all of them."""

    id: str
    requests: Sequence[EngineRequest]
    terms: Terms = Terms()


class AbortedDelta(msgspec.Struct, frozen=True):
    """The delta that ends an aborted request."""

    finish: Finish
    usage: Usage
    text: str = ""
    token_ids: list[int] = []
    verified: Verified | None = None
    log_probs: Sequence[TokenLogProb] = NONE
    prompt_log_probs: Sequence[TokenLogProb] = NONE
    phases: Phases | None = None


class Collected:
    """The whole answer to one request so far."""

    def __init__(self, asked: Speculative) -> None:
        self.report = SpeculationReport(asked)
        self.token_ids: list[int] = []
        self.log_probs = self.prompt_log_probs = NONE
        self.usage = NOTHING
        self.finish: Finish | None = None
        self.text = ""
        self.last_at = 0.0  # time.perf_counter()

    def add(self, delta: DeltaLike) -> None:
        """Append what a step added."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.log_probs = extended(self.log_probs, delta.log_probs)
        self.prompt_log_probs = delta.prompt_log_probs or self.prompt_log_probs  # one delta has all
        self.report.add(delta.verified, len(delta.token_ids))
        self.usage, self.finish = delta.usage, delta.finish
        self.last_at = time.perf_counter()


class Runner:
    """Starts and follows requests, and knows the ids of those that are open."""

    def __init__(
        self, client: EngineClient, metrics: ServerMetrics, spans: RequestSpans = NO_SPANS, max_len: int = MOST_LEN
    ) -> None:
        """`max_len`: tokens of a prompt and its answer."""
        self._client = client
        self._max_len = max_len
        self._spans = spans
        self._metrics = metrics
        # By the name of an API key: an id that its user may name -> ids of requests. "": of no key.
        self._open: dict[str, dict[str, tuple[str, ...]]] = {}
        self._waiting: set[str] = set()  # requests that start after another one, by their ids on the link
        self._writing: Turns[str] = Turns(1)

    def writing(self, group: Group) -> Turn:
        """The turns at which a large answer to a client's requests is written."""
        return functools.partial(self._writing.turn, group.terms.client)

    async def run(self, group: Group) -> Steps:
        """Yield what the steps add, until every request has finished. The first error ends all.

        Raises: RequestError with the API's field name, Overloaded, RequestTimeout, ActorDied, Problem if an id is in
        use.
        """
        key = group.terms.key
        await self._check_log_probs(group)
        names, arrived_at = self._claim(group), time.monotonic()
        waiting = {id_on_link(key, request.request_id) for request in group.requests if request.after}
        self._waiting |= waiting
        try:
            with ExitStack() as spans:
                async with self._client.together() as running:
                    run = _GroupRun(group, functools.partial(self._follow, spans), running, arrived_at)
                    await run.start()
                    while run.is_open:
                        if step := await run.step(self._waiting):
                            yield step
        finally:
            self._waiting -= waiting
            mine = self._open[key]
            for name in names:
                del mine[name]
            if not mine:
                del self._open[key]

    async def collect(self, group: Group) -> list[Collected]:
        """Wait for the whole answer, in the order of the requests."""
        answers = [Collected(request.sampling.speculative) for request in group.requests]
        async with aclosing(self.run(group)) as steps:
            async for step in steps:
                for index, delta in step:
                    answers[index].add(delta)
        return answers

    async def prompt_ids(self, prompt: Prompt, owner: str) -> list[int]:
        """The token ids of a prompt, before it is truncated. `owner`: whose turn it takes. Raises: as `run`."""
        if isinstance(prompt, TokenPrompt):
            return unpack_ids(prompt.ids)
        return await self._client.tokenize(prompt, owner=owner)

    async def abort(self, name: str, of_key: str | None) -> None:
        """End the request or group of this id, exactly; it may also belong to another client of the engine.

        `of_key`: the API key whose requests may be ended; None: every key's.
        """
        found: dict[str, None] = {}
        for key in self._keys(of_key):
            ids = self._open[key].get(name, ())
            self._start_none(key, ids)
            found |= dict.fromkeys(ids)
        for request_id in found or (name,):
            await self._client.cancel(request_id, everyone=True, of_key=of_key)

    async def abort_all(self, of_key: str | None) -> None:
        """End every request of an API key; None: of every client."""
        for key in self._keys(of_key):
            for ids in self._open[key].values():
                self._start_none(key, ids)
        await self._client.cancel("", everyone=True, of_key=of_key)

    def _keys(self, of_key: str | None) -> list[str]:
        """Those with open requests, of which `of_key` may be one."""
        return list(self._open) if of_key is None else [of_key] * (of_key in self._open)

    def _start_none(self, key: str, ids: Sequence[str]) -> None:
        """Requests that wait for another one's first token are not to start."""
        self._waiting.difference_update(id_on_link(key, request_id) for request_id in ids)

    async def text_of(self, prompt: Prompt, skip_special_tokens: bool, owner: str) -> str:
        """A prompt as text; token ids are decoded, at the owner's turn."""
        assert not isinstance(prompt, ChatPrompt), "a conversation has a template's text"
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await self._client.detokenize(unpack_ids(prompt.ids), skip_special_tokens, owner)

    async def _check_log_probs(self, group: Group) -> None:
        try:
            asked = [(request.prompt, request.sampling) for request in group.requests]
            await check_log_probs(asked, self._max_len, partial(self.prompt_ids, owner=group.terms.client))
        except RequestError as error:
            raise renamed(error, group.requests[0].names) from None

    def _claim(self, group: Group) -> list[str]:
        owned: dict[str, tuple[str, ...]] = {request.request_id: (request.request_id,) for request in group.requests}
        owned.setdefault(group.id, tuple(request.request_id for request in group.requests))
        mine = self._open.get(group.terms.key, {})  # kept only with something in it
        for name in owned:
            if name in mine:
                raise Problem(400, f"rid: a request with the id {name!r} is running", "rid", "invalid_value")
        mine.update(owned)
        self._open[group.terms.key] = mine
        return list(owned)

    def _follow(self, spans: ExitStack, index: int, request: EngineRequest) -> "_Followed":
        block = spans.enter_context(ExitStack())
        asked = request.sampling if self._spans is NO_SPANS else request.own_sampling
        span = block.enter_context(self._spans.request(request.request_id, asked))
        return _Followed(index, request, self._metrics.start_request(), span, block)


class _Followed:
    """One request that runs: its place in the group, its clock, and its span, which lasts as long as `block`."""

    def __init__(
        self, index: int, request: EngineRequest, timer: RequestTimer, span: RequestSpan, block: ExitStack
    ) -> None:
        self.index = index
        self.request = request
        self._timer = timer
        self._span = span
        self._block = block
        self._usage = NOTHING

    def message(self, terms: Terms) -> Generate:
        if self._span.is_recorded:
            terms = msgspec.structs.replace(terms, is_traced=True)
        asked = self.request
        if asked.cache_salt:
            terms = msgspec.structs.replace(terms, cache_salt=asked.cache_salt)
        request_id = id_on_link(terms.key, asked.request_id)
        return Generate(request_id, asked.prompt, asked.sampling, terms, asked.seed)

    def delta_of(self, answer: DeltaLike | OverlapSpecError) -> DeltaLike:
        """What an answer adds: an abort is a delta too. Raises: what else has ended the request."""
        if isinstance(answer, RequestAborted):
            self._span.aborted(str(answer))
            delta: DeltaLike = AbortedDelta(Finish(FinishKind.ABORT, message=str(answer)), self._usage)
        elif isinstance(answer, RequestError):
            raise renamed(answer, self.request.names)
        elif isinstance(answer, OverlapSpecError):
            raise answer
        else:
            self._usage, delta = answer.usage, answer
            self._timer.tokens(len(answer.token_ids))
            self._span.add(answer)
            if answer.finish is not None:
                self._timer.finished()
        if delta.finish is not None:
            self._block.close()
        return delta


class _GroupRun:
    """The requests of a group: those that run, and those that start when another one has begun."""

    def __init__(
        self,
        group: Group,
        follow: Callable[[int, EngineRequest], _Followed],
        running: RequestsLike,
        arrived_at: float,
    ) -> None:
        self._terms = group.terms
        self._follow = follow
        self._running = running
        self._arrived_at = arrived_at
        self._open: dict[str, _Followed] = {}  # by their ids on the link, as all that follows
        self._not_taken: list[tuple[str, DeltaLike | OverlapSpecError]] = []
        self._later: dict[str, list[tuple[int, EngineRequest]]] = {}  # by the request that they come after
        for index, request in enumerate(group.requests):
            after = self._id_on_link(request.after) if request.after else ""
            self._later.setdefault(after, []).append((index, request))

    @property
    def is_open(self) -> bool:
        """Whether a request runs, or is to start."""
        return bool(self._open or self._later)

    async def start(self) -> None:
        """Start the requests that come after no other."""
        await self._start(self._later.pop("", []), has_begun=False)

    async def step(self, waiting: set[str]) -> list[tuple[int, DeltaLike]]:
        """What has arrived. `waiting`: of the requests that have not started, those that were not aborted."""
        step: list[tuple[int, DeltaLike]] = []
        next_ones: list[tuple[int, EngineRequest]] = []
        for request_id, answer in self._not_taken or await self._running.take():
            followed = self._open[request_id]
            if step and isinstance(answer, OverlapSpecError) and not isinstance(answer, RequestAborted):
                self._not_taken = [(request_id, answer)]  # what came before it is passed on first
                return step
            delta = followed.delta_of(answer)
            step.append((followed.index, delta))
            if delta.finish is not None:
                del self._open[request_id]
            next_ones += self._later.pop(request_id, ())
        if not next_ones:
            return step
        ids = [self._id_on_link(request.request_id) for _, request in next_ones]
        for request_id, (index, _) in zip(ids, next_ones, strict=True):
            if request_id not in waiting:
                step.append((index, AbortedDelta(Finish(FinishKind.ABORT, message="aborted on request"), NOTHING)))
        started = [each for request_id, each in zip(ids, next_ones, strict=True) if request_id in waiting]
        await self._start(started, has_begun=True)
        waiting.difference_update(ids)
        return step

    def _id_on_link(self, request_id: str) -> str:
        return id_on_link(self._terms.key, request_id)

    async def _start(self, requests: Sequence[tuple[int, EngineRequest]], has_begun: bool) -> None:
        """Many are sent in parts, between which others have their turn. `has_begun`: the group has had a token."""
        for first in range(0, len(requests), PART):
            if first:
                await asyncio.sleep(0)
            await self._start_part(requests[first : first + PART], has_begun)

    async def _start_part(self, requests: Sequence[tuple[int, EngineRequest]], has_begun: bool) -> None:
        age_s = time.monotonic() - self._arrived_at
        terms = msgspec.structs.replace(self._terms, age_s=age_s, has_begun=has_begun)
        opened = {self._id_on_link(request.request_id): self._follow(index, request) for index, request in requests}
        self._open |= opened
        try:
            await self._running.start([followed.message(terms) for followed in opened.values()])
        except RequestError as error:
            raise renamed(error, requests[0][1].names) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error with the API's name for the field, also at the beginning of its message."""
    name, text = names.get(error.field, error.field), str(error)
    return RequestError(name, name + text.removeprefix(error.field) if text.startswith(error.field) else text)


G = TypeVar("G", bound=Group)


def sent_by(request: Request, group: G) -> G:
    """The group, as this client's."""
    identity = identity_of(request)
    terms = msgspec.structs.replace(group.terms, client=identity.client, key=identity.key)
    return msgspec.structs.replace(group, terms=terms)
