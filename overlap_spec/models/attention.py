"""Self-attention of one model over its paged KV cache. Not here: projections (the families) and page ownership.

Every layer writes the K/V of its rows first; then the row at position p sees positions 0..p of its request,
or in a layer with a window the last so many of them.
"""

from dataclasses import dataclass

from overlap_spec_kernels import DecodeScratch, decode_attention, paged_attention, rope_kv_write
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Rotates, stores and attends, for all layers of one model. Grouped-query heads: n % nkv == 0."""

    cache: KVCache
    cos_sin: Tensor  # [positions, d] f32 (f64 for a float64 model)
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scratch: DecodeScratch
    windows: tuple[int | None, ...]  # by layer: keys that a row sees, its own included; None: all

    def __call__(self, layer: int, qkv: Tensor, rows: RowBatch, settled: bool = False) -> Tensor:
        """Shapes: qkv [T, (n + 2 nkv) d] -> [T, n d]. Writes the rows' K/V into the cache of `layer`."""
        k_cache, v_cache, scale = self.cache.k[layer], self.cache.v[layer], self.head_dim**-0.5
        window = self.windows[layer]
        if rows.cache_rows is None or rows.row_starts is None:
            return decode_attention(
                qkv,
                self.cos_sin,
                rows.positions,
                rows.page_table,
                k_cache,
                v_cache,
                self.scratch,
                scale,
                settled,
                window,
            )
        num_rows = qkv.shape[0]
        heads = qkv.view(num_rows, -1, self.head_dim)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q = rope_kv_write(q, k, v, self.cos_sin, rows.positions, rows.cache_rows, k_cache, v_cache)
        attended = paged_attention(
            q,
            k_cache,
            v_cache,
            rows.page_table,
            rows.row_starts,
            rows.positions,
            rows.max_rows,
            scale,
            rows.uniform,
            window,
        )
        return attended.view(num_rows, -1)
