"""Errors of speculative decoding, planted into the verify steps of a ring: the live audit must find each kind.

Plain steps, prefill and audits run through the same target and are left alone. `every`: how many verify steps of a slot
there are to an error, on average.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetModel, TargetOutput
from overlap_spec.spec.interfaces import Verifier
from overlap_spec.spec.types import Drawn, SlotBatch, Window
from overlap_spec.worker.executor import Executor


class AcceptsRejected:
    """Accepts a guess that the target did not draw."""

    def __init__(self, inner: Verifier, rng: random.Random, every: float) -> None:
        self._inner = inner
        self._rng = rng
        self._every = every

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        drawn = self._inner.verify(window, lazy_logits, batch)
        tokens = drawn.tokens.clone()
        for slot in range(len(tokens)):
            if window.tokens.shape[1] > 1 and self._rng.random() < 1 / self._every:
                tokens[slot, 0] = torch.where(window.tokens[slot, 1] >= 0, window.tokens[slot, 1], tokens[slot, 0])
        return replace(drawn, tokens=tokens)


@dataclass
class WrongRows:
    """A target whose forward gets the rows that `spoil` leaves."""

    inner: TargetModel
    spoil: Callable[[RowBatch], RowBatch]

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        return self.inner.forward(tokens, self.spoil(rows) if rows.max_rows > 1 else rows)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def accept_rejected(executor: Executor, rng: random.Random, every: float) -> None:
    step = executor.decode_step
    step.method = replace(step.method, verifier=AcceptsRejected(step.method.verifier, rng, every))


def leave_rows_stale(executor: Executor, rng: random.Random, every: float) -> None:
    """The KV of a root is not written: what is there is a rejected guess's, or another request's."""
    page_size = executor.slots.pool.page_size

    def spoil(rows: RowBatch) -> RowBatch:
        placed = rows.placed(page_size)
        assert placed.cache_rows is not None
        cache_rows = placed.cache_rows.clone().view(-1, rows.max_rows)
        for slot in range(len(cache_rows)):
            if rng.random() < 1 / every:
                cache_rows[slot, 0] = 0  # the dummy page
        return replace(placed, cache_rows=cache_rows.view(-1))

    _spoil(executor, spoil)


def shift_positions(executor: Executor, rng: random.Random, every: float) -> None:
    """A window is rotated, and attends, one position too far."""

    def spoil(rows: RowBatch) -> RowBatch:
        positions = rows.placed(executor.slots.pool.page_size).positions.clone().view(-1, rows.max_rows)
        for slot in range(len(positions)):
            if rng.random() < 1 / every:
                positions[slot] += 1
        return replace(rows.placed(executor.slots.pool.page_size), positions=positions.view(-1))

    _spoil(executor, spoil)


def _spoil(executor: Executor, spoil: Callable[[RowBatch], RowBatch]) -> None:
    step = executor.decode_step
    step._target = WrongRows(step._target, spoil)  # type: ignore[assignment]


PLANTS = {
    "a rejected guess accepted": accept_rejected,
    "a stale KV row": leave_rows_stale,
    "a window one position off": shift_positions,
}
