"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060): a layer that recurs, as Gated DeltaNet does (`gated_delta.py`).

    x --> C, B, x: short causal convolution over the last K tokens, SiLU; they are what is q, k and v there
    x --> of each head a step t = softplus(. + dt); its decay is a = exp(-A t)
    S <-- a S + B (t x)^T               S [state, head]: nothing of what B finds is taken away
    out = S^T C + D x, times SiLU(z), normalised over all heads, then a linear

So what tokens of a chunk add does not depend on each other: the paper's form by matrices (section 6) solves no system.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from overlap_spec_kernels.norm.silu_mul import silu, softplus
from torch import Tensor

from overlap_spec.models.layers.gated_delta import GatedHeadNorm, RecurrentShape, TokenRows


@dataclass(frozen=True, slots=True)
class GatedRowNorm(GatedHeadNorm):
    """The norm of a row that was multiplied by SiLU of its gate, over all heads; its weight is [n dv]."""

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = self.weight.dtype
        return F.rms_norm(x.to(wide) * silu(gate.to(wide)), self.weight.shape, self.weight, self.eps).to(x.dtype)


@dataclass(frozen=True)
class Mamba2Shape(RecurrentShape):
    """Mamba-2's: the one gate of a head is its step, which is the rate at which it learns, too."""

    num_products: ClassVar[int] = 2

    def of_tokens(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> TokenRows:
        copies = self.num_heads // self.num_key_heads
        step = softplus(gates + self.offset)
        log_decay = -self.steepness * step
        q, k = (part.repeat_interleave(copies, dim=2) for part in (q, k))
        return TokenRows(q, k, v, log_decay, log_decay.exp(), step)

    def added(self, decayed: Tensor, token: TokenRows) -> Tensor:
        return token.v * token.rate[..., None]

    def added_in_chunk(
        self, memory: Tensor, since: Tensor, k: Tensor, v: Tensor, rate: Tensor, between: Tensor
    ) -> Tensor:
        return rate * v
