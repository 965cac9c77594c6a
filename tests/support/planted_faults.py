"""Errors of speculative decoding, planted into the verify steps of a ring: the live audit must find each kind.

Windows are chains. Plain steps, prefill and audits run through the same target and are left alone. Which windows an
error goes into depends on their roots, and on nothing that time decides: the same requests have the same errors in any
batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor

from overlap_spec.features.grammar.grammars import RequestGrammar
from overlap_spec.features.grammar.window_masks import HostWindow
from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetModel, TargetOutput
from overlap_spec.speculative.interfaces import Drawn, SlotBatch, Verifier, Window
from overlap_spec.worker.executor import Executor
from support.late_grammars import grammars_of


@dataclass
class Chance:
    """One window in `every`, on average. `num_planted` counts the errors."""

    every: float
    seed: int = 0
    num_planted: int = 0

    def picks(self, roots: Tensor, positions: Tensor) -> list[int]:
        """Indices of the windows that have the error."""
        windows = zip(roots.tolist(), positions.tolist(), strict=True)
        picked = [index for index, window in enumerate(windows) if self._hash(*window) * self.every < 1 << 32]
        self.num_planted += len(picked)
        return picked

    def _hash(self, *window: int) -> int:
        return int.from_bytes(blake2b(b"%d %d %d" % (self.seed, *window), digest_size=4).digest())


class AcceptsRejected:
    """Accepts a guess that the target did not draw."""

    def __init__(self, inner: Verifier, chance: Chance) -> None:
        self._inner = inner
        self._chance = chance

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        drawn = self._inner.verify(window, lazy_logits, batch)
        if window.tokens.shape[1] == 1:
            return drawn
        tokens, guesses = drawn.tokens.clone(), window.tokens[:, 1]
        (rejected,) = ((guesses >= 0) & (guesses != tokens[:, 0])).nonzero(as_tuple=True)
        for picked in self._chance.picks(window.tokens[rejected, 0], window.positions[rejected, 0]):
            tokens[rejected[picked], 0] = guesses[rejected[picked]]
        return replace(drawn, tokens=tokens)


@dataclass
class WrongRows:
    """A target whose forward gets the rows that `spoil` leaves."""

    inner: TargetModel
    spoil: Callable[[Tensor, RowBatch], RowBatch]

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        return self.inner.forward(tokens, self.spoil(tokens, rows) if rows.max_rows > 1 else rows)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def accept_rejected(executor: Executor, chance: Chance) -> None:
    step = executor.decode_step
    step.method = replace(step.method, verifier=AcceptsRejected(step.method.verifier, chance))


def leave_rows_stale(executor: Executor, chance: Chance) -> None:
    """The KV of a root is not written: what is there is a rejected guess's, or another request's."""
    page_size = executor.slots.pool.page_size

    def spoil(tokens: Tensor, rows: RowBatch) -> RowBatch:
        placed = rows.placed(page_size)
        assert placed.cache_rows is not None
        cache_rows = placed.cache_rows.clone().view(-1, rows.max_rows)
        for slot in _picked(chance, tokens, placed):
            cache_rows[slot, 0] = 0  # the dummy page
        return replace(placed, cache_rows=cache_rows.view(-1))

    _spoil(executor, spoil)


def shift_positions(executor: Executor, chance: Chance) -> None:
    """A window is rotated, and attends, one position too far."""
    page_size = executor.slots.pool.page_size

    def spoil(tokens: Tensor, rows: RowBatch) -> RowBatch:
        placed = rows.placed(page_size)
        positions = placed.positions.clone().view(-1, rows.max_rows)
        for slot in _picked(chance, tokens, placed):
            positions[slot] += 1
        return replace(placed, positions=positions.view(-1))

    _spoil(executor, spoil)


def keep_a_rejected_token(executor: Executor, chance: Chance) -> None:
    """What recurs takes one token more of the window before than was accepted, where it was not accepted whole."""
    layers = executor._snapshots.state.layers

    def spoil(tokens: Tensor, rows: RowBatch) -> RowBatch:
        assert rows.state is not None
        starts = rows.positions.view(-1, rows.max_rows)[:, 0]
        for picked in _picked(chance, tokens, rows):
            slot = rows.state.slots[picked]
            if starts[picked] - layers[0].position[slot] < rows.max_rows:
                for layer in layers:
                    layer.position[slot] -= 1
        return rows

    _spoil(executor, spoil)


def forbid_a_token(executor: Executor, chance: Chance) -> None:
    """The mask of a grammar lacks the first token that it allows, where it allows others."""
    grammars = grammars_of(executor).grammars
    compute = grammars.masks

    def masks(
        of: Sequence[RequestGrammar], windows: Sequence[HostWindow], memory: Tensor, places: Sequence[int]
    ) -> None:
        compute(of, windows, memory, places)
        width = len(windows[0].tokens)
        if width > 1:  # audits have one column
            firsts, lasts = (torch.stack([memory[place + column] for place in places]) for column in (0, width - 1))
            for window in chance.picks(firsts.sum(1), lasts.sum(1)):
                for column in memory[places[window] : places[window] + width]:
                    _forbid_first(column)

    grammars.masks = masks


def _forbid_first(mask: Tensor) -> None:
    less, first = mask.clone(), int(mask.nonzero()[0])
    less[first] &= less[first] - 1
    mask.copy_(less if less.any() else mask)


def _picked(chance: Chance, tokens: Tensor, rows: RowBatch) -> list[int]:
    width = rows.max_rows
    return chance.picks(tokens.view(-1, width)[:, 0], rows.positions.view(-1, width)[:, 0])


def _spoil(executor: Executor, spoil: Callable[[Tensor, RowBatch], RowBatch]) -> None:
    step = executor.decode_step
    step.target = WrongRows(step.target, spoil)


PLANTS = {
    "a rejected guess accepted": accept_rejected,
    "a stale KV row": leave_rows_stale,
    "a window one position off": shift_positions,
}
