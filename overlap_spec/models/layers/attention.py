"""Self-attention of one model over its paged KV cache.

Every layer first writes the K/V of its rows. Then the row at position p attends to positions 0..p of its request, or,
in a layer with a sliding window, to the last of them. A row of a tree attends to the positions before the tree, to
itself and to its ancestors.

On a CPU the data shared by all layers is computed only once. The result is what `rope_kv_write_reference`
and `paged_attention_reference` compute, layer after layer. Of the operations that these take in each layer, half only
look up angles, pages and visible keys, which are the same in all layers.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from overlap_spec_kernels import (
    DecodeScratch,
    HeadsArgument,
    RowAttention,
    chunk_attention,
    decode_attention,
    divide_keys,
    ordered_attention,
    ordered_windows,
    paged_attention,
    rope_kv_write,
    takes_long_chunks,
    takes_windows,
    tree_attention,
)
from overlap_spec_kernels.attention.dense_attention import dense_attention
from overlap_spec_kernels.attention.kv_format import EIGHT_BITS, NO_SCALES, KVScales, write_rows
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.paged_chunks import takes_heads
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference, rotate_heads
from overlap_spec_kernels.attention.short_decode import Step
from overlap_spec_kernels.attention.tree_attention import tree_attention_reference
from overlap_spec_kernels.attention.tree_windows import takes_trees, tree_windows
from overlap_spec_kernels.norm.norm_heads import HeadNorms, UnnormedHeads
from torch import Tensor

from overlap_spec.models.interfaces import LongChunk, RowBatch, ShortChunks, near_keys, starts_on_cpu
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention_choice import AttentionChoice
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.recurrent_state import NO_STATE, StateShape


@dataclass(frozen=True, slots=True)
class Request:
    """The rows and keys of one request."""

    begin: int
    end: int  # rows begin..end - 1
    first: int  # the first key in its rows' windows
    stop: int  # one past the last key
    pages: Tensor | None  # i32, the pages of its keys; None if they are consecutive
    mask: Tensor | None  # [rows, keys], added to scores; None: a single row attends to all


class Forward:
    """The data that the layers of one forward share."""

    def __init__(self, rows: RowBatch, cos_sin: Tensor, page_size: int) -> None:
        self.rows = rows
        self._page_size = page_size
        self._requests: dict[int | None, list[Request]] = {}
        cos, sin = cos_sin.index_select(0, rows.positions)[:, None, None].chunk(2, dim=-1)
        self._cos, self._sin = torch.cat((cos, cos), dim=2), torch.cat((-sin, sin), dim=2)  # [T, 1, 2, d / 2]

    def rotated(self, heads: Tensor) -> Tensor:
        """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin). Shapes: [T, n, d] -> the same."""
        halves = heads.unflatten(2, (2, -1))
        turned: Tensor = (halves * self._cos).add_(halves.flip(2) * self._sin)
        return turned.to(heads.dtype).view(heads.shape)

    def write(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, scales: KVScales = NO_SCALES) -> None:
        """Put K and V of the rows into the cache. Shapes: k, v [T, nkv, d]."""
        assert self.rows.cache_rows is not None
        write_rows(k_cache, self.rows.cache_rows, k, scales.k)
        write_rows(v_cache, self.rows.cache_rows, v, scales.v)

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scale: float,
        window: int | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Request by request. Shapes: q [T, n, d], sinks [n] -> [T, n, d]."""
        if window not in self._requests:
            self._requests[window] = list(self._requests_of(window, q.dtype))
        k_rows, v_rows = (cache.view(-1, *cache.shape[2:]) for cache in (k_cache, v_cache))
        outputs = []
        for request in self._requests[window]:
            k, v = _keys(request, k_rows, k_cache).to(q.dtype), _keys(request, v_rows, v_cache).to(q.dtype)
            outputs.append(dense_attention(q[request.begin : request.end], k, v, request.mask, scale, sinks))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs) if outputs else torch.empty_like(q)

    def attended(self, q: Tensor, layer: "PagedLayer") -> Tensor:
        """In a layer's cache, by its scales. Shapes: q [T, n, d] -> [T, n d]."""
        scale, sinks = layer.shape.scale * layer.scales.k, layer.shape.sinks
        out = self.attend(q, layer.k_cache, layer.v_cache, scale, layer.window, sinks)
        return (out if layer.scales.v == 1.0 else out * layer.scales.v).reshape(len(q), -1)

    def _requests_of(self, window: int | None, dtype: torch.dtype) -> Sequence[Request]:
        """Read the rows' positions and pages on the host, once per forward."""
        assert self.rows.row_starts is not None
        starts, size = list(self.rows.row_starts.numpy()), self._page_size
        spans = [(int(begin), int(end)) for begin, end in zip(starts, starts[1:], strict=False)]
        requests = []
        for index, (begin, end) in enumerate(spans):
            if begin == end:
                continue
            positions = self.rows.positions[begin:end]
            lowest, highest = int(positions[0]), int(positions[-1])
            earliest = 0 if window is None else max(lowest - window + 1, 0)
            pages = self.rows.page_table[index, earliest // size : highest // size + 1]
            page = int(pages[0])
            consecutive = torch.equal(pages, torch.arange(page, page + len(pages), dtype=pages.dtype))
            first = page * size + earliest % size if consecutive else earliest % size
            mask = None if end - begin == 1 else _mask(positions, earliest, highest + 1, window, dtype)
            stop = first + highest + 1 - earliest
            requests.append(Request(begin, end, first, stop, None if consecutive else pages, mask))
        return requests


def _keys(request: Request, rows: Tensor, cache: Tensor) -> Tensor:
    """Shapes: rows [pages * size, nkv, d], cache [pages, size, nkv, d] -> [keys, nkv, d]."""
    if request.pages is not None:
        rows = cache.index_select(0, request.pages).view(-1, *cache.shape[2:])
    return rows[request.first : request.stop]


def _mask(positions: Tensor, first: int, stop: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Zero where the row at a position attends to a key, else -inf. Shapes: positions [R] -> [R, keys]."""
    keys, ends = torch.arange(first, stop), positions[:, None]
    hidden = keys > ends if window is None else (keys > ends) | (keys <= ends - window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


class Forwards:
    """Caches the current forward: all its layers call with the same rows, or with the same two parts in turns."""

    def __init__(self) -> None:
        self._last: deque[Forward] = deque(maxlen=2)

    def of(self, rows: RowBatch, cos_sin: Tensor, page_size: int) -> Forward:
        """The shared data of these rows, computed at the first layer's call."""
        for known in self._last:
            if known.rows is rows:
                return known
        self._last.append(Forward(rows, cos_sin, page_size))
        return self._last[-1]


@dataclass(frozen=True)
class AttentionShape:
    """The heads of one layer. Grouped-query heads: num_heads % num_kv_heads == 0."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # factor of the products of queries and keys
    window: int | None  # keys that a row attends to, its own included; None: all
    rope: RopeConfig
    kv_scales: KVScales = NO_SCALES  # of keys and values in a cache of 8 bits
    sinks: Tensor | None = field(default=None, compare=False)  # [num_heads], a logit that adds nothing
    latent_rank: int | None = None  # of latent attention (`latent.py`): columns of a key that are its value
    reads: int | None = None  # the layer that has written the keys and values; None: this one does


LayerShape = AttentionShape | StateShape  # of a layer that attends, or of one that recurs instead


def attending(shapes: Sequence[LayerShape]) -> list[AttentionShape]:
    """Those of the layers that attend, in order."""
    return [shape for shape in shapes if isinstance(shape, AttentionShape)]


def kv_shape_of(shapes: Sequence[LayerShape]) -> KVShape:
    """The sizes of a cache for layers with these heads and states."""
    states = [shape for shape in shapes if isinstance(shape, StateShape)]
    assert len({shape.sizes for shape in states}) < 2, "layers with states are alike"
    found = attending(shapes)
    own = [index for index, shape in enumerate(found) if shape.reads is None]
    sizes = tuple((found[index].num_kv_heads, found[index].head_dim) for index in own)
    ranks = {found[index].latent_rank for index in own}
    assert len(ranks) == 1, "one cache holds latents, or keys and values"
    heads, columns = max(sizes, key=math.prod)
    places = tuple(own.index(index if shape.reads is None else shape.reads) for index, shape in enumerate(found))
    return KVShape(
        *(len(own), heads, columns, ranks.pop()),
        state=StateShape(len(states), *states[0].sizes) if states else NO_STATE,
        sizes=sizes if len(set(sizes)) > 1 else (),
        places=places if len(own) < len(found) else (),
    )


class PagedLayer(NamedTuple):
    """The cache and constants of one layer's attention."""

    k_cache: Tensor  # [num_pages, page_size, nkv, d]
    v_cache: Tensor
    cos_sin: Tensor  # [positions, d] f32 (f64 for a float64 model)
    shape: AttentionShape
    window: int | None
    forwards: Forwards  # on a CPU: of all layers with this rotation
    long_apart: bool  # long chunks attend each by itself
    scales: KVScales


class PagedAttention:
    """Rotates, stores and attends, for all layers of one model."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        cache: KVCache,
        num_positions: int,
        choice: AttentionChoice,
    ) -> None:
        """`num_positions` bounds the rows' positions; `dtype`: the model's. Layers that recur are not counted."""
        shapes = attending(shapes)
        self.cache = cache
        self._choice = choice
        self._dtype = dtype
        device = cache.k[0].device
        is_latent = shapes[0].latent_rank is not None  # it has one kernel, and scratch, of its own
        some = 1 if is_latent or device.type != "cuda" else None
        self._scratch = DecodeScratch.allocate(max(shape.head_dim for shape in shapes), device, some)
        tables: dict[int, tuple[Tensor, Forwards]] = {}
        windows = choice.windows(tuple(shape.window for shape in shapes))
        alike = (
            choice.torch_only or choice.in_order or is_latent or takes_heads(dtype, cache.k[0])
        )  # one kernel attends to chunks of any length
        kinds = {(shape.num_heads, k.shape): (k, v) for shape, k, v in zip(shapes, cache.k, cache.v, strict=True)}
        apart = {key for key, kv in kinds.items() if not alike and takes_long_chunks(key[0], dtype, *kv)}
        layers = []
        for shape, window, k_cache, v_cache in zip(shapes, windows, cache.k, cache.v, strict=True):
            key = next((index for index, other in enumerate(shapes) if other.rope == shape.rope))
            if key not in tables:
                tables[key] = shape.rope.table(num_positions, dtype, device), Forwards()
            cos_sin, forwards = tables[key]
            # A window as long as the longest sequence would only cost time: leave it out.
            reached = None if window is None or window >= num_positions else window
            long_apart = reached is None and shape.sinks is None and (shape.num_heads, k_cache.shape) in apart
            scales = shape.kv_scales if k_cache.dtype in EIGHT_BITS else NO_SCALES
            layers.append(PagedLayer(k_cache, v_cache, cos_sin, shape, reached, forwards, long_apart, scales))
        self._layers = tuple(layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """By layer: keys that a row attends to, its own included; None: all."""
        return tuple(layer.window for layer in self._layers)

    @property
    def page_size(self) -> int:
        """Places of a page."""
        return self._layers[0].k_cache.shape[1]

    def constants(self, index: int) -> tuple[object, ...]:
        """What the attention of layer `index` works with, beside weights: equal constants launch the same kernels."""
        return self._layers[index]

    def divide(self, lengths: Tensor, page_table: Tensor, width: int) -> Tensor | None:
        """How decode attention divides its programs among requests of these lengths; None: equally. Sync: never.

        Shapes: lengths [B] i64, page_table [B, P] i32 -> [S] i64.
        """
        layer = next((layer for layer in self._layers if layer.window is None), None)
        if self._choice.places_rows or layer is None:
            return None
        dtype, heads = self._dtype, layer.shape.num_heads
        return divide_keys(lengths, page_table, layer.k_cache, heads, width, dtype, self._scratch)

    def heads_on_cpu(self, index: int) -> HeadsArgument | None:
        """Layer `index` for a CPU's kernel; None if that does not attend here."""
        layer = self._layers[index]
        caches, shape = (layer.k_cache, layer.v_cache), layer.shape
        if self._kernel_of(layer) is None:
            return None
        return HeadsArgument.of(layer.cos_sin, *caches, shape.num_heads, shape.scale, layer.window)

    def _kernel_of(self, layer: PagedLayer) -> RowAttention | None:
        """The CPU's kernel for rows of sequences; None if there is none, or none for sinks or another layer's K/V."""
        kernel, shape = self._choice.of_rows, layer.shape
        takes = kernel is not None and shape.sinks is None and kernel.takes(shape.head_dim, layer.k_cache)
        return kernel if takes and shape.reads is None else None

    def placed(self, rows: RowBatch) -> RowBatch:
        """Rows as layers need them: with their cache rows, where no kernel finds these. Sync: never."""
        if not self._choice.places_rows:
            return rows
        if rows.parts:
            return replace(rows, parts=tuple(map(self.placed, rows.parts)))
        if rows.cache_rows is not None or all(self._takes_windows(layer, rows) for layer in self._layers):
            return rows
        return rows.placed(self.page_size)

    def _takes_windows(self, layer: PagedLayer, rows: RowBatch) -> bool:
        """Whether one launch in one order writes and attends. `rows`: windows without cache rows."""
        shape = layer.shape
        is_own = self._choice.in_order and not self._choice.torch_only and shape.reads is None and shape.sinks is None
        return is_own and takes_windows(rows.max_rows, shape.num_heads // shape.num_kv_heads, shape.head_dim)

    def _takes_trees(self, layer: PagedLayer, qkv: Tensor, rows: RowBatch) -> bool:
        """Whether one launch writes and attends. `rows`: of trees, else never."""
        if rows.tree is None or not rows.tree.are_rows or self._choice.places_rows or rows.read is not None:
            return False
        shape = layer.shape
        return shape.reads is None and takes_trees(_step(layer, qkv, rows), layer.window, shape.sinks)

    def recurred(self, index: int, projected: Tensor, gates: Tensor | None, rows: RowBatch) -> Tensor:
        """What rows find in a layer that recurs (`recurrent.py`); here is none."""
        raise AssertionError("no layer recurs")

    def __call__(
        self, index: int, qkv: Tensor | UnnormedHeads, rows: RowBatch, read_before_wait: bool = False
    ) -> Tensor:
        """Writes the rows' K/V into the cache of layer `index`, and attends.

        `read_before_wait`: positions and pages were written before the launch that this one may overlap.
        Shapes: qkv [T, (n + 2 nkv) d] -> [T, n d], [B, n d] with `rows.read`.
        """
        layer = self._layers[index]
        qkv, norms = self._to_norm(layer, qkv, rows) if isinstance(qkv, UnnormedHeads) else (qkv, None)
        if rows.parts:
            pieces = qkv.split([len(part.positions) for part in rows.parts])
            outputs = [
                self(index, piece, part, read_before_wait) for piece, part in zip(pieces, rows.parts, strict=True)
            ]
            return torch.cat(outputs)
        own = layer.shape.reads is None
        if rows.cache_rows is None and self._takes_windows(layer, rows):
            places = (layer.cos_sin, rows.positions, rows.page_table, layer.k_cache, layer.v_cache)
            return ordered_windows(qkv, *places, layer.shape.scale, read_before_wait, layer.window, layer.scales)
        if rows.cache_rows is None and (self._choice.places_rows or not (own or qkv.is_cuda)):
            rows = rows.placed(layer.k_cache.shape[1])
        if rows.tree is None and (rows.cache_rows is None or rows.row_starts is None):
            return decode_attention(
                qkv,
                layer.cos_sin,
                rows.positions,
                rows.page_table,
                layer.k_cache,
                layer.v_cache,
                self._scratch,
                layer.shape.scale,
                read_before_wait,
                layer.window,
                layer.scales,
                rows.shares,
                layer.shape.sinks,
                own,
                norms,
            )
        num_rows, cache_rows, shape = qkv.shape[0], rows.cache_rows, layer.shape
        if rows.tree is not None and self._takes_trees(layer, qkv, rows):
            keys = rows.tree.prefix, rows.tree.mask
            return tree_windows(_step(layer, qkv, rows), *keys, shape.scale, read_before_wait, norms)
        assert cache_rows is not None
        heads = qkv.view(num_rows, -1, shape.head_dim)
        kernel = None if qkv.is_cuda else self._kernel_of(layer)
        if kernel is not None:
            attended = _by_kernel(kernel, layer, qkv, rows)
            return attended if rows.read is None else attended[rows.read.index]
        if not qkv.is_cuda and rows.tree is None and rows.read is None:
            return self._on_cpu(layer, heads, rows)
        q = self._written(layer, heads, rows.positions, cache_rows)
        if rows.read is not None:
            assert rows.read.rows is not None
            q, rows, read_before_wait = q[rows.read.index], rows.read.rows, False
        if rows.tree is not None:
            return self._attend_to_tree(layer, q, rows).reshape(len(q), -1)
        return self._attend(layer, q, rows, read_before_wait).reshape(len(q), -1)

    def _to_norm(self, layer: PagedLayer, heads: UnnormedHeads, rows: RowBatch) -> tuple[Tensor, HeadNorms | None]:
        """The heads, and the norms that one launch applies with all else; None: they are normed."""
        is_decode = rows.tree is None and rows.cache_rows is None and not (rows.parts or self._choice.places_rows)
        is_read_here = is_decode and heads.qkv.is_cuda and layer.shape.reads is None
        if is_read_here or self._takes_trees(layer, heads.qkv, rows):
            return heads.qkv, heads.norms
        return heads.normed(), None

    def write(self, index: int, projected: Tensor, rows: RowBatch) -> None:
        """Write the rows' K/V into the cache of layer `index`, and nothing else. `rows` have cache rows.

        Shapes: projected [T, m], keys and values in its last 2 nkv d columns.
        """
        layer, cache_rows = self._layers[index], rows.cache_rows
        assert cache_rows is not None
        heads = projected.view(len(projected), -1, layer.shape.head_dim)
        self._written(layer, heads[:, -2 * layer.shape.num_kv_heads :], rows.positions, cache_rows)

    def _written(self, layer: PagedLayer, heads: Tensor, positions: Tensor, cache_rows: Tensor) -> Tensor:
        """Rotate queries and keys, write K/V, return the queries. Shapes: heads [T, n + 2 nkv, d], n >= 0.

        Of a layer that attends to another one's K/V, heads are queries alone. Shapes: [T, n, d].
        """
        if layer.shape.reads is not None:
            return rotate_heads(heads, layer.cos_sin, positions)
        num_kv_heads = layer.shape.num_kv_heads
        q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
        write = rope_kv_write_reference if self._choice.torch_only else rope_kv_write
        return write(q, k, v, layer.cos_sin, positions, cache_rows, layer.k_cache, layer.v_cache, layer.scales)

    def _on_cpu(self, layer: PagedLayer, heads: Tensor, rows: RowBatch) -> Tensor:
        """Rows of sequences. Shapes: heads [T, n + 2 nkv, d] -> [T, n d]."""
        num_heads, num_kv_heads = layer.shape.num_heads, layer.shape.num_kv_heads
        forward = layer.forwards.of(rows, layer.cos_sin, layer.k_cache.shape[1])
        if layer.shape.reads is not None:
            return forward.attended(forward.rotated(heads), layer)
        rotated = forward.rotated(heads[:, :-num_kv_heads])
        forward.write(rotated[:, num_heads:], heads[:, -num_kv_heads:], layer.k_cache, layer.v_cache, layer.scales)
        return forward.attended(rotated[:, :num_heads], layer)

    def _attend(self, layer: PagedLayer, q: Tensor, rows: RowBatch, read_before_wait: bool = False) -> Tensor:
        """Rows of sequences. Shapes: q [T, n, d] -> [T, n, d]."""
        if rows.runs and layer.long_apart:
            outputs = [self._attend_in_run(layer, q[run.begin : run.end], run) for run in rows.runs]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        assert rows.row_starts is not None
        shared = (q, layer.k_cache, layer.v_cache, rows.page_table, rows.row_starts, rows.positions)
        kind = (layer.window, layer.scales, layer.shape.sinks)
        if self._choice.torch_only:
            return paged_attention_reference(*shared, layer.shape.scale, *kind)
        if self._choice.in_order:
            sizes = (rows.max_rows, layer.shape.scale)
            return ordered_attention(*shared, *sizes, *kind[:2], read_before_wait, layer.shape.sinks)
        return paged_attention(*shared, rows.max_rows, layer.shape.scale, rows.uniform, *kind)

    def _attend_in_run(self, layer: PagedLayer, q: Tensor, run: LongChunk | ShortChunks) -> Tensor:
        """Shapes: q [n, n, d], of this run -> the same."""
        if isinstance(run, ShortChunks):
            return self._attend(layer, q, run.rows)
        caches, scale = (layer.k_cache, layer.v_cache), layer.shape.scale
        return chunk_attention(q, *caches, run.pages, run.start, scale, scales=layer.scales)

    def _attend_to_tree(self, layer: PagedLayer, q: Tensor, rows: RowBatch) -> Tensor:
        """Rows of trees. Shapes: q [T, n, d] -> [T, n, d]."""
        tree = rows.tree
        assert tree is not None
        mask = tree.near(rows.positions, layer.window)
        shared = (q, layer.k_cache, layer.v_cache, rows.page_table, tree.prefix, tree.cache_rows, mask, rows.positions)
        scale, window, sinks = layer.shape.scale, layer.window, layer.shape.sinks
        if self._choice.torch_only:
            return tree_attention_reference(*shared, scale, window, layer.scales, sinks)
        return tree_attention(*shared, scale, window, self._scratch, layer.scales, sinks)


def _step(layer: PagedLayer, qkv: Tensor, rows: RowBatch) -> Step:
    return Step(qkv, layer.cos_sin, rows.positions, rows.page_table, layer.k_cache, layer.v_cache)


def _by_kernel(kernel: RowAttention, layer: PagedLayer, qkv: Tensor, rows: RowBatch) -> Tensor:
    """Rows of sequences or of trees. Shapes: qkv [T, (n + 2 nkv) d] -> [T, n d]."""
    assert rows.cache_rows is not None
    places = (rows.positions, rows.cache_rows, starts_on_cpu(rows), rows.page_table)
    shape, caches = layer.shape, (layer.k_cache, layer.v_cache)
    given = (qkv.contiguous(), layer.cos_sin, *places, *caches, shape.num_heads, shape.scale)
    return kernel(*given, layer.window, near_keys(rows))
