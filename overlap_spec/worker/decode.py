"""One decode step, as device work alone: verify the window, commit, draft the next one. Not here: plans and copies.

It is cut in two where tokens may leave: `verify` ends with what is to be published, `draft` works after it. Both
take nothing from the host but the slots, so that either can be captured as a CUDA graph (`graphs.py`).

A step has one width w: it verifies w columns of the window and proposes w - 1 guesses. At width 1 all of it is in
`verify`, and the draft does not run; `catch_up` lets it absorb what it missed, before a step that the plan says.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetModel, TargetOutput
from overlap_spec.spec.interfaces import SpecMethod
from overlap_spec.spec.rows import window_rows
from overlap_spec.spec.types import SAMPLING_WORK, SamplingWork, SlotBatch
from overlap_spec.worker.parts import NO_PARTS, Parts
from overlap_spec.worker.slots import Committed, SlotRows


@dataclass(frozen=True)
class Verified:
    """What `verify` leaves for `draft`."""

    before: SlotBatch
    rows: RowBatch
    output: TargetOutput
    committed: Committed


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
        self.parts: Parts = NO_PARTS  # replaced before the capture by who wants to know
        self._page_size = page_size

    def catch_up(self, slots: Tensor, counts: Tensor) -> None:
        """See `Decoder`."""
        self.method.proposer.catch_up(self._slots.batch(slots, SAMPLING_WORK[0]), counts)

    def verify(self, slots: Tensor, width: int, sampling: SamplingWork) -> Verified:
        """See `Decoder`."""
        batch, window, tokens = self._slots.windows(slots, width, self._page_size, sampling)
        rows = window_rows(batch, window.positions, self._page_size)
        output = self._target.forward(tokens, rows)
        drawn = self.method.verifier.verify(window, self._target.scores(output.stream), batch)
        self.parts.mark("verify")  # after the head, which computes scores only when they are asked for
        committed = self._slots.commit(batch, window, drawn)
        if width == 1 < self._slots.width:
            self.method.proposer.defer(batch, output, committed.verdict)
        return Verified(batch, rows, output, committed)

    def draft(self, verified: Verified) -> None:
        """See `Decoder`."""
        proposer, verdict, after = self.method.proposer, verified.committed.verdict, verified.committed.after
        width = verdict.tokens.shape[1]
        if width > 1:
            learnt = proposer.extend(verified.before, verified.rows, verified.output, verdict)
            self.parts.mark("extend")
            self._slots.set_guesses(after, proposer.propose(after, learnt, width - 1))
