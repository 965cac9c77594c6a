"""A weight in 16 bits whose products add up K in one order, from the first column to the last, for any number of rows.

Tensor cores give a row of x the same bits in tiles of every shape as long as K is walked in one order (measured on an
H200: 146 shapes, `mma.sync` and `wgmma`). So the number of rows may choose tiles here, but K is never divided, and what
else a row needs (a norm, an argmax) is computed by kernels that have a program for each row. No BLAS multiplies.

    few rows     streamed_linear.py, each of whose warps has all of K, or
                 warpgroup_linear.py, whose programs do: large weights of 9 to 128 rows of x
    more         wide_linear.py: large weights
    else         tiles of x times tiles of W, below

Which of them, and their sizes, were measured on an H200 (docs/history.md).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require, runs_gluon, runs_triton
from overlap_spec_kernels.linear.call import call_of, num_columns
from overlap_spec_kernels.linear.dense import MatrixOperand, fused_linear_reference, linear_logits_reference
from overlap_spec_kernels.linear.linear_argmax import argmax_of_programs
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.linear.streamed_linear import Stream
from overlap_spec_kernels.linear.warpgroup_linear import Tiles, tiles_for
from overlap_spec_kernels.linear.wide_linear import IN_PARTS, Wide, plain_for, wide_for
from overlap_spec_kernels.norm.add_rms_norm import add_rms_norm
from overlap_spec_kernels.norm.normed import Norm, Normed, normalised

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_STREAMED, _MOST_LARGE = 16, 8  # rows of x for which a weight is streamed, small or large
_LARGE = 8 << 20  # bytes of a large weight
_MOST_ROWS = 128  # of x, which a program of warpgroup_linear.py takes at once
_FEW_TILES = 67  # of 64 rows of W: fewer leave half of a Hopper's multiprocessors idle
_GROUP = 8  # tiles of x that take the same tiles of W one after another, so that these are in the cache
_KINDS = (256, 512, 1024)  # most rows of a kind of tiles, of more than 64; more rows are another kind
_ROUND = 132  # tiles that keep a Hopper's multiprocessors busy


class OrderedTiles(NamedTuple):
    """Sizes of a program's tiles, and what it loads at once. None of them changes a bit."""

    block_m: int  # rows of x
    block_n: int  # rows of W (twice as many if gated)
    block_k: int
    num_warps: int
    num_stages: int


class OrderedOperand(LinearOperand):
    """A weight whose products have one order of sums. What else a row needs is computed by row, in one order too."""

    __slots__ = ()

    @abstractmethod
    def multiplied(self, rows: Tensor, gated: bool, dtype: torch.dtype) -> Tensor:
        """Shapes: [T, I] -> [T, O], or [T, O / 2] if gated, of type `dtype`."""

    def product(self, x: Tensor | Normed) -> Tensor:
        rows = normalised(x)
        return self.multiplied(rows, False, rows.dtype)

    def gated(self, x: Tensor | Normed) -> Tensor:
        rows = normalised(x)
        return self.multiplied(rows, True, rows.dtype)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self.multiplied(normalised(x), False, torch.float32)

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Normed:
        rows, values = add_rms_norm(self.product(x), residual, norm.weight, norm.eps, dependent=True)
        return Normed(values, rows)


@dataclass(frozen=True, slots=True)
class OrderedWeight(MatrixOperand, OrderedOperand):
    """W, unquantised; a row's results depend on W and the row alone."""

    def check(self, x: Tensor) -> None:
        MatrixOperand.check(self, x)
        require(not runs_triton(x) or x.dtype in _DTYPES, "weight", "16 bits: other products have no fixed order")

    def argmax(self, x: Tensor | Normed, ids: Tensor | None) -> Tensor:
        rows, cut = normalised(x), None
        if runs_triton(rows):
            cut = ordered_cut_for(rows, self.matrix, False) or ordered_wide_for(rows, self.matrix, "ARGMAX")
        if cut is None:
            return OrderedOperand.argmax(self, rows, ids)
        return argmax_of_programs(rows, self.matrix, ids, cut, by_row=isinstance(cut, Wide))

    def multiplied(self, rows: Tensor, gated: bool, dtype: torch.dtype) -> Tensor:
        if not runs_triton(rows):
            if dtype != rows.dtype:
                return linear_logits_reference(rows, self.matrix)
            return fused_linear_reference(rows, self.matrix, gated)
        if cut := ordered_cut_for(rows, self.matrix, gated):
            call = call_of(rows, self.matrix, gated, None, dtype, cut.block_n)
            cut.run(call, cut.num_programs(self.matrix, gated))
            assert call.out is not None
            return call.out
        return multiply_many(rows, self.matrix, gated, dtype)


def ordered_cut_for(x: Tensor, weight: Tensor, gated: bool) -> Stream | Tiles | None:
    """The division among programs of `DenseWeight`'s kernels, with all of K in each warp; None: neither applies."""
    if x.dtype not in _DTYPES or not runs_gluon(x.device):
        return None
    num_rows, size_k = x.shape
    if size_k % 64 or x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    large = weight.nbytes >= _LARGE
    if size_k % 256:
        return _stream_of_short_rows(num_rows, large)
    if not large:
        return Stream(32, 256, 1, 2, 4, late=True) if num_rows <= _MOST_STREAMED else None
    if num_rows <= _MOST_LARGE:
        return _stream_of_large(weight, gated)
    if tiles := tiles_for(x, weight, gated):
        return tiles._replace(splits=1)
    many = num_rows <= _MOST_ROWS and not gated and ceil_div(weight.shape[0], 64) >= _FEW_TILES
    return Tiles(64, 128, 4) if many else None


def _stream_of_large(weight: Tensor, gated: bool) -> Stream:
    """For up to 8 rows. Rows of W are read fastest where much of each is read at once."""
    size_n, size_k = weight.shape
    if size_k % 512:
        return Stream(32, 256, 1, 2, 4, per_sm=1) if gated else Stream(32, 256, 1, 2, 5, per_sm=2)
    if gated:
        return Stream(16, 512, 1, 1, 5, per_sm=1)
    if size_n <= 4096 and size_k <= 4096:
        return Stream(32, 256, 1, 2, 5, per_sm=2)
    return (
        Stream(16, 512, 1, 1, 3, per_sm=3) if size_n <= 8192 and size_k <= 4096 else Stream(32, 512, 1, 2, 5, per_sm=1)
    )


def _stream_of_short_rows(num_rows: int, large: bool) -> Stream | None:
    """Of a weight whose rows are not a multiple of 256."""
    if not large:
        return Stream(32, 64, 1, 2, 8, late=True) if num_rows <= 64 else None
    if num_rows <= 16:
        return Stream(64, 64, 1, 4, 4, late=True)
    return Stream(32, 64, 1, 2, 4, late=True) if num_rows <= 32 else None


def ordered_wide_for(x: Tensor, weight: Tensor, end: str) -> Wide | None:
    """The division among clusters of `wide_linear.py`, which have all of K too; None where it does not apply.

    `end`: GATED, ARGMAX or PLAIN, which is a product as it is.
    """
    if x.shape[0] <= _MOST_ROWS:
        return None
    wide = wide_for(x, weight, end == "GATED")
    return plain_for(x, weight) if wide is not None and end == "PLAIN" else wide


def multiply_many(
    x: Tensor, weight: Tensor, gated: bool, dtype: torch.dtype, scales: Tensor | None = None, parts: int = 1,
    row_scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The product for any number of rows, fast for many. Sync: never.

    `scales`: of W's rows, which multiply sums. `parts`: of K, whose sums are added; more than 128 rows then.
    `row_scales`: of x, which multiply the results of that; more than 128 rows of a large weight then.
    Shapes: x [T, I], weight [O, I], scales [O] f32, row_scales [T] f32 -> [T, O], or [T, O / 2] if gated.
    """
    wide = ordered_wide_for(x, weight, "GATED" if gated else "PLAIN")
    if wide is None:
        assert parts == 1 and row_scales is None
        return multiply_in_order(x, weight, gated, dtype, scales=scales)
    wide = wide if parts == 1 else IN_PARTS._replace(parts=parts)
    call = call_of(x, weight, gated, None, dtype, wide.block_n)
    wide.run(call, wide.num_programs(weight, gated), scales, row_scales)
    assert call.out is not None
    return call.out


def ordered_tiles_for(num_rows: int, size_n: int, gated: bool) -> OrderedTiles:
    """Tiles for so many rows and columns of the result. Every choice gives the same bits.

    Kinds of tiles end at `_KINDS` rows, so that few prompts before serving compile them all.
    """
    if num_rows <= 16:
        return OrderedTiles(16, 32, 128, 4, 5 - gated)
    if num_rows <= 32:
        return OrderedTiles(32, 32, 128, 4, 5 - gated)
    if num_rows <= 64:
        return OrderedTiles(64, 64, 64, 4, 4) if size_n > 8192 and not gated else OrderedTiles(64, 32, 128, 4, 4)
    if num_rows <= 128 and size_n <= 4096:
        return OrderedTiles(64, 64, 128, 4, 4 if gated else 6) if size_n > 2048 else OrderedTiles(64, 32, 64, 4, 6)
    most = next((rows for rows in _KINDS if num_rows <= rows), 2 * _KINDS[-1])
    if ceil_div(most, 128) * ceil_div(size_n, 128) < _ROUND:
        return OrderedTiles(64, 64, 64, 4, 4)
    if gated:
        return OrderedTiles(128, 128, 64, 8, 3)
    if ceil_div(most, 128) * ceil_div(size_n, 256) < _ROUND:
        return OrderedTiles(128, 128, 64, 8, 4)
    return OrderedTiles(128, 256, 64, 8, 3)


def multiply_in_order(
    x: Tensor,
    weight: Tensor,
    gated: bool,
    dtype: torch.dtype,
    tiles: OrderedTiles | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """The product by tiles; `tiles`: other ones than those for its shape; `scales` as in `multiply_many`. Sync: never.

    Shapes: x [T, I], weight [O, I], scales [O] f32 -> [T, O], or [T, O / 2] if gated.
    """
    num_rows, size_k = x.shape
    size_n = num_columns(weight, gated)
    tiles = tiles or ordered_tiles_for(num_rows, size_n, gated)
    out = x.new_empty((num_rows, size_n), dtype=dtype)
    programs = ceil_div(num_rows, tiles.block_m) * ceil_div(size_n, tiles.block_n)
    _ordered_linear_kernel[(programs,)](
        x,
        weight,
        weight if scales is None else scales,
        out,
        x.stride(0),
        num_rows,
        size_n,
        SIZE_K=size_k,
        GATED=gated,
        SCALED=scales is not None,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP=_GROUP,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
        **dependent_launch(x.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _ordered_linear_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, scales_ptr: tl.tensor, out_ptr: tl.tensor, x_stride: int, num_rows: int,
    size_n: tl.tensor,
    SIZE_K: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a tile of the result, which walks all of K."""
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(size_n, BLOCK_N)
    in_group = GROUP * tiles_n
    group, place = tl.program_id(0) // in_group, tl.program_id(0) % in_group
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    tile_m, tile_n = group * GROUP + place % height, place // height
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.minimum(m, num_rows - 1).to(tl.int64)  # rows and columns past the last are computed and not written
    column = tl.minimum(n, size_n - 1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_places = x_ptr + row[:, None] * x_stride + k[None, :]
    w_places = weight_ptr + column[None, :] * SIZE_K + k[:, None]
    up_places = w_places + size_n.to(tl.int64) * SIZE_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    wait_for_inputs(PDL)
    for first in range(0, SIZE_K, BLOCK_K):
        if SIZE_K % BLOCK_K:
            inside = k < SIZE_K - first
            x = tl.load(x_places + first, mask=inside[None, :], other=0.0)
            w = tl.load(w_places + first, mask=inside[:, None], other=0.0)
        else:
            x, w = tl.load(x_places + first), tl.load(w_places + first)
        acc = tl.dot(x, w, acc)
        if GATED:
            if SIZE_K % BLOCK_K:
                w_up = tl.load(up_places + first, mask=(k < SIZE_K - first)[:, None], other=0.0)
            else:
                w_up = tl.load(up_places + first)
            up = tl.dot(x, w_up, up)
    if SCALED:
        acc *= tl.load(scales_ptr + column)[None, :]
        if GATED:
            up *= tl.load(scales_ptr + size_n + column)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    places = out_ptr + m.to(tl.int64)[:, None] * size_n + n[None, :]
    tl.store(places, acc.to(out_ptr.dtype.element_ty), mask=(m < num_rows)[:, None] & (n < size_n)[None, :])
