"""Decode steps as CUDA graphs: what a step launches is recorded once and replayed. Not here: what it launches.

Two graphs a step, cut where tokens leave, so that an ordinary event between them tells the host that results are out;
one captured event could not tell replay N from N + 1. Everything is on one stream: the copy of slots into a graph's
input for step N + 1 runs after step N, and so does whatever overwrites its output.

    launch:  slots -> input | verify graph | published -> pinned, event | draft graph

A graph has a fixed number of rows. A smaller batch is padded with the dummy slot, whose page table is all page 0
and whose length is put back to 0 before every step.
"""

import bisect
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap_spec.spec.types import SAMPLING_WORK, SamplingWork
from overlap_spec.worker.decode import DecodeStep, Verified
from overlap_spec.worker.slots import SlotRows


@dataclass(frozen=True)
class StepGraphs:
    """One batch size and one kind of sampling, captured."""

    slots: Tensor  # [B] i64, the input
    verify: torch.cuda.CUDAGraph
    verified: Verified  # fixed addresses
    draft: Callable[[], None]


class GraphDecoder:
    """Replays the smallest captured batch that holds the step's; what none holds is launched operation by operation."""

    def __init__(self, step: DecodeStep, slots: SlotRows, width: int, batch_sizes: Sequence[int]) -> None:
        self._step = step
        self._rows = slots
        self._width = width
        self._sizes = sorted(batch_sizes)
        self._graphs: dict[tuple[int, SamplingWork], StepGraphs] = {}
        self._running: StepGraphs | None = None

    def capture(self) -> None:
        """Capture every batch size and kind of sampling, largest first, in one memory pool."""
        pool: Any = torch.cuda.graph_pool_handle()
        with torch.inference_mode(), _no_garbage_collection():
            for size in reversed(self._sizes):
                for sampling in SAMPLING_WORK:
                    self._graphs[size, sampling] = self._capture(size, sampling, pool)
        torch.cuda.synchronize()

    def verify(self, slots: Tensor, width: int, sampling: SamplingWork) -> Verified:
        """See `Decoder`. The result is overwritten by the next step; its first len(slots) rows are this batch."""
        size = self._size_for(len(slots), width)
        if size is None:
            self._running = None
            return self._step.verify(slots, width, sampling)
        graphs = self._running = self._graphs[size, sampling]
        graphs.slots[: len(slots)].copy_(slots)
        graphs.slots[len(slots) :].fill_(self._rows.dummy)
        graphs.verify.replay()
        return graphs.verified

    def draft(self, verified: Verified) -> None:
        """See `Decoder`."""
        if self._running is None:
            self._step.draft(verified)
        else:
            self._running.draft()

    def _size_for(self, num_slots: int, width: int) -> int | None:
        index = bisect.bisect_left(self._sizes, num_slots)
        return self._sizes[index] if width == self._width and index < len(self._sizes) else None

    def _capture(self, size: int, sampling: SamplingWork, pool: Any) -> StepGraphs:
        slots = torch.full((size,), self._rows.dummy, dtype=torch.int64, device=self._rows.length.device)
        self._step.draft(self._verify(slots, sampling))  # compiles kernels, which a capture must not
        torch.cuda.synchronize()
        verify = torch.cuda.CUDAGraph()
        with torch.cuda.graph(verify, pool=pool):
            verified = self._verify(slots, sampling)
        return StepGraphs(slots, verify, verified, self._capture_draft(verified, pool))

    def _capture_draft(self, verified: Verified, pool: Any) -> Callable[[], None]:
        """Returns the replay. A window of one has no guesses: there is nothing to launch, and nothing to capture."""
        if self._width == 1:
            return lambda: None
        draft = torch.cuda.CUDAGraph()
        with torch.cuda.graph(draft, pool=pool):
            self._step.draft(verified)
        return draft.replay

    def _verify(self, slots: Tensor, sampling: SamplingWork) -> Verified:
        self._rows.rest_dummy()
        return self._step.verify(slots, self._width, sampling)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect now, and not while a capture is under way: freeing CUDA memory would invalidate it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
