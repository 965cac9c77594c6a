"""An asyncio client of the engine, over ZeroMQ, for the HTTP server and for Python users.

    async with Client(endpoint) as client:
        async for delta in client.generate("The sky is"):
            print(delta.text, end="")

Leaving the loop ends the request: when the generator is closed, its Cancel leaves at once. One task reads the socket
and gives every answer to its own request, so a slow consumer delays no other: it gets fewer and larger deltas.
"""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from overlap_spec.client.answers import Answer, Answers, Delta, Question, Reply, error_in
from overlap_spec.client.calls import Calls, Completion, Together, aborted, completion_of, prompt_of, with_shared_parts
from overlap_spec.client.link import ClientDealer, Connection, pack_ids, unpack_ids
from overlap_spec.errors import ActorDied, OverlapSpecError, Overloaded, RequestAborted
from overlap_spec.messages import (
    ANY_TERMS,
    AuditReply,
    AuditReport,
    Cancel,
    ChatPrompt,
    Detokenize,
    Detokenized,
    DraftUpdated,
    FinishKind,
    Flush,
    FlushDone,
    Generate,
    GetAudit,
    GetStats,
    Ping,
    Pong,
    Prompt,
    Rejected,
    SamplingParams,
    Stats,
    StatsReply,
    Terms,
    TextDeltas,
    TextPrompt,
    ToClient,
    ToFrontendFromClient,
    Tokenize,
    Tokenized,
    UpdateDraft,
    is_another_frontend,
)
from overlap_spec.runtime.tracing import NO_TRACE, Recorder

__all__ = ["Client", "Completion", "Delta"]

R = TypeVar("R", bound=Reply)
A = TypeVar("A", bound=Answer)
AnyPrompt = str | Sequence[dict[str, Any]] | Sequence[int] | Prompt

HEARTBEAT_S = 2.5
LOST_S = 60.0  # without a connection, after which open calls fail: an engine's frontend may be started again
POLL_S = 0.1  # between questions whether the engine is ready
TURN_S = 0.005  # of this thread's CPU time, after which other tasks of the loop have a turn


class Client:
    """One connection to an engine. Open it in the event loop that uses it: `async with`, or `open` and `close`.

    An engine that is busy ends no call, however long it takes. One that has died ends them all, and is noticed by its
    connection: `lost_s` without one. The owner of its processes knows better and tells (`fail`, `frontend_died`): its
    client's `lost_s` is `math.inf`. If its frontend alone is another one, calls go on there with what comes next.
    """

    def __init__(
        self,
        endpoint: str,
        api_key: str | None = None,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        lost_s: float = LOST_S,
        trace: Recorder = NO_TRACE,
    ) -> None:
        self.endpoint, self._api_key = endpoint, api_key
        self._heartbeat_s, self._lost_s, self._trace = heartbeat_s, lost_s, trace
        self._calls = Calls()
        self._link: ClientDealer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: OverlapSpecError | None = None
        self._connection = Connection()
        self._session = 0  # of the last Pong; 0: none yet
        self._is_lost = False  # the frontend has died, and none has its place: requests wait for one that is ready
        self._held: list[Cancel] = []  # of requests that wait, or of all, meanwhile

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect; the engine need not be there yet. Cancellation: cannot be cancelled half way."""
        self._link = ClientDealer(self.endpoint, self._api_key, heartbeats=math.isfinite(self._lost_s))
        self._connection = Connection()
        self._session, self._failure, self._is_lost, self._held = 0, None, False, []
        self._tasks = [
            asyncio.create_task(self._listen(self._link), name="client-listen"),
            asyncio.create_task(self._connection.follow(self._link), name="client-connection"),
            asyncio.create_task(self._beat(), name="client-heartbeat"),
        ]

    async def close(self) -> None:
        """Cancel open requests and disconnect. A second call does nothing. Cancellation: disconnects all the same."""
        self._give_up(RequestAborted("the client was closed"))
        link, self._link = self._link, None
        if link is None:
            return
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await link.close()

    def fail(self, error: OverlapSpecError) -> None:
        """End every open and every later call with `error`: the engine is gone."""
        self._failure = error
        self._calls.fail(error)

    def frontend_died(self, error: OverlapSpecError) -> None:
        """Another frontend takes the place of one that has died: calls go on there.

        Those that have seen one die before, and pings, end with `error`.
        """
        if self._link is None or self._failure is not None:
            return
        self._link.renew()
        self._connection.changed(False)
        self._session = 0
        if not self._is_lost:
            self._is_lost = True
            self._calls.frontend_died(error)
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._until_found(), name="client-until-found"))

    async def generate(
        self,
        prompt: AnyPrompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        terms: Terms = ANY_TERMS,
    ) -> AsyncGenerator[Delta, None]:
        """Yield what steps add as it comes, the last delta with a `finish`.

        After a finish of kind ABORT the next step of the loop raises RequestAborted. Leaving a loop over a
        generator that nothing else refers to closes it; else close it yourself (`contextlib.aclosing`).
        Raises: RequestError naming the field, Overloaded, RequestTimeout, RequestAborted, RequestFailed, ActorDied.
        Cancellation: the request is cancelled at the engine, at once.
        """
        request_id = request_id or uuid.uuid4().hex
        message = Generate(request_id, prompt_of(prompt), sampling or SamplingParams(), terms)
        await self._calls.until_free(request_id)
        with self._call(request_id) as answers:
            begun = self._trace.now()
            self._send_kept(message)
            self._trace.span("send request", begun)
            ended = False
            try:
                while not ended:
                    answer = await answers.take()
                    ended = not isinstance(answer, Delta) or answer.finish is not None
                    delta = _expect(answer, Delta)
                    yield delta
            finally:
                if not ended:
                    self._leave_all((request_id,))
        if delta.finish is not None and delta.finish.kind is FinishKind.ABORT:
            raise aborted(delta.finish)

    def together(self) -> Together:
        """A block for requests that are followed together (`client/calls.py`)."""
        return Together(self._calls, self._send_all, self._leave_all)

    async def complete(
        self,
        prompt: AnyPrompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        terms: Terms = ANY_TERMS,
    ) -> Completion:
        """Wait for the whole answer. Raises and Cancellation: as `generate`."""
        async with aclosing(self.generate(prompt, sampling, request_id, terms)) as deltas:
            return completion_of([delta async for delta in deltas])

    async def cancel(self, request_id: str, everyone: bool = False, of_key: str | None = None) -> None:
        """End a request of this client, or with `everyone` of any client (all of them if the id is "").

        `of_key`: a gateway's limit to the requests of one API key. Without the operator's key, where there is one, a
        client ends those of its own key. Its generator gets a last delta, then RequestAborted. Cancellation: never
        waits.
        """
        message = Cancel(request_id, everyone, self._api_key or "", of_key)
        if self._is_lost:
            self._held.append(message)
        else:
            self._send(message)

    async def tokenize(
        self,
        prompt: str | Sequence[dict[str, Any]] | TextPrompt | ChatPrompt,
        add_special_tokens: bool = True,
        owner: str = "",
    ) -> list[int]:
        """Token ids of a text, or of chat messages. `owner`: whose turn it takes, if a gateway asks for others.

        Raises: as `generate`. Cancellation: the work is dropped.
        """
        asked = prompt_of(prompt)
        assert isinstance(asked, TextPrompt | ChatPrompt)
        reply = await self._ask(Tokenize(uuid.uuid4().hex, asked, add_special_tokens, owner), Tokenized)
        return unpack_ids(reply.ids)

    async def detokenize(self, ids: Sequence[int], skip_special_tokens: bool = False, owner: str = "") -> str:
        """Text of token ids. `owner`: as of `tokenize`. Raises: as `generate`. Cancellation: the work is dropped."""
        message = Detokenize(uuid.uuid4().hex, pack_ids(ids, "tokens"), skip_special_tokens, owner)
        return (await self._ask(message, Detokenized)).text

    async def flush_cache(self) -> bool:
        """Empty the prefix cache; False if something runs. Cancellation: the cache may be emptied all the same."""
        return (await self._ask(Flush(uuid.uuid4().hex, self._api_key or ""), FlushDone)).success

    async def stats(self) -> Stats:
        """The engine's newest periodic report. Cancellation: the answer is dropped."""
        return (await self._ask(GetStats(uuid.uuid4().hex), StatsReply)).stats

    async def audit(self) -> AuditReport:
        """What the live audit has found so far. Cancellation: the answer is dropped."""
        return (await self._ask(GetAudit(uuid.uuid4().hex, self._api_key or ""), AuditReply)).report

    async def update_draft(self, path: str, load_format: str = "auto") -> None:
        """Write a checkpoint of the engine's disk over the draft. Cancellation: it may be written all the same."""
        await self._ask(UpdateDraft(uuid.uuid4().hex, path, load_format, self._api_key or ""), DraftUpdated)

    async def ping(self) -> Pong:
        """Ask whether the frontend is there and the engine warm. Cancellation: the answer is dropped."""
        sent_at = time.monotonic()
        with self._call(_ping_id(sent_at)) as answers:
            self._send(Ping(sent_at))
            return _expect(await answers.take(), Pong)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the engine is warm. Cancellation: safe.

        Raises: Overloaded if it still starts after `timeout_s`, ActorDied if nothing has answered by then.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not (await self.ping()).ready:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            if self._session:
                raise Overloaded(f"the engine is still starting after {timeout_s} s") from None
            raise self._unreached("answer from", timeout_s or 0.0) from None

    def _send(self, message: ToFrontendFromClient) -> None:
        self._open_link().send(message)

    def _send_kept(self, message: Question) -> None:
        """Send what an open call asks, now or when there is a frontend again."""
        self._calls.keep(message)
        link = self._open_link()
        if not self._is_lost:
            link.send(message)

    def _open_link(self) -> ClientDealer:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._link is None:
            raise RuntimeError("the client is not open: use `async with Client(..)`")
        return self._link

    def _send_all(self, requests: Sequence[Generate]) -> None:
        begun, link = self._trace.now(), self._open_link()
        if not self._is_lost:
            link.send_all(with_shared_parts(requests))
        self._trace.span("send request", begun, requests=len(requests))

    def _leave_all(self, request_ids: Collection[str]) -> None:
        """Cancel requests of which nothing more is wanted."""
        if self._is_lost:
            for request_id in request_ids:
                self._calls.close(request_id)
        elif self._link is not None and self._failure is None and request_ids:
            for request_id in request_ids:
                self._calls.leave(request_id)
            self._link.send_all([Cancel(request_id) for request_id in request_ids])

    def _give_up(self, error: OverlapSpecError) -> None:
        """End every open call, and cancel the requests at the engine."""
        if self._link is not None:
            for request_id in self._calls.ids():
                self._link.send(Cancel(request_id))
        self._calls.fail(error)

    @contextmanager
    def _call(self, request_id: str) -> Iterator[Answers]:
        answers = self._calls.open(request_id)
        try:
            yield answers
        finally:
            self._calls.close(request_id)

    async def _ask(self, message: Question, kind: type[R]) -> R:
        with self._call(message.request_id) as answers:
            self._send_kept(message)
            try:
                return _expect(await answers.take(), kind)
            except asyncio.CancelledError:
                if self._link is not None and not self._is_lost and isinstance(message, Tokenize | Detokenize):
                    self._link.send(Cancel(message.request_id))
                raise

    async def _listen(self, link: ClientDealer) -> None:
        until = time.thread_time() + TURN_S
        try:
            while True:
                message = await link.recv()
                self._dispatch(message)
                if time.thread_time() >= until:
                    await asyncio.sleep(0)  # of a burst there is always one more message to be read at once
                    until = time.thread_time() + TURN_S
        except Exception as error:  # without this task no call would ever end
            self.fail(ActorDied("frontend", f"its messages cannot be read: {error}"))

    def _dispatch(self, message: ToClient) -> None:
        match message:
            case TextDeltas():
                begun = self._trace.now()
                self._calls.deliver(message)
                self._trace.span("deliver", begun, requests=len(message.request_ids))
            case Rejected():
                self._calls.reject(message)
            case Pong():
                self._heard_pong(message)
            case _:
                self._calls.answer(message.request_id, message)

    def _heard_pong(self, message: Pong) -> None:
        self._calls.answer(_ping_id(message.sent_at), message)
        before, self._session = self._session or message.session, message.session
        if is_another_frontend(before, message.session):
            self.frontend_died(ActorDied("frontend", "another one has taken its place"))
        elif before != message.session:
            self._give_up(RequestAborted("the engine gave this client up: it was cut off, or read too slowly"))
        elif self._is_lost and message.ready:
            self._go_on()

    async def _until_found(self) -> None:
        """Ask whether there is a frontend that is ready, until there is."""
        while self._is_lost and self._link is not None and self._failure is None:
            self._link.send(Ping(time.monotonic()))
            await asyncio.sleep(POLL_S)

    def _go_on(self) -> None:
        """Send every request to the new frontend, and what was to be cancelled meanwhile."""
        self._is_lost = False
        link = self._open_link()
        self._calls.send_again(link)
        while self._held:
            link.send(self._held.pop(0))

    async def _beat(self) -> None:
        while True:
            if self._link is not None and self._failure is None:
                self._link.send(Ping(time.monotonic()))
            await self._connection.made(self._heartbeat_s)  # there may be another frontend behind a new one
            if self._connection.lost_s > self._lost_s:
                await asyncio.sleep(POLL_S)  # if it was this process that slept, there may be news to be read
                if (lost_s := self._connection.lost_s) > self._lost_s:
                    self._give_up(self._unreached("connection to", lost_s))

    def _unreached(self, what: str, seconds: float) -> ActorDied:
        hint = "" if self._session else ": is it running, and is the API key right?"
        return ActorDied("frontend", f"no {what} {self.endpoint} for {seconds:.1f} s{hint}")


def _ping_id(sent_at: float) -> str:
    return f"\0ping {sent_at!r}"


def _expect(answer: Answer, kind: type[A]) -> A:
    if isinstance(answer, kind):
        return answer
    raise error_in(answer)
