"""What accepts or rejects guesses. Under each rule greedy requests are judged by matching.

**Match verification** of a chain: the target draws, and a guess is accepted when it is what was drawn. The target draws
its own token after every node of the window, keyed by (seed, position, token id), exactly as plain decoding would draw
it; guesses only decide how many of those draws are kept. So the committed tokens are plain decoding's, greedy or
sampled, for any guess.

**Rejection sampling** of a chain: a guess is accepted with a probability; after a rejection the token is drawn from a
residual. Two rules. Classic rejection (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318):
guesses are drawn from the draft's q and accepted with probability min(1, p / q), and max(p - q, 0) is the residual: the
committed tokens have the target's distribution, but are not those of plain decoding with that seed. Thresholds
(SGLang's): a guess is accepted with probability p / acc, or if p >= single; the residual is p without it: exact with
both at 1, lossy below. p and q are those of processed logits. Coins, residuals and drawn guesses have streams of noise
of their own, keyed like the target's by (seed, position, token).

**Thresholds of trees**, SGLang's rule too: siblings are tried in order; if all are rejected the token is drawn from a
residual. A node has one uniform number: the first child is accepted for which it is less than the children's p so far,
its own included, divided by `acc`; or whose own p is at least `single`. If none is, the residual holds none of them.
With both thresholds at 1 that is the target's p: a child is accepted with its own probability, and the rest is left to
the residual.

**Synthetic acceptance** is a benchmark's stand-in for the accept decision. A head with random weights guesses nothing
right, so the speed of a shape is measured with an accept length that is given. Everything else is done as ever: every
row of the window is computed, sampled and judged; only how many guesses are accepted is then replaced. What is
committed are the guesses and a drawn token, so text means nothing. Random weights also find all guesses equally likely.
A tree that grew by that would be as broad as it can, and its columns would be of no use to narrow windows. So it grows
by what a draft that guesses so well would say (`certainty`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from overlap_spec_kernels import gumbel, largest_columns, stream, synthetic_accept, uniform
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.context import Sampling
from overlap_spec.sampling.sampler import Draw, draw_after, draw_columns, log_weights, processed_logits, slices
from overlap_spec.speculative.interfaces import Drawn, SlotBatch, Verifier, Window, chain_context, window_context


class ChainVerifier:
    """Accepts the longest run of guesses that equals the target's draws, and adds the draw that follows it."""

    def __init__(self, token_ids: Tensor, draw: Draw = draw_columns) -> None:
        self._token_ids = token_ids  # [V] i64
        self._draw = draw

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        return Drawn(draw_after(lazy_logits, window_context(window, batch, self._token_ids), self._draw))


class GreedyVerifier:
    """Lets another verifier judge every request as if its temperature were 0, which is lossy where it is not."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Does not keep the target's distribution at temperatures above 0."""
        sampling = batch.sampling
        greedy = replace(sampling, work=replace(sampling.work, sampled=False, filtered=False))
        return self._inner.verify(window, lazy_logits, replace(batch, sampling=greedy))


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


class TreeThresholdVerifier:
    """After each column of a tree, the token of the accepted child, or one that is no child's."""

    def __init__(self, thresholds: Thresholds, token_ids: Tensor) -> None:
        self._thresholds = thresholds
        self._token_ids = token_ids  # [V] i64

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Keeps the target's distribution where the thresholds do."""
        context = window_context(window, batch, self._token_ids)
        if not batch.sampling.work.sampled:
            return Drawn(draw_after(lazy_logits, context))
        logits = processed_logits(lazy_logits, context)
        drawn = torch.cat([self._draw(window, logits, context.positions, batch, part) for part in slices(logits)])
        return Drawn(torch.where(batch.sampling.temperature[:, None] > 0, drawn, largest_columns(logits)))

    def _draw(self, window: Window, logits: Tensor, positions: Tensor, batch: SlotBatch, part: slice) -> Tensor:
        """Shapes: logits [B, W, V], positions [B, W] -> [b, W] i64, for the slots in `part`."""
        tokens, positions, seed = window.tokens[part], positions[part], batch.sampling.seed[part, None]
        width = tokens.shape[1]
        column = torch.arange(width, device=tokens.device)
        guessed = (tokens >= 0) & (column > 0)
        # A window of one column has no parents: it is its own root.
        parents = torch.zeros_like(tokens) if window.parents is None else window.parents[part]
        p = log_weights(logits, batch.sampling, part).softmax(1).view(*tokens.shape, -1)
        place = parents * p.shape[2] + tokens.clamp(min=0)  # of a guess among its parent's tokens
        p_guess = p.flatten(1).gather(1, place).masked_fill(~guessed, 0.0)
        coins = uniform(stream(seed, COIN), positions).gather(1, parents)
        accepted = guessed & self._accepts(coins, p_guess, parents, column)
        is_child = accepted[:, None] & (parents[:, None] == column[:, None])  # [b, W, W]: of a column, in a column
        first = torch.where(is_child, column, width).amin(2)
        residual = self._residual(p, place, guessed)
        seeds = stream(seed, RESIDUAL).expand(-1, width).reshape(-1)
        noise = gumbel(seeds, positions.reshape(-1), self._token_ids).view_as(p)
        drawn = largest_columns(residual.log() + noise)
        return torch.where(first < width, tokens.gather(1, first.clamp(max=width - 1)), drawn)

    def _accepts(self, coins: Tensor, p_guess: Tensor, parents: Tensor, column: Tensor) -> Tensor:
        """Whether each guess is accepted if its siblings before it are rejected. Shapes: [b, W] -> bool [b, W]."""
        upto = (parents[:, :, None] == parents[:, None]) & (column[:, None] >= column)
        tried = torch.where(upto, p_guess[:, None], 0.0).sum(2)
        return (coins * self._thresholds.acc < tried) | (p_guess >= self._thresholds.single)

    def _residual(self, p: Tensor, place: Tensor, guessed: Tensor) -> Tensor:
        """p without what was tried. What rounds to nothing leaves p. Shapes: p [b, W, V] -> the same."""
        tried = torch.zeros_like(p).flatten(1).scatter_add(1, place, guessed.to(p.dtype)).view_as(p)
        rest = p.masked_fill(tried > 0, 0.0)
        return torch.where(rest.sum(2, keepdim=True) > 0, rest, p)


TABLE_SIZE = 1 << 16  # a power of two
SEED = 1234
SURE = 0.02, 0.98  # of a guess, at least and at most
HALVINGS = 30


class SyntheticAcceptance:
    """Guesses to accept: floor or ceil of the mean, chosen per (seed, position) so that the mean comes out."""

    def __init__(self, means: Sequence[float], seeds: Tensor) -> None:
        """`means`: one, or two, of which seeds from TABLE_SIZE on take the second. `seeds`: of every slot.

        Shapes: [S] i64.
        """
        assert len(means) in (1, 2) and min(means) >= 1, "a step commits at least its bonus"
        self._seeds = seeds
        order = torch.randperm(TABLE_SIZE, generator=torch.Generator().manual_seed(SEED))
        halves = [(order < round((mean % 1) * TABLE_SIZE)).long() + (int(mean) - 1) for mean in means]
        self._table = torch.cat(halves).to(seeds.device)  # a lookup is one launch, a generator some thirty

    def accept_len(self, batch: SlotBatch) -> Tensor:
        """How many guesses to accept, which may be more than there are. Shapes: -> [B] i64. Sync: never."""
        return synthetic_accept(self._table, self._seeds, batch.slots, batch.lengths)


def certainty(mean: float, num_levels: int, topk: int) -> list[float]:
    """Log-probs that a draft gives a node's children, best first, where `mean` tokens a step are committed.

    Each guess is as often right after those before it: rate + rate^2 + .. over the levels is mean - 1.
    """
    low, high = SURE
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        too_low = sum(rate**level for level in range(1, num_levels + 1)) < mean - 1
        low, high = (rate, high) if too_low else (low, rate)
    return [math.log(low) + rank * math.log(1 - low) for rank in range(topk)]


class SimulatedVerifier:
    """Replaces another verifier's accept decision, after it has done all its work."""

    def __init__(self, inner: Verifier, acceptance: SyntheticAcceptance) -> None:
        self._inner = inner
        self._acceptance = acceptance

    def verify(self, window: Window, lazy_logits: LazyLogits, batch: SlotBatch) -> Drawn:
        """Does not keep the target's distribution."""
        return replace(self._inner.verify(window, lazy_logits, batch), accept_len=self._acceptance.accept_len(batch))
