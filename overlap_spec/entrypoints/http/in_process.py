"""An engine behind an HTTP server of this process, as benchmarks measure it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from overlap_spec.config import ApiKeys
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.engine_client import server_info
from overlap_spec.entrypoints.http.http_server import HttpServer, freeze_heap

HOST = "127.0.0.1"


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[tuple[str, int]]:
    """A started engine behind its HTTP server. Yields host and port."""
    info = server_info(engine.config, engine.settings, lambda: engine.facts)
    info = replace(info, keys=ApiKeys())  # its requests carry none
    server = HttpServer(create_app(engine.client, info, lambda: engine.health), HOST, 0)
    await server.start()
    freeze_heap()
    try:
        yield HOST, server.port
    finally:
        await server.stop(1.0)
