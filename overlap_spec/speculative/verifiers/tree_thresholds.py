"""Rejection sampling of trees: siblings are tried in order; if all are rejected the token is drawn from a residual.

SGLang's rule. A node has one uniform number: the first child is accepted for which it is less than the children's p so
far, its own included, divided by `acc`; or whose own p is at least `single`. If none is, the residual holds none of
them. With both thresholds at 1 that is the target's p: a child is accepted with its own probability, and the rest is
left to the residual.
Greedy requests are judged by matching.
"""

import torch
from overlap_spec_kernels import gumbel, largest_columns, stream, uniform
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.sampler import draw_after, log_weights, processed_logits, slices
from overlap_spec.speculative.types import Drawn, SlotBatch, Window, window_context
from overlap_spec.speculative.verifiers.rejection import COIN, RESIDUAL, Thresholds


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
