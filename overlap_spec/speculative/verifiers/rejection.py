"""Rejection sampling: a guess is accepted with a probability; after a rejection the token is drawn from a residual.

Two rules. Classic rejection (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318): guesses are
drawn from the draft's q and accepted with probability min(1, p / q), and max(p - q, 0) is the residual: the committed
tokens have the target's distribution, but are not those of plain decoding with that seed. Thresholds (SGLang's): a
guess is accepted with probability p / acc, or if p >= single; the residual is p without it: exact with both at 1, lossy
below. Greedy requests are judged by matching under either rule. p and q are those of processed logits.

Noise: coins, residuals and drawn guesses have streams of their own, keyed like the target's by (seed, position, token).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from overlap_spec_kernels import gumbel, largest_columns, stream, uniform
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.context import Sampling
from overlap_spec.sampling.sampler import draw_after, log_weights, processed_logits, slices
from overlap_spec.speculative.types import Drawn, SlotBatch, Window, chain_context, window_context

GUESS, COIN, RESIDUAL = 1, 2, 3  # purposes of noise


class AcceptRule(Protocol):
    """When a guess is accepted, and what is drawn from where it is not. Shapes: guesses [b, K] i64, p [b, K, V] f64."""

    def accepts(self, guesses: Tensor, p_guess: Tensor, coins: Tensor, slots: Tensor) -> Tensor:
        """Shapes: p_guess, coins [b, K] f64, slots [b] i64 -> bool [b, K]."""

    def residual(self, p: Tensor, guesses: Tensor, slots: Tensor) -> Tensor:
        """Weights, not normalised. Shapes: -> [b, K, V] f64."""


@dataclass(frozen=True)
class Thresholds:
    """`single` and `acc` in (0, 1]."""

    single: float
    acc: float

    def accepts(self, guesses: Tensor, p_guess: Tensor, coins: Tensor, slots: Tensor) -> Tensor:
        return (coins * self.acc < p_guess) | (p_guess >= self.single)

    def residual(self, p: Tensor, guesses: Tensor, slots: Tensor) -> Tensor:
        return p.scatter(2, guesses[:, :, None], 0.0)


class DraftProbs:
    """What the guesses of each slot were drawn from: the proposer writes it, the verifier reads it one step later."""

    allocated = False  # by a proposer that can draw its guesses

    def allocate(self, num_rows: int, num_guesses: int, target_ids: Tensor) -> None:
        """For slot rows 0..num_rows - 1. Shapes: target_ids [Vd] i64, the draft's columns."""
        self.allocated = True
        self.target_ids = target_ids
        size = (num_rows, num_guesses)
        self._probs = torch.zeros(*size, len(target_ids), dtype=torch.float32, device=target_ids.device)
        self._of_guess = torch.zeros(size, dtype=torch.float32, device=target_ids.device)

    def draw(self, lazy_logits: LazyLogits, batch: SlotBatch, guesses: Sequence[Tensor]) -> Tensor:
        """Draw the guess that follows `guesses` from q. Shapes: guesses [B] i64 each -> target ids [B] i64."""
        sampling, index = batch.sampling, len(guesses)
        context = chain_context(batch, guesses, self.target_ids)
        if not sampling.work.sampled:
            return draw_after(lazy_logits, context).squeeze(1)
        logits = processed_logits(lazy_logits, context).squeeze(1).double()
        q = (logits / sampling.temperature.clamp(min=1e-6)[:, None]).softmax(1)
        noise = gumbel(stream(sampling.seed, GUESS), batch.lengths + (1 + index), self.target_ids)
        columns = torch.where(sampling.temperature > 0, (q.log() + noise).argmax(1), logits.argmax(1))
        self._probs[batch.slots, index] = q.float()
        self._of_guess[batch.slots, index] = q.gather(1, columns[:, None]).squeeze(1).float()
        return self.target_ids[columns]

    def of_guesses(self, slots: Tensor, num_guesses: int) -> Tensor:
        """q of each guess. Shapes: slots [b] i64 -> [b, K] f64."""
        return self._of_guess[slots, :num_guesses].double()

    def over(self, slots: Tensor, num_guesses: int, vocab_size: int) -> Tensor:
        """q over the target's vocabulary. Shapes: slots [b] i64 -> [b, K, V] f64."""
        q = torch.zeros(len(slots), num_guesses, vocab_size, dtype=torch.float64, device=slots.device)
        return q.index_copy(2, self.target_ids, self._probs[slots, :num_guesses].double())


def draw_guess(
    lazy_logits: LazyLogits, batch: SlotBatch, guesses: Sequence[Tensor], target_ids: Tensor, probs: DraftProbs | None
) -> Tensor:
    """Draw the next guess of each chain: from q if `probs` is to be told of it, else with the target's noise.

    Shapes: logits of B rows, guesses so far [B] i64 each, target_ids [Vd] i64 -> target ids [B] i64.
    """
    if probs is not None:
        return probs.draw(lazy_logits, batch, guesses)
    return draw_after(lazy_logits, chain_context(batch, guesses, target_ids)).squeeze(1)


@dataclass(frozen=True)
class Rejection:
    """Guesses were drawn from `probs`, each with coins of its own."""

    probs: DraftProbs

    def accepts(self, guesses: Tensor, p_guess: Tensor, coins: Tensor, slots: Tensor) -> Tensor:
        return coins * self.probs.of_guesses(slots, guesses.shape[1]) < p_guess

    def residual(self, p: Tensor, guesses: Tensor, slots: Tensor) -> Tensor:
        """A difference that rounds to nothing leaves p."""
        rest = (p - self.probs.over(slots, *p.shape[1:])).clamp(min=0.0)
        return torch.where(rest.sum(2, keepdim=True) > 0, rest, p)


class ResidualVerifier:
    """Judges a chain by a rule."""

    def __init__(self, rule: AcceptRule, token_ids: Tensor) -> None:
        self._rule = rule
        self._token_ids = token_ids  # [V] i64

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Keeps the target's distribution where the rule does."""
        context = window_context(window, batch, self._token_ids)
        if not batch.sampling.work.sampled:
            return Drawn(draw_after(lazy_logits, context))
        logits, guesses = processed_logits(lazy_logits, context), window.tokens[:, 1:]
        judged = [self._judge(guesses, logits, context.positions, batch, part) for part in slices(logits)]
        tokens, accept_len = (torch.cat(parts) for parts in zip(*judged, strict=True))
        return self._with_greedy(window, logits, batch.sampling, tokens, accept_len)

    def _judge(
        self, guesses: Tensor, logits: Tensor, positions: Tensor, batch: SlotBatch, part: slice
    ) -> tuple[Tensor, Tensor]:
        """Shapes: guesses [B, K], logits [B, W, V] -> tokens [b, W], accept_len [b], of the slots in `part`."""
        guesses, positions, slots = guesses[part], positions[part], batch.slots[part]
        seed, width = batch.sampling.seed[part, None], positions.shape[1]
        p = log_weights(logits, batch.sampling, part).softmax(1).view(*positions.shape, -1)
        guessed, guesses = guesses >= 0, guesses.clamp(min=0)
        p_guess = p[:, :-1].gather(2, guesses[:, :, None]).squeeze(2)
        coins = uniform(stream(seed, COIN), positions[:, :-1])
        accept_len = (guessed & self._rule.accepts(guesses, p_guess, coins, slots)).long().cumprod(1).sum(1)
        residual = self._rule.residual(p[:, :-1], guesses, slots)
        weights = torch.cat((torch.where(guessed[:, :, None], residual, p[:, :-1]), p[:, -1:]), 1)
        seeds = stream(seed, RESIDUAL).expand(-1, width).reshape(-1)
        noise = gumbel(seeds, positions.reshape(-1), self._token_ids).view_as(weights)
        return largest_columns(weights.log() + noise), accept_len

    def _with_greedy(
        self, window: Window, logits: Tensor, sampling: Sampling, tokens: Tensor, accept_len: Tensor
    ) -> Drawn:
        """Greedy slots of the batch by matching, as if they were alone."""
        largest = largest_columns(logits)
        matching = (window.tokens[:, 1:] == largest[:, :-1]).long().cumprod(1).sum(1)
        sampled = sampling.temperature > 0
        return Drawn(torch.where(sampled[:, None], tokens, largest), torch.where(sampled, accept_len, matching))
