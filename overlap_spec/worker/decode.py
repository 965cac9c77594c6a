"""The windows of a decode step, as device work alone: verify them, commit, draft the next ones.

All of it takes nothing from the host but the slots, so that each function of `PartKind` (`runner.py`) can be captured
as a CUDA graph. Tokens leave after `decide`. A new kind of sampling captures its `decide` alone.

A step has one width w: it verifies w columns of the window and proposes w - 1 guesses. At width 1 there is nothing to
draft; `absorb_missed` makes up for it (`inputs.py`). How chains differ from trees is in `windows.py`.
"""

from dataclasses import replace

import torch
from overlap_spec_kernels import Published, Verdict
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, TargetModel, TargetOutput
from overlap_spec.sampling.context import GREEDY_WORK, SamplingWork
from overlap_spec.sampling.stages import Decided, KeptLogits
from overlap_spec.speculative.interfaces import ABSORBED_ROWS, SelfDrafting, SlotBatch, SpecMethod
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step import NO_MARKS, ProfileMarks, StepShape
from overlap_spec.worker.windows import ChainWindows, Forwarded, TreeWindows, Windows, WindowsRead


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
        verdict = Verdict.allocate(len(slots), self._windows.columns(width), slots.device)
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
