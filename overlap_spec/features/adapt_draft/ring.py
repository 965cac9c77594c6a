"""A bounded ring on the device of what the target computed for requests, written inside captured steps.

A segment holds so many positions of one request. A row on either side takes the positions before and behind them, and
one more row those of slots that are not followed:

    | before | first, first + 1, .. | behind | before | ..  .. | behind | not followed |
              <--- segment_rows --->

Nothing of it is ever copied to the host, and so nothing of it reaches a disk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from overlap_spec_kernels import keep_states
from torch import Tensor

from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.models.interfaces import LoadedTarget, RowBatch, TargetOutput
from overlap_spec.speculative.drafts import EngineShape
from overlap_spec.speculative.interfaces import Guesses, Prompts, Proposer, SlotBatch, Verdict
from overlap_spec.worker.devices import Device

SIDES = 2


@dataclass(frozen=True)
class StateRing:
    """`aux` [R, n * H], `hidden` [R, H]; `places` [S, 3] i64: of each slot the bounds of positions, what is added."""

    num_segments: int
    segment_rows: int
    aux: Tensor
    hidden: Tensor
    places: Tensor

    @classmethod
    def allocate(cls, num_segments: int, segment_rows: int, num_aux: int, shape: EngineShape) -> "StateRing":
        """Take its memory."""
        count = num_segments * (segment_rows + SIDES) + 1
        aux, hidden = (
            torch.zeros(count, columns * shape.hidden_size, dtype=shape.dtype, device=shape.device)
            for columns in (num_aux, 1)
        )
        places = torch.tensor([(0, 0, count - 1)] * shape.num_rows, device=shape.device)
        return cls(num_segments, segment_rows, aux, hidden, places)

    def first_row(self, segment: int) -> int:
        """The row of a segment's first position."""
        return segment * (self.segment_rows + SIDES) + 1

    def follow(self, slots: Mapping[int, tuple[int, int] | None], device: Device) -> None:
        """Write slots' rows to (segment, first position) from now on; None: to none. Sync: never."""
        values: list[int] = []
        for slot, followed in slots.items():
            if followed is None:
                values += (slot, 0, 0, len(self.aux) - 1)
            else:
                segment, first = followed
                values += (slot, first - 1, first + self.segment_rows, self.first_row(segment) - first)
        slots_and_places = device.upload(torch.tensor(values)).view(-1, 4)
        self.places[slots_and_places[:, 0]] = slots_and_places[:, 1:]

    def rows_of(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows of the ring for positions of slots. Shapes: slots [B] i64, positions [B, R] i64 -> [B * R] i64."""
        places = self.places[slots]
        return (positions.clamp(min=places[:, :1], max=places[:, 1:2]) + places[:, 2:]).view(-1)


@dataclass(frozen=True)
class WatchedProposer:
    """A proposer of chains with a head, and the ring that gets what it is shown (`Proposer`)."""

    inner: Proposer[Any]
    ring: StateRing
    weights: Eagle3Weights
    target: LoadedTarget

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Any:
        """Keep aux hidden states alone: the last layer may have computed few rows."""
        assert rows.row_starts is not None, "chunks say where their rows are"
        at = torch.ones_like(rows.positions).cumsum(0)
        slots = prompts.chunk_slots[torch.searchsorted(rows.row_starts[1:].long(), at)]
        self.ring.aux.index_copy_(0, self.ring.rows_of(slots, rows.positions[:, None]), output.aux)
        return self.inner.prefill(prompts, rows, output)

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Any:
        """Keep the window's rows: those of guesses that are rejected are written again by the next step."""
        self._keep(batch, rows.positions.view(len(batch.slots), -1), output)
        return self.inner.extend(batch, rows, output, verdict)

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        self._keep(batch, batch.lengths[:, None], output)
        self.inner.defer(batch, output, verdict)

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        self.inner.catch_up(batch, counts)

    def propose(self, batch: SlotBatch, learnt: Any, num_guesses: int) -> Guesses:
        return self.inner.propose(batch, learnt, num_guesses)

    def _keep(self, batch: SlotBatch, positions: Tensor, output: TargetOutput) -> None:
        kept, places = (self.ring.aux, self.ring.hidden), self.ring.places
        keep_states(kept, places, batch.slots, positions.contiguous(), output.aux, output.final)
