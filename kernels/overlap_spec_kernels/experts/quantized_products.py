"""Products of rows with the matrices of their experts, as `products.py` has them, in 8 and 4 bits.

W's rows are the rows of a product, and rows of x its columns. So W is widened in registers, once in a program however
many rows of x it has, and is an operand of `wgmma` there. Its columns are added up 16 at a time in their order, by
tiles of all sizes. Two values are widened at once: a conversion of each would take longer than memory takes to bring
it. Of gate and up a program has rows in turn, so that tiles of 64 rows, the smallest that `wgmma` takes, are many.

Float8 in blocks has kernels in CUDA C++ with the same bits. An expert of few rows has `quantized_streams.py`. From 64
rows of an expert on, `expert_tiles.cu` takes as many as there are: tiles of Triton's have a power of 2.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.experts.products import (
    Clamp,
    Places,
    Tile,
    gate_of,
    listed_tile,
    rows_by_expert,
    tile_of_expert,
    tile_of_place,
    wait_for_choice,
)
from overlap_spec_kernels.experts.quantized_streams import (
    multiply_few,
    multiply_listed,
    streams_gate,
    streams_listed,
)
from overlap_spec_kernels.experts.stacks import QuantizedStack
from overlap_spec_kernels.language import tl, wait
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2
from overlap_spec_kernels.linear.call import num_multiprocessors
from overlap_spec_kernels.linear.packing import of_8_bits, widened
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper, tensor_map

# Rows of x, and of W, of gate and up together: `wgmma` takes 64 or more. A step of the loop is a run of columns.
_WIDE = Tile(16, 32, 128, 4, 2)  # float32
_FEW = {True: Tile(16, 64, 128, 4, 3), False: Tile(16, 64, 128, 4, 3)}  # by `gated`
_SOME = Tile(64, 128, 128, 4, 3)

TILES_SOURCE = Path(__file__).parent / "cuda" / "expert_tiles.cu"
_TILED = 64  # rows of an expert on average from which it multiplies
_NUMBERS = 64, 128, 144, 152, 160, 168, 176, 184, 192  # of rows of x, of which a tile takes the least that suffices
_SLICES, _STAGES, _PIECE = 1, 3, 96  # of 16 columns that are widened at once; of the ring; rows that are staged
_COLUMNS = {True: 64, False: 128}  # of the result, of a program, by whether it is gated
_CLUSTER, _GROUP = 2, 8  # programs that share rows of x; each brings a part, whole groups of rows


class ManyRows(NamedTuple):
    """A tile of many rows of x, of `multiply_many_kernel`."""

    rows: int
    rest: int
    columns: int  # of W's rows, of gate and up together
    warps: int
    stages: int


MANY = ManyRows(128, 64, 128, 8, 3)
# By bits: rows of an expert on average from which a tile is used.
_AVERAGES: dict[int, dict[int, Tile | ManyRows]] = {8: {128: MANY, 32: _SOME}, 4: {32: _SOME}}


def quantized_tile(num_pairs: int, num_experts: int, gated: bool, bits: int, is_wide: bool = False) -> Tile | ManyRows:
    """`bits`: of a weight's value. `is_wide`: x is of float32."""
    if is_wide:
        return _WIDE
    fits = (tile for average, tile in _AVERAGES[bits].items() if num_pairs >= average * num_experts)
    return next(fits, _FEW[gated])


def multiply_quantized(
    x: Tensor, weight: QuantizedStack, bias: Tensor | None, places: Places, first: bool, gated: bool,
    clamp: Clamp | None,
) -> Tensor:  # fmt: skip
    """See `products.multiply`."""
    if first and gated and clamp is None and bias is None and streams_gate(x, weight, places.experts):
        return multiply_few(x, weight, places.experts)
    (num_experts, rows, size_k), pairs, packing = weight.shape, places.experts.numel(), weight.packing
    (num_rows, top_k), size_n = places.experts.shape, rows // 2 if gated else rows
    if clamp is None and bias is None and streams_listed(x, weight, places, gated):
        return multiply_listed(x, weight, places, gated, top_k if first else 1)
    out = torch.empty((pairs, size_n), dtype=x.dtype, device=x.device)
    tile = quantized_tile(pairs, num_experts, gated, packing.bits, x.element_size() > 2)
    if isinstance(tile, ManyRows):
        _multiply_many(x, weight, bias, out, places, top_k if first else 1, gated, clamp, tile)
        return out
    tiles = min(pairs, pairs // tile.rows + num_experts) if places.are_listed else pairs
    multiply_quantized_kernel[(ceil_div(rows, tile.columns), tiles)](
        x,
        weight.data,
        packing.scales,
        packing.scales if packing.zeros is None else packing.zeros,
        packing.scales.shape[2],
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
        BITS=packing.bits,
        GROUP=packing.group,
        SCALE_ROWS=packing.scale_rows,
        ZEROS=packing.zeros is not None,
        PART=packing.part,
        LISTED=places.are_listed,
        ALONE=num_rows == 1,
        FIRST=first,
        GATED=gated,
        BIASED=bias is not None,
        CLAMPED=clamp is not None,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_E=next_power_of_2(num_experts),
        BLOCK_T=next_power_of_2(top_k),
        STAGES=tile.stages,
        num_warps=tile.warps,
        **dependent_launch(x.device, num_rows),
    )
    return out


def _multiply_many(
    x: Tensor, weight: QuantizedStack, bias: Tensor | None, out: Tensor, places: Places, shared: int, gated: bool,
    clamp: Clamp | None, tile: ManyRows,
) -> None:  # fmt: skip
    (num_experts, rows, size_k), (pairs, size_n), packing = weight.shape, out.shape, weight.packing
    multiply_many_kernel[(ceil_div(rows, tile.columns), pairs // (tile.rows + tile.rest) + num_experts)](
        x,
        weight.data,
        packing.scales,
        packing.scales.shape[2],
        x if bias is None else bias,
        out,
        *places[1:],
        x.stride(0),
        size_n,
        len(places.experts),
        shared,
        *(clamp or (1.0, 0.0)),
        SIZE_K=size_k,
        EXPERTS=num_experts,
        GROUP=packing.group,
        SCALE_ROWS=packing.scale_rows,
        GATED=gated,
        BIASED=bias is not None,
        CLAMPED=clamp is not None,
        ROWS=tile.rows,
        REST=tile.rest,
        BLOCK_N=tile.columns,
        HALF=packing.part // 2,
        BLOCK_E=next_power_of_2(num_experts),
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


class _Tiles(ctypes.Structure):
    """`Work` of expert_tiles.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("scales", "counts", "listed", "out")),
        *((name, ctypes.c_int) for name in ("size_n", "num_rows", "chunks", "scale_columns", "scale_rows")),
    )


def takes_tiles(x: Tensor, gate_up: QuantizedStack, down: QuantizedStack, places: Places) -> bool:
    """Whether expert_tiles.cu multiplies them: float8 in blocks, of many rows. Shapes: x [T, I]."""
    known = (weight.packing for weight in (gate_up, down))
    is_known = all(each.bits == 8 and each.group == 128 and each.zeros is None for each in known)
    whole = all(size % 128 == 0 for size in down.shape[1:]) and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    are_many = places.experts.numel() >= _TILED * len(gate_up.data)
    return is_known and whole and are_many and x.dtype == torch.bfloat16 and places.are_listed and runs_hopper(x.device)


def multiply_tiles(x: Tensor, gate_up: QuantizedStack, down: QuantizedStack, places: Places) -> Tensor:
    """Both products of each place. Shapes: x [T, I], gate_up [E, 2 J, I], down [E, I, J] -> [T * k, I]. Sync: never."""
    (_, size, inner), pairs = down.shape, places.experts.numel()
    middle = x.new_empty(pairs, inner)
    _multiply_tiles(rows_by_expert(x, places), gate_up, middle, places, True)
    out = x.new_empty(pairs, size)  # where these rows of x were
    _multiply_tiles(middle, down, out, places, False)
    return out


def _multiply_tiles(x: Tensor, weight: QuantizedStack, out: Tensor, places: Places, gated: bool) -> None:
    """Write the products of rows that lie by expert: if gated so as well, else by place. Sync: never."""
    (num_experts, _, size_k), scales, size_n = weight.shape, weight.packing.scales, out.shape[1]
    read = (each.data_ptr() for each in (scales, places.counts, places.listed, out))
    sizes = size_n, len(places.experts), size_k // 128, scales.shape[2], weight.packing.scale_rows
    cluster = math.gcd(size_n // _COLUMNS[gated], _CLUSTER)
    maps = tensor_map(weight.data.view(-1, size_k), 64, 128), _maps_of(x, _NUMBERS, cluster)
    programs = num_multiprocessors(x.device) // cluster * cluster
    _tiles(gated, num_experts, cluster, x.device).launch(programs, (*maps, _Tiles(*read, *sizes)))


def _maps_of(x: Tensor, numbers: tuple[int, ...], cluster: int) -> ctypes.Structure:
    """`Maps` of expert_tiles.cuh."""

    class Maps(ctypes.Structure):
        _fields_ = (("opaque", ctypes.c_uint64 * 16 * len(numbers)),)

    boxes = (bytes(tensor_map(x, _copied(number, cluster) // cluster, 64)) for number in numbers)
    return Maps.from_buffer_copy(b"".join(boxes))


@functools.cache
def _tiles(gated: bool, num_experts: int, cluster: int, device: torch.device) -> CudaKernel:
    stage, staged = (_NUMBERS[-1] * 2 + 128) * 128, 2 * _PIECE * (_COLUMNS[gated] + 16)
    return CudaKernel(code_of_tiles(gated, num_experts, cluster), "expert_tiles", 3 * 128, _STAGES * stage + staged)


def code_of_tiles(gated: bool, num_experts: int, cluster: int) -> CudaCode:
    """What expert_tiles.cu is compiled from."""
    sizes = {"GATED": int(gated), "EXPERTS": num_experts, "MOST": _NUMBERS[-1], "PIECE": _PIECE}
    sizes |= {"SLICES": _SLICES, "STAGES": _STAGES, "CLUSTER": cluster}
    defines = tuple(f"{key}={value}" for key, value in sizes.items())
    return CudaCode(TILES_SOURCE, defines, (("wgmma.h", _wgmma_header(_NUMBERS, cluster)),))


def _copied(rows: int, cluster: int) -> int:
    """Rows that programs of a cluster bring, for `rows` that are multiplied."""
    return ceil_div(rows, _GROUP * cluster) * _GROUP * cluster


def _wgmma_header(numbers: tuple[int, ...], cluster: int) -> str:
    """The text of `wgmma.h`, which expert_tiles.cu includes: products of 64 rows of W with each number of rows of x."""
    products = "".join(_product(rows) for rows in numbers)
    size = "".join(f"live <= {rows} ? {i} : " for i, rows in enumerate(numbers[:-1]))
    copied = tuple(_copied(rows, cluster) for rows in numbers)
    return f"""{products}
constexpr int SIZES = {len(numbers)};
__device__ __forceinline__ int size_of(int live) {{ return {size}{len(numbers) - 1}; }}
__device__ __forceinline__ int rows_of(int size) {{ return {_by_size(numbers)}; }}
__device__ __forceinline__ int copied_of(int size) {{ return {_by_size(copied)}; }}
#define FOR_ROWS(do_) {" ".join(f"do_({rows})" for rows in numbers)}
"""


def _by_size(numbers: tuple[int, ...]) -> str:
    return "".join(f"size == {i} ? {rows} : " for i, rows in enumerate(numbers[:-1])) + f"{numbers[-1]}"


def _product(rows: int) -> str:
    sums = rows // 2
    registers, w = (", ".join(f"%{begin + i}" for i in range(n)) for begin, n in ((0, sums), (sums, 4)))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    return f"""
__device__ __forceinline__ void multiply(float (&sums)[{sums}], const u32 (&w)[4], u64 x, bool add) {{
    asm volatile(
        "{{ .reg .pred add; setp.ne.b32 add, %{sums + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{registers}}}, {{{w}}}, "
        "%{sums + 4}, add, 1, 1, 0; }}"
        : {operands} : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x), "r"(static_cast<int>(add)));
}}
"""


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def multiply_quantized_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, scales_ptr: tl.tensor, zeros_ptr: tl.tensor, scale_stride: int,
    bias_ptr: tl.tensor, out_ptr: tl.tensor, experts_ptr: tl.tensor,
    counts_ptr: tl.tensor, places_ptr: tl.tensor, x_stride: int, size_n: tl.tensor, num_rows: int, shared: int,
    alpha: float, limit: float, SIZE_K: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, PART: tl.constexpr, LISTED: tl.constexpr,
    ALONE: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK_N rows of W and tile of BLOCK_M rows of x of one expert.

    A step of the loop is a run of PART columns, whose bytes hold a value each, or two, of columns that are PART / 2
    apart (`linear/packing.py`).
    """
    wait_for_choice(PDL, FIRST)
    if LISTED:
        expert, place, live, runs = listed_tile(counts_ptr, places_ptr, num_rows, EXPERTS, BLOCK_M, BLOCK_E)
    else:
        expert, place, live, runs = tile_of_place(experts_ptr, num_rows, TOP_K, ALONE, BLOCK_M, BLOCK_T)
    if not FIRST:
        wait(PDL)
    if runs:
        rows = size_n.to(tl.int64) * (2 if GATED else 1)  # of an expert's matrix
        row = tl.minimum(tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), rows - 1)  # none is behind the last
        n = row
        if GATED:  # gate's and up's in turn
            n = row // 2 + row % 2 * size_n
        first = expert.to(tl.int64) * rows
        HALVES: tl.constexpr = 8 // BITS
        WIDTH: tl.constexpr = PART // HALVES  # columns of a product
        GROUPS: tl.constexpr = SIZE_K // GROUP if GROUP > 0 else 1
        matrix = weight_ptr + (first + n)[:, None] * (SIZE_K // HALVES) + tl.arange(0, WIDTH)[None, :]
        x_rows = x_ptr + (place // shared).to(tl.int64)[None, :] * x_stride + tl.arange(0, WIDTH)[:, None]
        scales = scales_ptr + expert.to(tl.int64) * GROUPS * scale_stride + n // SCALE_ROWS
        zeros = zeros_ptr + first * GROUPS + n
        is_read = live[None, :] | (BLOCK_M > 16)  # a large tile reads the row of place 0 instead of others
        y = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for run in tl.range(0, SIZE_K // PART, num_stages=STAGES):
            w = tl.load(matrix + run * WIDTH)
            part = y
            if GROUP > 0:
                part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            for half in tl.static_range(HALVES):
                k = run * PART + half * WIDTH
                x = tl.load(x_rows + k, mask=is_read, other=0.0)
                group = k // GROUP if GROUP > 0 else 0
                values = widened(w, half, zeros + group * rows, x.dtype, BITS, ZEROS)
                part = tl.dot(values, x, part, input_precision="ieee")
                if GROUP > 0 and (half == HALVES - 1 or GROUP < PART):
                    y += part * tl.load(scales + group * scale_stride)[:, None]
                    part = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
            if GROUP == 0:
                y = part
        if GROUP == 0:
            y *= tl.load(scales)[:, None]
        _finish(y, bias_ptr + first + n, out_ptr, place, live, size_n, alpha, limit, GATED, BIASED, CLAMPED, 1)


@TritonKernel
def _finish(
    y: tl.tensor, biases: tl.tensor, out_ptr: tl.tensor, place: tl.tensor, live: tl.tensor, size_n: tl.tensor,
    alpha: float, limit: float, GATED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr, RUN: tl.constexpr,
) -> None:  # fmt: skip
    """Add the biases, apply the gate, and store. Of gate and up there are RUN rows in turn.

    Shapes: y [N, M], biases [N], place, live [M].
    """
    if BIASED:
        y += tl.load(biases).to(tl.float32)[:, None]
    OUT: tl.constexpr = y.shape[0] // 2 if GATED else y.shape[0]
    result = y
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (OUT // RUN, 2, RUN, y.shape[1])), (0, 2, 3, 1)))
        result = tl.reshape(gate_of(gate, up, alpha, limit, GATED, CLAMPED), (OUT, y.shape[1]))
    column = tl.program_id(0) * OUT + tl.arange(0, OUT)
    to = out_ptr + place.to(tl.int64)[None, :] * size_n + column[:, None]
    tl.store(to, result, mask=live[None, :] & (column < size_n)[:, None])


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def multiply_many_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, scales_ptr: tl.tensor, scale_stride: int, bias_ptr: tl.tensor,
    out_ptr: tl.tensor, counts_ptr: tl.tensor, places_ptr: tl.tensor, x_stride: int, size_n: tl.tensor, num_rows: int,
    shared: int, alpha: float, limit: float, SIZE_K: tl.constexpr, EXPERTS: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, CLAMPED: tl.constexpr, ROWS: tl.constexpr,
    REST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, STAGES: tl.constexpr, HALF: tl.constexpr,
) -> None:  # fmt: skip
    """As `multiply_quantized_kernel` in 8 bits, one program per BLOCK_N rows of W and ROWS + REST rows of x.

    What W is widened to is an operand of all of them, though a tile of them has a power of 2. So an expert of some more
    than ROWS rows is read once. A step has its columns in two halves: one is widened while the other is multiplied.
    """
    expert, rank, count, runs = tile_of_expert(counts_ptr, EXPERTS, ROWS + REST, BLOCK_E)
    if runs:
        listed = places_ptr + expert.to(tl.int64) * num_rows
        own = rank + tl.arange(0, ROWS)
        place, live = tl.load(listed + own % count), own < count  # past its end a tile reads the expert's rows again
        rows = size_n.to(tl.int64) * (2 if GATED else 1)  # of an expert's matrix
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        if GATED:  # eight of gate's and up's in turn: a thread has a row of a product, and the eighth after it
            n = n // 16 * 8 + n % 8 + n // 8 % 2 * size_n
        n = tl.minimum(n, rows - 1)  # none is behind the last
        first = expert.to(tl.int64) * rows
        GROUPS: tl.constexpr = SIZE_K // GROUP if GROUP > 0 else 1
        k = tl.arange(0, HALF)
        matrix = weight_ptr + (first + n)[:, None] * SIZE_K + k[None, :]
        scales = scales_ptr + expert.to(tl.int64) * GROUPS * scale_stride + n // SCALE_ROWS
        x_rows = x_ptr + (place // shared).to(tl.int64)[None, :] * x_stride + k[:, None]
        y = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        own = rank + ROWS + tl.arange(0, REST)
        rest_place, rest_live = tl.load(listed + own % count), own < count
        rest_rows = x_ptr + (rest_place // shared).to(tl.int64)[None, :] * x_stride + k[:, None]
        rest = tl.zeros((BLOCK_N, REST), dtype=tl.float32)
        for begin in tl.range(0, SIZE_K, 2 * HALF, num_stages=STAGES):
            one = of_8_bits(tl.load(matrix + begin), x_ptr.dtype.element_ty)
            two = of_8_bits(tl.load(matrix + begin + HALF), x_ptr.dtype.element_ty)
            scale = tl.load(scales + begin // GROUP * scale_stride)[:, None] if GROUP > 0 else None
            if GATED:  # which order needs fewer registers was measured
                y = _with_step(y, one, two, x_rows + begin, scale)
            rest = _with_step(rest, one, two, rest_rows + begin, scale)
            if not GATED:
                y = _with_step(y, one, two, x_rows + begin, scale)
        if GROUP == 0:
            scale = tl.load(scales)[:, None]
            y *= scale
            rest *= scale
        biases = bias_ptr + first + n
        _finish(y, biases, out_ptr, place, live, size_n, alpha, limit, GATED, BIASED, CLAMPED, 8)
        _finish(rest, biases, out_ptr, rest_place, rest_live, size_n, alpha, limit, GATED, BIASED, CLAMPED, 8)


@TritonKernel
def _with_step(
    y: tl.tensor, one: tl.tensor, two: tl.tensor, x_rows: tl.tensor, scale: tl.tensor | None
) -> tl.tensor:  # fmt: skip
    """The sum with products of two halves of a step, which have a scale of their own if it is not None."""
    part = y
    if scale is not None:
        part = tl.zeros(y.shape, dtype=tl.float32)
    part = tl.dot(one, tl.load(x_rows), part, input_precision="ieee")
    part = tl.dot(two, tl.load(x_rows + one.shape[1]), part, input_precision="ieee")
    return part if scale is None else y + part * scale
