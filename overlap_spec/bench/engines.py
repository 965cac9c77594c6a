"""The engines that one benchmark compares, and their description in reports.

engine      as configured                 depth1   the same, one step in flight
plain       the same without speculation
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any

from msgspec.structs import replace

from overlap_spec.bench.report import describe_run
from overlap_spec.config import EngineConfig, synthetic_acceptance
from overlap_spec.config.resolve import without_speculation
from overlap_spec.engine import Engine

Serve = Callable[[Engine], AbstractAsyncContextManager[tuple[str, int]]]  # an engine's HTTP server: host and port


def variants(config: EngineConfig, compared: Iterable[str]) -> dict[str, EngineConfig]:
    """The configured engine, and those named in `compared`: plain, depth1."""
    others = {"plain": without_speculation(config), "depth1": replace(config, disable_overlap_schedule=True)}
    return {"engine": config, **{name: others[name] for name in compared}}


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
