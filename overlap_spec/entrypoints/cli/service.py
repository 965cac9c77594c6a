"""The life of engine and HTTP server, from a bound port to an empty process table.

    bind -> start the engine (503 meanwhile) -> print the table -> serve -> stop
    one signal: new requests 503, open ones finish, status 0       a second: everything ends at once, status 1
    scheduler or worker dies: both are started again (`--recover`), requests wait, /health answers 503 meanwhile
    another actor dies, or too many: open streams get an error event, /health answers 503, status 1
    one had to be killed at the end, because it hung: status 1

The port is bound first, so that a busy one is found before a weight is read.
"""

import asyncio
import logging
import time

from msgspec.structs import replace
from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.config import EngineConfig, is_loopback
from overlap_spec.config.resolve import http_limits
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.progress import shown_progress
from overlap_spec.entrypoints.cli.signals import StopSignals
from overlap_spec.entrypoints.cli.start_table import http_url, print_start
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.auth import SHALLOW
from overlap_spec.entrypoints.http.engine_client import HealthOf, server_info
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.http_server import HttpServer, freeze_heap
from overlap_spec.entrypoints.http.probes import health_response
from overlap_spec.entrypoints.http.request_spans import NO_SPANS, SPANS_S, RequestSpans, open_spans
from overlap_spec.entrypoints.http.streams import GOODBYE_S
from overlap_spec.errors import OverlapSpecError, RequestAborted
from overlap_spec.messages import EngineHealth, EngineState

CLOSE_S = 0.7  # for answers that are still being written at the end

log = logging.getLogger(__name__)


async def serve(config: EngineConfig) -> int:
    """Run the service to its end. Returns the exit status.

    Raises: OverlapSpecError if the port is taken or the engine does not start.
    """
    engine = Engine(config, watched=not config.disable_ui)
    service = Service(engine)
    with StopSignals(force=lambda: engine.kill("a second signal")) as signals:
        try:
            await service.bind()
            if await signals.interrupt(service.start()):
                return 0
            if await signals.interrupt(engine.wait_failed()):
                await service.drain()
            status = await service.report_failure()
        finally:
            await service.stop()
    return 1 if engine.killed else status


class Service:
    """One engine behind one port."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._front = Front(self.health)
        self._server = HttpServer(self._front, engine.config.host, engine.config.port, http_limits(engine.config))
        self._spans: RequestSpans = NO_SPANS
        self._draining = False
        self._is_late = False  # the time to drain is over
        self._state, self._state_since = EngineState.STARTING, time.monotonic()

    async def bind(self) -> None:
        """Bind the port. Raises: OverlapSpecError if that fails."""
        config = self._engine.config
        try:
            await self._server.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OverlapSpecError(f"cannot listen on {config.host} port {config.port}: {reason}") from None
        if not self._engine.keys.names and not is_loopback(config.host):
            log.warning("--host %s is reachable from other machines, and there is no --api-key", config.host)

    async def start(self) -> None:
        """Start the engine and answer requests from then on. Raises: ConfigError, CheckpointError, ActorDied."""
        engine = self._engine
        with shown_progress(log.info) as engine.progress:
            await engine.start()
        for note in engine.notes:
            log.info("%s", note)
        info = server_info(engine.config, engine.settings, lambda: engine.facts)
        self._spans = open_spans(engine.settings.server.otlp, info.model_name)
        app = self._front.app = create_app(engine.client, info, self.health, engine.watch, self._spans)
        app.state.large_bodies.start()
        freeze_heap()
        url = http_url(engine.config.host, self._server.port)
        engine.announce(url)
        print_start(engine.settings, engine.facts, url, engine.endpoint)

    def health(self) -> EngineHealth:
        """The state of engine and server. A state that knows no time of its own began when it was first seen."""
        health, now = self._engine.health, time.monotonic()
        if self._draining and health.state is not EngineState.FAILED:
            health = replace(health, state=EngineState.DRAINING, reason="the server is shutting down", since_s=0.0)
        if health.state is not self._state:
            self._state, self._state_since = health.state, now
        return health if health.since_s else replace(health, since_s=now - self._state_since)

    async def drain(self) -> None:
        """Refuse new requests and let open ones finish, within bounds."""
        self._draining = True
        seconds = self._engine.config.drain_timeout
        log.info("stopping: open requests have %.0f s to finish; a second signal ends them now", seconds)
        if await self._engine.drain(seconds) or self._engine.failure is not None:
            return
        self._is_late = True
        log.warning("requests are still open after %.0f s; aborting them", seconds)
        await self._engine.client.cancel("", everyone=True)
        await asyncio.sleep(GOODBYE_S)
        self._engine.client.fail(RequestAborted("the engine is stopping"))  # where it does not answer

    async def report_failure(self) -> int:
        """Log a failure and give its error events time to leave. Returns the exit status."""
        if self._engine.failure is None:
            return 0
        log.error("%s; stopping", self._engine.failure)
        await asyncio.sleep(GOODBYE_S)
        return 1

    async def stop(self) -> None:
        """End connections, processes and files: the last answers first, if there is time for them."""
        closing = asyncio.create_task(self._server.stop(CLOSE_S))
        try:
            if not self._is_late:
                await asyncio.wait((closing,))
            await self._engine.stop()
        finally:
            await closing
            await asyncio.to_thread(self._spans.close, SPANS_S)


class Front:
    """The ASGI app of the port: 503 until the engine is warm, then the server's app."""

    def __init__(self, health: HealthOf) -> None:
        self.app: ASGIApp = self._starting
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def _starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Problem(503, "the engine is starting", code="not_ready").response()
        if scope["type"] == "http" and scope["path"] in SHALLOW:
            answer = health_response(self._health())
        await answer(scope, receive, send)
