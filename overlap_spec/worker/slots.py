"""What two steps share: one device row per running request, and the little the host remembers of it.

Rows are only written by work that travels in the same queue as the steps, so a slot's new owner cannot see its
predecessor, and a step in flight cannot see its successor.

What requests bring to their slots is packed into 64-bit integers for `write_slots`. A new request's row, in this order:
seed, stop_from, top_k, output_from, most_steps; temperature, top_p and min_p as doubles; the stop ids; the columns of
features, in their order.
"""

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from overlap_spec_kernels import (
    CHANGE_FIELDS,
    GatheredTree,
    GatheredWindow,
    SlotTables,
    gather_tree,
    gather_window,
    judge_chain,
    judge_tree,
    place_guesses,
    place_tree,
    write_slots,
)
from torch import Tensor

from overlap_spec.messages import MAX_STOP_IDS, ResetSlot, SamplingParams, StepPlan
from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.context import GREEDY_WORK, Sampling, SamplingWork, cheapest_work
from overlap_spec.sampling.stages import Decided, LogitProcessors, LogitStage, RowOutput, RowPacker, SlotColumns
from overlap_spec.speculative.interfaces import Drawn, Guesses, SlotBatch, Verdict, Window
from overlap_spec.worker.devices import pack_ints

NUM_INTS, NUM_FLOATS = 5, 3
STOP_IDS_AT = NUM_INTS + NUM_FLOATS
ROW_WIDTH = STOP_IDS_AT + MAX_STOP_IDS
EVERYTHING = 1 << 62  # a top_k that keeps everything, steps without a limit
_SCALARS = struct.Struct(f"={NUM_INTS}q{NUM_FLOATS}d")
_NO_STOPS = pack_ints([-1] * MAX_STOP_IDS)


class SlotChange(NamedTuple):
    """What a step writes for a slot."""

    slot: int
    first_column: int  # of its page table, for the pages
    pages: Sequence[int]
    reset: ResetSlot | None  # of a request that takes the slot


def pack_changes(changes: Sequence[SlotChange], added: Sequence[SlotColumns]) -> bytes:
    """As `write_slots` takes them. `added`: by features."""
    width = ROW_WIDTH + sum([columns.width for columns in added])
    fields: list[int] = []
    pages: list[int] = []
    rows: list[bytes] = []
    pages_at = len(changes) * CHANGE_FIELDS
    resets_at = pages_at + sum(len(change.pages) for change in changes)
    for slot, first, new_pages, reset in changes:
        reset_at = -1
        if reset is not None:
            reset_at, resets_at = resets_at, resets_at + width
            rows.append(_pack_reset(reset))
            rows += [columns.pack(reset) for columns in added]
        fields += (slot, first, len(new_pages), pages_at + len(pages), reset_at)
        pages += new_pages
    return b"".join((pack_ints(fields + pages), *rows))


def most_steps(reset: ResetSlot) -> int:
    """Guesses in a row, at most, of a request's windows."""
    asked = reset.sampling.speculative.num_steps
    return EVERYTHING if asked is None else asked


def _pack_reset(reset: ResetSlot) -> bytes:
    sampling = reset.sampling
    assert sampling.seed is not None, "the frontend draws a seed for every request"
    temperature = 0.0 if sampling.greedy else sampling.temperature
    top_k = EVERYTHING if sampling.top_k == -1 else sampling.top_k
    ints = sampling.seed, reset.stop_from, top_k, reset.output_from, most_steps(reset)
    scalars = _SCALARS.pack(*ints, temperature, sampling.top_p, sampling.min_p)
    stops = pack_ints(reset.stop_ids)
    return b"".join((scalars, stops, _NO_STOPS[len(stops) :]))


@dataclass
class HostSlot:
    """What the host needs of a slot to build a step: never lengths, which live on the device."""

    sampling: SamplingWork
    num_pages: int
    most_steps: int  # guesses in a row, at most


class SlotRows:
    """The device rows. `length` is the number of tokens whose KV is written, the position of the root.

    The row after those of requests is the dummy slot: padding of a captured batch reads and writes it, and page 0 with
    it. The rows of placed steps (`place`) come last; drafts have none of those.
    """

    def __init__(
        self, num_slots: int, width: int, num_page_columns: int, processors: LogitProcessors, num_placed: int = 0
    ) -> None:
        self.dummy = num_slots
        self.pool = processors.pool
        self.processors = processors
        device = self.pool.tokens.device
        self.width = width
        self.num_rows = num_slots + 1  # that a draft keeps
        num_slots = self.num_rows + num_placed

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int64, device=device)

        self.length = ints(num_slots)  # [S]
        self.columns = ints(2, num_slots, width)  # [2, S, W]: both of the following
        self.window, self.parents = self.columns  # [S, W], root first; [S, W], columns: of chains never read
        self.page_table = torch.zeros(num_slots, num_page_columns, dtype=torch.int32, device=device)  # [S, P]
        self._rows = ints(num_slots, ROW_WIDTH)  # [S, R], as `pack_changes` packs them
        self.seeds = self._rows[:, 0]  # [S], a view
        self.most_steps = self._rows[:, 4].fill_(EVERYTHING)  # [S], a view: guesses in a row, at most, of its windows
        self._tables = SlotTables(self.page_table, self._rows, added=ints(num_slots, 0))
        self._added: Sequence[SlotColumns] = ()
        self.outputs: Sequence[RowOutput] = ()
        self._host: dict[int, HostSlot] = {}
        self.no_sampling = self.sampling(ints(0), GREEDY_WORK)  # of work that draws nothing

    def draw_through(
        self,
        stages: tuple[LogitStage, ...],
        outputs: Sequence[RowOutput] = (),
        added: Sequence[SlotColumns] = (),
    ) -> None:
        """Let requests draw through these stages of features too, write these outputs, and keep these columns.

        No request has come yet, and nothing is captured.
        """
        self.outputs, self._added = outputs, added
        rules = dict(self.processors.rules) | self._keep(added)
        self.processors = replace(self.processors, stages=stages, rules=rules)
        self.no_sampling = replace(self.no_sampling, processors=self.processors)

    def _keep(self, added: Sequence[SlotColumns]) -> dict[str, Tensor]:
        """Take the memory of these columns, which no slot asks for anything in: the dummy slot never will.

        Returns the rules that they give.
        """
        neutral = [torch.frombuffer(bytearray(columns.neutral), dtype=torch.int64) for columns in added]
        row = torch.cat(neutral or [torch.zeros(0, dtype=torch.int64)])
        kept = row.to(self.length.device).repeat(len(self.length), 1)
        self._tables = replace(self._tables, added=kept)
        rules: dict[str, Tensor] = {}
        for columns, part in zip(added, kept.split([columns.width for columns in added], 1), strict=True):
            rules.update(columns.rules(part))
        return rules

    # --- host side: what a step's plan holds ----------------------------------------------------------------

    def pack_changes(self, plan: StepPlan) -> tuple[int, bytes]:
        """How many slots get a new request or pages, and these packed as `apply` takes them; notes them on the host."""
        if not (plan.resets or plan.new_pages):
            return 0, b""
        changes = []
        for slot in {**plan.resets, **plan.new_pages}:
            reset, pages = plan.resets.get(slot), plan.new_pages.get(slot, [])
            if reset is not None:
                asked = reset.sampling
                self._host[slot] = HostSlot(self._asked_work(asked), 0, most_steps(reset))
            host = self._host[slot]
            changes.append(SlotChange(slot, host.num_pages, pages, reset))
            host.num_pages += len(pages)
        return len(changes), pack_changes(changes, self._added)

    def steps_of(self, slot: int) -> int:
        """Guesses in a row that a slot's windows have at most."""
        return self._host[slot].most_steps

    @property
    def num_pages(self) -> int:
        """Columns of the page table."""
        return self.page_table.shape[1]

    def most_pages(self, slots: Sequence[int]) -> int:
        return max(self._host[slot].num_pages for slot in slots)

    def packers(self, slots: Sequence[int], prompt_counts: Sequence[int] = ()) -> Sequence[RowPacker | None]:
        """What packs each output in a step of these slots; empty if no request asks for any."""
        packers = [output.packer(slots, prompt_counts) for output in self.outputs]
        return packers if any([packer is not None for packer in packers]) else ()

    def sampling_work(self, slots: Sequence[int]) -> SamplingWork:
        """The cheapest kind of sampling that does all of these slots' work."""
        return cheapest_work([self._host[slot].sampling for slot in slots])

    def _asked_work(self, asked: SamplingParams) -> SamplingWork:
        filters = asked.top_k != -1 or asked.top_p < 1 or asked.min_p > 0
        of_target = any([stage.asked(asked) for stage in self.processors.stages])
        outputs = any([output.asked(asked) for output in self.outputs])
        return _same_work(not asked.greedy, filters and not asked.greedy, asked.changes_logits, outputs, of_target)

    # --- device side ---------------------------------------------------------------------------------------

    def apply(self, changes: Tensor, count: int) -> None:
        """Write what `pack_changes` has packed. Sync: never. Shapes: flat i64."""
        if count:
            write_slots(self._tables, changes, count)

    def batch(self, slots: Tensor, work: SamplingWork) -> SlotBatch:
        """Gather the rows of a step's slots. Sync: never."""
        return SlotBatch(slots, self.length[slots], self.page_table[slots], self.sampling(slots, work))

    def gather(self, slots: Tensor, width: int, page_size: int, columns: int) -> GatheredWindow:
        """The windows of a step, as chains; of page tables, the first `columns`. Sync: never."""
        return gather_window(slots, self.length, self.window, self.page_table[:, :columns], width, page_size)

    def gather_trees(self, slots: Tensor, width: int, page_size: int, columns: int) -> GatheredTree:
        """The windows of a step, as trees; of page tables, the first `columns`. Sync: never."""
        windows = self.length, self.window, self.parents
        return gather_tree(slots, *windows, self.page_table[:, :columns], width, page_size)

    def sampling(self, slots: Tensor, work: SamplingWork) -> Sampling:
        """How the slots draw. What greedy slots never read is not gathered. Sync: never."""
        read = slots if work.sampled or work.processed or self.processors.own else slots[:0]
        rows = self._rows[read]
        seed, stop_from, top_k, output_from, _ = rows[:, :NUM_INTS].unbind(1)
        floats, stop_ids = rows[:, NUM_INTS:STOP_IDS_AT].view(torch.float64), rows[:, STOP_IDS_AT:]
        temperature, top_p, min_p = floats.unbind(1)
        drawing = temperature, top_k, top_p, min_p, seed
        return Sampling(*drawing, stop_from, stop_ids, output_from, slots, work, self.processors)

    def draft_sampling(self, slots: Tensor, work: SamplingWork) -> Sampling:
        """How guesses are drawn. Nothing is gathered where a guess is the largest logit. Sync: never."""
        needs_logits = work.sampled or self.processors.active(work)
        return self.sampling(slots, work) if needs_logits else self.no_sampling

    def commit(self, batch: SlotBatch, window: Window, drawn: Drawn, verdict: Verdict) -> None:
        """Judge the windows, write the verdict, advance the slots by what is committed. Sync: never.

        No slot has a guess after it.
        """
        slots = (batch.slots, batch.lengths, self.length, self.window, self.dummy)
        rest = drawn.accept_len, self.pool.rows_of(batch.page_table), verdict
        if window.parents is None:
            judge_chain(drawn.tokens, window.tokens, *slots, *rest)
        else:
            judge_tree(drawn.tokens, window.tokens, window.parents, *slots, verdict.tokens.shape[1], *rest)

    def write_outputs(self, logits: LazyLogits, decided: Decided) -> tuple[Tensor, ...]:
        """Every output of what was decided, which was drawn from these logits. Sync: never."""
        return tuple(output.write(logits.compute(), decided) for output in self.outputs)

    def start(self, batch: SlotBatch, roots: Tensor) -> None:
        """Put completed prompts at their first token. Shapes: roots [F] i64. Sync: never."""
        self.length[batch.slots] = batch.lengths
        self.pool.write(batch.page_table, batch.lengths, roots)
        self.window[batch.slots] = F.pad(roots[:, None], (0, self.width - 1), value=-1)

    def place(self, slots: Tensor, positions: Tensor, roots: Tensor) -> None:
        """Put slots at given roots. Shapes: [B] i64. Sync: never."""
        self.length[slots] = positions
        self.window[slots, 0] = roots
        self.pool.write(self.page_table[slots], positions, roots)

    def set_guesses(self, batch: SlotBatch, guesses: Guesses) -> None:
        """The next window's guesses, as deep as each slot may speculate; other columns hold -1. Sync: never."""
        if not len(guesses.tokens):
            return
        if guesses.parents is None:
            place_guesses(self.window, batch.slots, guesses.tokens, self.most_steps, self.dummy)
        else:
            placed = guesses.tokens, guesses.parents
            place_tree(self.window, self.parents, batch.slots, *placed, self.most_steps, self.dummy)


@functools.cache
def _same_work(sampled: bool, filtered: bool, processed: bool, outputs: bool, of_target: bool) -> SamplingWork:
    """One object for all requests of a kind (`cheapest_work`)."""
    return SamplingWork(sampled, filtered, processed, outputs, of_target)
