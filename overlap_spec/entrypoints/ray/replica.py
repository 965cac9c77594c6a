"""One replica: an engine and the server's app, called in the replica's process instead of over a socket.

start    the engine, which is warm before Serve sends a request
answer   a call is run through the app; what the app sends is yielded, all that has come at a time
health   the engine's, as `/health` shows it: a replica whose engine has failed is replaced
end      Serve waits for open calls, then the engine stops
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator

from ray import serve
from starlette.types import ASGIApp, Message

from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.http.access_log import ID_HEADER
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.engine_client import server_info
from overlap_spec.entrypoints.http.http_server import freeze_heap
from overlap_spec.entrypoints.http.request_spans import NO_SPANS, SPANS_S, RequestSpans, open_spans
from overlap_spec.entrypoints.http.streams import GOODBYE_S
from overlap_spec.entrypoints.ray.calls import REPLICA_HEADER, Call
from overlap_spec.entrypoints.ray.scaling import RUNNING, WAITING
from overlap_spec.messages import EngineState
from overlap_spec.runtime.log_limits import limit_lines

OF_PROXY = ID_HEADER.encode()  # Ray's proxy passes the id on to the app, and adds the same header to its answer

log = logging.getLogger(__name__)


class EngineReplica:
    """The deployment. Raises: ConfigError, CheckpointError or ActorDied if the engine cannot start."""

    async def __init__(self, config: EngineConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._id = serve.get_replica_context().replica_id.unique_id
        logging.basicConfig(level=config.log_level.upper(), format=f"%(asctime)s %(levelname)s {self._id}: %(message)s")
        limit_lines()
        self._engine = Engine(config)
        self._watch: asyncio.Task[None] | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._spans: RequestSpans = NO_SPANS
        await self._engine.start()
        for note in self._engine.notes:
            log.info("%s", note)
        info = server_info(config, self._engine.settings, lambda: self._engine.facts)
        self._spans = open_spans(self._engine.settings.server.otlp, info.model_name)
        health, watch = (lambda: self._engine.health), self._engine.watch
        self._app: ASGIApp = create_app(self._engine.client, info, health, watch, self._spans)
        self._watch = asyncio.create_task(self._leave_when_failed())
        freeze_heap()

    async def answer(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """Yield the ASGI messages of the answer. Leaving early is what a client does that closes its connection."""
        exchange = Exchange(call, self._id)
        task = asyncio.create_task(exchange.run(self._app))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            while messages := await exchange.take():
                yield messages
        finally:
            exchange.gone.set()

    async def answer_whole(self, call: Call) -> list[Message]:
        """All messages of the answer, for a call that goes to every replica."""
        return [message async for messages in self.answer(call) for message in messages]

    async def check_health(self) -> None:
        """Raises: RuntimeError if the engine has failed. One that recovers is well: its requests wait."""
        health = self._engine.health
        if health.state is EngineState.FAILED:
            raise RuntimeError(health.reason)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling.py` reads."""
        stats = await self._engine.client.stats()
        return {WAITING: float(stats.num_queued), RUNNING: float(stats.num_running)}

    async def _leave_when_failed(self) -> None:
        """End the process of an engine that has failed: routers drop a dead replica sooner than an unhealthy one."""
        log.error("%s; this replica ends", await self._engine.wait_failed())
        await asyncio.sleep(GOODBYE_S)
        os._exit(1)

    async def __del__(self) -> None:
        """Called by Serve when no call is open any more."""
        if self._watch is not None:
            self._watch.cancel()
        await self._engine.stop()
        await asyncio.to_thread(self._spans.close, SPANS_S)


class Exchange:
    """One call in the app: what it may receive, and what it has sent."""

    def __init__(self, call: Call, replica_id: str) -> None:
        self.gone = asyncio.Event()
        self._call = call
        self._header = (REPLICA_HEADER.encode(), replica_id.encode())
        self._is_read = False
        self._sent: list[Message] = []
        self._has_sent = asyncio.Event()
        self._is_over = False

    async def run(self, app: ASGIApp) -> None:
        """Run the app to its end; what it raises is in its log and its answer."""
        try:
            await app(dict(self._call.scope), self._receive, self._send)
        except Exception:
            log.exception("a call has failed")
        finally:
            self._is_over = True
            self._has_sent.set()

    async def take(self) -> list[Message]:
        """Wait for messages. Empty: there are no more."""
        await self._has_sent.wait()
        taken, self._sent = self._sent, []
        if not self._is_over:
            self._has_sent.clear()
        return taken

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [header for header in message.get("headers", ()) if header[0] != OF_PROXY]
            message = {**message, "headers": [*kept, self._header]}
        self._sent.append(message)
        self._has_sent.set()
