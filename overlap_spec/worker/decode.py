"""The windows of a decode step, as device work alone: verify them, commit, draft the next ones.

All of it takes nothing from the host but the slots, so that each function of `PartKind` (`runner.py`) can be captured
as a CUDA graph. Tokens leave after `decide`. A new kind of sampling captures its `decide` alone.

A step has one width w: it verifies w columns of the window and proposes w - 1 guesses. At width 1 there is nothing to
draft; `absorb_missed` makes up for it (`inputs.py`).

Chains and trees differ in which rows the target runs, and in what becomes of their KV.

A chain's KV is where it belongs. A tree's columns are side by side in the places after the length, each attends
to its ancestors alone, and what is accepted is moved:

    window   0 a b c d    a and b follow the root, c follows a, d follows b      places  L L+1 L+2 L+3 L+4
    path     0 b d        accepted: the KV of b moves to L + 1, that of d to L + 2; the next root is at L + 3
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from overlap_spec_kernels import Published, PublishedColumns, Verdict as KernelVerdict
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetModel, TargetOutput, TreeKeys
from overlap_spec.sampling.context import GREEDY_WORK, SamplingWork
from overlap_spec.sampling.stages import Decided, KeptLogits
from overlap_spec.speculative.interfaces import (
    ABSORBED_ROWS,
    SelfDrafting,
    SlotBatch,
    SpecMethod,
    Tree,
    Verdict,
    Window,
)
from overlap_spec.speculative.rows import tree_rows, window_rows
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import NO_MARKS, ProfileMarks, StepShape


class WindowsRead(NamedTuple):
    """The windows of a step, and what a forward takes of them."""

    batch: SlotBatch  # sampling is not gathered
    window: Window
    tokens: Tensor  # [B * W] i64
    rows: RowBatch


@dataclass(frozen=True)
class Forwarded:
    """The windows of a step, and what the target's layers gave for their rows.

    Nothing here depends on how tokens are drawn. `verdict` is memory that `judge` writes, the same for every kind of
    sampling, so that a captured draft can read it whichever kind judged.
    """

    batch: SlotBatch  # sampling is not gathered
    window: Window
    rows: RowBatch
    output: TargetOutput
    verdict: Verdict

    @property
    def width(self) -> int:
        """Columns of each window."""
        return self.window.tokens.shape[1]


class Windows(Protocol):
    """Reads windows, and keeps what was accepted of them. Sync: never."""

    def read(self, slots: Tensor, width: int, num_pages: int) -> WindowsRead:
        """The first `width` columns; a forward's tokens and rows, whose page tables have `num_pages` columns.

        Shapes: slots [B] i64; tokens [B * W] i64.
        """

    def columns(self, width: int) -> PublishedColumns: ...

    def keep(self, forwarded: Forwarded) -> tuple[RowBatch, TargetOutput]:
        """Put what the forward wrote where it belongs. Returns D rows for each slot, accepted ones first.

        This is left for when tokens are on their way. It must come before the next step of the slots.
        """


class ChainWindows:
    """Nothing is to be moved: rows that are rejected are overwritten by the next step."""

    def __init__(self, slots: SlotRows, target: TargetModel, page_size: int, is_self_drafting: bool) -> None:
        self._slots = slots
        self._target = target
        self._page_size = page_size
        self._is_self_drafting = is_self_drafting

    def read(self, slots: Tensor, width: int, num_pages: int) -> WindowsRead:
        gathered = self._slots.gather(slots, width, self._page_size, num_pages)
        places = gathered.lengths, gathered.page_table
        batch = SlotBatch(slots, *places, self._slots.no_sampling, self._target.divide(*places, width))
        window = Window(gathered.window_tokens, gathered.positions.view(gathered.window_tokens.shape))
        return WindowsRead(batch, window, gathered.tokens, window_rows(batch, window.positions, self._page_size))

    def columns(self, width: int) -> PublishedColumns:
        return PublishedColumns(width, is_self_drafting=self._is_self_drafting)

    def keep(self, forwarded: Forwarded) -> tuple[RowBatch, TargetOutput]:
        return forwarded.rows, forwarded.output


class TreeWindows:
    """A window of one column has no guesses, so it is a chain."""

    def __init__(
        self, slots: SlotRows, target: TargetModel, page_size: int, is_self_drafting: bool, tree: Tree
    ) -> None:
        self._slots = slots
        self._page_size = page_size
        self._tree = tree
        self._single = ChainWindows(slots, target, page_size, is_self_drafting)

    def read(self, slots: Tensor, width: int, num_pages: int) -> WindowsRead:
        if width == 1:
            return self._single.read(slots, width, num_pages)
        gathered = self._slots.gather_trees(slots, width, self._page_size, num_pages)
        batch = SlotBatch(slots, gathered.lengths, gathered.page_table, self._slots.no_sampling)
        positions = gathered.positions.view(gathered.window_tokens.shape)
        longest = self._longest(width)
        keys = TreeKeys(gathered.lengths, gathered.extra_rows, gathered.mask, positions, longest, are_rows=True)
        rows = tree_rows(batch, positions, gathered.extra_rows, keys)
        window = Window(gathered.window_tokens, positions, gathered.parents, longest - 1)
        return WindowsRead(batch, window, gathered.tokens, rows)

    def columns(self, width: int) -> PublishedColumns:
        return self._single.columns(self._longest(width))._replace(is_tree=width > 1)

    def keep(self, forwarded: Forwarded) -> tuple[RowBatch, TargetOutput]:
        path, tree, before = forwarded.verdict.path, forwarded.rows.tree, forwarded.batch
        if path is None or tree is None:
            return self._single.keep(forwarded)
        longest = path.shape[1]
        self._tree.move(tree.cache_rows.gather(1, path), tree.cache_rows[:, :longest].contiguous())
        places = before.lengths[:, None] + torch.arange(longest, device=path.device)
        return window_rows(before, places, self._page_size), _along(path, forwarded.output)

    def _longest(self, width: int) -> int:
        """Tokens that a step of this width can commit, at most."""
        return min(self._tree.num_levels + 1, width)


def _along(path: Tensor, output: TargetOutput) -> TargetOutput:
    """What heads read of the columns of a path. Shapes: path [B, D] i64; rows [B * W, ..] -> [B * D, ..]."""
    aux_hidden = output.aux_hidden.view(len(path), -1, output.aux_hidden.shape[1])
    kept = aux_hidden.gather(1, path[:, :, None].expand(-1, -1, aux_hidden.shape[2])).flatten(0, 1)
    return TargetOutput(kept, kept if output.aux.shape[1] else output.aux[:0])


class DecodeStep:
    """Windows, as a `WindowKind`. `marks`: told where `decide` and `draft` are."""

    def __init__(
        self,
        slots: SlotRows,
        target: TargetModel,
        method: SpecMethod,
        page_size: int,
        marks: ProfileMarks = NO_MARKS,
    ) -> None:
        self._slots = slots
        self.target = target
        self.method = method
        self.page_size = page_size
        self.marks = marks
        self.self_drafting = method.proposer if isinstance(method.proposer, SelfDrafting) else None
        is_self_drafting, tree = self.self_drafting is not None, method.tree
        self._windows: Windows = (
            ChainWindows(slots, target, page_size, is_self_drafting)
            if tree is None
            else TreeWindows(slots, target, page_size, is_self_drafting, tree)
        )

    def forget(self) -> None:
        """Let go of what requests have said, where it is kept for others. Sync: never."""
        if self.self_drafting is not None:
            with torch.inference_mode():
                self.self_drafting.forget()

    def absorb_missed(self, slots: Tensor, counts: Tensor) -> None:
        """Absorb the first ABSORBED_ROWS of the rows that each slot has missed, and take them off its count.

        The batch is given as it was when no more had been committed. Shapes: slots, counts [B] i64.
        """
        batch, later = self._slots.batch(slots, GREEDY_WORK), (counts - ABSORBED_ROWS).clamp(min=0)
        self.method.proposer.catch_up(replace(batch, lengths=batch.lengths - later), counts - later)
        counts.copy_(later)

    def dummies(self, shape: StepShape) -> Tensor:
        return torch.full((shape.slots,), self._slots.dummy, dtype=torch.int64, device=self._slots.length.device)

    def read(self, slots: Tensor, shape: StepShape) -> WindowsRead:
        """See `PartKind`. Shapes: slots [B] i64."""
        return self._windows.read(slots, shape.width, shape.columns)

    def ran(self, read: WindowsRead, output: TargetOutput) -> Forwarded:
        slots, width = read.batch.slots, read.window.tokens.shape[1]
        verdict = KernelVerdict.allocate(len(slots), self._windows.columns(width), slots.device)
        return Forwarded(read.batch, read.window, read.rows, output, verdict)

    def decide(self, forwarded: Forwarded, sampling: SamplingWork) -> Published:
        self.marks.replayed(())
        window, output, verdict = forwarded.window, forwarded.output, forwarded.verdict
        batch = replace(forwarded.batch, sampling=self._slots.sampling(forwarded.batch.slots, sampling))
        logits: LazyLogits = self.target.logits(output.final)
        logits = KeptLogits(logits) if sampling.outputs else logits
        drawn = self.method.verifier.verify(window, logits, batch)
        self.marks.mark("verify")  # after the head, which computes logits only when they are asked for
        self._slots.commit(batch, window, drawn, verdict)
        if self.self_drafting is not None:
            self.self_drafting.report(batch, verdict, verdict.published.guess_report)
        elif forwarded.width == 1 < self._slots.width:
            self.method.proposer.defer(batch, output, verdict)
        if not sampling.outputs:
            return verdict.published
        decided = Decided(verdict.tokens, batch.slots, verdict.path)
        return verdict.published._replace(outputs=self._slots.write_outputs(logits, decided))

    def draft(self, forwarded: Forwarded, sampling: SamplingWork, width: int) -> None:
        if self.proposed(width) == 1:
            return
        proposer, verdict, before = self.method.proposer, forwarded.verdict, forwarded.batch
        rows, output = self._windows.keep(forwarded)
        learnt = proposer.extend(before, rows, output, verdict)
        self.marks.mark("extend")
        drawing = self._slots.draft_sampling(before.slots, self.method.draft_work(sampling))
        after = SlotBatch(
            before.slots, verdict.next_lengths, before.page_table, drawing, before.shares, verdict.next_positions
        )
        self._slots.set_guesses(after, proposer.propose(after, learnt, self.proposed(width) - 1))

    def proposed(self, width: int) -> int:
        """See `PartKind`. Guesses that cost nothing fill whole windows."""
        return width if self.self_drafting is None else self._slots.width
