"""The query, key and value map of families that normalise heads (Qwen3)."""

from dataclasses import dataclass

from overlap_spec_kernels import Normed, norm_heads
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear


@dataclass(frozen=True, slots=True)
class HeadNormLinear:
    """A fused map whose query and key heads are normalised, each by itself, before they are rotated."""

    qkv: AnyLinear  # [(n + 2 nkv) d, H]
    query: Tensor  # [d]
    key: Tensor  # [d]
    num_kv_heads: int
    eps: float

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 2 nkv) d]."""
        return norm_heads(self.qkv(x), self.query, self.key, self.num_kv_heads, self.eps)
