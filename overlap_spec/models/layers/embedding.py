"""The token embedding, and the inputs that targets and draft heads compute from it."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed, draft_input, embed_norm
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, Linear
from overlap_spec.models.layers.norm import Norm, RMSNorm
from overlap_spec.models.work import ForwardWork


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows by token id. Draft heads share it with its scale, so they read the same rows as the target's layers."""

    weight: Tensor  # [V, H]
    scale: float = 1.0  # factor of every row that is looked up, in the weight's type

    @property
    def vocab_size(self) -> int:
        """Rows V."""
        return self.weight.shape[0]

    @property
    def size(self) -> int:
        """Columns H."""
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The model's type."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.weight.device

    @property
    def fused(self) -> bool:
        """Whether kernels that look rows up may read them here."""
        return self.scale == 1.0

    def __call__(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens [T] i64 -> [T, H]."""
        rows = F.embedding(tokens, self.weight)
        return rows if self.scale == 1.0 else rows * self.scale

    def entering(self, norm: Norm, tokens: Tensor) -> Normed:
        """Rows, and the norm of them: one kernel where there is no scale. Shapes: tokens [T] i64 -> [T, H]."""
        if not self.fused or not isinstance(norm, RMSNorm):
            return norm.enter(self(tokens))
        return Normed(*embed_norm(tokens, self.weight, norm.weight, norm.eps))

    def scaled(self, scale: float) -> "Embedding":
        """The same memory, with a scale."""
        return Embedding(self.weight, scale)

    def tied_head(self) -> AnyLinear:
        """The head of a model that ties both: the same memory, without the scale."""
        return Linear(self.weight)


class LayerInputs(Protocol):
    """What every layer of a model gets of its rows' tokens, beside the residual."""

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""

    def __call__(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Shapes: tokens [T] i64, embedded [T, H] -> [T, L, P]."""


@dataclass(frozen=True, slots=True)
class DraftInput:
    """Concatenates the norms of a token's embedding and of its features: one kernel if that has both."""

    embedding: Embedding
    token_norm: Norm
    feature_norm: Norm

    def __call__(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Shapes: tokens [T] i64, features [T, H] -> [T, 2 H]."""
        token_norm, feature_norm = self.token_norm, self.feature_norm
        if self.embedding.fused and isinstance(token_norm, RMSNorm) and isinstance(feature_norm, RMSNorm):
            return draft_input(
                tokens, self.embedding.weight, token_norm.weight, features, feature_norm.weight, feature_norm.eps
            )
        return torch.cat((token_norm(self.embedding(tokens)), feature_norm(features)), dim=1)
