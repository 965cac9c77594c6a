"""One decode step of audits, as device work alone: plain decoding at given positions, along tokens that were served.

The plan has the place of every request of the step. Its root is written into its row, the target runs one column, and
a token is drawn as in plain decoding. What leaves is that token, and the margin of the served one. Nothing is
committed, and the draft takes no part: the next step's root is the served token, whatever was drawn.

**The margin** is by how much the logits would have to change for a request to draw another token than a given one. A
token is drawn if the filters keep it and its value, logit / T + noise, is the largest of those that are kept. So what
decides is how far apart two values are, and how far a column is from being kept or dropped. The margin is the smallest
change that makes a difference:

    margin = min( room of the token itself,
                least over all other columns of  max( value of the token - value of the column, - room of the column ) )

`room` is what keeps a column in, or with its sign changed what keeps it out. A margin is positive if the token is
the one that is drawn, and negative if it is not; that of a forbidden token is `FORBIDDEN`. All of it is in logits:
differences of logits / T, times T.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Published, PublishedColumns, gumbel
from torch import Tensor

from overlap_spec.config import Settings
from overlap_spec.messages import AuditRoom, Margins, Replayed, StepPlan, find
from overlap_spec.models.interfaces import RowBatch, TargetModel, TargetOutput
from overlap_spec.sampling.context import Sampling, SamplingWork
from overlap_spec.sampling.sampler import draw_columns, processed_logits
from overlap_spec.speculative.interfaces import SlotBatch, Window, window_context
from overlap_spec.worker.build import Parts
from overlap_spec.worker.decode import ChainWindows, WindowsRead
from overlap_spec.worker.hooks import Needs, StepHook
from overlap_spec.worker.slots import SlotRows
from overlap_spec.worker.startup.geometry import LoadedModels
from overlap_spec.worker.step import StepShape

FORBIDDEN = -1e30  # in place of -inf, of which no difference can be taken
TINIEST = 1e-300


def margins_of(logits: Tensor, positions: Tensor, tokens: Tensor, sampling: Sampling) -> Tensor:
    """The margin of `tokens`, one for each slot, drawn at `positions` from processed logits. Sync: never.

    Shapes: logits [B, V], positions, tokens [B] i64 -> [B] f64.
    """
    sampled = sampling.temperature > 0 if sampling.work.sampled else torch.zeros_like(tokens, dtype=torch.bool)
    temperature = torch.ones_like(tokens, dtype=torch.float64)
    if sampling.work.sampled:
        temperature = torch.where(sampled, sampling.temperature.clamp(min=1e-6), temperature)
    scaled = logits.double().clamp(min=2 * FORBIDDEN) / temperature[:, None]
    values = scaled
    if sampling.work.sampled:
        noise = gumbel(sampling.seed, positions, torch.arange(logits.shape[1], device=logits.device))
        values = scaled + noise.masked_fill(~sampled[:, None], 0.0)
    ahead = values.gather(1, tokens[:, None]) - values
    if sampling.work.filtered:
        room = _room(scaled, sampling).masked_fill(~sampled[:, None], torch.inf)
        own = room.gather(1, tokens[:, None]).squeeze(1)
        margin = torch.minimum(own, _least_ahead(torch.maximum(ahead, -room), tokens))
    else:
        margin = _least_ahead(ahead, tokens)
    forbidden = scaled.gather(1, tokens[:, None]).squeeze(1) * temperature <= FORBIDDEN
    return (margin * temperature).masked_fill(forbidden, FORBIDDEN)


def _least_ahead(ahead: Tensor, tokens: Tensor) -> Tensor:
    """Shapes: [B, V], tokens [B] -> [B]."""
    return ahead.scatter(1, tokens[:, None], torch.inf).amin(1)


def _room(scaled: Tensor, sampling: Sampling) -> Tensor:
    """By how much each column is within the filters; negative: outside; infinite: whatever changes.

    Shapes: [B, V] -> [B, V].
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    num_columns = scaled.shape[1]
    by_k = _to_edge(ordered, sampling.top_k.clamp(max=num_columns))
    by_min_p = ordered - (ordered[:, :1] + sampling.min_p[:, None].log())
    room = torch.minimum(torch.minimum(by_k, _room_in_mass(ordered, sampling.top_p)), by_min_p)
    return torch.empty_like(room).scatter_(1, order, room)


def _room_in_mass(ordered: Tensor, top_p: Tensor) -> Tensor:
    """The room of top_p, which keeps a column while the mass before it is less than top_p.

    To be kept or dropped, a column must take the place of another one, u: then the mass before u is before it. That is
    the larger of two changes: of its logit, as far as u's; and of the mass before u, as far as top_p (measured in
    log-odds, which change like a difference of logits). Along a row one of the two grows and the other shrinks, so the
    least is at one of the two columns where they cross. Shapes: [B, V], [B] -> [B, V].
    """
    p = ordered.softmax(-1)
    mass_room = _log_odds(top_p)[:, None] - _log_odds(p.cumsum(-1) - p)  # decreases along a row, as `ordered` does
    u = torch.searchsorted(-(mass_room + ordered), -ordered).clamp(min=1)
    beyond = F.pad(ordered, (0, 1), value=-torch.inf).gather(1, u)
    mass_beyond = F.pad(mass_room, (0, 1), value=-torch.inf).gather(1, u)
    kept = torch.minimum(ordered - beyond, mass_room.gather(1, u - 1))
    dropped = torch.maximum(ordered - ordered.gather(1, u - 1), mass_beyond)
    room = torch.where(mass_room > 0, kept, dropped)
    return room.masked_fill(top_p[:, None] >= 1, torch.inf)


def _to_edge(ordered: Tensor, num_kept: Tensor) -> Tensor:
    """How far a kept column is above the first one that is dropped, and how far a dropped one is below the last kept.

    The first `num_kept` columns are kept. The distance of a dropped column is negative.

    Shapes: [B, V], [B] i64 -> [B, V].
    """
    num_columns = ordered.shape[1]
    outside = ordered.gather(1, num_kept.clamp(max=num_columns - 1)[:, None])
    outside = outside.masked_fill((num_kept >= num_columns)[:, None], -torch.inf)
    inside = ordered.gather(1, (num_kept - 1).clamp(min=0)[:, None])
    rank = torch.arange(num_columns, device=ordered.device)
    return torch.where(rank < num_kept[:, None], ordered - outside, ordered - inside)


def _log_odds(mass: Tensor) -> Tensor:
    inside = mass.clamp(TINIEST, 1 - 2**-53)
    return inside.log() - (-inside).log1p()


FIELDS = 4  # of a slot: itself, the root's position, the root, the token that was served after it
CPU_AUDITS, GPU_AUDITS = 8, 32  # audits in one step, at most
# Where each has a recurrent state, which may take as much as a long request's keys: these, or one for so many requests.
STATE_AUDITS, STATES = 8, 8
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
    recurs = models.target.kv_shape.state.num_layers > 0
    on_gpu = min(max(STATE_AUDITS, slots // STATES), GPU_AUDITS) if recurs else GPU_AUDITS
    num_audits = min(slots, CPU_AUDITS if on_cpu else on_gpu)
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
