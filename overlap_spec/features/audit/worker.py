"""One decode step of audits, as device work alone: plain decoding at given positions, along tokens that were served.

The plan has the place of every request of the step. Its root is written into its row, the target runs one column, and
a token is drawn as in plain decoding. What leaves is that token, and the margin of the served one
(`margins.py`). Nothing is committed, and the draft takes no part: the next step's root is the served token,
whatever was drawn.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from overlap_spec_kernels import Published, PublishedColumns
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.features.audit.margins import margins_of
from overlap_spec.messages import AuditRoom, Margins, Replayed, StepPlan, find
from overlap_spec.models.interfaces import RowBatch, TargetModel, TargetOutput
from overlap_spec.sampling.sampler import draw_columns, processed_logits
from overlap_spec.sampling.types import SamplingWork
from overlap_spec.speculative.types import SlotBatch, Window, window_context
from overlap_spec.worker.build import Parts
from overlap_spec.worker.hooks import Needs, StepHook
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.startup.geometry import LoadedModels
from overlap_spec.worker.step import StepShape
from overlap_spec.worker.windows import ChainWindows, WindowsRead

FIELDS = 4  # of a slot: itself, the root's position, the root, the token that was served after it
CPU_AUDITS, GPU_AUDITS = 8, 32  # audits in one step, at most
MOST_CONTROLS = 128  # rows of a step of controls
COLUMNS = PublishedColumns(1)  # of what leaves, beside the margins


def needs(settings: Settings, models: LoadedModels) -> Needs:
    """Slots of audits, and the batches of their steps: few, because a larger one takes hardly longer.

    So many audits cost little more than one. Controls have clearly more rows, to meet the noise of batch shapes: on a
    GPU as many as a verify step of many requests, for which the same kernels run.
    """
    slots, on_cpu = settings.scheduler.max_running_requests, settings.model.device == "cpu"
    if settings.audit.rate == 0 or not models.method.verification(settings.spec.accept).draws_plainly:
        return Needs()
    num_audits = min(slots, CPU_AUDITS if on_cpu else GPU_AUDITS)
    rows = 0 if on_cpu else min(slots * settings.spec.width, MOST_CONTROLS)
    batches = {max(num_audits // 4, 1), num_audits, max(rows, 2 * num_audits)}
    return Needs(placed_slots=num_audits, placed_batches=tuple(sorted(batches)))


def attach(parts: Parts) -> StepHook | None:
    """Run audits, if there are slots for them."""
    slots, geometry = parts.slots, parts.geometry
    if not geometry.placed_slots:
        return None
    room = AuditRoom(slots.dummy + 1, geometry.placed_slots, geometry.placed_batches[-1])
    return AuditHook(AuditStep(slots, parts.target, slots.pool.page_size), room)


class AuditHook(StepHook):
    """Has steps of its own, in slots of its own."""

    def __init__(self, step: "AuditStep", room: AuditRoom) -> None:
        self.placed = step
        self._room = room

    def ready(self) -> tuple[AuditRoom]:
        """Which slots are for audits."""
        return (self._room,)

    def placed_step(self, plan: StepPlan) -> "AuditedStep | None":
        """Whether the plan is of audits."""
        replayed = find(plan.extensions, Replayed)
        return None if replayed is None else AuditedStep(plan.slots, replayed)


@dataclass(frozen=True)
class AuditedStep:
    """One step of audits, on the host."""

    slots: Sequence[int]
    replayed: Replayed

    @property
    def size(self) -> int:
        """Slots that it is padded to."""
        return max(len(self.slots), self.replayed.padded_to)

    def laid_out(self, size: int, dummy: int) -> Iterable[int]:
        return laid_out(self.slots, self.replayed, size, dummy)

    def pack(
        self, tokens: list[list[int]], longest: int, of_tokens: memoryview | None, of_prompts: memoryview | None
    ) -> Margins:
        assert of_tokens is not None
        return Margins(list(of_tokens.cast("B").cast("d")))


@dataclass(frozen=True)
class ReplayedRows:
    """What the layers gave for a step of audits. `decide` writes `published`."""

    served: Tensor  # [B] i64
    batch: SlotBatch  # sampling is not gathered
    window: Window
    output: TargetOutput
    published: Tensor  # [B, n] i64: `COLUMNS`


class ReplayedRead(NamedTuple):
    """The windows of a step of audits, and what a forward takes of them."""

    served: Tensor  # [B] i64
    windows: WindowsRead

    @property
    def tokens(self) -> Tensor:
        """Shapes: [B] i64."""
        return self.windows.tokens

    @property
    def rows(self) -> RowBatch:
        return self.windows.rows


def laid_out(slots: Sequence[int], replayed: Replayed, size: int, dummy: int) -> Iterable[int]:
    """The integers of a step, field by field, padded with the dummy slot."""
    num_spare = size - len(slots)
    spare = [0] * num_spare
    yield from (*slots, *[dummy] * num_spare)
    yield from (*replayed.positions, *spare)
    yield from (*replayed.roots, *spare)
    yield from (*replayed.served, *spare)


class AuditStep:
    """Windows at given places, as a `PartKind`."""

    def __init__(self, slots: SlotRows, target: TargetModel, page_size: int) -> None:
        self._slots = slots
        self.target = target
        self._windows = ChainWindows(slots, target, page_size, is_self_drafting=False)
        self._token_ids = torch.arange(target.vocab_size, device=slots.length.device)

    def dummies(self, shape: StepShape) -> Tensor:
        values = list(laid_out((), Replayed(), shape.slots, self._slots.dummy))
        return torch.tensor(values, dtype=torch.int64, device=self._slots.length.device)

    def read(self, packed: Tensor, shape: StepShape) -> ReplayedRead:
        """See `PartKind`. Shapes: packed [FIELDS * B] i64."""
        slots, positions, roots, served = packed.view(FIELDS, -1)
        self._slots.place(slots, positions, roots)
        return ReplayedRead(served, self._windows.read(slots, 1, self._slots.num_pages))

    def ran(self, read: ReplayedRead, output: TargetOutput) -> ReplayedRows:
        served, (batch, window, _, _) = read
        published = torch.zeros(len(served), COLUMNS.row_size, dtype=torch.int64, device=served.device)
        return ReplayedRows(served, batch, window, output, published)

    def decide(self, replayed: ReplayedRows, sampling: SamplingWork) -> Published:
        """Draw tokens and compare them."""
        drawing = self._slots.sampling(replayed.batch.slots, sampling)
        batch = SlotBatch(replayed.batch.slots, replayed.batch.lengths, replayed.batch.page_table, drawing)
        context = window_context(replayed.window, batch, self._token_ids)
        logits = processed_logits(self.target.logits(replayed.output.final), context)
        drawn = draw_columns(logits, context.positions, drawing, self._token_ids)
        margin = margins_of(logits.squeeze(1), context.positions.squeeze(1), replayed.served, drawing)
        replayed.published[:, COLUMNS.tokens] = drawn
        return Published(replayed.published, COLUMNS, (margin[:, None],))

    def draft(self, replayed: ReplayedRows, sampling: SamplingWork, width: int) -> None:
        """Nothing is committed."""

    def proposed(self, width: int) -> int:
        return width
