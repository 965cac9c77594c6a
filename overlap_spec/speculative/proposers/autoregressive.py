"""Proposes a chain with a draft head that runs one step per guess (EAGLE family).

The row rule, from which everything follows: the draft row at position p holds (features of p, token of p + 1), writes
its KV at p and predicts the token of p + 2.

    committed  x0 .. xL | guesses          L = length: the root xL has no target KV yet
    draft rows 0 .. L-1 |                  row L-1 = (features of L-1, xL) predicts guess 1, at position L+1
                        | L, L+1, ..       row L+i = (own output, guess i+1) predicts guess i+2

Steps of width 1 need no guesses, so there the head does not run: each leaves one draft row behind, and what that row is
made of (the target's aux hidden states, the token after it) is kept in a ring per slot. Before the ring is full, and
before a wider step, `catch_up` absorbs deferred rows, some at a time, of which it computes keys and values alone: then
the draft's KV is complete again. The worker counts them (`worker/inputs.py`); the scheduler keeps a bound, so that
none of them counts as cached (`Request.valid_len`).
"""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import Normed, keep_row, select_rows
from torch import Tensor

from overlap_spec.models.interfaces import DraftHead, LazyLogits, RowBatch, TargetOutput
from overlap_spec.speculative.interfaces import ABSORBED_ROWS, Guesses, Prompts, SlotBatch, Verdict
from overlap_spec.speculative.rows import earlier_rows, reading_windows, single_rows
from overlap_spec.speculative.verifiers import DraftProbs, draw_guess

FEW_ROWS = 16  # of windows, of which a layer computes all as fast as one row each


@dataclass(frozen=True)
class DeferredRows:
    """What draft rows are made of, by slot and position modulo N: a ring that holds the last N positions."""

    aux_hidden: Tensor  # [S, N, n * H], what `fuse` takes
    tokens: Tensor  # [S, N] i64

    @staticmethod
    def allocate(num_rows: int, most: int, aux_size: int, dtype: torch.dtype, device: torch.device) -> "DeferredRows":
        """N = most; 0 if nothing is ever deferred."""
        aux_hidden = torch.zeros(num_rows, most, aux_size, dtype=dtype, device=device)
        return DeferredRows(aux_hidden, torch.zeros(num_rows, most, dtype=torch.int64, device=device))

    @property
    def most(self) -> int:
        """Rows that a slot can defer."""
        return self.tokens.shape[1]

    def put(self, batch: SlotBatch, output: TargetOutput, tokens: Tensor) -> None:
        """Keep the row at `batch.lengths`, one per slot, if anything is kept. Shapes: tokens [B] i64."""
        if self.most == 0:
            return
        keep_row(self.aux_hidden, self.tokens, batch.slots, batch.lengths, output.aux_hidden, tokens)

    def get(self, batch: SlotBatch, positions: Tensor) -> tuple[Tensor, TargetOutput]:
        """The rows at positions [B, R] i64. Shapes: -> tokens [B * R] i64, aux_hidden [B * R, n * H].

        One index for slots and places: so torch copies rows 16 bytes at a time, and not number by number.
        """
        index = (batch.slots[:, None] * self.most + positions % self.most).view(-1)
        aux_hidden = self.aux_hidden.flatten(0, 1)[index]
        return self.tokens.view(-1)[index], TargetOutput(aux_hidden, aux_hidden)


class AutoregressiveProposer:
    """A `Proposer[Tensor]`, and a `Drafter` of trees.

    It learns the head's output at the last committed draft row, from which guess 1 is drawn. Shapes: [B, H].
    """

    first_row = 0

    def __init__(
        self, head: DraftHead, page_size: int, deferred: DeferredRows, probs: DraftProbs | None = None
    ) -> None:
        """`probs`: guesses are drawn, and it is told what from; else they share the target's noise."""
        self.target_ids = head.target_ids
        self._head = head
        self._probs = probs
        self._page_size = page_size
        self._deferred = deferred

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Tensor:
        """Absorb prompt chunks: every row, with the token that follows it. Without guesses, keys and values alone."""
        features = self._head.fuse(output)
        if not prompts.proposes:
            self._head.absorb(prompts.next_tokens, features, rows.read_whole())
            return features  # not used
        drafted = self._head.forward(prompts.next_tokens, features, rows)
        return drafted.values[prompts.last_rows] if rows.read is None else drafted.values

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Tensor:
        """Absorb what is kept of the window: each row with the token after it; later rows are overwritten next time."""
        if len(verdict.follow) > FEW_ROWS:
            rows = reading_windows(rows, verdict.accept_len)
        drafted = self._head.forward(verdict.follow, self._head.fuse(output), rows).values
        if rows.read is not None:
            return drafted
        return select_rows(drafted.view(*verdict.tokens.shape, -1), verdict.accept_len)

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Keep the root's row and the token committed after it. Needs a ring, and no more rows than it holds."""
        self._deferred.put(batch, output, verdict.follow)

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Write the draft KV of deferred rows; `extend` follows before the next guess. Shapes: counts [B] i64."""
        rows = earlier_rows(batch, counts, ABSORBED_ROWS, self._page_size)
        tokens, output = self._deferred.get(batch, rows.positions.view(len(batch.slots), -1))
        self._head.absorb(tokens, self._head.fuse(output), rows)

    def propose(self, batch: SlotBatch, learnt: Tensor, num_guesses: int) -> Guesses:
        """Draw each guess, with the noise the target will use at that position."""
        drafted = self.enter(batch, learnt)
        guesses: list[Tensor] = []
        for i in range(num_guesses):
            if guesses:
                rows = single_rows(batch, i - 1, self._page_size)
                drafted = self.advance(guesses[-1], self.features(drafted), rows)
            guesses.append(draw_guess(self.logits(drafted), batch, guesses, self.target_ids, self._probs))
        return Guesses(torch.stack(guesses) if guesses else batch.slots.new_empty(0, len(batch.slots)))

    def enter(self, batch: SlotBatch, learnt: Tensor) -> Normed:
        return self._head.enter(learnt)

    def features(self, drafted: Normed) -> Tensor:
        return self._head.next_features(drafted)

    def advance(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        return self._head.forward(tokens, features, rows)

    def logits(self, drafted: Normed) -> LazyLogits:
        return self._head.logits(drafted)
