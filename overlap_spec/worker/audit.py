"""One decode step of audits, as device work alone: plain decoding at given positions, along tokens that were served.

The plan has the place of every request of the step. Its root is written into its row, the target runs one column, and
a token is drawn as in plain decoding. What leaves is that token, and the margin of the served one
(`sampling/margins.py`). Nothing is committed, and the draft takes no part: the next step's root is the served token,
whatever was drawn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from overlap_spec_kernels import PublishedColumns
from torch import Tensor

from overlap_spec.messages import Replayed
from overlap_spec.models.interfaces import TargetModel, TargetOutput
from overlap_spec.models.layers.skip_layers import rehearsing
from overlap_spec.sampling.margins import leads
from overlap_spec.sampling.sampler import draw_columns, processed_logits
from overlap_spec.sampling.types import SamplingWork
from overlap_spec.speculative.draw_contexts import window_context
from overlap_spec.speculative.types import SlotBatch, Window
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.step_graphs import (
    GraphRecorder,
    PartGraphs,
    Parts,
    capture_parts,
    no_collection,
    run_once,
)
from overlap_spec.worker.windows import ChainWindows

FIELDS = 4  # of a slot: itself, the root's position, the root, the token that was served after it
COLUMNS = PublishedColumns(1)  # of what leaves; the lead's bits are one more column


@dataclass(frozen=True)
class ReplayedRows:
    """What the layers gave for a step of audits. `judge` writes `published`."""

    served: Tensor  # [B] i64
    batch: SlotBatch  # sampling is not gathered
    window: Window
    output: TargetOutput
    published: Tensor  # [B, n + 1] i64: `COLUMNS`, and the lead's bits


class Auditor(Protocol):
    """Runs the parts of audit steps, launching each operation or replaying graphs. Sync: never."""

    def size_for(self, num_slots: int) -> int:
        """How many slots to lay a step out for."""
        ...

    def forward(self, packed: Tensor) -> ReplayedRows:
        """Run the target's layers. Shapes: packed [FIELDS * B] i64."""
        ...

    def judge(self, replayed: ReplayedRows, sampling: SamplingWork) -> Tensor:
        """Draw tokens and compare them. Shapes: -> `ReplayedRows.published`."""
        ...


def laid_out(slots: Sequence[int], replayed: Replayed, size: int, dummy: int) -> Iterable[int]:
    """The integers of a step, field by field, padded with the dummy slot."""
    num_spare = size - len(slots)
    spare = [0] * num_spare
    yield from (*slots, *[dummy] * num_spare)
    yield from (*replayed.positions, *spare)
    yield from (*replayed.roots, *spare)
    yield from (*replayed.served, *spare)


class AuditStep:
    """The parts of a step, operation by operation."""

    def __init__(self, slots: SlotRows, target: TargetModel, page_size: int) -> None:
        self._slots = slots
        self._target = target
        self._windows = ChainWindows(slots, target, page_size, is_self_drafting=False)
        self._token_ids = torch.arange(target.vocab_size, device=slots.length.device)

    def size_for(self, num_slots: int) -> int:
        """Nothing is padded."""
        return num_slots

    def forward(self, packed: Tensor) -> ReplayedRows:
        slots, positions, roots, served = packed.view(FIELDS, -1)
        self._slots.place(slots, positions, roots)
        batch, window, tokens, rows = self._windows.read(slots, 1, self._slots.num_pages)
        output = self._target.forward(tokens, rows)
        published = torch.zeros(len(slots), COLUMNS.row_size + 1, dtype=torch.int64, device=packed.device)
        return ReplayedRows(served, batch, window, output, published)

    def judge(self, replayed: ReplayedRows, sampling: SamplingWork) -> Tensor:
        drawing = self._slots.sampling(replayed.batch.slots, sampling)
        batch = SlotBatch(replayed.batch.slots, replayed.batch.lengths, replayed.batch.page_table, drawing)
        context = window_context(replayed.window, batch, self._token_ids)
        logits = processed_logits(self._target.logits(replayed.output.final), context)
        drawn = draw_columns(logits, context.positions, drawing, self._token_ids)
        lead = leads(logits.squeeze(1), context.positions.squeeze(1), replayed.served, drawing)
        replayed.published[:, COLUMNS.tokens] = drawn
        replayed.published[:, -1] = lead.view(torch.int64)
        return replayed.published


@dataclass(frozen=True)
class AuditGraphs:
    """One batch size, captured."""

    packed: Tensor  # i64, the input
    parts: PartGraphs[ReplayedRows, Tensor]


class GraphAuditor:
    """Replays the smallest captured batch that holds the step's; what none holds is launched operation by operation."""

    def __init__(self, step: AuditStep, slots: SlotRows, sizes: Iterable[int]) -> None:
        self._step = step
        self._slots = slots
        self._sizes = sorted(sizes)
        self._graphs: dict[int, AuditGraphs] = {}
        self._running: AuditGraphs | None = None  # of the step being launched

    def run_once(self) -> None:
        """Launch what `capture` captures, operation by operation."""
        with torch.inference_mode(), rehearsing():
            for size in reversed(self._sizes):
                run_once(self._parts(self._packed(size)))

    def capture(self, recorder: GraphRecorder) -> None:
        """Capture every size, largest first."""
        with torch.inference_mode(), no_collection():
            for size in reversed(self._sizes):
                packed = self._packed(size)
                self._graphs[size] = AuditGraphs(packed, capture_parts(self._parts(packed), recorder))
        recorder.finish()

    def size_for(self, num_slots: int) -> int:
        """See `Auditor`."""
        return next((size for size in self._sizes if size >= num_slots), num_slots)

    def forward(self, packed: Tensor) -> ReplayedRows:
        graphs = self._running = self._graphs.get(len(packed) // FIELDS)
        if graphs is None:
            return self._step.forward(packed)
        graphs.packed.copy_(packed)
        graphs.parts.layers()
        return graphs.parts.forwarded

    def judge(self, replayed: ReplayedRows, sampling: SamplingWork) -> Tensor:
        if self._running is None:
            return self._step.judge(replayed, sampling)
        kind = self._running.parts.kinds[sampling]
        kind.judge()
        return kind.judged

    def _packed(self, size: int) -> Tensor:
        slots = self._slots
        values = list(laid_out((), Replayed(), size, slots.dummy))
        return torch.tensor(values, dtype=torch.int64, device=slots.length.device)

    def _parts(self, packed: Tensor) -> Parts[ReplayedRows, Tensor]:
        step = self._step
        return Parts(lambda: step.forward(packed), step.judge, None, lambda work: work)
