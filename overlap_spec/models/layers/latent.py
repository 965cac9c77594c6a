"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form.

    x --> queries of n heads, each with a part that is rotated and one that is not
    x --> the token's row: a latent of all heads' keys and values, normalised, and a rotated key that all heads share

    key of a head   = W_key  [dn, r] latent, beside the shared rotated key
    value of a head = W_value [dv, r] latent

Keys and values of the heads are never computed. Since q (W c) = (q W) c, a query multiplies by its head's W_key first,
and attends to the latent rows themselves. What it finds there is a sum of latents, of which W_value makes the head's
result. So all heads attend to one head of keys, whose first r columns are its values; the cache has one row a token.

Prompts take the same form. Expanded keys and values would be fewer operations where a chunk is long.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from overlap_spec_kernels import LatentScratch, Normed, latent_attention, latent_tree_attention, rope_latent_write
from overlap_spec_kernels.attention.kv_format import write_rows
from overlap_spec_kernels.attention.latent_heads import absorbed_heads, head_products, in_halves
from overlap_spec_kernels.attention.rope_latent_write import rope_latent_write_reference
from overlap_spec_kernels.norm.norm_heads import UnnormedHeads
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import AttentionShape, LayerShape, PagedAttention, PagedLayer, attending
from overlap_spec.models.layers.attention_choice import AttentionChoice
from overlap_spec.models.layers.decoder import Attend, Projection
from overlap_spec.models.layers.linear import AnyLinear, Linear
from overlap_spec.models.layers.norm import Norm, RMSNorm
from overlap_spec.models.work import ForwardWork, product_work, total_work


@dataclass(frozen=True, slots=True)
class LowRankQueries:
    """What makes queries of their own latent, which the first linear gives in their place."""

    norm: RMSNorm  # [rq]
    up: AnyLinear  # [n (dn + dr), rq]

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        return self.norm.work + self.up.work

    def __call__(self, latent: Tensor) -> Tensor:
        """Shapes: [T, rq] -> [T, n (dn + dr)]."""
        return self.up(self.norm(latent))


@dataclass(frozen=True, slots=True)
class LatentRows:
    """What gives the rows of the cache, in the last r + dr columns of a linear's result."""

    down: AnyLinear  # [m + r + dr, H]
    norm: RMSNorm  # [r]
    rope_dim: int  # dr
    interleaved: bool  # pairs that are rotated are neighbours in the checkpoint; false: they are halves

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        return self.down.work + self.norm.work

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, r + dr]."""
        return self.finished(self.down(x))

    def finished(self, projected: Tensor) -> Tensor:
        """Shapes: [T, m + r + dr], of the linear -> [T, r + dr], before rotation."""
        rank = len(self.norm.weight)
        latent, key = projected[:, -(rank + self.rope_dim) :].split((rank, self.rope_dim), dim=1)
        return torch.cat((self.norm(latent), in_halves(key, self.interleaved)), dim=1)


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """`Projection` of latent attention: absorbed queries of all heads, then the token's row."""

    rows: LatentRows
    low_rank: LowRankQueries | None  # None: the first linear gives the queries themselves
    key: Tensor  # [n, dn, r]
    in_order: bool = False  # sums of products with `key` have one order, whatever rows are beside a row

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        queries = ForwardWork() if self.low_rank is None else self.low_rank.work
        return self.rows.work + queries + product_work(self.key.nbytes, self.key.numel())

    def __call__(self, x: Tensor | Normed) -> Tensor:
        """Shapes: [T, H] -> [T, (n + 1) (r + dr)]."""
        projected = self.rows.down(x)
        (num_heads, _, rank), rope_dim = self.key.shape, self.rows.rope_dim
        queries = projected[:, : -(rank + rope_dim)]
        queries = queries if self.low_rank is None else self.low_rank(queries)
        by_head = queries.view(len(queries), num_heads, -1)
        rows, norm = projected[:, -(rank + rope_dim) :], self.rows.norm
        return absorbed_heads(by_head, self.key, rows, norm.weight, norm.eps, self.rows.interleaved, self.in_order)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """`Attention` of a layer. Of several ranks each has a part of the heads, and all have the same rows."""

    qkv: LatentProjection
    value: Tensor  # [n, r, dv]
    output: AnyLinear  # [H, n dv]
    shape: AttentionShape

    def ordered(self) -> "LatentAttention":
        """The same, whose products of heads have one order of sums for any number of rows: of a model in 16 bits."""
        return replace(self, qkv=replace(self.qkv, in_order=True))

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes: products with keys of r + dr columns, and with values of r."""
        rank = self.value.shape[1]
        attended = ForwardWork(pair_flop=2 * self.shape.num_heads * (self.shape.head_dim + rank))
        products = product_work(self.value.nbytes, self.value.numel())
        return total_work((self.qkv.work, products, self.output.work, attended))

    @property
    def keys_values(self) -> Projection:
        """A view of a weight whose rows are contiguous; other formats give queries too, which are not used."""
        rows = self.qkv.rows
        if not isinstance(rows.down, Linear):
            return rows
        return replace(rows, down=rows.down.rows(slice(-self.shape.head_dim, None)))

    def __call__(self, x: Normed, attend: Attend) -> Tensor:
        return self.output(self._values(attend(self.qkv(x))))

    def add(self, x: Normed, norm: Norm, attend: Attend) -> Normed:
        return norm.join(self.output, self._values(attend(self.qkv(x))), attend.kept(x.values), attend.takes)

    def _values(self, latents: Tensor) -> Tensor:
        """Of sums of latents. Shapes: [R, n r] -> [R, n dv]."""
        by_head = latents.view(len(latents), len(self.value), -1)
        return head_products(by_head, self.value, self.qkv.in_order).flatten(1)


class PagedLatents(PagedAttention):
    """Rotates, stores and attends, for all layers with latent attention of one model.

    Windows of a chain, trees and chunks of prompts attend by one kernel. On a CPU the rows of sequences share what all
    layers share, as those of other attention.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        cache: KVCache,
        num_positions: int,
        choice: AttentionChoice,
    ) -> None:
        """See `PagedAttention`."""
        super().__init__(shapes, dtype, cache, num_positions, replace(choice, of_rows=None))
        found = attending(shapes)
        rank = found[0].latent_rank
        assert rank is not None, "one cache holds layers that are alike"
        num_heads, device = max(shape.num_heads for shape in found), cache.k[0].device
        self._latent_scratch = LatentScratch.allocate(num_heads, rank, device)

    def divide(self, lengths: Tensor, page_table: Tensor, width: int) -> Tensor | None:
        return None  # pieces of keys are as long in every request

    def placed(self, rows: RowBatch) -> RowBatch:
        return rows  # its kernels find the places of windows, whatever was chosen

    def __call__(
        self, index: int, qkv: Tensor | UnnormedHeads, rows: RowBatch, read_before_wait: bool = False
    ) -> Tensor:
        """See `PagedAttention`. Shapes: qkv [T, (n + 1) (r + dr)] -> [T, n r], [B, n r] with `rows.read`."""
        if rows.parts or self._choice.torch_only or isinstance(qkv, UnnormedHeads):
            return super().__call__(index, qkv, rows, read_before_wait)
        layer = self._layers[index]
        heads = qkv.view(len(qkv), -1, layer.shape.head_dim)
        in_order = rows.tree is None and rows.read is None and rows.row_starts is not None
        if not qkv.is_cuda and in_order and rows.cache_rows is not None:
            return self._on_cpu(layer, heads, rows)
        places = rows.page_table if rows.cache_rows is None else rows.cache_rows
        q = self._written(layer, heads, rows.positions, places)
        if rows.read is not None:
            assert rows.read.rows is not None
            q, rows, read_before_wait = q[rows.read.index], rows.read.rows, False
        return self._attended(layer, q, rows, read_before_wait).flatten(1)

    def write(self, index: int, projected: Tensor, rows: RowBatch) -> None:
        """Write the rows into the cache of layer `index`. Shapes: projected [T, r + dr]."""
        assert rows.cache_rows is not None
        self._written(self._layers[index], projected[:, None], rows.positions, rows.cache_rows)

    def _written(self, layer: PagedLayer, heads: Tensor, positions: Tensor, places: Tensor) -> Tensor:
        """Rotate and store; `places` as in `rope_latent_write`. Shapes: heads [T, n + 1, r + dr] -> [T, n, r + dr]."""
        write = rope_latent_write_reference if self._choice.torch_only else rope_latent_write
        rank, scale = layer.v_cache.shape[3], layer.scales.k
        return write(heads, rank, layer.cos_sin, positions, places, layer.k_cache, scale)

    def _attended(self, layer: PagedLayer, q: Tensor, rows: RowBatch, read_before_wait: bool) -> Tensor:
        """Shapes: q [T, n, r + dr] -> [T, n, r]."""
        shared = (q, layer.k_cache, layer.v_cache.shape[3], rows.page_table)
        kind = (layer.shape.scale, self._latent_scratch, layer.window, layer.scales)
        if (tree := rows.tree) is None:
            return latent_attention(*shared, rows.row_starts, rows.positions, *kind, read_before_wait)
        mask = tree.near(rows.positions, layer.window)
        return latent_tree_attention(*shared, tree.prefix, tree.cache_rows, mask, rows.positions, *kind)

    def _on_cpu(self, layer: PagedLayer, heads: Tensor, rows: RowBatch) -> Tensor:
        """Rows of sequences. Shapes: heads [T, n + 1, r + dr] -> [T, n r]."""
        assert rows.cache_rows is not None
        forward = layer.forwards.of(rows, layer.cos_sin, layer.k_cache.shape[1])
        turned = forward.rotated(heads[:, :, layer.v_cache.shape[3] :])
        return forward.attended(_stored(layer, heads, turned, rows.cache_rows), layer)


def _stored(layer: PagedLayer, heads: Tensor, turned: Tensor, cache_rows: Tensor) -> Tensor:
    """Write the rows, return the queries. Shapes: heads [T, n + 1, r + dr], turned [T, n + 1, dr] -> [T, n, r + dr]."""
    whole = torch.cat((heads[:, :, : layer.v_cache.shape[3]], turned.to(heads.dtype)), dim=2)
    write_rows(layer.k_cache, cache_rows, whole[:, -1:], layer.scales.k)
    return whole[:, :-1]


def paged_attention_of(
    shapes: Sequence[LayerShape],
    dtype: torch.dtype,
    cache: KVCache,
    num_positions: int,
    choice: AttentionChoice,
) -> PagedAttention:
    """That of layers with these heads. `num_positions` bounds the rows' positions; `dtype`: the model's."""
    kind = PagedAttention if attending(shapes)[0].latent_rank is None else PagedLatents
    return kind(shapes, dtype, cache, num_positions, choice)
