"""The engines that one benchmark compares, and their description in reports.

engine      as configured                 depth1   the same, one step in flight
plain       the same without speculation
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from overlap_spec.bench.report import describe_run
from overlap_spec.config import ApiKeys, EngineConfig, synthetic_acceptance
from overlap_spec.config.resolve import without_speculation
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.engine_client import server_info
from overlap_spec.entrypoints.http.http_server import HttpServer, freeze_heap

HOST = "127.0.0.1"


def variants(config: EngineConfig, compared: Iterable[str]) -> dict[str, EngineConfig]:
    """The configured engine, and those named in `compared`: plain, depth1."""
    others = {"plain": without_speculation(config), "depth1": replace(config, disable_overlap_schedule=True)}
    return {"engine": config, **{name: others[name] for name in compared}}


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[tuple[str, int]]:
    """The engine behind its HTTP server. Yields host and port."""
    info = server_info(engine.config, engine.settings, lambda: engine.facts)
    info = replace(info, keys=ApiKeys())  # its requests carry none
    server = HttpServer(create_app(engine.client, info, lambda: engine.health), HOST, 0)
    await server.start()
    freeze_heap()
    try:
        yield HOST, server.port
    finally:
        await server.stop(1.0)


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Hardware, versions, commit and command."""
    return describe_run(engine.facts.worker.device, engine.settings.num_threads)


def describe_settings(engine: Engine) -> dict[str, Any]:
    """The settings that a figure depends on."""
    settings = engine.settings
    spec = settings.spec
    return {
        "model": settings.model.name,
        "load_format": settings.model.files.load_format,
        "dtype": settings.model.dtype,
        "method": spec.method,
        "num_steps": spec.num_steps,
        "topk": spec.topk,
        "num_draft_tokens": spec.width,
        "narrower": list(spec.narrower),
        "acceptance": acceptance_of(engine),
        "depth": settings.scheduler.depth,
        "max_running_requests": settings.scheduler.max_running_requests,
        "prefix_cache": settings.cache.prefix_cache,
        "skip_tokenizer_init": settings.skip_tokenizer_init,
        "graph_batch_sizes": list(settings.graph_batch_sizes),
        "compile_max_batch": settings.compile_max_batch,
    }


def acceptance_of(engine: Engine) -> str:
    """`real`, or a description of synthetic acceptance; empty without speculation."""
    spec = engine.settings.spec
    if spec.simulated_accept_lens:
        return synthetic_acceptance(spec.simulated_accept_lens)
    return "real" if spec.width > 1 else ""
