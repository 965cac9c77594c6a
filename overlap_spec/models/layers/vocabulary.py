"""Embedding and head whose rows, one for each token, are divided among ranks. Results are whole on every rank.

Every rank has equally many rows: the last ones are filled up with zeros, and no logit of such a row leaves this module.
(Megatron-LM, Shoeybi et al. 2019, arXiv:1909.08053.)
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.linear import AnyLinear, Linear, WrappedHead
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.layers.parallel import WHOLE, Communicator, Rank


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
