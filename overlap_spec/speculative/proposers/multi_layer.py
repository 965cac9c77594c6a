"""Proposes a chain with several MTP layers, one for each guess.

Layer i's row at position p holds (features of p, token of p + 1 + i) and has its own KV. With S layers:

    committed    x0 .. xL | guesses          L = length: the root xL has no target KV yet
    layer 0      .. L-2   | L-1: xL          predicts guess 1
    layer 1      .. L-3   | L-2: xL,  L-1: guess 1                  predicts guess 2
    layer 2      .. L-4   | L-3: xL,  L-2: guess 1,  L-1: guess 2   predicts guess 3

So the last S - 1 rows of a layer may hold guesses, and are made again once more is committed: what rows are made of
is kept in a ring per slot, and every forward has S - 1 rows in front of the new ones. Rows that are final, 0 .. L - S,
depend on tokens up to S after their own: that is the method's `key_lookahead`. Rows before the first one of which the
slot knows the features were found in the prefix cache, and are final: these are left alone.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetOutput
from overlap_spec.speculative.interfaces import ABSORBED_ROWS, Guesses, Prompts, SlotBatch, Verdict
from overlap_spec.speculative.rows import last_rows
from overlap_spec.speculative.verifiers import DraftProbs, draw_guess


class Layers(Protocol):
    """MTP layers, in the order of the guesses, with their KV caches."""

    num_layers: int  # S
    target_ids: Tensor  # [Vd] i64: target id of each column of logits

    def features(self, output: TargetOutput) -> Tensor:
        """What a target row hands to the first layer. Shapes: -> [T, H]."""

    def forward(self, layer: int, tokens: Tensor, features: Tensor, rows: RowBatch) -> Tensor:
        """Shapes: tokens [T] i64, features [T, H] -> [T, H]. Sync: never on CUDA."""

    def next_features(self, features: Tensor, output: Tensor) -> Tensor:
        """What the next layer reads where a layer has read `features`. Shapes: [T, H] each -> [T, H]."""

    def logits(self, layer: int, output: Tensor) -> LazyLogits:
        """Shapes: [R, H] -> logits [R, Vd]."""


@dataclass(frozen=True)
class RecentRows:
    """What the last N rows of each slot are made of, by position modulo N. The last slot is the dummy."""

    features: Tensor  # [S, N, H]
    tokens: Tensor  # [S, N] i64: the one after each row
    first: Tensor  # [S] i64: position of the first row that is known; those before it were cached

    @staticmethod
    def allocate(num_slots: int, num_rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> "RecentRows":
        """N = num_rows."""
        features = torch.zeros(num_slots, num_rows, hidden, dtype=dtype, device=device)
        tokens = torch.zeros(num_slots, num_rows, dtype=torch.int64, device=device)
        return RecentRows(features, tokens, tokens.new_zeros(num_slots))

    @property
    def most(self) -> int:
        """N."""
        return self.tokens.shape[1]

    def put(self, slots: Tensor, positions: Tensor, features: Tensor, tokens: Tensor) -> None:
        """Shapes: slots [B, 1] or [B, R] i64; positions, tokens [B, R] i64; features [B, R, H]."""
        places = positions % self.most
        self.features[slots, places] = features
        self.tokens[slots, places] = tokens

    def get(self, slots: Tensor, ends: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """The rows before `ends` [B] i64. Shapes: slots [B] i64 -> features [B * num_rows, H], tokens [B, num_rows]."""
        places = (ends[:, None] - num_rows + torch.arange(num_rows, device=ends.device)) % self.most
        return self.features[slots[:, None], places].flatten(0, 1), self.tokens[slots[:, None], places]


def rows_to_remember(num_layers: int, width: int, max_deferred: int) -> int:
    """N: what `propose` reads, or all that can be deferred, and after it a window's rows that may not stand."""
    return max(width, max_deferred) + num_layers - 1 + width - 1


class MultiLayerProposer:
    """A `Proposer[None]`: `propose` runs the rows that it remembers, and draws guesses between the layers."""

    def __init__(
        self,
        layers: Layers,
        page_size: int,
        recent: RecentRows,
        probs: DraftProbs | None = None,
    ) -> None:
        """`probs`: guesses are drawn, and it is told what from; else they share the target's noise."""
        self._layers = layers
        self._page_size = page_size
        self._recent = recent
        self._probs = probs

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> None:
        """Absorb prompt chunks, and make rows of the chunk before again, which now have their tokens."""
        assert rows.row_starts is not None
        starts, ends = rows.row_starts[:-1].long(), rows.row_starts[1:].long()
        begins = rows.positions[starts.clamp(max=len(rows.positions) - 1)]
        first = self._recent.first
        first[prompts.chunk_slots] = torch.where(prompts.fresh > 0, begins, first[prompts.chunk_slots])
        self._finish_earlier(prompts, rows.page_table, starts, ends, begins)
        features = self._layers.features(output)
        self._remember(prompts, features, starts, ends, begins)
        self._run_chunks(prompts.next_tokens, features, rows, ends)

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Remember the window's rows; those after the last accepted one are overwritten next time."""
        width = verdict.tokens.shape[1]
        positions = batch.lengths[:, None] + torch.arange(width, device=batch.lengths.device)
        features = self._layers.features(output).view(len(batch.slots), width, -1)
        self._recent.put(batch.slots[:, None], positions, features, verdict.follow.view_as(positions))

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Remember the root's row."""
        features = self._layers.features(output)[:, None]
        self._recent.put(batch.slots[:, None], batch.lengths[:, None], features, verdict.follow[:, None])

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Write the layers' KV of the last ABSORBED_ROWS rows. Rows that were not deferred get the same KV again."""
        self._run_last(batch, ABSORBED_ROWS, 0)

    def propose(self, batch: SlotBatch, learnt: None, num_guesses: int) -> Guesses:
        """Absorb what a window of so many guesses committed, and draw each guess from its layer."""
        guesses = self._run_last(batch, num_guesses + 1, num_guesses)
        return Guesses(torch.stack(guesses) if guesses else batch.slots.new_empty(0, len(batch.slots)))

    def _run_last(self, batch: SlotBatch, num_new: int, num_guesses: int) -> list[Tensor]:
        """Run all layers on the last `num_new` rows and those that wait for tokens. Shapes: -> num_guesses of [B]."""
        num_rows = num_new + self._layers.num_layers - 1
        rows = last_rows(batch.page_table, batch.lengths, self._recent.first[batch.slots], num_rows, self._page_size)
        features, tokens = self._recent.get(batch.slots, batch.lengths, num_rows)
        guesses: list[Tensor] = []
        for layer in range(self._layers.num_layers):
            output = self._layers.forward(layer, tokens.reshape(-1), features, rows)
            features = self._layers.next_features(features, output)
            tokens = F.pad(tokens[:, 1:], (0, 1))
            if layer < num_guesses:
                newest = output.view(len(batch.slots), num_rows, -1)[:, -1].contiguous()
                guesses.append(
                    draw_guess(self._layers.logits(layer, newest), batch, guesses, self._layers.target_ids, self._probs)
                )
                tokens[:, -1] = guesses[-1]
        return guesses

    def _run_chunks(self, next_tokens: Tensor, features: Tensor, rows: RowBatch, ends: Tensor) -> None:
        """Run all layers on chunks. Tokens that are not known yet are 0. Shapes: next_tokens [T] i64, ends [B] i64."""
        columns = torch.arange(len(next_tokens), device=next_tokens.device)
        end = ends[torch.searchsorted(ends, columns, right=True).clamp(max=len(ends) - 1)]
        for layer in range(self._layers.num_layers):
            known = columns + layer < end
            tokens = next_tokens[(columns + layer).clamp(max=len(next_tokens) - 1)].masked_fill(~known, 0)
            features = self._layers.next_features(features, self._layers.forward(layer, tokens, features, rows))

    def _finish_earlier(
        self, prompts: Prompts, page_table: Tensor, starts: Tensor, ends: Tensor, begins: Tensor
    ) -> None:
        """Make the S - 1 rows before each chunk again, with its first tokens. Shapes: starts, ends, begins [B] i64."""
        num_rows = self._layers.num_layers - 1
        if num_rows == 0:
            return
        rows = last_rows(page_table, begins, self._recent.first[prompts.chunk_slots], num_rows, self._page_size)
        features, tokens = self._recent.get(prompts.chunk_slots, begins, num_rows)
        after = starts[:, None] + torch.arange(num_rows, device=starts.device)
        known = prompts.next_tokens[after.clamp(max=len(prompts.next_tokens) - 1)]
        tokens = torch.cat((tokens, known.masked_fill(after >= ends[:, None], 0)), 1)
        for layer in range(self._layers.num_layers):
            shifted = tokens[:, layer : layer + num_rows].flatten().contiguous()  # a column alone is a view
            features = self._layers.next_features(features, self._layers.forward(layer, shifted, features, rows))

    def _remember(self, prompts: Prompts, features: Tensor, starts: Tensor, ends: Tensor, begins: Tensor) -> None:
        """Keep the last rows of each chunk, as many as one forward reads.

        Shapes: features [T, H]; starts, ends, begins [B] i64.
        """
        num_rows = max(ABSORBED_ROWS, self._layers.num_layers + 1) + self._layers.num_layers - 1
        newest = ends[:, None] - num_rows + torch.arange(num_rows, device=ends.device)
        is_there = newest >= starts[:, None]
        slots = torch.where(is_there, prompts.chunk_slots[:, None], len(self._recent.first) - 1)
        positions = begins[:, None] + newest - starts[:, None]
        newest = newest.clamp(min=0)
        self._recent.put(slots, positions, features[newest], prompts.next_tokens[newest])
