"""Detects what must not happen on a GPU once an engine is ready: a sync at a launch, a compilation, a cudaMalloc."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from overlap_spec_kernels.nvrtc import CudaCode

# For tests that call `synchronization_is_an_error`.
sync_mode_warns = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")


@contextmanager
def synchronization_is_an_error() -> Iterator[None]:
    """Operations that make the host wait for the device raise, whichever thread launches them. Events may be waited
    for: that is how results are read.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def compilations(loaded: bool = True) -> Iterator[list[str]]:
    """The functions in Triton, Gluon and CUDA C++ that are compiled in the block, as it goes.

    `loaded`: also those in Triton and Gluon that are read from Triton's cache, for which a step waits milliseconds.
    """
    import triton

    compiled: list[str] = []

    def note(*, src: Any, cache_hit: bool, **_: object) -> None:
        if loaded or not cache_hit:
            compiled.append(src.name)

    compile_cuda = CudaCode._compile

    def note_cuda(code: CudaCode) -> bytes:
        compiled.append(code.source.name)
        return compile_cuda(code)

    triton.knobs.compilation.listener = note
    try:
        with patch.object(CudaCode, "_compile", note_cuda):
            yield compiled
    finally:
        triton.knobs.compilation.listener = None


def device_allocations() -> int:
    """Calls of cudaMalloc by torch so far."""
    return int(torch.cuda.memory_stats()["num_device_alloc"])


def pinned_allocations() -> int:
    """Calls of cudaHostAlloc by torch so far."""
    return int(torch.cuda.host_memory_stats()["num_host_alloc"])
