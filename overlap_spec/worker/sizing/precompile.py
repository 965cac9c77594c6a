"""Compiles the kernels of every step at once, before anything is launched, where a start finds none of them.

One after another they take half a minute. Where they lie in Triton's cache already, this would only cost: a stamp
beside them states that. It names the kernels' sources and whatever else decides which of them are compiled, and how.
"""

import contextlib
import hashlib
from pathlib import Path

import msgspec
import overlap_spec_kernels
import torch
from overlap_spec_kernels import compiling_together

from overlap_spec.config import Settings
from overlap_spec.runtime.machine import num_cores
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.sizing.geometry import Geometry
from overlap_spec.worker.sizing.start_costs import what_they_depend_on
from overlap_spec.worker.sizing.warmup import cuda_prompt_lengths, graph_steps, warm_up

MOST_THREADS = 16


def precompile(settings: Settings, executor: Executor, geometry: Geometry) -> None:
    """Compile what `warm_up` and `capture_graphs` launch, unless an earlier start has. Only for a GPU."""
    stamp = _stamp(settings)
    if stamp.exists() or settings.compile_max_batch:  # torch.compile wants to see the operations themselves
        return
    with compiling_together(min(num_cores(), MOST_THREADS)):
        warm_up(executor, geometry, cuda_prompt_lengths(geometry))
        if settings.graph_batch_sizes:
            for steps in graph_steps(executor, geometry, settings.graph_batch_sizes).all:
                steps.run_once()
    with contextlib.suppress(OSError):
        stamp.touch()


def _stamp(settings: Settings) -> Path:
    """In Triton's cache: who empties it takes the stamp too."""
    import triton

    kernels = Path(overlap_spec_kernels.__file__).parent
    sources = [path.read_bytes() for path in sorted(kernels.rglob("*.py"))]
    of = what_they_depend_on(settings), settings.graph_batch_sizes, torch.cuda.get_device_name(), triton.__version__
    key = hashlib.sha256(b"".join([*sources, msgspec.json.encode(of)])).hexdigest()[:16]
    return Path(triton.knobs.cache.dir) / f"overlap-spec-{key}"
