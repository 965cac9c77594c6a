"""Linears of queries, keys and values with norms of queries and keys behind them."""

from dataclasses import dataclass

from overlap_spec_kernels import Normed, norm_heads
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.work import ForwardWork, product_work, total_work


@dataclass(frozen=True, slots=True)
class HeadNormLinear:
    """Query and key heads are normalised, each by itself, before they are rotated (Qwen3): one kernel."""

    qkv: AnyLinear  # [(n + 2 nkv) d, H]
    query: Tensor  # [d]
    key: Tensor  # [d]
    num_kv_heads: int
    eps: float

    @property
    def work(self) -> ForwardWork:
        norms = (self.query, self.key)
        return self.qkv.work + total_work(product_work(norm.nbytes, norm.numel()) for norm in norms)

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 2 nkv) d]."""
        return norm_heads(self.qkv(x), self.query, self.key, self.num_kv_heads, self.eps)
