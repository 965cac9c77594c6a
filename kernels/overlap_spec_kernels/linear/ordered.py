"""A weight in 16 bits whose products add up K in one order, for any number of rows.

Tensor cores give a row of x the same bits in tiles of every shape as long as K is walked in one order (measured on an
H200: 146 shapes, `mma.sync` and `wgmma`). So the number of rows may choose tiles here, but never how K is divided, and
what else a row needs (a norm, an argmax) is computed by kernels that have a program for each row. No BLAS multiplies.

A large weight's K is walked from the first column to the last. Of a small one, a product waits for the one before it
longer than for W, so every other piece of its K has a sum of its own (`piece_of`), and the two are added at the end.
A launch takes longer than a norm there, too. So a norm's work is divided as in `normed.py`: sums of squares of 16
columns, whose halves are added again and again, and of them every eighth in a sum, then these eight likewise.

    few rows     short_linear.py: small weights and up to 16 rows of x, whose programs have all of their rows of W;
                 streamed_linear.py, each of whose warps has all of K or all pieces of one sum, or
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

from overlap_spec_kernels.language import halves_added, tl, wait_for_inputs
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
    runs_gluon,
    runs_triton,
    runs_warpgroups,
)
from overlap_spec_kernels.linear.call import Addition, Call, call_of, num_columns
from overlap_spec_kernels.linear.dense import MatrixOperand, fused_linear_reference, linear_logits_reference
from overlap_spec_kernels.linear.linear_argmax import argmax_of_programs
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.linear.short_linear import short_for
from overlap_spec_kernels.linear.streamed_linear import _LEAST_PADDED, Stream
from overlap_spec_kernels.linear.warpgroup_linear import Tiles, tiles_for
from overlap_spec_kernels.linear.wide_linear import IN_PARTS, Wide, any_for, wide_for
from overlap_spec_kernels.norm.add_rms_norm import add_rms_norm
from overlap_spec_kernels.norm.normed import Norm, Normed, normalised, rows_of
from overlap_spec_kernels.norm.silu_mul import silu_mul

_DTYPES = (torch.bfloat16, torch.float16)
_MOST_STREAMED, _MOST_LARGE = 64, 8  # rows of x for which a weight is streamed, small or large
_LARGE = 8 << 20  # bytes of a large weight
_MOST_ROWS = 128  # of x, which a program of warpgroup_linear.py takes at once
_FEW_TILES = 67  # of 64 rows of W: fewer leave half of a Hopper's multiprocessors idle
_GROUP = 8  # tiles of x that take the same tiles of W one after another, so that these are in the cache
_KINDS = (256, 512, 1024)  # most rows of a kind of tiles, of more than 64; more rows are another kind
_PART = 16  # columns of a sum of squares
_MOST_PARTS = 64  # of a row, which each program of the next linear adds up
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
    def multiplied(self, x: Tensor | Normed, gated: bool, dtype: torch.dtype) -> Tensor:
        """Shapes: [T, I] -> [T, O], or [T, O / 2] if gated, of type `dtype`."""

    def product(self, x: Tensor | Normed) -> Tensor:
        return self.multiplied(x, False, rows_of(x).dtype)

    def gated(self, x: Tensor | Normed) -> Tensor:
        return self.multiplied(x, True, rows_of(x).dtype)

    def logits(self, x: Tensor | Normed) -> Tensor:
        return self.multiplied(normalised(x), False, torch.float32)

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        rows, values = add_rms_norm(self.product(x), residual, norm.weight, norm.eps, dependent=True)
        return Normed(values, rows)


@dataclass(frozen=True, slots=True)
class OrderedWeight(MatrixOperand, OrderedOperand):
    """W, unquantised; a row's results depend on W and the row alone."""

    divided: bool = True  # K of a small one

    @property
    def piece(self) -> int:
        return self.divided * piece_of(self.matrix)

    def check(self, x: Tensor) -> None:
        MatrixOperand.check(self, x)
        require(not runs_triton(x) or x.dtype in _DTYPES, "weight", "16 bits: other products have no fixed order")

    def argmax(self, x: Tensor | Normed, ids: Tensor | None) -> Tensor:
        rows, cut = normalised(x), None
        if runs_triton(rows):
            cut = ordered_cut_for(rows, self.matrix, False, self.piece) or ordered_wide_for(rows, self.matrix, "ARGMAX")
        if cut is None or self.bias is not None:
            return OrderedOperand.argmax(self, rows, ids)
        return argmax_of_programs(rows, self.matrix, ids, cut, by_row=isinstance(cut, Wide))

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        if not (self.piece and runs_triton(x) and self.shape[0] <= _PART * _MOST_PARTS):
            return OrderedOperand.add(self, x, residual, norm)
        call = self._run(x, False, x.dtype, Addition(residual, norm))
        assert call.out is not None and call.weighted is not None
        return Normed(call.out, call.weighted, call.sums, norm.eps)

    def multiplied(self, x: Tensor | Normed, gated: bool, dtype: torch.dtype) -> Tensor:
        rows = rows_of(x)
        if gated and self.bias is not None:
            return silu_mul(self.multiplied(x, False, dtype))
        if not runs_triton(rows):
            if dtype != rows.dtype:
                return linear_logits_reference(x, self.matrix, self.bias)
            return fused_linear_reference(x, self.matrix, gated, self.bias)
        squares = x.squares if isinstance(x, Normed) else None
        scales_sums = self.piece and squares is not None and len(squares) <= _MOST_PARTS
        out = self._run(x if scales_sums else normalised(x), gated, dtype).out
        assert out is not None
        return out

    def _run(self, x: Tensor | Normed, gated: bool, dtype: torch.dtype, add: Addition | None = None) -> Call:
        rows = rows_of(x)
        short = short_for(rows, self.matrix, gated, self.piece)
        few = short or ordered_cut_for(rows, self.matrix, gated, self.piece, add is not None)
        if cut := few or ordered_wide_for(rows, self.matrix, "GATED" if gated else "PLAIN"):
            call = call_of(x, self.matrix, gated, add, dtype, cut.block_n, self.bias)
            cut.run(call, cut.num_programs(self.matrix, gated))
        else:
            call = call_of(x, self.matrix, gated, add, dtype, _PART, self.bias)
            run_tiles(call, piece=self.piece)
        return call


def piece_of(weight: Tensor) -> int:
    """Columns of a piece of K: the first, third, .. piece are one sum, the others another. 0: K is one sum.

    A K of one piece for each sum has none: the compiler makes one sum of two products that are added as they are.
    """
    size_k = weight.shape[1]
    if weight.nbytes >= _LARGE or size_k % 64 or size_k <= 128:
        return 0
    return 32 if size_k % 128 else 64


def ordered_cut_for(x: Tensor, weight: Tensor, gated: bool, piece: int, adds: bool = False) -> Stream | Tiles | None:
    """The division among programs of `DenseWeight`'s kernels, with sums of K in warps of their own; None: neither.

    `piece`: of `piece_of`. `adds`: to a residual, with a norm after it.
    """
    if x.dtype not in _DTYPES or not runs_gluon(x.device):
        return None
    num_rows, size_k = x.shape
    if size_k % 64 or x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    if piece:
        return _stream_of_pieces(num_rows, piece, adds)
    if weight.nbytes < _LARGE or (size_k % 256 and (gated or size_k < _LEAST_PADDED)):
        return _stream_of_short_rows(num_rows)
    if num_rows <= _MOST_LARGE:
        return _stream_of_large(weight, gated)
    if tiles := tiles_for(x, weight, gated):
        return tiles._replace(splits=1)
    many = num_rows <= _MOST_ROWS and not gated and ceil_div(weight.shape[0], 64) >= _FEW_TILES
    if not many or not runs_warpgroups(x.device):
        return None
    return Tiles(64, 64, 8) if size_k % 128 else Tiles(64, 128, 4)


def _stream_of_pieces(num_rows: int, piece: int, adds: bool) -> Stream | None:
    """Of a small weight. A program that adds has 16 columns, whose squares are one sum of a norm's."""
    few = Stream(_PART, 2 * piece, 2, 1, 10 if piece == 32 else 12, late=True, in_order=True)
    if num_rows <= 16:
        return few
    few = few._replace(stages=6 if num_rows <= _MOST_STREAMED else 8, most_rows=16)
    if adds:
        return few if num_rows <= _MOST_ROWS else None
    return few._replace(block_n=2 * _PART, warps_n=2) if num_rows <= _MOST_STREAMED else None


def _stream_of_large(weight: Tensor, gated: bool) -> Stream:
    """For up to 8 rows. Rows of W are read fastest where much of each is read at once."""
    size_n, size_k = weight.shape
    if size_k % 512 and size_k % 256 == 0:
        return Stream(32, 256, 1, 2, 4, per_sm=1) if gated else Stream(32, 256, 1, 2, 5, per_sm=2)
    if gated:
        return Stream(16, 512, 1, 1, 5, per_sm=1)
    if size_n <= 4096 and size_k <= 4096 and size_k % 256 == 0:
        return Stream(32, 256, 1, 2, 5, per_sm=2)
    return (
        Stream(16, 512, 1, 1, 3, per_sm=3) if size_n <= 8192 and size_k <= 4096 else Stream(32, 512, 1, 2, 5, per_sm=1)
    )


def _stream_of_short_rows(num_rows: int) -> Stream | None:
    """Of a weight whose rows are not a multiple of 256, or which is small."""
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
    return wide if wide is None or end == "ARGMAX" else any_for(x, weight, end == "GATED")


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


def ordered_tiles_for(num_rows: int, size_n: int, gated: bool, piece: int = 0) -> OrderedTiles:
    """Tiles for so many rows and columns of the result. Every choice gives the same bits.

    Kinds of tiles end at `_KINDS` rows, so that few prompts before serving compile them all.
    """
    if piece:  # They have twice as many sums in registers, and as many columns at once, as the others.
        if num_rows > _KINDS[-1]:
            return OrderedTiles(128, 64, piece, 8, 3)
        if num_rows > 128:
            return OrderedTiles(64, 64, piece, 4, 4)
        return OrderedTiles(min(max(next_power_of_2(num_rows), 16), 64), 32, piece, 4, 3 if piece == 64 else 6)
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
    piece: int = 0,
) -> Tensor:
    """The product by tiles; `tiles`: other ones than those for its shape; `scales` as in `multiply_many`. Sync: never.

    Shapes: x [T, I], weight [O, I], scales [O] f32 -> [T, O], or [T, O / 2] if gated.
    """
    call = call_of(x, weight, gated, None, dtype, _PART)
    run_tiles(call, tiles, scales, piece)
    assert call.out is not None
    return call.out


def run_tiles(call: Call, tiles: OrderedTiles | None = None, scales: Tensor | None = None, piece: int = 0) -> None:
    """See `multiply_in_order`; with a norm before or after it, where the call has one. `piece`: of `piece_of`."""
    num_rows, size_k = call.x.shape
    size_n = num_columns(call.weight, call.gated)
    tiles = tiles or ordered_tiles_for(num_rows, size_n, call.gated, piece)
    programs = ceil_div(num_rows, tiles.block_m) * ceil_div(size_n, tiles.block_n)
    _ordered_linear_kernel[(programs,)](
        *call.tensors(),
        call.given(scales),
        call.given(call.bias),
        *call.sizes()[:4],
        call.eps,
        SIZE_K=size_k,
        GATED=call.gated,
        SCALED=scales is not None,
        PARTS=call.num_squares,
        ADD=call.residual is not None,
        BIASED=call.bias is not None,
        PIECES=piece > 0,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP=_GROUP,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        enable_fp_fusion=False,
        **dependent_launch(call.x.device, num_rows),
    )


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _ordered_linear_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, squares_ptr: tl.tensor, residual_ptr: tl.tensor, norm_ptr: tl.tensor,
    out_ptr: tl.tensor, weighted_ptr: tl.tensor, sums_ptr: tl.tensor, scales_ptr: tl.tensor, bias_ptr: tl.tensor,
    x_stride: int, residual_stride: int, size_n: tl.tensor, num_rows: int, eps: float,
    SIZE_K: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr,
    BIASED: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program for a tile of the result, which walks all of K.

    PIECES: blocks go to two sums by turns. PARTS: sums of squares of a row, of which the norm before it is made.
    """
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
    up_offset = size_n.to(tl.int64) * SIZE_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    other, other_up = acc, acc
    MASKED: tl.constexpr = SIZE_K % BLOCK_K != 0
    wait_for_inputs(PDL)
    if PARTS:
        scale = _scale_of_rows(squares_ptr + row, num_rows, eps, SIZE_K, PARTS)[:, None]
    for first in range(0, SIZE_K, 2 * BLOCK_K if PIECES else BLOCK_K):
        inside = k < SIZE_K - first
        acc, up = _with_block(acc, up, x_places + first, w_places + first, up_offset, inside, MASKED, GATED)
        if PIECES:
            x_second, w_second = x_places + first + BLOCK_K, w_places + first + BLOCK_K
            other, other_up = _with_block(other, other_up, x_second, w_second, up_offset, inside, False, GATED)
    if PIECES:
        acc += other
        up += other_up
    if SCALED:
        acc *= tl.load(scales_ptr + column)[None, :]
        if GATED:
            up *= tl.load(scales_ptr + size_n + column)[None, :]
    if PARTS:
        acc *= scale
        up *= scale
    if BIASED:
        acc += tl.load(bias_ptr + column).to(tl.float32)[None, :]
    if GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * up
    mask = (m < num_rows)[:, None] & (n < size_n)[None, :]
    places = m.to(tl.int64)[:, None] * size_n + n[None, :]
    if ADD:
        acc += tl.load(residual_ptr + row[:, None] * residual_stride + column[None, :]).to(tl.float32)
    rounded = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + places, rounded, mask=mask)
    if ADD:
        wide = tl.where(mask, rounded.to(tl.float32), 0.0)
        weighted = wide * tl.load(norm_ptr + column).to(tl.float32)[None, :]
        tl.store(weighted_ptr + places, weighted.to(weighted_ptr.dtype.element_ty), mask=mask)
        squares = tl.reshape(wide * wide, (BLOCK_M * BLOCK_N,))
        squares = halves_added(halves_added(halves_added(halves_added(squares, 16), 8), 4), 2)
        part = tile_n * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)
        inside = (m < num_rows)[:, None] & (part * 16 < size_n)[None, :]
        sums = tl.reshape(squares, (BLOCK_M, BLOCK_N // 16))
        tl.store(sums_ptr + part[None, :].to(tl.int64) * num_rows + m[:, None], sums, mask=inside)


@TritonKernel
def _scale_of_rows(
    squares_ptr: tl.tensor, num_rows: int, eps: float, SIZE_K: tl.constexpr, PARTS: tl.constexpr
) -> tl.tensor:
    """The scale of a norm, as streamed_linear.py has it in order. Shapes: squares [M] pointers -> [M]."""
    ROWS: tl.constexpr = squares_ptr.shape[0]
    total = tl.zeros([ROWS, 8], tl.float32)
    for first in tl.static_range(0, PARTS, 8):  # loads that do not wait for one another
        part = first + tl.arange(0, 8)
        places = squares_ptr[:, None] + part[None, :].to(tl.int64) * num_rows
        total += tl.load(places, mask=(part < PARTS)[None, :], other=0.0)
    total = halves_added(halves_added(halves_added(tl.reshape(total, (ROWS * 8,)), 4), 2), 2)
    return tl.rsqrt(total / SIZE_K + eps)


@TritonKernel
def _with_block(
    acc: tl.tensor, up: tl.tensor, x_places: tl.tensor, w_places: tl.tensor, up_offset: tl.tensor, inside: tl.tensor,
    MASKED: tl.constexpr, GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The sums with a block of columns added."""
    x = tl.load(x_places, mask=inside[None, :], other=0.0) if MASKED else tl.load(x_places)
    w = tl.load(w_places, mask=inside[:, None], other=0.0) if MASKED else tl.load(w_places)
    acc = tl.dot(x, w, acc)
    if GATED:
        up_places = w_places + up_offset
        w_up = tl.load(up_places, mask=inside[:, None], other=0.0) if MASKED else tl.load(up_places)
        up = tl.dot(x, w_up, up)
    return acc, up
