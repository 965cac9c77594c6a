"""Products of rows with the matrices of their experts, and the gate between two of them.

A tile has rows of one expert. Where x has few rows, a program finds out which ones by itself: there is a tile for each
place, and the first place of an expert has all rows of x that have chosen it; tiles of its other places end at once.
Otherwise each expert's places are listed before, on Hopper by expert_lists.cu.

Tensor cores add the columns of a product in one order in tiles of every size. So a row's result has the same bits
wherever it is, and whatever rows are beside it. Weights of few bits have kernels of their own (`quantized_products.py`,
`float4_products.py`), which divide K by the shape and the format of the weight alone: sums of a group of columns are
scaled by its scale, and groups follow one another.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import let_next_begin, tl, wait, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

FEW_ROWS = 16  # rows of x up to which tiles need no list
_GROUP_BLOCK = 1024  # places that a program looks at together
_LISTED_ROWS, _LISTING_THREADS, _MOST_EXPERTS = 64, 1024, 1024  # of expert_lists.cu
_MOST_K = 128  # columns of a step


class Clamp(NamedTuple):
    """A gated product whose factors are bounded (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1)."""

    alpha: float
    limit: float  # gate <= limit, -limit <= up <= limit


class Places(NamedTuple):
    """Where experts are chosen: places among the T * k."""

    experts: Tensor  # [T, k] i64
    counts: Tensor  # [E] i32: how often each is; not read where x has few rows
    listed: Tensor  # [E, T] i32: its places, ascending

    @property
    def are_listed(self) -> bool:
        """Whether tiles are of listed places."""
        return len(self.experts) > FEW_ROWS


class Tile(NamedTuple):
    """Rows and columns of a program, and how it is launched."""

    rows: int
    columns: int
    most_k: int  # columns of a step of the loop, which do not change the order of sums
    warps: int
    stages: int


_FEW = {True: Tile(16, 32, _MOST_K, 4, 4), False: Tile(16, 32, _MOST_K, 4, 4)}  # by `gated`
_FEW_WIDE = Tile(16, 32, _MOST_K, 4, 2)  # float32
# by rows of an expert on average from which they are used; the gated product has both halves of the columns
_MANY = {128: Tile(128, 128, 64, 8, 4), 32: Tile(64, 64, _MOST_K, 4, 3)}


def tile_of(num_pairs: int, num_experts: int, gated: bool, is_wide: bool = False) -> Tile:
    """`is_wide`: of float32."""
    if is_wide:
        return _FEW_WIDE
    for average, tile in _MANY.items():
        if num_pairs >= average * num_experts:
            return tile._replace(columns=tile.columns // 2 if gated and tile.columns == 128 else tile.columns)
    return _FEW[gated]


def places_of(experts: Tensor, num_experts: int) -> Places:
    """Shapes: experts [T, k] i64. Sync: never."""
    num_rows, pairs = len(experts), experts.numel()
    if num_rows <= FEW_ROWS:
        return Places(experts, experts, experts)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    listed = torch.empty((num_experts, num_rows), dtype=torch.int32, device=experts.device)
    if runs_hopper(experts.device) and num_experts <= _MOST_EXPERTS:
        pointers = experts.data_ptr(), counts.data_ptr(), listed.data_ptr(), None, None
        work = _Lists(*pointers, num_rows, num_experts, 0, 0)
        _lists("list_places", experts.shape[1], experts.device).launch(ceil_div(num_rows, _LISTED_ROWS), (work,))
    else:
        group_kernel[(num_experts,)](
            experts, counts, listed, num_rows, pairs, BLOCK=_GROUP_BLOCK, **dependent_launch(experts.device, num_rows)
        )
    return Places(experts, counts, listed)


class _Lists(ctypes.Structure):
    """`Work` of expert_lists.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("experts", "counts", "listed", "x", "out")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_experts", "x_stride", "pieces")),
    )


@functools.cache
def _lists(name: str, top_k: int, device: torch.device) -> CudaKernel:
    code = CudaCode(Path(__file__).parent / "cuda" / "expert_lists.cu", (f"TOP_K={top_k}",))
    return CudaKernel(code, name, _LISTING_THREADS, 0)


def rows_by_expert(x: Tensor, places: Places) -> Tensor:
    """The row of each listed place, those of an expert side by side: on Hopper. Rows have whole 16 bytes.

    Shapes: x [T, I] -> [T * k, I]. Sync: never.
    """
    (num_rows, top_k), size, experts = places.experts.shape, x.shape[1] * x.element_size(), len(places.listed)
    out = torch.empty((num_rows * top_k, x.shape[1]), dtype=x.dtype, device=x.device)
    stride = x.stride(0) * x.element_size()
    pointers = places.experts.data_ptr(), None, None, x.data_ptr(), out.data_ptr()
    work = _Lists(*pointers, num_rows, experts, stride // 16, size // 16)
    _lists("gather_rows", top_k, x.device).launch(ceil_div(num_rows, _LISTED_ROWS), (work,))
    return out


def multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    places: Places,
    first: bool,
    gated: bool,
    clamp: Clamp | None,
) -> Tensor:
    """The product of each place. `first`: right after the choice, and a row of x is that of its k places.

    Shapes: x [T, I] if first, else [T * k, I], weight [E, O, I], bias [E, O] -> [T * k, O], or [T * k, O / 2] if gated.
    Sync: never.
    """
    (num_experts, rows, size_k), pairs = weight.shape, places.experts.numel()
    (num_rows, top_k), size_n = places.experts.shape, rows // 2 if gated else rows
    tile = tile_of(pairs, num_experts, gated, x.element_size() > 2)
    out = torch.empty((pairs, size_n), dtype=x.dtype, device=x.device)
    tiles = min(pairs, pairs // tile.rows + num_experts) if places.are_listed else pairs
    multiply_kernel[(ceil_div(size_n, tile.columns), tiles)](
        x,
        weight,
        x if bias is None else bias,
        out,
        *places,
        x.stride(0),
        size_n,
        num_rows,
        top_k if first else 1,
        *(clamp or (1.0, 0.0)),
        SIZE_K=size_k,
        EXPERTS=num_experts,
        TOP_K=top_k,
        LISTED=places.are_listed,
        ALONE=num_rows == 1,
        FIRST=first,
        GATED=gated,
        BIASED=bias is not None,
        CLAMPED=clamp is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=min(max(next_power_of_2(size_k), 16), tile.most_k),
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_T=next_power_of_2(top_k),
        STAGES=tile.stages,
        num_warps=tile.warps,
        **dependent_launch(x.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows", "pairs"))
def group_kernel(
    experts_ptr: tl.tensor, counts_ptr: tl.tensor, places_ptr: tl.tensor, num_rows: int, pairs: int,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per expert: where it is chosen, ascending, and how often."""
    expert, count = tl.program_id(0), 0
    wait_for_inputs(PDL)
    for begin in range(0, pairs, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        mine = (tl.load(experts_ptr + place, mask=place < pairs, other=-1) == expert).to(tl.int32)
        rank = count + tl.cumsum(mine, axis=0) - 1
        tl.store(places_ptr + expert.to(tl.int64) * num_rows + rank, place, mask=mine > 0)
        count += tl.sum(mine, axis=0)
    tl.store(counts_ptr + expert, count)


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def multiply_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, out_ptr: tl.tensor, experts_ptr: tl.tensor,
    counts_ptr: tl.tensor, places_ptr: tl.tensor, x_stride: int, size_n: tl.tensor, num_rows: int, shared: int,
    alpha: float, limit: float, SIZE_K: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
    LISTED: tl.constexpr, ALONE: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    CLAMPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK_N columns and tile of BLOCK_M rows of one expert."""
    wait_for_choice(PDL, FIRST)
    if LISTED:
        expert, place, live, runs = listed_tile(counts_ptr, places_ptr, num_rows, EXPERTS, BLOCK_M, BLOCK_E)
    else:
        expert, place, live, runs = tile_of_place(experts_ptr, num_rows, TOP_K, ALONE, BLOCK_M, BLOCK_T)
    if not FIRST:
        wait(PDL)
    if runs:
        x_rows = x_ptr + (place // shared).to(tl.int64)[:, None] * x_stride
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside_n = n < size_n
        rows = size_n.to(tl.int64) * (2 if GATED else 1)  # of an expert's matrix
        first = expert.to(tl.int64) * rows
        matrix = weight_ptr + (first + n)[None, :] * SIZE_K
        up_matrix = matrix + size_n.to(tl.int64) * SIZE_K
        y = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in tl.range(0, (SIZE_K + BLOCK_K - 1) // BLOCK_K, num_stages=STAGES):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            mask = (k < SIZE_K)[:, None] & inside_n[None, :]
            x = tl.load(x_rows + k[None, :], mask=live[:, None] & (k < SIZE_K)[None, :], other=0.0)
            y = tl.dot(x, tl.load(matrix + k[:, None], mask=mask, other=0.0), y, input_precision="ieee")
            if GATED:
                up = tl.dot(x, tl.load(up_matrix + k[:, None], mask=mask, other=0.0), up, input_precision="ieee")
        if BIASED:
            biases = bias_ptr + first + n
            y = _plus(y, tl.load(biases, mask=inside_n, other=0.0))
            if GATED:
                up = _plus(up, tl.load(biases + size_n, mask=inside_n, other=0.0))
        y = gate_of(y, up, alpha, limit, GATED, CLAMPED)
        tl.store(out_ptr + place.to(tl.int64)[:, None] * size_n + n[None, :], y, mask=live[:, None] & inside_n[None, :])


@TritonKernel
def _plus(y: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Not `y + bias`: of a loop of one step the compiler would begin the product's sum with the bias.

    Shapes: [M, N], [N].
    """
    return tl.fma(y, tl.full(y.shape, 1.0, tl.float32), tl.broadcast_to(bias.to(tl.float32)[None, :], y.shape))


@TritonKernel
def wait_for_choice(PDL: tl.constexpr, FIRST: tl.constexpr) -> None:
    """What must be before a program reads which experts are chosen.

    The first product, gated or not, is the first kernel after the choice. It waits before it lets the next one begin.
    So the second product, and the sum after it, read the choice at once, as all that was written before it.
    """
    if FIRST:
        wait(PDL)
    let_next_begin(PDL)


@TritonKernel
def gate_of(
    y: tl.tensor, up: tl.tensor, alpha: float, limit: float, GATED: tl.constexpr, CLAMPED: tl.constexpr
) -> tl.tensor:
    """The product of a gate and what it multiplies; y itself where nothing is gated."""
    if CLAMPED:
        y = tl.minimum(y, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
        y = y / (1.0 + tl.exp(-alpha * y)) * (up + 1.0)
    elif GATED:
        y = y / (1.0 + tl.exp(-y)) * up
    return y


@TritonKernel
def listed_tile(
    counts_ptr: tl.tensor, places_ptr: tl.tensor, num_rows: int, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Its expert, its places, which of them there are, and whether there is any. Tiles of an expert follow one another.

    Shapes: [], [BLOCK_M], [BLOCK_M], [].
    """
    expert, rank, count, runs = tile_of_expert(counts_ptr, EXPERTS, BLOCK_M, BLOCK_E)
    rank += tl.arange(0, BLOCK_M)
    place = tl.load(places_ptr + expert.to(tl.int64) * num_rows + rank, mask=rank < count, other=0)
    return expert, place, rank < count, runs


@TritonKernel
def tile_of_expert(
    counts_ptr: tl.tensor, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The expert of a tile of ROWS rows, the rank of its first row, the expert's rows, and whether there is any."""
    each = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + each, mask=each < EXPERTS, other=0)
    tiles = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((ends <= tl.program_id(1)).to(tl.int32), axis=0)
    first = tl.program_id(1) - tl.sum(tl.where(each == expert, ends - tiles, 0), axis=0)
    return expert, first * ROWS, tl.sum(tl.where(each == expert, counts, 0), axis=0), expert < EXPERTS


@TritonKernel
def tile_of_place(
    experts_ptr: tl.tensor, num_rows: int, TOP_K: tl.constexpr, ALONE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """As `listed_tile`, of up to BLOCK_M rows of x: each is a row of the tile, if it has chosen the expert.

    ALONE: x has one row, so no place is compared with others.
    """
    row = tl.arange(0, BLOCK_M)
    expert = tl.load(experts_ptr + tl.program_id(1))
    if ALONE:
        live, runs = row == 0, expert >= 0
        place = tl.where(live, tl.program_id(1), 0)
    else:
        column = tl.arange(0, BLOCK_T)[None, :]
        places = row[:, None] * TOP_K + column
        chosen = tl.load(experts_ptr + places, mask=(row < num_rows)[:, None] & (column < TOP_K), other=-1)
        mine = chosen == expert
        live = tl.sum(mine.to(tl.int32), axis=1) > 0
        place = tl.sum(tl.where(mine, places, 0), axis=1)
        runs = tl.min(tl.where(live, row, BLOCK_M), axis=0) == tl.program_id(1) // TOP_K
    return expert, place, live, runs
