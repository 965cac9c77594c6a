"""Self-attention of one model over its paged KV cache.

Every layer writes the K/V of its rows first; then the row at position p sees positions 0..p of its request,
or in a layer with a window the last so many of them. A row of a tree sees the positions before the tree, and of the
tree itself and its ancestors.
"""

from dataclasses import dataclass, field

from overlap_spec_kernels import DecodeScratch, decode_attention, paged_attention, rope_kv_write, tree_attention
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference
from overlap_spec_kernels.attention.tree_attention import tree_attention_reference
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import AttentionChoice
from overlap_spec.models.layers.cpu_attention import Forwards


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
    choice: AttentionChoice
    forwards: Forwards = field(default_factory=Forwards)  # on a CPU

    def __call__(self, layer: int, qkv: Tensor, rows: RowBatch, settled: bool = False) -> Tensor:
        """Shapes: qkv [T, (n + 2 nkv) d] -> [T, n d]. Writes the rows' K/V into the cache of `layer`."""
        k_cache, v_cache, scale = self.cache.k[layer], self.cache.v[layer], self.head_dim**-0.5
        window = self.windows[layer]
        if rows.cache_rows is None and self.choice.places_rows:
            rows = rows.placed(k_cache.shape[1])
        if rows.tree is None and (rows.cache_rows is None or rows.row_starts is None):
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
        num_rows, cache_rows = qkv.shape[0], rows.cache_rows
        assert cache_rows is not None
        heads = qkv.view(num_rows, -1, self.head_dim)
        if not qkv.is_cuda and rows.tree is None:
            return self._on_cpu(heads, k_cache, v_cache, rows, window)
        q, k, v = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        write = rope_kv_write_reference if self.choice.torch_only else rope_kv_write
        q = write(q, k, v, self.cos_sin, rows.positions, cache_rows, k_cache, v_cache)
        attend = self._attend if rows.tree is None else self._attend_to_tree
        return attend(q, k_cache, v_cache, rows, window).reshape(num_rows, -1)

    def _on_cpu(self, heads: Tensor, k_cache: Tensor, v_cache: Tensor, rows: RowBatch, window: int | None) -> Tensor:
        """Rows of sequences. Shapes: heads [T, n + 2 nkv, d] -> [T, n d]."""
        forward = self.forwards.of(rows, self.cos_sin, k_cache.shape[1])
        rotated = forward.rotated(heads[:, : -self.num_kv_heads])
        forward.write(rotated[:, self.num_heads :], heads[:, -self.num_kv_heads :], k_cache, v_cache)
        q = rotated[:, : self.num_heads]
        return forward.attend(q, k_cache, v_cache, self.head_dim**-0.5, window).reshape(len(heads), -1)

    def _attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: RowBatch, window: int | None) -> Tensor:
        """Rows of sequences. Shapes: q [T, n, d] -> [T, n, d]."""
        scale, row_starts, positions = self.head_dim**-0.5, rows.row_starts, rows.positions
        assert row_starts is not None
        shared = (q, k_cache, v_cache, rows.page_table, row_starts, positions)
        if self.choice.torch_only:
            return paged_attention_reference(*shared, scale, window)
        return paged_attention(*shared, rows.max_rows, scale, rows.uniform, window)

    def _attend_to_tree(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, rows: RowBatch, window: int | None
    ) -> Tensor:
        """Rows of trees. Shapes: q [T, n, d] -> [T, n, d]."""
        tree, scale = rows.tree, self.head_dim**-0.5
        assert tree is not None
        mask = tree.near(rows.positions, window)
        shared = (q, k_cache, v_cache, rows.page_table, tree.prefix, tree.cache_rows, mask, rows.positions)
        if self.choice.torch_only:
            return tree_attention_reference(*shared, scale, window)
        return tree_attention(*shared, scale, window, self.scratch)
