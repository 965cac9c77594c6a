"""Queries of clients beside requests: tokenize, detokenize, flush the cache, statistics."""

from collections import deque

from msgspec.structs import replace

from overlap_spec.client.link import ClientLink, pack_ids
from overlap_spec.config import OPERATOR
from overlap_spec.errors import RequestError
from overlap_spec.frontend.lifecycle import Outbox
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.frontend.request_reader import PromptReader
from overlap_spec.messages import (
    AskedById,
    Detokenize,
    Detokenized,
    Flush,
    FlushCache,
    FlushDone,
    Flushed,
    GetStats,
    Stats,
    StatsReply,
    Tokenize,
    Tokenized,
)


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
