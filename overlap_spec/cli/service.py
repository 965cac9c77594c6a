"""The life of engine and HTTP server, from a bound port to an empty process table.

    bind -> start the engine (503 meanwhile) -> print the table -> serve -> stop
    one signal: new requests 503, open ones finish, status 0       a second: everything ends at once, status 1
    scheduler or worker dies: new requests 503 until both have been started again (`--recover`), open ones go on
    another actor dies, or too many: open streams get an error event, /health answers 503, status 1

The port is bound first, so that a busy one is found before a weight is read.
"""

import asyncio
import ipaddress
import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.cli.progress import shown_progress
from overlap_spec.cli.signals import StopSignals
from overlap_spec.cli.start_table import http_url, print_start
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import OverlapSpecError
from overlap_spec.server.app import create_app
from overlap_spec.server.engine_client import server_info
from overlap_spec.server.http_server import HttpServer, freeze_heap
from overlap_spec.server.problems import Problem

DRAIN_S = 30.0  # for open requests after the first signal
GOODBYE_S = 0.3  # after a failure: error events leave, and /health answers 503
CLOSE_S = 1.0  # for answers that are still being written at the end

log = logging.getLogger(__name__)


async def serve(config: EngineConfig) -> int:
    """Run the service to its end. Returns the exit status.

    Raises: OverlapSpecError if the port is taken or the engine does not start.
    """
    engine = Engine(config)
    service = Service(engine)
    with StopSignals(force=lambda: engine.kill("a second signal")) as signals:
        try:
            await service.bind()
            if await signals.interrupt(service.start()):
                return 0
            if await signals.interrupt(engine.wait_failed()):
                await service.drain()
            return await service.report_failure()
        finally:
            await service.stop()


class Service:
    """One engine behind one port."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._front = Front()
        self._server = HttpServer(self._front, engine.config.host, engine.config.port)
        self._draining = False

    async def bind(self) -> None:
        """Bind the port. Raises: OverlapSpecError if that fails."""
        config = self._engine.config
        try:
            await self._server.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OverlapSpecError(f"cannot listen on {config.host} port {config.port}: {reason}") from None
        if config.api_key is None and not is_loopback(config.host):
            log.warning("--host %s is reachable from other machines, and there is no --api-key", config.host)

    async def start(self) -> None:
        """Start the engine and answer requests from then on. Raises: ConfigError, CheckpointError, ActorDied."""
        engine = self._engine
        with shown_progress(log.info) as engine.progress:
            await engine.start()
        for note in engine.notes:
            log.info("%s", note)
        info = server_info(engine.config, engine.settings, engine.facts)
        self._front.app = create_app(engine.client, info, self.health)
        freeze_heap()
        url = http_url(engine.config.host, self._server.port)
        print_start(engine.settings, engine.facts, url, engine.endpoint)

    def health(self) -> tuple[bool, str]:
        """Whether new requests are taken, and if not why."""
        if self._engine.failure is not None:
            return False, f"the engine has failed: {self._engine.failure}"
        if self._draining:
            return False, "the server is shutting down"
        if self._engine.recovering:
            return False, f"the engine is recovering: {self._engine.recovering}"
        return True, ""

    async def drain(self) -> None:
        """Refuse new requests and let open ones finish, within bounds."""
        self._draining = True
        log.info("stopping: open requests have %.0f s to finish; a second signal ends them now", DRAIN_S)
        if not await self._engine.drain(DRAIN_S) and self._engine.failure is None:
            log.warning("requests are still open after %.0f s; aborting them", DRAIN_S)
            await self._engine.client.cancel("", everyone=True)

    async def report_failure(self) -> int:
        """Log a failure and give its error events time to leave. Returns the exit status."""
        if self._engine.failure is None:
            return 0
        log.error("%s; stopping", self._engine.failure)
        await asyncio.sleep(GOODBYE_S)
        return 1

    async def stop(self) -> None:
        """End connections, processes and files."""
        await self._server.stop(CLOSE_S)
        await self._engine.stop()


class Front:
    """The ASGI app of the port: 503 until the engine is warm, then the server's app."""

    def __init__(self) -> None:
        self.app: ASGIApp = _starting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    await Problem(503, "the engine is starting", code="not_ready").response()(scope, receive, send)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server on that address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
