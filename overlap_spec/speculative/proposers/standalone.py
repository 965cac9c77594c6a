"""Proposes a chain with a small language model: an ordinary one, or one that reads the target's keys and values.

The rows of an ordinary one are not shifted: the draft row at position p holds the token of p, writes its KV at p and
predicts p + 1.

    committed  x0 .. xL | guesses g1 .. gK        L = length: the root xL has no target KV yet
    draft rows 0 .. L-2 |                         written by steps before
               L-1, L   |                         one forward of two rows; row L predicts g1
                        | L+1 .. L+K-1            one forward each: row L+i = gi predicts g(i+1)

So K guesses take K forwards, and absorbing what was committed takes none of its own: an accepted guess has its KV
from when it was the last input, and only gK never was one. If all K stand, gK's row is the one before the new root; it
rides along with the root, always, so that shapes are static (written again it is what it was). Rows of guesses that did
not stand are wrong, and stand at or past the new length: each is overwritten before a row attends to it, because rows
are written in order and a row sees none after it. So before a step draft KV is right at 0..L, and with it at every
position that the prefix cache may take (0..L-1), whatever the widths of the steps were.

Steps of width 1 run no draft; their tokens are kept in a ring per slot, and `catch_up` writes their rows, up to the
root's, some in each forward. Where nothing is proposed after a prompt, its root is the first of them.

The other attends to the target's own keys and values, and has none itself.

    committed   x0 .. xL | guesses        L = length: the root xL has no KV yet
    guess 1     (hidden state of L-1, xL) at position L-1, sees 0 .. L-1
    guess i+1   (own hidden state, guess i) at the same position, sees the same

So nothing is absorbed and nothing deferred: what a step learns is the target's hidden state after the last committed
token that it has read, and the root.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from overlap_spec_kernels import Normed, select_rows
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetOutput
from overlap_spec.speculative.interfaces import ABSORBED_ROWS, Guesses, Prompts, SlotBatch, Verdict
from overlap_spec.speculative.rows import earlier_rows, reading_last, single_rows, window_rows
from overlap_spec.speculative.verifiers import DraftProbs, draw_guess


class SmallModel(Protocol):
    """A language model that has the target's token ids, with a KV cache of its own."""

    target_ids: Tensor  # [Vd] i64: target id of each column of its logits

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        """Row at position p holds the token of p. Shapes: tokens [T] i64."""

    def logits(self, hidden: Tensor | Normed) -> LazyLogits:
        """Shapes: hidden [R, H] -> logits [R, Vd]."""


@dataclass(frozen=True)
class RecentTokens:
    """The last N committed tokens of each slot, its root the newest, by position modulo N."""

    tokens: Tensor  # [S, N] i64

    @staticmethod
    def allocate(num_rows: int, max_deferred: int, device: torch.device) -> "RecentTokens":
        """N = max_deferred, and at least the root."""
        return RecentTokens(torch.zeros(num_rows, max(1, max_deferred), dtype=torch.int64, device=device))

    @property
    def most(self) -> int:
        """N."""
        return self.tokens.shape[1]

    def put(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Keep a token of each slot. Shapes: slots, positions, tokens [B] i64."""
        self.tokens[slots, positions % self.most] = tokens

    def get(self, batch: SlotBatch, positions: Tensor) -> Tensor:
        """Shapes: positions [B, R] i64 -> [B, R] i64."""
        return self.tokens[batch.slots[:, None], positions % self.most]


@dataclass(frozen=True)
class LastTokens:
    """The committed tokens at the end of each slot, as a forward takes them. n: 2, or what a step can commit."""

    tokens: Tensor  # [B, n] i64
    count: Tensor | None = None  # [B] i64: how many of them there are, the root the last; None: n


class StandaloneProposer:
    """A `Proposer[LastTokens]`: it learns each slot's root and the token before that."""

    first_row = 1

    def __init__(
        self, model: SmallModel, page_size: int, recent: RecentTokens, probs: DraftProbs | None = None
    ) -> None:
        """`probs`: guesses are drawn, and it is told what from; else they share the target's noise."""
        self.target_ids = model.target_ids
        self._model = model
        self._probs = probs
        self._page_size = page_size
        self._recent = recent

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> LastTokens:
        """Absorb prompt chunks: every row, the first token's too. The root's is left to `propose` or `catch_up`."""
        self._model.forward(prompts.tokens, rows)
        last = torch.stack((prompts.tokens, prompts.next_tokens), 1)[prompts.last_rows]
        self._recent.put(prompts.slots, rows.positions[prompts.last_rows] + 1, last[:, 1])
        return LastTokens(last)

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> LastTokens:
        """Find the new root and the token before it, which is the old root if no guess is accepted. No forward."""
        known = torch.cat((self._recent.get(batch, batch.lengths[:, None]), verdict.tokens), 1)  # from the old root on
        return LastTokens(known.gather(1, torch.stack((verdict.accept_len, verdict.accept_len + 1), 1)))

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Keep the token committed after the root: the new root."""
        self._recent.put(batch.slots, batch.lengths + 1, verdict.follow)

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Write the draft KV of the last `counts` rows, of which the root's is one."""
        past_root = replace(batch, lengths=batch.lengths + 1)
        rows = reading_last(earlier_rows(past_root, counts, ABSORBED_ROWS, self._page_size))
        tokens = self._recent.get(batch, rows.positions.view(len(batch.slots), -1))
        self._model.forward(tokens.reshape(-1), rows)

    def propose(self, batch: SlotBatch, learnt: LastTokens, num_guesses: int) -> Guesses:
        """Draw each guess, with the noise the target will use at that position."""
        hidden = self.enter(batch, learnt)
        guesses: list[Tensor] = []
        for i in range(num_guesses):
            if guesses:
                rows = single_rows(batch, i, self._page_size)
                hidden = self.advance(guesses[-1], self.features(hidden), rows)
            guesses.append(draw_guess(self.logits(hidden), batch, guesses, self.target_ids, self._probs))
        return Guesses(torch.stack(guesses) if guesses else batch.slots.new_empty(0, len(batch.slots)))

    def enter(self, batch: SlotBatch, learnt: LastTokens) -> Tensor | Normed:
        """Run the root and the token before it. See `Drafter`."""
        self._recent.put(batch.slots, batch.lengths, learnt.tokens[:, 1])
        before = (batch.lengths - 1).clamp(min=0)  # the dummy slot has no tokens
        rows = window_rows(batch, torch.stack((before, before + 1), 1), self._page_size)
        hidden = self._model.forward(learnt.tokens.reshape(-1), rows).hidden
        return hidden.view(len(batch.slots), 2, -1)[:, 1].contiguous()

    def features(self, drafted: Tensor | Normed) -> Tensor:
        """Nothing but tokens is handed on. See `Drafter`."""
        values = drafted.values if isinstance(drafted, Normed) else drafted
        return values[:, :0]

    def advance(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Tensor | Normed:
        return self._model.forward(tokens, rows).final

    def logits(self, drafted: Tensor | Normed) -> LazyLogits:
        return self._model.logits(drafted)


class RereadingProposer(StandaloneProposer):
    """The same where guesses are trees, which leave no KV behind: what a step commits is read once it is known.

    It learns the tokens that were committed last, the root at their end, and how many they are.
    """

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> LastTokens:
        roots = super().prefill(prompts, rows, output).tokens[:, 1]
        return LastTokens(roots[:, None], torch.ones_like(roots))

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> LastTokens:
        """See the class. No forward."""
        return LastTokens(verdict.tokens, verdict.accept_len + 1)

    def enter(self, batch: SlotBatch, learnt: LastTokens) -> Tensor | Normed:
        """Run what was committed; rows after the root's are overwritten before a row attends to them."""
        assert learnt.count is not None, "as this class learns"
        tokens, count = learnt.tokens.clamp(min=0), learnt.count
        self._recent.put(batch.slots, batch.lengths, tokens.gather(1, count[:, None] - 1).squeeze(1))
        columns = torch.arange(tokens.shape[1], device=tokens.device)
        rows = window_rows(batch, (batch.lengths - count + 1)[:, None] + columns, self._page_size)
        hidden = self._model.forward(tokens.reshape(-1), rows).hidden
        return select_rows(hidden.view(*tokens.shape, -1), count - 1)


class SharedKVModel(Protocol):
    """A model that is attached to the target's KV cache."""

    target_ids: Tensor  # [Vd] i64: target id of each column of its logits

    def forward(self, tokens: Tensor, hidden: Tensor, rows: RowBatch) -> Tensor:
        """Rows write nothing. Shapes: tokens [R] i64, hidden [R, H], of the target's width -> [R, h]."""

    def next_hidden(self, output: Tensor) -> Tensor:
        """Shapes: [R, h] -> [R, H]."""

    def logits(self, output: Tensor) -> LazyLogits:
        """Shapes: [R, h] -> logits [R, Vd]."""


class LastRow(NamedTuple):
    """What is known of the end of each slot."""

    hidden: Tensor  # [B, H]: of the target, after its final norm, of the last token that it has read
    root: Tensor  # [B] i64


class SharedKVProposer:
    """A `Proposer[LastRow]`."""

    def __init__(self, model: SharedKVModel, page_size: int, probs: DraftProbs | None = None) -> None:
        """`probs`: guesses are drawn, and it is told what from; else they share the target's noise."""
        self._model = model
        self._page_size = page_size
        self._probs = probs

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> LastRow:
        """Nothing is absorbed: the last row of each chunk is kept."""
        hidden = output.hidden if rows.read is not None else output.hidden[prompts.last_rows]
        return LastRow(hidden, prompts.next_tokens[prompts.last_rows])

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> LastRow:
        """Find the last accepted row of each window, and the token after it."""
        hidden = select_rows(output.hidden.view(*verdict.tokens.shape, -1), verdict.accept_len)
        root = verdict.follow.view_as(verdict.tokens).gather(1, verdict.accept_len[:, None]).squeeze(1)
        return LastRow(hidden, root)

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Nothing is missed: a step that needs guesses reads what it needs itself."""

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Nothing was missed."""

    def propose(self, batch: SlotBatch, learnt: LastRow, num_guesses: int) -> Guesses:
        """Draw each guess, with the noise the target will use at that position."""
        last = (batch.lengths - 1).clamp(min=0)  # the dummy slot has no tokens
        rows = window_rows(batch, last[:, None], self._page_size)
        tokens, hidden = learnt.root, learnt.hidden
        guesses: list[Tensor] = []
        for _ in range(num_guesses):
            output = self._model.forward(tokens, hidden, rows)
            logits = self._model.logits(output)
            guesses.append(draw_guess(logits, batch, guesses, self._model.target_ids, self._probs))
            tokens, hidden = guesses[-1], self._model.next_hidden(output)
        return Guesses(torch.stack(guesses) if guesses else batch.slots.new_empty(0, len(batch.slots)))
