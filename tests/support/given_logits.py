"""Given logits in place of a head, and what a step commits of a decision."""

from dataclasses import dataclass

import torch
from overlap_spec_kernels.window.judge_chain import judge_chain
from torch import Tensor

from overlap_spec.speculative.interfaces import Drawn, Verdict, Window


@dataclass(frozen=True)
class GivenLogits:
    """Logits as a test has them."""

    given: Tensor  # [B, W, V] or [R, V]

    def compute(self) -> Tensor:
        """Shapes: -> [R, V]."""
        return self.given.reshape(-1, self.given.shape[-1])

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """Shapes: -> [R] i64."""
        columns = self.compute().argmax(-1)
        return columns if ids is None else ids[columns]


def window_of(tokens: Tensor, first: int = 0) -> Window:
    """A window at the same positions in every row."""
    return Window(tokens, first + torch.arange(tokens.shape[1]).expand(tokens.shape))


def commit(window: Tensor, drawn: Drawn) -> Verdict:
    """What slots 0.. commit, from length 0. Shapes: window [B, W] i64."""
    slots = torch.arange(len(window))
    lengths = torch.zeros(len(window) + 1, dtype=torch.int64)
    rows = torch.zeros(len(window) + 1, window.shape[1], dtype=torch.int64)
    return judge_chain(
        drawn.tokens, window.contiguous(), slots, lengths[:-1].clone(), lengths, rows, len(window), drawn.accept_len
    )
