"""One decode step, as device work alone: verify the window, commit, draft the next one.

It has three parts, which take nothing from the host but the slots, so that each can be captured as a CUDA graph
(`decode_graphs.py`):

    forward   read the windows, run the target's layers                            x batch size, width
    judge     head, draw tokens, judge the windows, commit, write what leaves      x kind of sampling
    draft     absorb what was committed, propose the next windows                  x what a draft takes of that kind

Tokens leave after `judge`. A new kind of sampling captures its `judge` alone.

A step has one width w: it verifies w columns of the window and proposes w - 1 guesses. At width 1 there is nothing to
draft; `catch_up` lets the draft absorb what it missed (`draft_lag.py`). How chains differ from trees
is in `windows.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from overlap_spec_kernels import Verdict
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, TargetModel, TargetOutput
from overlap_spec.sampling.log_probs import KeptLogits, window_log_probs
from overlap_spec.sampling.types import GREEDY_WORK, SamplingWork
from overlap_spec.speculative.interfaces import SelfDrafting, SpecMethod
from overlap_spec.speculative.types import SlotBatch
from overlap_spec.worker.profile_marks import NO_MARKS, ProfileMarks
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.windows import ChainWindows, Forwarded, TreeWindows, Windows, WindowsRead


class Decoder(Protocol):
    """Runs the parts of decode steps, launching each operation or replaying graphs. Sync: never."""

    def catch_up(self, slots: Tensor, counts: Tensor) -> None:
        """Let the draft absorb the `counts` last rows of each slot, which it missed. Shapes: [B] i64."""
        ...

    def forward(self, slots: Tensor, width: int, most_pages: Callable[[], int]) -> Forwarded:
        """Run the target's layers on the slots' windows. `most_pages`: counts those of the slot with the most.

        Shapes: slots [B] i64.
        """
        ...

    def judge(self, forwarded: Forwarded, sampling: SamplingWork) -> Verdict:
        """Draw tokens, judge the windows and commit."""
        ...

    def draft(self, forwarded: Forwarded, sampling: SamplingWork) -> None:
        """Absorb what was committed and propose the next windows."""
        ...


class DecodeStep:
    """The parts of a step, operation by operation. `marks`: told where `judge` and `draft` are."""

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

    def catch_up(self, slots: Tensor, counts: Tensor) -> None:
        self.method.proposer.catch_up(self._slots.batch(slots, GREEDY_WORK), counts)

    def forward(self, slots: Tensor, width: int, most_pages: Callable[[], int]) -> Forwarded:
        return self.forward_within(self._slots.num_pages, slots, width)

    def forward_within(self, num_pages: int, slots: Tensor, width: int) -> Forwarded:
        """The same with page tables of so many columns. Shapes: slots [B] i64."""
        read = self._windows.read(slots, width, num_pages)
        return self.forwarded(read, self.target.forward(read.tokens, read.rows))

    def read(self, slots: Tensor, width: int) -> WindowsRead:
        """What the target runs. Shapes: slots [B] i64."""
        return self._windows.read(slots, width, self._slots.num_pages)

    def forwarded(self, read: WindowsRead, output: TargetOutput) -> Forwarded:
        """What the target gave for it, with memory for the verdict."""
        slots, width = read.batch.slots, read.window.tokens.shape[1]
        verdict = Verdict.allocate(len(slots), self._windows.columns(width), slots.device)
        return Forwarded(read.batch, read.window, read.rows, output, verdict)

    def judge(self, forwarded: Forwarded, sampling: SamplingWork) -> Verdict:
        window, output, verdict = forwarded.window, forwarded.output, forwarded.verdict
        batch = replace(forwarded.batch, sampling=self._slots.sampling(forwarded.batch.slots, sampling))
        logits: LazyLogits = self.target.logits(output.final)
        logits = KeptLogits(logits) if sampling.log_probs else logits
        drawn = self.method.verifier.verify(window, logits, batch)
        self.marks.mark("verify")  # after the head, which computes logits only when they are asked for
        self._slots.commit(batch, window, drawn, verdict)
        if self.self_drafting is not None:
            self.self_drafting.lookahead(batch, verdict, verdict.published.lookahead)
        elif forwarded.width == 1 < self._slots.width:
            self.method.proposer.defer(batch, output, verdict)
        if not sampling.log_probs:
            return verdict
        log_probs = window_log_probs(logits.compute(), verdict, batch.slots, self._slots.listed)
        return verdict._replace(published=verdict.published._replace(log_probs=log_probs))

    def draft(self, forwarded: Forwarded, sampling: SamplingWork) -> None:
        if not self.drafts_after(forwarded.width):
            return
        proposer, verdict, before = self.method.proposer, forwarded.verdict, forwarded.batch
        rows, output = self._windows.keep(forwarded)
        learnt = proposer.extend(before, rows, output, verdict)
        self.marks.mark("extend")
        drawing = self._slots.draft_sampling(before.slots, self.method.draft_work(sampling))
        after = SlotBatch(
            before.slots, verdict.next_lengths, before.page_table, drawing, before.shares, verdict.next_positions
        )
        width = forwarded.width if self.self_drafting is None else self._slots.width
        self._slots.set_guesses(after, proposer.propose(after, learnt, width - 1))

    def drafts_after(self, width: int) -> bool:
        """Whether `draft` does anything after a step of this width."""
        return width > 1 or (self.self_drafting is not None and self._slots.width > 1)
