"""One decode step, as device work alone: verify the window, commit, draft the next one. Not here: plans and copies.

It is cut in two where tokens may leave: `verify` ends with what is to be published, `draft` works after it. Both
take nothing from the host but the slots, so that either can be captured as a CUDA graph (`graphs.py`).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetModel, TargetOutput
from overlap_spec.spec.interfaces import SpecMethod
from overlap_spec.spec.rows import window_rows
from overlap_spec.spec.types import SamplingWork, SlotBatch, Verdict, Window
from overlap_spec.worker.slots import SlotRows


@dataclass(frozen=True)
class Verified:
    """What `verify` leaves for `draft`. `published`: committed tokens, padded with -1, then the number of guesses."""

    before: SlotBatch
    after: SlotBatch
    rows: RowBatch
    output: TargetOutput
    verdict: Verdict
    published: Tensor  # [B, W + 1] i64


class Decoder(Protocol):
    """Runs decode steps, launching each operation or replaying a graph."""

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
        self._page_size = page_size

    def verify(self, slots: Tensor, width: int, sampling: SamplingWork) -> Verified:
        """See `Decoder`."""
        batch = self._slots.batch(slots, sampling)
        window = Window(self._slots.window[slots, :width])
        rows = window_rows(batch, width, self._page_size)
        output = self._target.forward(window.tokens.clamp(min=0).reshape(-1), rows)
        logits = self._target.logits(output.hidden).view(len(slots), width, -1)
        verdict = self.method.verifier.verify(window, logits, batch)
        after = self._slots.commit(batch, verdict)
        published = torch.cat((verdict.tokens, window.num_proposed[:, None]), 1)
        return Verified(batch, after, rows, output, verdict, published)

    def draft(self, verified: Verified) -> None:
        """See `Decoder`."""
        self.method.proposer.extend(verified.before, verified.rows, verified.output, verified.verdict)
        self._slots.set_guesses(verified.after, self.method.proposer.propose(verified.after))
