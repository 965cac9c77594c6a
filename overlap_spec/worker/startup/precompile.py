"""Compiles the kernels of every step at once, before anything is launched, where a start finds none of them.

One after another they take most of a minute. Where they lie in Triton's cache already, this would only cost: a stamp
beside them states that. It names the kernels' sources and whatever else decides which of them are compiled, and how.
"""

import contextlib
import hashlib
import logging
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from overlap_spec_kernels import compiling_together

from overlap_spec.config import Settings
from overlap_spec.worker.compilers import STAMPED, compilers
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry
from overlap_spec.worker.startup.start_costs import what_they_depend_on
from overlap_spec.worker.startup.warmup import (
    cuda_prompt_lengths,
    graph_runner,
    graph_sizes,
    run_uncaptured,
    warm_up,
)

log = logging.getLogger(__name__)


def precompile(
    settings: Settings, executor: Executor, geometry: Geometry, started: ProcessPoolExecutor | None = None
) -> None:
    """Compile what `warm_up` and `capture_graphs` launch, unless an earlier start has. Only for a GPU.

    Whatever goes wrong, the start goes on: what is not compiled now will be when it is launched. `started`: processes
    that were started ahead (`started_compilers`); they end here.
    """
    stamp = _stamp(settings, geometry)
    if stamp.exists() or settings.compile_max_batch:  # torch.compile wants to see the operations themselves
        if started is not None:
            started.shutdown(wait=False, cancel_futures=True)
        return
    try:
        with compiling_together(started or compilers()):
            warm_up(executor, geometry, cuda_prompt_lengths(geometry), decodes=not settings.graph_batch_sizes)
            if settings.graph_batch_sizes:
                graph_runner(executor, graph_sizes(executor, geometry, settings.graph_batch_sizes)).run_once()
                run_uncaptured(executor, geometry)
    except Exception:
        log.warning("kernels are compiled one after another, because not all could be compiled at once", exc_info=True)
        return
    with contextlib.suppress(OSError):
        stamp.touch()


def _stamp(settings: Settings, geometry: Geometry) -> Path:
    """In Triton's cache: who empties it takes the stamp too."""
    import triton

    key = hashlib.sha256(msgspec.json.encode(what_they_depend_on(settings, geometry))).hexdigest()[:16]
    return Path(triton.knobs.cache.dir) / f"{STAMPED}{key}"
