"""A frontend service on memory links: the test plays its clients, its scheduler and its supervisor."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from msgspec.structs import replace

from overlap_spec import features
from overlap_spec.client.link import Arrival, Gone, pack_ids
from overlap_spec.features import absent_fields
from overlap_spec.frontend.codec import Codec
from overlap_spec.frontend.hooks import attached
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.frontend.service import FrontendService
from overlap_spec.messages import (
    ANY_TERMS,
    Abort,
    Admit,
    EngineLimits,
    Finish,
    FlushCache,
    Generate,
    Memo,
    SamplingParams,
    Shutdown,
    Terms,
    TextPrompt,
    ToClient,
    ToFrontend,
    TokenDeltas,
    TokenPrompt,
    ToScheduler,
    ToSupervisor,
)
from support.fake_settings import fake_settings
from support.memory_link import MemoryLink
from support.small_tokenizers import EOS, smollm2

LIMITS = EngineLimits(max_len=1000, max_total_tokens=2000, max_running_requests=4, vocab_size=49152)
TIMEOUT_S = 20.0
MESSAGE_BYTES = 1000  # of every message, as far as the service is told

M = TypeVar("M")


class FakeClients:
    """A client link made of queues: `said` goes to the service, `heard` is what it has sent."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[tuple[int, Arrival]] = asyncio.Queue()
        self.heard: asyncio.Queue[tuple[int, ToClient]] = asyncio.Queue()

    def send(self, client: int, message: ToClient) -> None:
        self.heard.put_nowait((client, message))

    async def recv(self) -> tuple[int, Arrival]:
        return await self.said.get()

    @property
    def more_bytes(self) -> int:
        return MESSAGE_BYTES * self.said.qsize()


class Harness:
    """Everything around one running service."""

    def __init__(self, codec: Codec, max_queued: int, flags: Terms) -> None:
        self.clients = FakeClients()
        self.inbox: MemoryLink[ToFrontend] = MemoryLink(ToFrontend)
        self.scheduler: MemoryLink[ToScheduler] = MemoryLink(ToScheduler)
        self.supervisor: list[ToSupervisor] = []
        checks = RequestChecks((EOS,), max_queued, seed=1)
        checks.flags = flags
        self.service = FrontendService(codec, checks, self.scheduler, self.clients, self.supervisor.append)
        self.attach()

    def attach(self, **settings: object) -> None:
        """Let the features attach that these settings want."""
        parts = self.service.parts(replace(fake_settings(), **settings))
        self.service.attach(attached(features.modules(features.FRONTEND), parts, absent_fields()))

    def say(self, message: Arrival, client: int = 1) -> None:
        self.clients.said.put_nowait((client, message))

    def generate(
        self,
        text: str | Sequence[int] = "Hi",
        request_id: str = "a",
        client: int = 1,
        terms: Terms = ANY_TERMS,
        **sampling: object,
    ) -> None:
        prompt = TextPrompt(text) if isinstance(text, str) else TokenPrompt(pack_ids(text))
        params = SamplingParams(**sampling)
        self.say(Generate(request_id, prompt, params, terms), client)

    def leave(self, client: int = 1) -> None:
        self.say(Gone("left"), client)

    async def admitted(self) -> Admit:
        return await self.to_scheduler(Admit)

    async def aborted(self) -> Abort:
        return await self.to_scheduler(Abort)

    async def to_scheduler(self, kind: type[M]) -> M:
        """The next message; a memo, which may come at any time, only if one is looked for."""
        async with asyncio.timeout(TIMEOUT_S):
            message = await self.scheduler.recv()
            while isinstance(message, Memo) and kind is not Memo:
                message = await self.scheduler.recv()
        assert isinstance(message, kind), message
        return message

    async def heard(self, kind: type[M], client: int = 1) -> M:
        async with asyncio.timeout(TIMEOUT_S):
            to, message = await self.clients.heard.get()
        assert to == client and isinstance(message, kind), (to, message)
        return message

    def commit(self, *rows: tuple[int, list[int], Finish | None]) -> None:
        """One step of the scheduler: uid, run and provisional finish of each request."""
        self.inbox.send(
            TokenDeltas(
                [uid for uid, _, _ in rows],
                [tokens for _, tokens, _ in rows],
                [finish for _, _, finish in rows],
                [1] * len(rows),
                cached_tokens={uid: 2 for uid, *_ in rows},
            )
        )

    async def settle(self) -> None:
        """Let both loops handle the messages sent so far."""
        for _ in range(20):
            await asyncio.sleep(0)

    def nothing_more(self) -> bool:
        """But for memos."""
        return self.clients.heard.empty() and all(isinstance(each, Memo) for each in self.scheduler.drain())


@asynccontextmanager
async def serving(
    codec: Codec | None = None, max_queued: int = 8, warm: bool = True, flags: Terms = ANY_TERMS
) -> AsyncIterator[Harness]:
    """A service that runs while the block does."""
    harness = Harness(codec or smollm2(), max_queued, flags)
    if warm:
        harness.inbox.send(LIMITS)
    task = asyncio.create_task(harness.service.serve(harness.inbox))
    await harness.settle()
    try:
        yield harness
    finally:
        harness.inbox.send(Shutdown(drain=False))
        async with asyncio.timeout(TIMEOUT_S):
            await task


__all__ = ["EOS", "LIMITS", "FakeClients", "FlushCache", "Harness", "serving"]
