"""The frontend's service: what it does with each message.

It owns every open request from Generate to its last row, and decides finish, text, ids and usage. When a request ends
here while the scheduler still runs it, the service sends an Abort and drops the rows that still arrive. `Queries` are
what clients ask beside requests: tokenize, detokenize, flush the cache, statistics.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from overlap_spec.client.link import Arrival, ClientLink, Gone, Malformed, Unread, pack_ids
from overlap_spec.config import OPERATOR, Settings
from overlap_spec.errors import RequestError
from overlap_spec.frontend.codec import Codec
from overlap_spec.frontend.encode_pool import LONG
from overlap_spec.frontend.hooks import Hooks, Parts
from overlap_spec.frontend.lifecycle import Lifecycle, Outbox
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.frontend.request_checks import Refusal, RequestChecks, for_scheduler
from overlap_spec.frontend.request_reader import PromptReader, RequestReader, is_long, resumed
from overlap_spec.frontend.rows import Rows
from overlap_spec.messages import (
    AbortReason,
    Admit,
    AskedById,
    Cancel,
    Detokenize,
    Detokenized,
    Drained,
    EngineLimits,
    ErrorCode,
    Flush,
    FlushCache,
    FlushDone,
    Flushed,
    Generate,
    GetStats,
    LivenessProbe,
    Memo,
    Ping,
    Pong,
    Recover,
    Refused,
    Shutdown,
    Started,
    Stats,
    StatsReply,
    ToFrontend,
    TokenDeltas,
    Tokenize,
    Tokenized,
    ToScheduler,
    ToSupervisor,
)
from overlap_spec.runtime.log_limits import without_quotes
from overlap_spec.runtime.tracing import NO_TRACE, Recorder
from overlap_spec.runtime.transport import BatchOutlet, Inbox


class Queries:
    """Answers clients; the scheduler flushes its cache, and its last report has the statistics."""

    def __init__(
        self,
        prompts: PromptReader,
        checks: RequestChecks,
        scheduler: Outbox,
        clients: ClientLink,
    ) -> None:
        self._prompts = prompts
        self._checks = checks
        self._scheduler = scheduler
        self._clients = clients
        self.stats = Stats()  # the newest report
        self._flushing: deque[tuple[int, str]] = deque()  # client and request id, in the order of answers

    async def answer(self, client: int, query: AskedById) -> None:
        """Raises: RequestError, also if no part of the engine answers it. Cancellation: no answer is sent."""
        match query:
            case Tokenize():
                ids = await self._prompts.encode(query.prompt, query.add_special_tokens, False, client, query.owner)
                self._clients.send(client, Tokenized(query.request_id, pack_ids(ids)))
            case Detokenize():
                owner, vocab_size = query.owner or f"link {client}", self._checks.vocab_size
                text = await self._prompts.decode(query.ids, query.skip_special_tokens, vocab_size, owner)
                self._clients.send(client, Detokenized(query.request_id, text))
            case Flush():
                self._checks.check_admin(query.key)
                self._flushing.append((client, query.request_id))
                self._scheduler.send(FlushCache())
            case GetStats():
                self._clients.send(client, stats_reply(query, self.stats))
            case _:
                raise RequestError("request", f"{type(query).__name__}: the part that answers it is not there")

    def flushed(self, message: Flushed) -> None:
        """Pass the scheduler's answer to the client of the oldest Flush."""
        client, request_id = self._flushing.popleft()
        self._clients.send(client, FlushDone(request_id, message.success))

    def ask_again(self) -> None:
        """Ask a new scheduler what the one before it has not answered."""
        for _ in self._flushing:
            self._scheduler.send(FlushCache())


def stats_reply(query: GetStats, stats: Stats) -> StatsReply:
    """The answer. What other clients had sent before shows to the operator alone: who guesses would see that he hit."""
    if query.of_key not in (None, OPERATOR):
        stats = replace(stats, unshared_tokens_total=0)
    return StatsReply(query.request_id, stats)


RETURN_S = 3.0  # for clients to send their requests again once they may: they ask ten times a second whether they may

RenewLinks = Callable[[int], tuple[Inbox[ToFrontend], BatchOutlet[ToScheduler]]]  # of a generation

log = logging.getLogger(__name__)


class FrontendService:
    """Two loops over one table of open requests; `serve` runs both until Shutdown."""

    def __init__(
        self,
        codec: Codec,
        checks: RequestChecks,
        scheduler: BatchOutlet[ToScheduler],
        clients: ClientLink,
        tell_supervisor: Callable[[ToSupervisor], None],
    ) -> None:
        self._codec = codec
        self._checks = checks
        self._scheduler = Outbox(scheduler)
        self._clients = clients
        self._tell_supervisor = tell_supervisor
        # What an actor replaces:
        self.trace: Recorder = NO_TRACE
        self.report_alive: Callable[[], None] = lambda: None
        self._prompts = PromptReader(codec, checks.trusts_templates)
        self._reader = RequestReader(codec, checks, self._prompts)
        self.renew: RenewLinks = _no_links  # an actor replaces it
        self._queries = Queries(self._prompts, checks, self._scheduler, clients)
        self._lifecycle = Lifecycle(checks, self._scheduler, clients, lambda _: self._report_if_drained())
        self._requests = self._lifecycle.requests
        self.rows = Rows(self._lifecycle, self._scheduler, clients)
        self.hooks = self._reader.hooks
        self._reading: dict[asyncio.Task[None], tuple[int, str]] = {}  # long prompts and grammars: client, request id
        self._stopped = False
        self._returning = False  # clients of a frontend that is gone may still send their requests again

    def parts(self, settings: Settings, generation: int = 0) -> Parts:
        """What features may use."""
        own = self._codec, self._checks, self._scheduler, self._clients, self._lifecycle, self.rows.turns
        return Parts(settings, generation, *own, self._prompts.run_apart)

    def number_from(self, uid: int) -> None:
        """Requests have uids from this one on."""
        self._requests.number_from(uid)

    def expect_returns(self) -> None:
        """Another frontend has died: its clients send what they had open once this engine is ready."""
        self._returning = True

    def attach(self, hooks: Hooks) -> None:
        """These are called from now on."""
        self.hooks = self._reader.hooks = hooks

    async def serve(self, inbox: Inbox[ToFrontend]) -> None:
        """Run both loops until Shutdown. Cancellation: both end; open requests get no answer."""
        self._inbox = inbox
        loops = [asyncio.create_task(self._serve_engine()), asyncio.create_task(self._serve_clients())]
        try:
            done, _ = await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in done:
                loop.result()
        finally:
            tasks = [*loops, *self._reading]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._prompts.close()

    # --- the engine's side ---

    async def _serve_engine(self) -> None:
        while not self._stopped:
            inbox = self._inbox
            steps: list[TokenDeltas] = []
            self.rows.turns.begin_turn()
            for message in inbox.drain() or (() if self.rows.turns else (await inbox.recv(),)):
                if isinstance(message, TokenDeltas):
                    for take in self.hooks.step:
                        take(message)
                    steps.append(message)
                    continue
                self.rows.add(steps)
                self._from_engine(message)
                if self._inbox is not inbox:
                    break  # what else it held is of a scheduler that is gone
            self.rows.add(steps)
            self.rows.take_turn({})
            await asyncio.sleep(0)  # a busy engine must not keep the other loop from running

    def _from_engine(self, message: ToFrontend) -> None:
        is_known = any([take(message) for take in self.hooks.message])  # each is told, whichever knows it
        match message:
            case EngineLimits():
                if self._checks.limits is None and self._returning:
                    asyncio.get_running_loop().call_later(RETURN_S, self._all_are_back)
                self._checks.limits = message
                self._prompts.max_len = message.max_len
            case Started():
                self._note_started(message.uids)
            case Recover():
                self._recover(message)
            case Refused():
                if (request := self._requests.by_uid(message.uid)) is not None:
                    self._lifecycle.reject(request, message.code, message.message, message.field)
            case Flushed():
                self._queries.flushed(message)
            case Memo():
                pass  # of a feature, which has taken it
            case Stats():
                self._queries.stats = message
            case LivenessProbe():
                self.trace.watch(message.watch_s)
                self.report_alive()
            case Shutdown():
                self._shut_down(message.drain)
            case _:
                assert is_known, f"no feature takes {type(message).__name__}"

    # --- a new scheduler and worker ---

    def _note_started(self, uids: list[int]) -> None:
        for uid in uids:
            request = self._requests.by_uid(uid)
            if request is not None:
                request.has_slot()

    def _recover(self, message: Recover) -> None:
        """Lead the links to a new scheduler, which makes again what has not left."""
        self.rows.turns.clear()
        self._inbox, outlet = self.renew(message.generation)
        self._scheduler.renew(outlet)
        for recovered in self.hooks.recovered:
            recovered(message)
        self._queries.ask_again()

    def _shut_down(self, drain: bool) -> None:
        self._checks.draining = True
        self._stopped = not drain
        if drain:
            self._report_if_drained()
            return
        stopping = Refusal(ErrorCode.SHUTTING_DOWN, "the engine is stopping")
        for request in self._requests:
            self._lifecycle.fail(request, AbortReason.SHUTDOWN, stopping)

    def _report_if_drained(self) -> None:
        if self._checks.draining and not self._stopped and not self._requests and not self._returning:
            self._tell_supervisor(Drained())

    def _all_are_back(self) -> None:
        self._returning = False
        self._report_if_drained()

    # --- the clients' side ---

    async def _serve_clients(self) -> None:
        while True:
            client, message = await self._clients.recv()
            more_bytes = self._clients.more_bytes
            if not isinstance(message, Generate):
                self._scheduler.release()  # it may wait for the scheduler's answer
            elif more_bytes:
                self._scheduler.hold(more_bytes)
                if self._checks.limits is not None and not self._requests:
                    self._scheduler.send_first(self._checks.limits.ahead_tokens)
            await self._from_client(client, message)
            if not more_bytes:
                self._scheduler.release()
            await asyncio.sleep(0)  # as above: a busy client must not hold up the engine

    async def _from_client(self, client: int, message: Arrival) -> None:
        match message:
            case Generate() | Tokenize() | Detokenize() if self._takes_long(message):
                task = asyncio.create_task(self._attempt(client, message))
                self._reading[task] = client, message.request_id
                task.add_done_callback(self._reading.pop)
            case Ping():
                self._clients.send(client, Pong(message.sent_at, self._checks.limits is not None, client))
            case Gone():
                self._client_gone(client, message)
            case Unread():
                why = f"its answer was aborted: {message.num_bytes} bytes of it are unread"
                self._end(self._requests.find(client, message.request_id), why)
            case Malformed():
                log.warning("client %d sent something malformed: %s", client, without_quotes(message.error))
                if message.request_id:
                    self._lifecycle.refuse(client, message.request_id, RequestError(message.field, message.error))
            case _:
                await self._attempt(client, message)

    async def _attempt(self, client: int, message: AskedById) -> None:
        """Do what a client asked. An error of any kind is answered to that client alone."""
        try:
            if isinstance(message, Generate):
                await self._generate(client, message)
            elif isinstance(message, Cancel):
                self._cancel(client, message)
            elif not any(answer(client, message) for answer in self.hooks.query):
                await self._queries.answer(client, message)
        except Exception as error:
            self._lifecycle.refuse(client, message.request_id, error)

    def _takes_long(self, message: Generate | Tokenize | Detokenize) -> bool:
        """Whether to answer beside other requests: what it needs is done in a thread, or in turns."""
        if isinstance(message, Detokenize):
            return len(message.ids) > 4 * LONG  # bytes of int32
        if isinstance(message, Generate) and (message.continued or self._reader.takes_long(message.sampling)):
            return True
        return is_long(message.prompt)

    async def _generate(self, client: int, message: Generate) -> None:
        # What is not new goes on behind another frontend, or belongs to a group whose first request has begun.
        limits = self._checks.check_open(is_new=message.continued is None and not message.terms.has_begun)
        owner = message.terms.client or f"link {client}"
        displaced = self._lifecycle.make_room(owner, limits.max_running_requests)
        self._codec.check_stop_strings("stop", message.sampling.stop)
        self._codec.check_stop_strings("stop_regex", message.sampling.stop_regex)
        stop_ids = self._checks.stop_ids(message.sampling)
        request = self._lifecycle.open(client, message, owner)
        if displaced is not None:
            self._lifecycle.give_place(displaced, limits.max_running_requests)
        arrived_at = time.monotonic()
        earlier = None
        try:
            read = await self._reader.read(request, message, limits)
            if request in self._requests:
                self._reader.open_output(request, message.prompt, read)
                if message.continued is not None:
                    earlier = await resumed(request, message.continued, limits.vocab_size)
        except Exception:
            if request not in self._requests:
                return  # cancelled while its prompt was read: its last row has been sent
            self._lifecycle.close(request)
            raise
        if request in self._requests:
            if earlier is not None:
                self._lifecycle.began(request)
            asked, prompt = for_scheduler(read.sampling), read.prompt
            salt = message.terms.cache_salt
            admit = Admit(request.uid, prompt.packed, asked, stop_ids, arrived_at, earlier, owner, salt)
            self._admit(request, admit)
            self.trace.instant("admit", prompt_tokens=len(prompt.ids), seconds=time.monotonic() - arrived_at)

    def _admit(self, request: OpenRequest, admit: Admit) -> None:
        for settled in self.hooks.admission:
            admit = settled(request, admit)
        request.follow(self.hooks.followers(request, admit))
        self._scheduler.send(admit)

    def _cancel(self, client: int, message: Cancel) -> None:
        if not message.everyone:
            self._end(self._requests.find(client, message.request_id), "aborted on request")
            self._stop_reading(client, message.request_id)  # a query's text: a request has been closed
            return
        if message.of_key is None or not message.request_id:
            self._checks.check_admin(message.key)
        self._end(self._requests.find_everywhere(message.request_id, message.of_key), "aborted on request")

    def _end(self, requests: list[OpenRequest], why: str) -> None:
        for request in requests:
            self._stop_reading(request.client, request.request_id)
            self._lifecycle.cancel(request, why)

    def _stop_reading(self, client: int, request_id: str | None = None) -> None:
        """Drop what is read for a request, or for a client."""
        for task, (reader, id_read) in self._reading.items():
            if reader == client and request_id in (None, id_read):
                task.cancel()

    def _client_gone(self, client: int, message: Gone) -> None:
        self._stop_reading(client)
        requests = self._requests.of_client(client)
        if requests:
            log.warning("client %d %s; aborting its %d requests", client, message.why, len(requests))
        for request in requests:
            self._lifecycle.abort(request, AbortReason.CLIENT_GONE)


def _no_links(generation: int) -> tuple[Inbox[ToFrontend], BatchOutlet[ToScheduler]]:
    raise AssertionError("this frontend's links are never renewed")
