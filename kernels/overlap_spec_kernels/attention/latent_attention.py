"""Multi-head latent attention over pages: all heads attend to one row a token, whose first columns are its value.

    row of a token   | latent, `rank` columns: key and value | rotated columns: key alone |

It is for windows of decode, for chunks of prompts and for trees alike. A tile has pairs of a row and a head of one
request; the keys of a tile are cut into pieces whose ends are places in the sequence, the same ones for every length:

    UNIT = 64 keys     16 pieces of 64 | 8 of 128 | 120 of 256 | others of 512     and of a tree's rows, its extra keys

A piece has an online softmax of its own, and pieces are added in their order. So a row's result has the same bits
whatever rows are beside it, in its request or in others, in decode and in a prompt. Programs take one piece after
another, of all tiles; a second launch adds what they have found (`add_pieces_kernel`). Where pieces would fill more
memory than there is, a program takes a whole tile and adds its pieces as it goes, by the same operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.attention import latent_decode
from overlap_spec_kernels.attention._latent_attention_kernel import add_pieces_kernel, latent_attention_kernel
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, fits_cache
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.tree_attention import tree_attention_reference
from overlap_spec_kernels.launch import ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.limits import MASK_BITS

UNIT = 64  # keys of a request's first pieces, which a program takes at once
MAX_RANK, MAX_ROPE = 512, 64  # two blocks of such keys, and their queries, fill the shared memory of a Hopper
STEP = 8  # columns that both are a multiple of: rows of 40 and 10 in float32 were read at misaligned addresses
_MOST_PAIRS = 64  # of a tile: its sums fill the registers of 8 warps
_SLOTS = 8192  # pieces of one row's heads that there is memory for, but no more than:
_MOST_FLOATS = 1 << 26
MOST_SCRATCH_BYTES = 4 * _MOST_FLOATS  # of a `LatentScratch`, but for a hundredth
_SHARED_BYTES = 227 * 1024  # of a Hopper
_KEYS, _KEYS_F32 = 64, 16  # of a block
_PAIRS_F32 = 16  # of a tile, always: without tensor cores, sums may depend on its shape
_COLUMNS = 128  # that a program adds
_BATCHES = (32, 256)  # requests that kernels are compiled for: a warp's lanes, or a program's, have one each
_AT_ONCE = 16  # pieces that are loading at once while they are added
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class LatentScratch:
    """Memory through which pieces are added. Launches on one stream may share it."""

    sums: Tensor  # [F] f32: of each slot, for its rows and heads, what a piece has found, not divided
    stats: Tensor  # [G] f32: of each slot highest scores, then denominators
    num_programs: int  # of a launch
    unit: int = UNIT

    @classmethod
    def allocate(
        cls, num_heads: int, rank: int, device: torch.device, num_slots: int = _SLOTS, unit: int = UNIT
    ) -> LatentScratch:
        """For rows with so many heads. A launch has as many programs as a GPU has multiprocessors, 1 on a CPU.

        With fewer slots, programs take whole tiles for smaller batches and shorter requests.
        """
        on_gpu = device.type == "cuda"
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1
        num_pairs = max(min(num_slots * num_heads, _MOST_FLOATS // rank), num_programs * _MOST_PAIRS)
        sums, stats = (torch.empty(num_pairs * size, dtype=torch.float32, device=device) for size in (rank, 2))
        return cls(sums, stats, num_programs, unit)


def latent_attention(
    q: Tensor,
    cache: Tensor,
    rank: int,
    page_table: Tensor,
    row_starts: Tensor | None,
    positions: Tensor,
    scale: float,
    scratch: LatentScratch,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
    read_before_wait: bool = False,
) -> Tensor:
    """softmax(q K^T * scale) V, where the row at position p attends to keys 0..p of its request; V are latents.

    With a sliding window it attends to keys max(0, p - window + 1)..p. Rows row_starts[b]..row_starts[b + 1] - 1 belong
    to request b, at ascending positions; without row_starts every request has as many. The rows' own keys are in the
    cache (`rope_latent_write`). Page-table entries beyond a request's last position are never followed. Scores,
    softmax and sums are float32 (float64 for float64), weights are rounded to q's dtype before they meet values.
    read_before_wait: as of `decode_attention`; another kernel writes q and the rows' own keys before this one.
    Shapes: q [T, n, rank + rope], cache [num_pages, page_size, 1, rank + rope], page_table [B, P] i32, row_starts
    [B + 1] i32, positions [T] i64 -> [T, n, rank]. Raises: ValueError naming the argument. Sync: never on CUDA.
    """
    _require_rows(q, cache, rank, page_table, positions, window)
    num_requests = page_table.shape[0]
    if row_starts is None:
        require(len(q) % num_requests == 0, "q", "as many rows for each row of page_table")
    else:
        fits = row_starts.shape == (num_requests + 1,) and row_starts.dtype == torch.int32
        require(fits, "row_starts", "[B + 1] int32")
    if not runs_triton(q):
        return latent_attention_reference(q, cache, rank, page_table, row_starts, positions, scale, window, scales)
    windows = latent_decode.Windows(q, cache, page_table, positions)
    pieces = latent_decode.Pieces(scratch.unit, scratch.sums, scratch.stats)
    is_plain = row_starts is None and window is None and scales == NO_SCALES
    if is_plain and latent_decode.takes(windows, rank, pieces):
        return latent_decode.attend(windows, scale, pieces, scratch.num_programs, read_before_wait)
    return _run(_Rows(q, cache, rank, page_table, row_starts, positions), None, scale, scratch, window, scales)


def latent_attention_reference(
    q: Tensor,
    cache: Tensor,
    rank: int,
    page_table: Tensor,
    row_starts: Tensor | None,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """Attention with one KV head, whose values are a part of its keys. Sync: reads positions on the host."""
    if row_starts is None:
        width = len(q) // len(page_table)
        row_starts = torch.arange(len(page_table) + 1, dtype=torch.int32, device=q.device) * width
    caches = (cache, cache[..., :rank])
    return paged_attention_reference(q, *caches, page_table, row_starts, positions, scale, window, scales)


def latent_tree_attention(
    q: Tensor,
    cache: Tensor,
    rank: int,
    page_table: Tensor,
    prefix: Tensor,
    extra_rows: Tensor,
    mask: Tensor,
    positions: Tensor,
    scale: float,
    scratch: LatentScratch,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """The same of rows of trees: to places 0..prefix[b] - 1 and those of the M extra keys whose bit is set.

    Extra keys and masks as in `tree_attention`; a row that sees nothing is 0.
    Shapes: q [B * R, n, rank + rope], cache [num_pages, page_size, 1, rank + rope], page_table [B, P] i32, prefix [B]
    i64, extra_rows [B, M] i64, mask [B, R, ceil(M / 64)] i64, positions [B * R] i64 -> [B * R, n, rank]. Raises:
    ValueError naming the argument. Sync: never on CUDA.
    """
    _require_rows(q, cache, rank, page_table, positions, window)
    num_requests, num_extra = page_table.shape[0], extra_rows.shape[1]
    width, rest = divmod(len(q), num_requests)
    require(rest == 0, "q", "the same rows for each row of page_table")
    require(prefix.shape == (num_requests,), "prefix", "[B]")
    require(extra_rows.shape[0] == num_requests and num_extra >= 1, "extra_rows", "[B, M], at least one column")
    require(mask.shape == (num_requests, width, ceil_div(num_extra, MASK_BITS)), "mask", "[B, R, ceil(M / 64)]")
    for name, value in {"prefix": prefix, "extra_rows": extra_rows, "mask": mask}.items():
        require(value.dtype == torch.int64 and value.is_contiguous(), name, "int64, contiguous")
    tree = _Tree(prefix, extra_rows, mask)
    if not runs_triton(q):
        return latent_tree_attention_reference(q, cache, rank, page_table, *tree, positions, scale, window, scales)
    return _run(_Rows(q, cache, rank, page_table, None, positions), tree, scale, scratch, window, scales)


def latent_tree_attention_reference(
    q: Tensor,
    cache: Tensor,
    rank: int,
    page_table: Tensor,
    prefix: Tensor,
    extra_rows: Tensor,
    mask: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None = None,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """As `latent_attention_reference`. Sync: reads prefix, mask and positions on the host."""
    rows = (q, cache, cache[..., :rank], page_table, prefix, extra_rows, mask, positions)
    return tree_attention_reference(*rows, scale, window, scales)


def _require_rows(
    q: Tensor, cache: Tensor, rank: int, page_table: Tensor, positions: Tensor, window: int | None
) -> None:
    require(q.dim() == 3 and q.stride(2) == 1, "q", "[T, n, rank + rope] with a contiguous last dimension")
    require(cache.dim() == 4 and cache.is_contiguous(), "cache", "[num_pages, page_size, 1, rank + rope], contiguous")
    require(cache.shape[2:] == (1, q.shape[2]), "cache", "one head, as long as those of q")
    require(fits_cache(q.dtype, cache), "cache", "the dtype of q, or 8 bits")
    require(0 < rank < q.shape[2], "rank", "a part of a head's columns")
    on_cpu = not runs_triton(q)
    rope = q.shape[2] - rank
    require(on_cpu or (rank <= MAX_RANK and rope <= MAX_ROPE), "rank", "at most 512, and 64 more columns")
    require(on_cpu or rank % STEP == rope % STEP == 0, "rank", "a multiple of 8, and so many more columns")
    require(page_table.dim() == 2 and page_table.dtype == torch.int32, "page_table", "[B, P] int32")
    require(page_table.stride(1) == 1, "page_table", "a contiguous last dimension")
    require(positions.shape == (len(q),) and positions.dtype == torch.int64, "positions", "[T] int64")
    require(positions.is_contiguous(), "positions", "contiguous")
    require(window is None or window >= 1, "window", "at least 1")


class _Rows(NamedTuple):
    """Rows of requests and their pages, as `latent_attention` describes them."""

    q: Tensor
    cache: Tensor
    rank: int
    page_table: Tensor
    row_starts: Tensor | None
    positions: Tensor


class _Tree(NamedTuple):
    """What `latent_tree_attention` has in place of the keys up to a row's position."""

    prefix: Tensor
    extra_rows: Tensor
    mask: Tensor


class _Tiling(NamedTuple):
    """How rows and heads are divided among tiles, chosen from shapes alone."""

    block_h: int  # rows times heads of a tile, padded
    pairs: int  # the same without padding
    block_n: int  # keys of a block
    block_r: int
    block_t: int
    stages: int  # blocks that are loading at once, the one that is multiplied included

    def shared_bytes(self, itemsize: int) -> int:
        """Of a program: blocks of keys, queries, weights."""
        row = (self.block_r + self.block_t) * itemsize
        return (self.stages * self.block_n + self.block_h) * row + self.block_n * self.block_h * itemsize


def _tiling(rows: _Rows, most_pairs: int, shared_bytes: int) -> _Tiling:
    """The largest tiles that are full and fit. `most_pairs`: of a row and a head, in one request."""
    is_float, itemsize = rows.q.dtype == torch.float32, rows.q.element_size()
    block_r, block_t = (max(next_power_of_2(size), 16) for size in (rows.rank, rows.q.shape[2] - rows.rank))
    largest = _PAIRS_F32 if is_float else min(max(next_power_of_2(most_pairs), 16), _MOST_PAIRS)
    sizes = [largest >> shift for shift in range(3) if largest >> shift >= 16]
    block_n = _KEYS_F32 if is_float else _KEYS
    tilings = [_Tiling(h, min(h, most_pairs), block_n, block_r, block_t, stages) for stages in (2, 1) for h in sizes]
    return next((each for each in tilings if each.shared_bytes(itemsize) <= shared_bytes), tilings[-1])


def _run(
    rows: _Rows, tree: _Tree | None, scale: float, scratch: LatentScratch, window: int | None, scales: KVScales
) -> Tensor:
    q, cache, rank, page_table, row_starts, positions = rows
    (num_rows, num_heads, _), (num_requests, num_pages), page_size = q.shape, page_table.shape, cache.shape[1]
    width = num_rows // num_requests if row_starts is None else 0
    most_pairs = (width or num_rows) * num_heads
    tiling = _tiling(rows, most_pairs, _shared_bytes(q.device))
    assert scratch.unit % tiling.block_n == 0, "a piece has whole blocks"
    num_slots = min(scratch.sums.shape[0] // rank, scratch.stats.shape[0] // 2) // tiling.pairs
    # With so many tiles there is enough work without pieces, which would have to be added.
    most_tiles, num_tiles = 2 * scratch.num_programs, num_requests * ceil_div(width * num_heads, tiling.block_h)
    out = torch.empty((num_rows, num_heads, rank), dtype=q.dtype, device=q.device)
    prefix, extra_rows, mask = tree or (positions, positions, positions)
    num_extra = extra_rows.shape[1] if tree else 0
    places = (positions if row_starts is None else row_starts, positions, prefix)
    sizes = (num_requests, num_slots, most_tiles, tiling.pairs, width, num_extra)
    block_b = next((size for size in _BATCHES if num_requests <= size), next_power_of_2(num_requests))
    shared = {
        "HEADS": num_heads, "RANK": rank, "UNIT": scratch.unit, "WINDOW": window or 0, "TREE": tree is not None,
        "UNIFORM": row_starts is None, "BLOCK_H": tiling.block_h,
        "BLOCK_B": block_b, **dependent_launch(q.device, num_rows),
    }  # fmt: skip
    latent_attention_kernel[(scratch.num_programs,)](
        *(q, cache, page_table, *places, extra_rows, mask, out, scratch.sums, scratch.stats),
        *(scale * scales.k * _LOG2_E, scales.v, q.stride(0), q.stride(1), page_table.stride(0), *sizes),
        ROPE=q.shape[2] - rank,
        PAGE_SIZE=page_size,
        IN_PARTS=q.dtype == torch.float32,
        BLOCK_N=tiling.block_n,
        BLOCK_R=tiling.block_r,
        BLOCK_T=tiling.block_t,
        num_warps=8,
        num_stages=tiling.stages,
        **shared,
    )
    if num_tiles < most_tiles and (tree is not None or num_pages * page_size > scratch.unit):
        block_c = min(next_power_of_2(rank), _COLUMNS if width else MAX_RANK)  # a chunk has many rows
        add_pieces_kernel[(num_rows * num_heads, ceil_div(rank, block_c))](
            *(*places, out, scratch.sums, scratch.stats, scales.v, *sizes),
            BLOCK_C=block_c,
            AT_ONCE=_AT_ONCE,
            num_warps=1,
            **shared,
        )
    return out


def _shared_bytes(device: torch.device) -> int:
    """That a program may have."""
    if device.type != "cuda":
        return _SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)
