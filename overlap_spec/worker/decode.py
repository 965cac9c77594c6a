"""One decode step, as device work alone: verify the window, commit, draft the next one.

It is cut in two where tokens may leave: `verify` ends with what is to be published, `draft` works after it. Both
take nothing from the host but the slots, so that either can be captured as a CUDA graph (`decode_graphs.py`).

A step has one width w: it verifies w columns of the window and proposes w - 1 guesses. At width 1 all of it is in
`verify`, and the draft does not run; `catch_up` lets it absorb what it missed, before a step that the plan says. How
chains differ from trees is in `windows.py`.
"""

from typing import Protocol

from torch import Tensor

from overlap_spec.models.interfaces import TargetModel
from overlap_spec.sampling.types import SAMPLING_WORK, SamplingWork
from overlap_spec.spec.interfaces import SelfDrafting, SpecMethod
from overlap_spec.worker.handle import LOOKAHEAD_SHIFT
from overlap_spec.worker.profile_marks import NO_MARKS, ProfileMarks
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.windows import ChainWindows, TreeWindows, Verified, Windows


class Decoder(Protocol):
    """Runs decode steps, launching each operation or replaying a graph."""

    def catch_up(self, slots: Tensor, counts: Tensor) -> None:
        """Let the draft absorb the `counts` last rows of each slot, which it missed. Sync: never. Shapes: [B] i64."""
        ...

    def verify(self, slots: Tensor, width: int, sampling: SamplingWork) -> Verified:
        """Verify and commit. Sync: never. Shapes: slots [B] i64."""
        ...

    def draft(self, verified: Verified) -> None:
        """Absorb what was committed and propose the next window. Sync: never."""
        ...


class DecodeStep:
    """The step itself, operation by operation."""

    def __init__(self, slots: SlotRows, target: TargetModel, method: SpecMethod, page_size: int) -> None:
        self._slots = slots
        self._target = target
        self.method = method
        self.parts: ProfileMarks = NO_MARKS  # replaced before the capture by who wants to know
        self.self_drafting = method.proposer if isinstance(method.proposer, SelfDrafting) else None
        tree = method.tree
        self._windows: Windows = ChainWindows(slots, page_size) if tree is None else TreeWindows(slots, page_size, tree)

    def catch_up(self, slots: Tensor, counts: Tensor) -> None:
        """See `Decoder`."""
        self.method.proposer.catch_up(self._slots.batch(slots, SAMPLING_WORK[0]), counts)

    def verify(self, slots: Tensor, width: int, sampling: SamplingWork) -> Verified:
        """See `Decoder`."""
        read = self._windows.read(slots, width, sampling)
        output = self._target.forward(read.tokens, read.rows)
        drawn = self.method.verifier.verify(read.window, self._target.logits(output.final), read.batch)
        self.parts.mark("verify")  # after the head, which computes logits only when they are asked for
        verified = self._windows.settle(read, drawn, output)
        committed = verified.committed
        if self.self_drafting is not None:
            lookahead = self.self_drafting.lookahead(read.batch, committed.verdict, verified.last)
            committed.published[:, -1] += lookahead << LOOKAHEAD_SHIFT
        elif width == 1 < self._slots.width:
            self.method.proposer.defer(read.batch, output, committed.verdict)
        return verified

    def draft(self, verified: Verified) -> None:
        """See `Decoder`."""
        proposer, committed = self.method.proposer, verified.committed
        if self.drafts_after(verified.width):
            verified = self._windows.keep(verified)
            learnt = proposer.extend(verified.before, verified.rows, verified.output, committed.verdict)
            self.parts.mark("extend")
            width = verified.width if self.self_drafting is None else self._slots.width
            self._slots.set_guesses(committed.after, proposer.propose(committed.after, learnt, width - 1))

    def drafts_after(self, width: int) -> bool:
        """Whether `draft` does anything after a step of this width."""
        return width > 1 or (self.self_drafting is not None and self._slots.width > 1)
