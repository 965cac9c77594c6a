"""A frontend on real sockets for the client's tests: one that is scripted, and the real service with an engine
that answers by itself."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq

from overlap_spec import features
from overlap_spec.client import Client
from overlap_spec.config import LinkSettings
from overlap_spec.features import absent_fields
from overlap_spec.frontend.frontend_actor import ClientEndpoint
from overlap_spec.frontend.hooks import attached
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.frontend.service import FrontendService
from overlap_spec.messages import (
    Abort,
    Admit,
    EngineLimits,
    Finish,
    FinishKind,
    FlushCache,
    Flushed,
    SamplingParams,
    Shutdown,
    Stats,
    ToClient,
    ToFrontend,
    ToFrontendFromClient,
    TokenDeltas,
    ToScheduler,
)
from support.fake_settings import fake_settings
from support.memory_link import MemoryLink
from support.small_tokenizers import smollm2

TIMEOUT_S = 20.0
STEP_S = 0.002
EOS = 2
LIMITS = EngineLimits(max_len=4000, max_total_tokens=8000, max_running_requests=64, vocab_size=49152)


def most(tokens: int, **sampling: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, **sampling)


class EchoScheduler:
    """Repeats each prompt for ever, two tokens a step, up to the request's length; keeps the messages that it got."""

    def __init__(self, outbox: MemoryLink[ToFrontend]) -> None:
        self.inbox: MemoryLink[ToScheduler] = MemoryLink(ToScheduler)
        self.aborted: list[Abort] = []
        self.running: dict[int, tuple[Admit, int]] = {}  # and tokens so far
        self._outbox = outbox

    async def run(self) -> None:
        while True:
            for message in self.inbox.drain():
                self._dispatch(message)
            if not self.running:
                self._dispatch(await self.inbox.recv())
            self._step()
            await asyncio.sleep(STEP_S)

    def _dispatch(self, message: ToScheduler) -> None:
        match message:
            case Admit():
                self.running[message.uid] = (message, 0)
            case Abort():
                self.aborted.append(message)
                self.running.pop(message.uid, None)
            case FlushCache():
                self._outbox.send(Flushed(success=not self.running))
            case _:
                raise AssertionError(message)

    def _step(self) -> None:
        step = TokenDeltas([], [], [], [])
        for uid, (admit, done) in list(self.running.items()):
            prompt = memoryview(admit.prompt).cast("i")
            most = admit.sampling.max_new_tokens or 0
            run = [prompt[index % len(prompt)] for index in range(done, min(done + 2, most))]
            done += len(run)
            self.running[uid] = (admit, done)
            step.uids.append(uid)
            step.tokens.append(run)
            step.finishes.append(Finish(FinishKind.LENGTH) if done == most else None)
            step.verify_steps.append(done // 2)
            if done == most:
                del self.running[uid]
        if step.uids:
            self._outbox.send(step)


class Stage:
    """One engine that echoes, behind a real endpoint."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, settings: dict[str, Any]) -> None:
        self.link = LinkSettings(**{"client_endpoint": None, "api_key": None, **settings})
        self.private = f"ipc://{directory}/client.sock"  # the HTTP server's, whatever else is bound
        self.endpoint = ClientEndpoint(context, self.link, self.private)
        self.inbox: MemoryLink[ToFrontend] = MemoryLink(ToFrontend)
        self.scheduler = EchoScheduler(self.inbox)
        checks = RequestChecks((EOS,), self.link.max_queued_requests, seed=1)
        checks.admin_key = self.link.admin_key
        self.service = FrontendService(smollm2(), checks, self.scheduler.inbox, self.endpoint.router, lambda _: None)
        parts = self.service.parts(fake_settings())
        self.service.attach(attached(features.modules(features.FRONTEND), parts, absent_fields()))

    def warm(self) -> None:
        self.inbox.send(LIMITS)
        self.inbox.send(Stats(max_total_tokens=8000))

    async def until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.002)

    @asynccontextmanager
    async def client(self, api_key: str | None = None, **options: float) -> AsyncIterator[Client]:
        async with Client(self.endpoint.address, api_key, **options) as client:
            yield client


def with_engine(
    story: Callable[[Stage], Awaitable[None]], directory: Path, warm: bool = True, **settings: object
) -> None:
    """Run a story with an engine that echoes."""

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stage = Stage(context, directory, settings)
        if warm:
            stage.warm()
        serving = asyncio.create_task(stage.service.serve(stage.inbox))
        echoing = asyncio.create_task(stage.scheduler.run())
        try:
            async with asyncio.timeout(4 * TIMEOUT_S):
                await story(stage)
        finally:
            stage.inbox.send(Shutdown(drain=False))
            await serving
            echoing.cancel()
            stage.endpoint.close()
            context.destroy(linger=0)

    asyncio.run(run())


class ScriptedFrontend:
    """The other end of a client's link, with the test's own answers, or none."""

    def __init__(self, endpoint: ClientEndpoint) -> None:
        self.endpoint = endpoint

    async def heard(self, kind: type[Any]) -> Any:
        """The next message of this kind; others, such as heartbeats, are skipped."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                _, message = await self.endpoint.router.recv()
                if isinstance(message, kind):
                    return message

    def say(self, message: ToClient, client: int = 1) -> None:
        self.endpoint.router.send(client, message)


def with_script(
    story: Callable[[ScriptedFrontend, Client], Awaitable[None]], directory: Path, **options: float
) -> None:
    """Run a story with a client and a scripted frontend."""

    async def run() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        link = LinkSettings(client_endpoint=None, api_key=None)
        try:
            with ClientEndpoint(context, link, f"ipc://{directory}/client.sock") as endpoint:
                async with asyncio.timeout(4 * TIMEOUT_S), Client(endpoint.address, **options) as client:
                    await story(ScriptedFrontend(endpoint), client)
        finally:
            context.destroy(linger=0)

    asyncio.run(run())


__all__ = ["TIMEOUT_S", "ScriptedFrontend", "Stage", "ToFrontendFromClient", "most", "with_engine", "with_script"]
