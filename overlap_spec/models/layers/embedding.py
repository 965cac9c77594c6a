"""The token embedding, and the inputs that targets and draft heads compute from it.

The rows of embedding and head, one for each token, are divided among ranks. Results are whole on every rank. Every
rank has equally many rows: the last ones are filled up with zeros, and no logit of such a row leaves this module.
(Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053.)
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed, draft_input, embed_norm
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, Linear, WrappedHead
from overlap_spec.models.layers.norm import Norm, RMSNorm
from overlap_spec.models.layers.parallel import WHOLE, Communicator, Rank
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


def communicator_of(rank: Rank) -> Communicator:
    """What a divided layer computes with."""
    assert rank.communicator is not None, "a divided layer computes with others"
    return rank.communicator


@dataclass(frozen=True, slots=True)
class DividedEmbedding(Embedding):
    """A rank's rows of the embedding. `weight`: [ceil(V / n), H], of the tokens from rank * ceil(V / n) on."""

    num_tokens: int = 0  # V
    rank: Rank = WHOLE

    @property
    def vocab_size(self) -> int:
        return self.num_tokens

    @property
    def fused(self) -> bool:
        return False

    def __call__(self, tokens: Tensor) -> Tensor:
        """One rank finds the row, all others bring zeros: the sum is the row itself. Shapes: tokens [T] -> [T, H]."""
        own = tokens - self.rank.rank * len(self.weight)
        is_here = (own >= 0) & (own < len(self.weight))
        found = F.embedding(own.where(is_here, 0), self.weight).masked_fill(~is_here[..., None], 0)
        rows = communicator_of(self.rank).all_reduce(found)
        return rows if self.scale == 1.0 else rows * self.scale

    def entering(self, norm: Norm, tokens: Tensor) -> Normed:
        return norm.enter(self(tokens))

    def scaled(self, scale: float) -> "DividedEmbedding":
        return replace(self, scale=scale)

    def tied_head(self) -> AnyLinear:
        return DividedHead(Linear(self.weight), self.num_tokens, self.rank)


def rank_of(embedding: Embedding) -> Rank:
    """The rank that has this part of a target."""
    return embedding.rank if isinstance(embedding, DividedEmbedding) else WHOLE


@dataclass(frozen=True, slots=True)
class DividedHead(WrappedHead):
    """A rank's rows of the head, [ceil(V / n), H]. Each computes its logits, and all gather those of all."""

    num_tokens: int  # V
    rank: Rank
    kept: Tensor | None = None  # [N] i64, the tokens whose logits are wanted; None: all

    @property
    def out_features(self) -> int:
        return self.num_tokens if self.kept is None else len(self.kept)

    def rows(self, ids: Tensor | slice) -> "DividedHead":
        """A selection from what is gathered: rows of any ids lie on any rank."""
        tokens = torch.arange(self.num_tokens, device=self.device) if self.kept is None else self.kept
        return replace(self, kept=tokens[ids])

    def _changed(self, logits: Tensor) -> Tensor:
        """Without the columns of rows that were filled up. Shapes: [T, ceil(V / n)] -> [T, V], [T, N]."""
        whole = communicator_of(self.rank).all_gather(logits)
        return whole[:, : self.num_tokens].contiguous() if self.kept is None else whole[:, self.kept]
