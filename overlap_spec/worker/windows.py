"""What is between a decode step's slots and its forward: windows read, judged and kept, as chains or as trees.

A chain's KV stands where it belongs. A tree's columns stand side by side in the places after the length, each attends
to its ancestors alone, and what survives is moved:

    window   0 a b c d    a and b follow the root, c follows a, d follows b      places  L L+1 L+2 L+3 L+4
    path     0 b d        stands: the KV of b moves to L + 1, that of d to L + 2; the next root stands at L + 3
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetOutput, TreeKeys
from overlap_spec.sampling.types import SamplingWork
from overlap_spec.spec.interfaces import Tree
from overlap_spec.spec.rows import tree_rows, window_rows
from overlap_spec.spec.types import Drawn, SlotBatch, Window
from overlap_spec.worker.slots import Committed, SlotRows


@dataclass(frozen=True)
class Read:
    """The windows of a step."""

    batch: SlotBatch
    window: Window
    tokens: Tensor  # [B * W] i64, what the forward runs on
    rows: RowBatch  # where they stand


@dataclass(frozen=True)
class Verified:
    """What `verify` leaves for `draft`: `rows` and `output` of the window's rows, or of what was kept of them."""

    width: int
    before: SlotBatch
    rows: RowBatch
    output: TargetOutput
    committed: Committed
    path: Tensor | None = None  # [B, D] i64, of trees: the columns that stand, first

    @property
    def last(self) -> Tensor:
        """The window columns where runs of accepted guesses end. Shapes: -> [B] i64."""
        ends = self.committed.verdict.accept_len
        return ends if self.path is None else self.path.gather(1, ends[:, None]).squeeze(1)


class Windows(Protocol):
    """Reads and settles the windows of steps. Sync: never."""

    def read(self, slots: Tensor, width: int, sampling: SamplingWork) -> Read:
        """The first `width` columns. Shapes: slots [B] i64."""
        ...

    def settle(self, read: Read, drawn: Drawn, output: TargetOutput) -> Verified:
        """Commit what was decided."""
        ...

    def keep(self, verified: Verified) -> Verified:
        """Put what the forward wrote where it belongs: D rows for each slot, those that stand first.

        This is left for when tokens are on their way. It must come before the next step of the slots.
        """
        ...


class ChainWindows:
    """Nothing is to be moved: rows that do not stand are overwritten by the next step."""

    def __init__(self, slots: SlotRows, page_size: int) -> None:
        self._slots = slots
        self._page_size = page_size

    def read(self, slots: Tensor, width: int, sampling: SamplingWork) -> Read:
        """See `Windows`."""
        batch, window, tokens = self._slots.windows(slots, width, self._page_size, sampling)
        return Read(batch, window, tokens, window_rows(batch, window.positions, self._page_size))

    def settle(self, read: Read, drawn: Drawn, output: TargetOutput) -> Verified:
        """See `Windows`."""
        committed = self._slots.commit(read.batch, read.window, drawn)
        return Verified(read.window.tokens.shape[1], read.batch, read.rows, output, committed)

    def keep(self, verified: Verified) -> Verified:
        """It is there."""
        return verified


class TreeWindows:
    """A window of one column has no guesses, so it is a chain."""

    def __init__(self, slots: SlotRows, page_size: int, tree: Tree) -> None:
        self._slots = slots
        self._page_size = page_size
        self._tree = tree
        self._single = ChainWindows(slots, page_size)

    def read(self, slots: Tensor, width: int, sampling: SamplingWork) -> Read:
        """See `Windows`."""
        if width == 1:
            return self._single.read(slots, width, sampling)
        seen = self._slots.tree_windows(slots, width, self._page_size, sampling)
        positions, longest = seen.window.positions, self._longest(width)
        keys = TreeKeys(seen.batch.lengths, seen.cache_rows, seen.mask, positions, longest)
        window = replace(seen.window, num_levels=longest - 1)
        return Read(seen.batch, window, seen.tokens, tree_rows(seen.batch, positions, seen.cache_rows, keys))

    def settle(self, read: Read, drawn: Drawn, output: TargetOutput) -> Verified:
        """See `Windows`."""
        width = read.window.tokens.shape[1]
        if width == 1:
            return self._single.settle(read, drawn, output)
        committed, path = self._slots.commit_tree(read.batch, read.window, drawn, self._longest(width))
        return Verified(width, read.batch, read.rows, output, committed, path)

    def keep(self, verified: Verified) -> Verified:
        """See `Windows`."""
        path, tree, before = verified.path, verified.rows.tree, verified.before
        if path is None or tree is None:
            return verified
        longest = path.shape[1]
        self._tree.move(tree.cache_rows.gather(1, path), tree.cache_rows[:, :longest].contiguous())
        places = before.lengths[:, None] + torch.arange(longest, device=path.device)
        rows = window_rows(before, places, self._page_size)
        return replace(verified, rows=rows, output=_along(path, verified.output))

    def _longest(self, width: int) -> int:
        """Tokens that a step of this width can commit, at most."""
        return min(self._tree.num_levels + 1, width)


def _along(path: Tensor, output: TargetOutput) -> TargetOutput:
    """What heads read of the columns of a path. Shapes: path [B, D] i64; rows [B * W, ..] -> [B * D, ..]."""
    aux_hidden = output.aux_hidden.view(len(path), -1, output.aux_hidden.shape[1])
    kept = aux_hidden.gather(1, path[:, :, None].expand(-1, -1, aux_hidden.shape[2])).flatten(0, 1)
    return TargetOutput(kept, kept if output.aux.shape[1] else output.aux[:0])
