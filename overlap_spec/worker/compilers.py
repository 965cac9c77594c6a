"""Processes that compile kernels (`startup/warmup.py`), started before the worker imports torch.

Each imports torch and Triton before it compiles anything, which takes seconds. On a machine where no start has compiled
kernels yet, they do so while the worker imports the same, and loads weights. Where cores are few the worker would wait
for them. This module imports neither.
"""

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from overlap_spec.config import Settings, kernel_cache
from overlap_spec.runtime.machine import num_cores

MOST_PROCESSES = 16  # each takes some 300 MiB of the host's memory while it compiles
CORES_AHEAD, CORES_LEFT = 8, 2  # cores that it takes to start processes ahead, and how many of them are the worker's
STAMPED = "overlap-spec-"  # how the name of a stamp begins: a start has compiled its kernels


def started_compilers(settings: Settings) -> ProcessPoolExecutor | None:
    """For a start that will compile everything; None where it will not, or where some start has before it.

    `precompile` ends them.
    """
    compiles = settings.model.device == "cuda" and not settings.compile_max_batch
    if not compiles or num_cores() < CORES_AHEAD or any(Path(kernel_cache()).glob(f"{STAMPED}*")):
        return None
    processes = compilers()
    for _ in range(min(num_cores() - CORES_LEFT, MOST_PROCESSES)):  # a job starts a process
        processes.submit(os.getpid)
    return processes


def compilers() -> ProcessPoolExecutor:
    """Processes that end with this one; each starts when it is needed."""
    spawned = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(min(num_cores(), MOST_PROCESSES), spawned, _begin, (os.getpid(),))


def _begin(parent: int) -> None:
    """Ctrl-C in a terminal reaches them too, but is the parent's: a pool without its processes reports it loudly."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from overlap_spec_kernels import begin_compiler

    begin_compiler(parent)
