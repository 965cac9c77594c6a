"""How hidden states leave the worker: a proposer that guesses nothing and writes what it is shown into a ring.

Methods give the worker their proposer, and the target keeps the outputs of the layers that a proposer names. So the
worker needs to know nothing of training. Rows go to the ring by the place of their request in it:

    row of a request's token i  ->  ring[base of its slot + i];  of a request without a base  ->  the last row

The base of each slot is on the device, so that captured steps write too. A part of the ring is written again when the
training step that reads it has been launched: both are in one stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from overlap_spec.models.interfaces import DraftProfile, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.speculative.drafts import EngineShape
from overlap_spec.speculative.interfaces import Prompts
from overlap_spec.speculative.proposers.none import NoProposer

NOWHERE = -1
PARTS = 2  # one is trained on while the other is written


class FeatureRing:
    """Aux hidden states and the final one of so many rows (`LoadedProposer`, before it is attached)."""

    def __init__(self, aux_layers: tuple[int, ...], hidden_size: int, part_rows: int) -> None:
        """`part_rows`: of each part."""
        self._aux_layers, self._hidden_size = aux_layers, hidden_size
        self.part_rows = part_rows
        self._next = 0
        self._rows: Tensor
        self._bases: Tensor
        self._known: list[int] = []  # what the device has

    @property
    def profile(self) -> DraftProfile:
        return DraftProfile(aux_layers=self._aux_layers)

    def attach(self, cache: KVCache, shape: EngineShape) -> "RingWriter":
        """Take the ring's memory."""
        width = (len(self._aux_layers) + 1) * self._hidden_size
        count = PARTS * self.part_rows + 1
        self._rows = torch.zeros(count, width, dtype=shape.dtype, device=shape.device)
        self._known = [NOWHERE] * shape.num_rows
        self._bases = torch.tensor(self._known, device=shape.device)
        return RingWriter(self._rows, self._bases)

    def part(self) -> int:
        """The first row of the part that is free next."""
        begin, self._next = self._next * self.part_rows, (self._next + 1) % PARTS
        return begin

    def place(self, bases: Mapping[int, int]) -> None:
        """Requests take slots, and their rows go there from now on; `NOWHERE`: they are not kept. Sync: never."""
        changed = [slot for slot, base in bases.items() if self._known[slot] != base]
        if not changed:
            return
        for slot in changed:
            self._known[slot] = bases[slot]
        device = self._bases.device
        values = torch.tensor([self._known[slot] for slot in changed], device=device)
        self._bases[torch.tensor(changed, device=device)] = values

    def read(self, begin: int, count: int, length: int) -> tuple[Tensor, Tensor]:
        """Rows of `count` requests with `length` rows each. Shapes: -> aux [B, L, n * H], hidden [B, L, H]."""
        assert count * length <= self.part_rows, "a batch fits a part of the ring"
        rows = self._rows[begin : begin + count * length].view(count, length, -1)
        aux = len(self._aux_layers) * self._hidden_size
        return rows[..., :aux], rows[..., aux:]


@dataclass(frozen=True)
class RingWriter(NoProposer):
    """The proposer. `rows` [N + 1, (n + 1) * H], `bases` [S + 1] i64."""

    rows: Tensor
    bases: Tensor

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Any:
        """Write the rows of prompts. Sync: never."""
        assert rows.row_starts is not None, "chunks say where their rows are"
        places = torch.ones_like(rows.positions).cumsum(0)
        chunks = torch.searchsorted(rows.row_starts[1:].long(), places)
        bases = self.bases[prompts.chunk_slots[chunks]]
        index = torch.where(bases == NOWHERE, len(self.rows) - 1, bases + rows.positions)
        self.rows.index_copy_(0, index, torch.cat((output.aux, output.hidden), 1))
