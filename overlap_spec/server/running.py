"""Runs the engine requests of one HTTP request, and aborts them when the HTTP client stops listening.

    Group of EngineRequests --Runner.run--> lists of (index in the group, delta) --> collect | a stream

A list holds all deltas that had arrived. Leaving `Runner.run` early, for whatever reason, aborts the unfinished
requests of the group.
"""

import asyncio
import functools
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Annotated, TypeVar

import msgspec

from overlap_spec.client.link import unpack_ids
from overlap_spec.client.log_probs import TokenLogProb
from overlap_spec.errors import RequestAborted, RequestError
from overlap_spec.messages import (
    ChatPrompt,
    Finish,
    FinishKind,
    Phases,
    Prompt,
    SamplingParams,
    Speculative,
    Terms,
    TextPrompt,
    TokenPrompt,
    Usage,
    Verified,
)
from overlap_spec.metrics.prometheus import ServerMetrics
from overlap_spec.server.engine_client import DeltaLike, EngineClient
from overlap_spec.server.problems import Problem
from overlap_spec.server.request_spans import NO_SPANS, RequestSpan, RequestSpans
from overlap_spec.server.speculation import SpeculationReport

T = TypeVar("T")
Steps = AsyncGenerator[list[tuple[int, DeltaLike]], None]
RequestId = Annotated[str, msgspec.Meta(max_length=256)]  # one that a user chooses
NOTHING = Usage(0, 0, 0, 0)


class EngineRequest(msgspec.Struct, frozen=True):
    """One request for the engine. `names`: by our names, those of its fields in the API that it came through.

    `after`: another request of the group; this one starts when that one's first token has come.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    names: Mapping[str, str]
    after: str = ""


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
    log_probs: list[TokenLogProb] = []
    prompt_log_probs: list[TokenLogProb] = []
    phases: Phases | None = None


class Collected:
    """The whole answer to one request so far."""

    def __init__(self, asked: Speculative) -> None:
        self.report = SpeculationReport(asked)
        self.token_ids: list[int] = []
        self.log_probs: list[TokenLogProb] = []
        self.prompt_log_probs: list[TokenLogProb] = []
        self.usage = NOTHING
        self.finish: Finish | None = None
        self.text = ""
        self.last_at = 0.0  # time.perf_counter()

    def add(self, delta: DeltaLike) -> None:
        """Append what a step added."""
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        self.log_probs.extend(delta.log_probs)
        self.prompt_log_probs.extend(delta.prompt_log_probs)
        self.report.add(delta.verified, len(delta.token_ids))
        self.usage, self.finish = delta.usage, delta.finish
        self.last_at = time.perf_counter()


class Runner:
    """Starts and follows requests, and knows the ids of those that are open."""

    def __init__(self, client: EngineClient, metrics: ServerMetrics, spans: RequestSpans = NO_SPANS) -> None:
        self._client = client
        self._spans = spans
        self._metrics = metrics
        self._open: dict[str, tuple[str, ...]] = {}  # an id that a user may name -> ids at the engine
        self._waiting: set[str] = set()  # requests that start after another one

    async def run(self, group: Group) -> Steps:
        """Yield what the steps add, until every request has finished.

        Raises: RequestError with the API's field name, Overloaded, RequestTimeout, ActorDied, Problem if an id is in
        use.
        """
        names, arrived_at = self._claim(group), time.monotonic()
        begun = {request.after: asyncio.Event() for request in group.requests}
        waiting = {request.request_id for request in group.requests if request.after}
        self._waiting |= waiting
        try:
            terms = functools.partial(_terms_now, group.terms, arrived_at)
            follows = [
                self._in_turn(request, begun, terms)
                if request.after or request.request_id in begun
                else self._follow(request, terms)
                for request in group.requests
            ]
            async with aclosing(_alone(follows[0]) if len(follows) == 1 else self._merge(follows)) as steps:
                async for step in steps:
                    yield step
        finally:
            self._waiting -= waiting
            for name in names:
                del self._open[name]

    async def collect(self, group: Group) -> list[Collected]:
        """Wait for the whole answer, in the order of the requests."""
        answers = [Collected(request.sampling.speculative) for request in group.requests]
        async with aclosing(self.run(group)) as steps:
            async for step in steps:
                for index, delta in step:
                    answers[index].add(delta)
        return answers

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, before it is truncated. Raises: as `run`."""
        if isinstance(prompt, TokenPrompt):
            return unpack_ids(prompt.ids)
        return await self._client.tokenize(prompt)

    async def abort(self, name: str) -> None:
        """End the request or group of this id, exactly; it may also belong to another client of the engine."""
        for request_id in self._open.get(name, (name,)):
            self._waiting.discard(request_id)
            await self._client.cancel(request_id, everyone=True)

    async def abort_all(self) -> None:
        """End every request of every client."""
        self._waiting.clear()
        await self._client.cancel("", everyone=True)

    async def text_of(self, prompt: Prompt, skip_special_tokens: bool) -> str:
        """A prompt as text; token ids are decoded."""
        assert not isinstance(prompt, ChatPrompt), "a conversation has a template's text"
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await self._client.detokenize(unpack_ids(prompt.ids), skip_special_tokens)

    def _claim(self, group: Group) -> list[str]:
        owned: dict[str, tuple[str, ...]] = {request.request_id: (request.request_id,) for request in group.requests}
        owned.setdefault(group.id, tuple(request.request_id for request in group.requests))
        for name in owned:
            if name in self._open:
                raise Problem(400, f"rid: a request with the id {name!r} is running", "rid", "invalid_value")
        self._open.update(owned)
        return list(owned)

    async def _merge(self, follows: list[AsyncGenerator[DeltaLike, None]]) -> Steps:
        """Follow many at once. What arrives together is yielded together; the first error ends all."""
        arrived: asyncio.Queue[tuple[int, DeltaLike] | Exception | None] = asyncio.Queue()
        tasks = [asyncio.create_task(_relay(index, deltas, arrived)) for index, deltas in enumerate(follows)]
        self._client.send_together()
        running = len(tasks)
        try:
            while running:
                step = []
                for item in await _take_all(arrived):
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        running -= 1
                    else:
                        step.append(item)
                if step:
                    yield step
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _in_turn(
        self, request: EngineRequest, begun: Mapping[str, asyncio.Event], terms: Callable[[bool], Terms]
    ) -> AsyncGenerator[DeltaLike, None]:
        """Yield one request's deltas, once the request that it comes after has begun."""
        if request.after:
            await begun[request.after].wait()
            if request.request_id not in self._waiting:
                yield AbortedDelta(Finish(FinishKind.ABORT, message="aborted on request"), NOTHING)
                return
            self._waiting.remove(request.request_id)
        mine = begun.get(request.request_id)
        async with aclosing(self._follow(request, terms)) as deltas:
            async for delta in deltas:
                if mine is not None:
                    mine.set()
                yield delta

    async def _follow(self, request: EngineRequest, terms: Callable[[bool], Terms]) -> AsyncGenerator[DeltaLike, None]:
        """Yield one request's deltas, the last of which has a finish: an abort is one."""
        timer = self._metrics.start_request()
        usage = NOTHING
        with self._spans.request(request.request_id, request.sampling) as span:
            deltas = self._generate(request, terms(bool(request.after)), span)
            try:
                async with aclosing(deltas):
                    async for delta in deltas:
                        usage = delta.usage
                        timer.tokens(len(delta.token_ids))
                        span.add(delta)
                        if delta.finish is not None:
                            timer.finished()
                        yield delta
                        if delta.finish is not None:
                            return
                raise AssertionError(f"{request.request_id}: the engine's last delta has no finish")
            except RequestAborted as error:
                span.aborted(str(error))
                yield AbortedDelta(Finish(FinishKind.ABORT, message=str(error)), usage)
            except RequestError as error:
                raise renamed(error, request.names) from None

    def _generate(self, request: EngineRequest, terms: Terms, span: RequestSpan) -> AsyncGenerator[DeltaLike, None]:
        if span.is_recorded:
            terms = msgspec.structs.replace(terms, is_traced=True)
        return self._client.generate(request.prompt, request.sampling, request_id=request.request_id, terms=terms)


def _terms_now(terms: Terms, arrived_at: float, has_begun: bool) -> Terms:
    """The terms of a request that is sent now. `has_begun`: the group has had a token."""
    return msgspec.structs.replace(terms, age_s=time.monotonic() - arrived_at, has_begun=has_begun)


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error with the API's name for the field, also at the beginning of its message."""
    name, text = names.get(error.field, error.field), str(error)
    return RequestError(name, name + text.removeprefix(error.field) if text.startswith(error.field) else text)


async def _alone(deltas: AsyncGenerator[DeltaLike, None]) -> Steps:
    async with aclosing(deltas):
        async for delta in deltas:
            yield [(0, delta)]


async def _relay(
    index: int,
    deltas: AsyncGenerator[DeltaLike, None],
    arrived: "asyncio.Queue[tuple[int, DeltaLike] | Exception | None]",
) -> None:
    """Put one request's deltas on the queue, then None, or the error that ended it."""
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                arrived.put_nowait((index, delta))
        arrived.put_nowait(None)
    except Exception as error:
        arrived.put_nowait(error)


async def _take_all(queue: asyncio.Queue[T]) -> list[T]:
    items = [await queue.get()]
    while not queue.empty():
        items.append(queue.get_nowait())
    return items
