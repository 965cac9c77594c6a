"""The router of a mixture of experts: logits, softmax, and the experts of largest probability.

K is divided into parts by its length alone. Each part is a product of tensor cores, in float32 and never rounded, and
parts are added in their order, whichever kernel does it. So a row's logits have the same bits whatever rows are beside
it, and however many:

    few rows      one launch: programs for parts and tiles of rows and experts, then one for each row, which waits for
                  their numbers, adds, and chooses
    more rows     a program for each part and tile of rows and experts; then one for each row, which adds, and chooses
    many rows     a program for each tile of rows and experts, which adds as well; then one for each row, which chooses

Few rows of 2,048 columns with 128 or 512 experts have a kernel in CUDA C++ on Hopper, with the same bits: `route_few`.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.experts.sum_of_experts import Routing, in_tiles
from overlap_spec_kernels.language import let_next_begin, tl, wait, wait_for_inputs
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
    shared_words,
    warps_for,
)  # fmt: skip
from overlap_spec_kernels.norm.normed import Normed, Unscaled, scale_of_row
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

_FEW_ROWS, _MANY_ROWS = 32, 512  # up to which there is one launch; from which a program adds all parts
_BLOCK, _LARGE_BLOCK = 16, 64  # rows of x, and experts, of a program: the smallest product, and one of many rows
_MOST_ROWS, _LARGEST_BLOCK = 4096, 128  # from which programs are enough for the largest one
_PART, _MAX_EXPERTS = 128, 1024  # columns; of a router
_PROGRAMS = 128  # of a tile of few rows, where each has some parts; of `route_few`, of one row
_MOST_SHARE = 4  # parts of a program, whose weights it holds
FEW_SOURCE = Path(__file__).parent / "cuda" / "route_few.cu"
_SIZE, _EXPERTS, _MOST_CHOSEN, _MOST_SCALED = 2048, (128, 512), 16, 8  # that `route_few` has; rows that it scales
_PADDED, _THREADS, _CLUSTER = (1, 8, 16, 32), 256, 4  # rows that it is compiled for; programs of several in a cluster
_ABSENT = -1  # bits of a number that is not there yet: a NaN that no product is


class Common(NamedTuple):
    """An expert that all rows have, behind those that they choose."""

    expert: int
    share: Tensor | None = None  # [1, H]: its weight is the sigmoid of x times this; None: it is 1


Rows = Tensor | Unscaled  # [T, H]; what is unscaled the router scales, and writes


def route(
    x: Rows, weight: Tensor, top_k: int, normalised: bool, bias: Tensor | None = None, common: Common | None = None
) -> Routing:
    """Softmax over all experts, of which a row takes the `top_k` most probable; of equal ones those of lower index.

    `normalised`: a row's weights are divided by their sum. NaN counts as the largest probability. A row's result has
    the same bits whatever rows are beside it.
    Shapes: x [T, H], weight [E, H], bias [E], of logits -> [T, k] twice, k = top_k and `common`; E <= 1024. Raises:
    ValueError naming the argument. Sync: never.
    """
    require_router(x, weight)
    require(1 <= top_k <= weight.shape[0], "top_k", "1 to the number of experts")
    fits = bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.is_contiguous())
    require(fits, "bias", "[E], contiguous, the dtype of weight")
    require_common(written(x), common)
    if runs_triton(weight):
        return _route_triton(x, weight, top_k, normalised, bias, common)
    return route_reference(written(x), weight, top_k, normalised, bias, common)


def written(x: Rows) -> Tensor:
    """The rows, which a kernel may not have scaled yet. Shapes: -> [T, H]."""
    return x.rows if isinstance(x, Unscaled) else x


def rows_to_route(x: Normed, num_experts: int) -> Rows:
    """What a router takes: one row on a GPU is scaled by the router itself, where it adds up squares as others do.

    A few are by `route_few`. With more, the kernel before leaves no room for it, and the one that scales lies between.
    """
    if x.squares is None:
        return x.normalised()
    unscaled = Unscaled(x, torch.empty_like(x.values, memory_format=torch.contiguous_format))
    own, others = warps_of_choice(next_power_of_2(num_experts)), warps_for(next_power_of_2(x.weighted.shape[1]))
    one = len(x.weighted) == 1 and runs_triton(x.weighted) and own == others
    return unscaled if one or takes_few(unscaled, num_experts) else x.normalised()


def require_common(x: Tensor, common: Common | None) -> None:
    """Raises: ValueError naming the argument."""
    if common is not None and common.share is not None:
        share = common.share
        require(share.shape == (1, x.shape[1]) and share.is_contiguous(), "share", "[1, H], contiguous")
        require(share.dtype == x.dtype, "share", "the dtype of x")


def require_router(rows: Rows, weight: Tensor) -> None:
    """Raises: ValueError naming the argument."""
    x = written(rows)
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, H] with a contiguous last dimension")
    require(weight.shape[1:] == x.shape[1:] and weight.is_contiguous(), "weight", "[E, H], contiguous")
    require(weight.dtype == x.dtype and weight.shape[0] <= _MAX_EXPERTS, "weight", "the dtype of x, at most 1024 rows")


def router_logits_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Shapes: x [T, H], weight [E, H], bias [E] -> [T, E], float32 or wider."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    matrix = weight.to(wide)
    logits = in_tiles(lambda rows: F.linear(rows, matrix), x.to(wide), len(matrix))
    return logits if bias is None else logits + bias.to(wide)


def route_reference(
    x: Tensor, weight: Tensor, top_k: int, normalised: bool, bias: Tensor | None = None, common: Common | None = None
) -> Routing:
    logits = router_logits_reference(x, weight, bias)
    ranked = logits.softmax(1).sort(dim=1, descending=True, stable=True)
    weights, experts = ranked.values[:, :top_k].contiguous(), ranked.indices[:, :top_k].contiguous()
    if normalised:
        weights = weights / weights.sum(1, keepdim=True)
    return with_common(Routing(experts, weights), x, common)


def with_common(routing: Routing, x: Tensor, common: Common | None) -> Routing:
    """The choice of each row, and what all rows have. Shapes: routing [T, k], x [T, H] -> [T, k + 1], or as it is."""
    if common is None:
        return routing
    experts, weights = routing
    own = weights.new_ones(len(x), 1)
    if common.share is not None:
        own = F.linear(x.to(weights.dtype), common.share.to(weights.dtype)).sigmoid()
    return Routing(F.pad(experts, (0, 1), value=common.expert), torch.cat((weights, own), dim=1))


def _route_triton(
    x: Rows, weight: Tensor, top_k: int, normalised: bool, bias: Tensor | None = None, common: Common | None = None
) -> Routing:
    if takes_few(x, len(weight), top_k):
        return route_few(x, weight, top_k, normalised, common, bias)
    given = (weight if bias is None else bias,)
    return chosen_by(_route_kernel, x, weight, top_k, given, common, NORMALISED=normalised, BIASED=bias is not None)


class _Few(ctypes.Structure):
    """`Work` of route_few.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "squares", "weight", "bias", "share", "words", "rows", "experts")),
        *(("weights", ctypes.c_void_p), ("eps", ctypes.c_float), ("common", ctypes.c_int), ("num_rows", ctypes.c_int)),
    )


def takes_few(x: Rows, num_experts: int, top_k: int = 1) -> bool:
    """Whether `route_few` takes these: up to 8 rows that it scales, or several, of sizes in whose order it adds up."""
    of = x.of if isinstance(x, Unscaled) else Normed(x, x)
    rows, squares = of.weighted, of.squares
    least, most = (2, _FEW_ROWS) if squares is None else (1, _MOST_SCALED)
    fits = least <= len(rows) <= most and rows.shape[1] == _SIZE and num_experts in _EXPERTS and top_k <= _MOST_CHOSEN
    whole = rows.is_contiguous() and rows.data_ptr() % 16 == 0 and rows.dtype == torch.bfloat16
    whole &= squares is None or (len(squares) == _SIZE // 16 and squares.is_contiguous())
    return fits and whole and runs_hopper(rows.device)


def route_few(
    x: Rows, weight: Tensor, top_k: int, normalised: bool, common: Common | None, bias: Tensor | None = None,
    moving: tuple[CudaCode, ctypes.Structure] | None = None,
) -> Routing:  # fmt: skip
    """See `route`: of few rows, on Hopper. `moving`: a source that moves logits, and what it takes. Sync: never."""
    (_, rows, squares, eps), out = x if isinstance(x, Unscaled) else (Normed(x, x), None)
    (num_experts, size), device, count = weight.shape, weight.device, len(rows)
    experts = torch.empty((count, top_k + (common is not None)), dtype=torch.int64, device=device)
    weights, (expert, share) = torch.empty_like(experts, dtype=torch.float32), common or (0, None)
    given = rows, squares, weight, bias, share, row_parts(num_experts, device), out, experts, weights
    work = _Few(*(None if each is None else each.data_ptr() for each in given), eps, expert, count)
    code, arguments = (CudaCode(FEW_SOURCE), (work,)) if moving is None else (moving[0], (work, moving[1]))
    padded = next(most for most in _PADDED if count <= most)
    names = {"HIDDEN": size, "EXPERTS": num_experts, "TOP_K": top_k, "SHARED": common is not None, "ROWS": padded}
    names |= {"NORMALISED": normalised, "BIASED": bias is not None}
    programs = _PROGRAMS + 1 if count == 1 else num_experts // 4 + ceil_div(count, _CLUSTER) * _CLUSTER
    _few_kernel(code, tuple(names.items()), device).launch(programs, arguments)
    return Routing(experts, weights)


@functools.cache
def _few_kernel(code: CudaCode, names: tuple[tuple[str, int], ...], device: torch.device) -> CudaKernel:
    defines = tuple(f"{name}={int(value)}" for name, value in names)
    return CudaKernel(code._replace(defines=defines), "route_few", _THREADS, 0)


def chosen_by(
    kernel: TritonKernel, rows: Rows, weight: Tensor, top_k: int, arguments: tuple[Any, ...], common: Common | None,
    **constants: Any,
) -> Routing:  # fmt: skip
    """Launch a kernel that begins with `row_of_program`, and after its own arguments has what `add_common` takes.

    Shapes: x [T, H], weight [E, H] -> [T, top_k] twice, or one column more. Sync: never.
    """
    x, squares, out, eps = written(rows), None, None, 0.0
    if isinstance(rows, Unscaled) and len(x) == 1:
        (_, x, squares, eps), out = rows
    elif isinstance(rows, Unscaled):
        x.copy_(rows.of.normalised())
    (num_rows, size), num_experts = x.shape, len(weight)
    parts, tiles, is_alone = ceil_div(size, _PART), ceil_div(num_experts, _BLOCK), num_rows <= _FEW_ROWS
    share = min(next_power_of_2(parts * tiles // _PROGRAMS), _MOST_SHARE)
    partial = row_parts(parts * num_experts, x.device) if is_alone else _partial_logits(x, weight)
    columns = top_k if common is None else top_k + 1
    experts = torch.empty((num_rows, columns), dtype=torch.int64, device=x.device)
    weights = torch.empty((num_rows, columns), dtype=torch.float32, device=x.device)
    block, (expert, factors) = next_power_of_2(num_experts), common or (0, None)
    programs = tiles * ceil_div(parts, share) * ceil_div(num_rows, _BLOCK) if is_alone else 0
    kernel[(programs + num_rows,)](
        *(x, weight, partial, x.stride(0), num_rows, squares, out, eps),
        *arguments,
        experts,
        weights,
        factors,
        expert,
        SIZE_K=size,
        EXPERTS=num_experts,
        PARTS=parts if is_alone else len(partial),
        SHARE=share if is_alone else 0,
        SQUARES=0 if squares is None else len(squares),
        BLOCK_S=1 if squares is None else next_power_of_2(len(squares)),
        TOP_K=top_k,
        COMMON=0 if common is None else next_power_of_2(size),
        EARLY=columns,
        BLOCK=block,
        BLOCK_K=_PART,
        **constants,
        num_warps=warps_of_choice(block),
        **dependent_launch(x.device, num_rows),
    )
    return Routing(experts, weights)


def warps_of_choice(block: int) -> int:
    """So many that no two of them read a part: one might find it there, and the other not yet."""
    return min(max(block // 32, 1), 4)


@functools.cache
def row_parts(size: int, device: torch.device) -> Tensor:
    """Parts of few rows' logits, `size` of a row; between kernels all are absent. Shapes: -> [rows * size] f32."""
    return shared_words(_FEW_ROWS * size, device, _ABSENT).view(torch.float32)


def _partial_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Logits in parts, of many rows in one. Shapes: -> [parts, T, E] f32."""
    (num_rows, size), num_experts = x.shape, len(weight)
    parts, is_split, is_wide = ceil_div(size, _PART), num_rows < _MANY_ROWS, x.element_size() > 2
    block = _BLOCK if is_split or is_wide else _LARGE_BLOCK if num_rows < _MOST_ROWS else _LARGEST_BLOCK
    partial = torch.empty((parts if is_split else 1, num_rows, num_experts), dtype=torch.float32, device=x.device)
    router_logits_kernel[(ceil_div(num_experts, block), ceil_div(num_rows, block), len(partial))](
        *(x, weight, partial, x.stride(0), num_rows),
        SIZE_K=size,
        EXPERTS=num_experts,
        PARTS=1 if is_split else parts,
        BLOCK=block,
        BLOCK_K=_PART,
        num_warps=8 if block == _LARGEST_BLOCK else 4,
        num_stages=3 if block == _LARGEST_BLOCK else 4,
        **dependent_launch(x.device, num_rows),
    )
    return partial


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def router_logits_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, partial_ptr: tl.tensor, x_stride: int, num_rows: int,
    SIZE_K: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per BLOCK experts, BLOCK rows, and PARTS of K."""
    wait_for_inputs(PDL)
    expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    live, known = row < num_rows, expert < EXPERTS
    logits = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for index in range(0, PARTS):
        k = (tl.program_id(2) * PARTS + index) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = k < SIZE_K
        x = tl.load(x_ptr + row[:, None] * x_stride + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(
            weight_ptr + expert[None, :] * SIZE_K + k[:, None], mask=known[None, :] & inside[:, None], other=0.0
        )
        # Not `logits += ..`, which the compiler would make one product of all parts.
        logits = tl.fma(tl.dot(x, w, input_precision="ieee"), tl.full((BLOCK, BLOCK), 1.0, tl.float32), logits)
    partial_ptr += tl.program_id(2).to(tl.int64) * num_rows * EXPERTS
    tl.store(partial_ptr + row[:, None] * EXPERTS + expert[None, :], logits, mask=live[:, None] & known[None, :])


@TritonKernel
def row_of_program(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, partial_ptr: tl.tensor, x_stride: int, num_rows: int,
    squares_ptr: tl.tensor, rows_ptr: tl.tensor, eps: float, experts_ptr: tl.tensor, SIZE_K: tl.constexpr,
    EXPERTS: tl.constexpr, PARTS: tl.constexpr, SHARE: tl.constexpr, SQUARES: tl.constexpr, BLOCK_S: tl.constexpr,
    EARLY: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The row that this program chooses for, after it has waited for its inputs; below 0: none.

    SQUARES: sums of which x's one row is scaled; programs of the first experts write it. 0: x is as it is.
    SHARE: programs before those of rows compute so many parts each. Otherwise the parts are there.

    EARLY: places of a row, which of few rows are below 0 before the next kernel begins: it may wait for each by itself
    (`chosen` of hopper.cuh). Shapes: -> [].
    """
    program = tl.program_id(0)
    if SHARE > 0:
        RUNS: tl.constexpr = (PARTS + SHARE - 1) // SHARE
        TILES: tl.constexpr = (EXPERTS + 15) // 16
        row = program - (num_rows + 15) // 16 * TILES * RUNS
        if row < 0:
            expert = program // RUNS % TILES * 16 + tl.arange(0, 16)[None, None, :]
            part = program % RUNS * SHARE + tl.arange(0, SHARE)[:, None, None]
            k = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, :, None]
            inside = (k < SIZE_K) & (expert < EXPERTS)
            w = tl.load(weight_ptr + expert * SIZE_K + k, mask=inside, other=0.0)  # which no kernel writes
            wait_for_inputs(PDL)
            own = (program // (RUNS * TILES) * 16 + tl.arange(0, 16)[None, :, None]).to(tl.int64)
            k = part * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
            x = tl.load(x_ptr + own * x_stride + k, mask=(own < num_rows) & (k < SIZE_K), other=0.0)
            if SQUARES > 0:
                scale = scale_of_row(squares_ptr, num_rows, SQUARES, SIZE_K, eps, BLOCK_S)
                x = (x.to(tl.float32) * scale).to(x.dtype)
                first = program // RUNS % TILES == 0
                tl.store(rows_ptr + own * SIZE_K + k, x, mask=(own < num_rows) & (k < SIZE_K) & first)
            logits = tl.dot(x, w, input_precision="ieee")
            place = partial_ptr + (part * num_rows + own) * EXPERTS + expert
            tl.store(place, logits, mask=(own < num_rows) & (part < PARTS) & (expert < EXPERTS))
        else:
            wait(PDL)
            places_ptr = experts_ptr + row.to(tl.int64) * EARLY
            for place in tl.static_range(EARLY):
                tl.store(places_ptr + place, -1)
            tl.atomic_xchg(places_ptr, tl.full((), -1, tl.int64), sem="acq_rel")  # all are, for all programs
            tl.debug_barrier()  # one warp has written them: no other one may let the next kernel begin before
            let_next_begin(PDL)
    else:
        row = program
        wait_for_inputs(PDL)
    return row


@TritonKernel
def add_common(
    x_ptr: tl.tensor, x_stride: int, row: tl.tensor, num_rows: int, squares_ptr: tl.tensor, eps: float,
    experts_ptr: tl.tensor, weights_ptr: tl.tensor, share_ptr: tl.tensor, common: int, SIZE_K: tl.constexpr,
    TOP_K: tl.constexpr, COMMON: tl.constexpr, SQUARES: tl.constexpr, BLOCK_S: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The first place of a row, behind whose own experts one is written that all rows have.

    COMMON: columns of x that are read for its weight; 0: there is none. Shapes: -> [].
    """
    place = row.to(tl.int64) * TOP_K
    if COMMON > 0:
        place += row
        weight = 1.0
        if share_ptr is not None:
            column = tl.arange(0, COMMON)
            share = tl.load(share_ptr + column, mask=column < SIZE_K, other=0.0).to(tl.float32)
            x = tl.load(x_ptr + row.to(tl.int64) * x_stride + column, mask=column < SIZE_K, other=0.0)
            if SQUARES > 0:
                scale = scale_of_row(squares_ptr, num_rows, SQUARES, SIZE_K, eps, BLOCK_S)
                x = (x.to(tl.float32) * scale).to(x.dtype)
            x = x.to(tl.float32)
            weight = 1.0 / (1.0 + tl.exp(-tl.sum(x * share, axis=0)))
        tl.store(experts_ptr + place + TOP_K, common)
        tl.store(weights_ptr + place + TOP_K, weight)
    return place


@TritonKernel
def logits_of_row(
    partial_ptr: tl.tensor, row: tl.tensor, num_rows: int, EXPERTS: tl.constexpr, PARTS: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The logits of a row, whose parts other programs are still computing if SHARE > 0.

    The bits of a number show whether it is there: a count of programs would have to come after it. What is read is
    absent again. Shapes: -> [BLOCK].
    """
    expert = tl.arange(0, BLOCK)
    partial_ptr += row.to(tl.int64) * EXPERTS
    logits, missing = _sum_of_parts(partial_ptr, expert, num_rows, EXPERTS, PARTS, SHARE)
    if SHARE > 0:
        while missing > 0:
            logits, missing = _sum_of_parts(partial_ptr, expert, num_rows, EXPERTS, PARTS, SHARE)
        absent = tl.full((BLOCK,), -1, tl.int32).to(tl.float32, bitcast=True)
        for index in tl.static_range(PARTS):
            tl.store(partial_ptr + index * num_rows * EXPERTS + expert, absent, mask=expert < EXPERTS)
    return logits


@TritonKernel
def _sum_of_parts(
    partial_ptr: tl.tensor, expert: tl.tensor, num_rows: int, EXPERTS: tl.constexpr, PARTS: tl.constexpr,
    SHARE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """In their order, and whether any is absent. Shapes: -> [BLOCK], []."""
    logits, is_absent = tl.zeros(expert.shape, tl.float32), expert < 0
    for index in tl.static_range(PARTS):
        place = partial_ptr + index * num_rows * EXPERTS + expert
        if SHARE > 0:
            part = tl.load(place, mask=expert < EXPERTS, other=0.0, volatile=True)
            is_absent |= part.to(tl.int32, bitcast=True) == -1
        else:
            part = tl.load(place, mask=expert < EXPERTS, other=0.0)
        logits += part
    return logits, tl.max(is_absent.to(tl.int32), axis=0)


@TritonKernel
def ranked(values: tl.tensor, TOP_K: tl.constexpr, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Candidates, among them the TOP_K largest, and how many values come before each: equal ones by their index.

    Where all pairs fit into registers they are compared at once. Of more values each warp looks for the largest of its
    own, without waiting for another, and those are compared.
    Shapes: values [BLOCK], without NaN -> indices [C] i32, ranks [C] i32, which are right below TOP_K.
    """
    if BLOCK <= 128:
        index = tl.arange(0, BLOCK)
        rank = _rank_in_pairs(values, index)
    else:
        bits = (values + 0.0).to(tl.int32, bitcast=True)  # 0 has no sign
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # in the order of values
        COLUMNS: tl.constexpr = 64 if BLOCK == 256 else 128
        ROWS: tl.constexpr = BLOCK // COLUMNS
        PLACES: tl.constexpr = 16 if TOP_K <= 16 else COLUMNS
        tl.static_assert(TOP_K <= COLUMNS)
        key = tl.reshape(key, (ROWS, COLUMNS))
        column, place = tl.arange(0, COLUMNS)[None, :], tl.arange(0, PLACES)[None, :]
        best = tl.full((ROWS, PLACES), -(2**31), tl.int32)
        where = tl.zeros((ROWS, PLACES), tl.int32)
        for step in range(TOP_K):
            largest = tl.max(key, axis=1)[:, None]
            first = tl.min(tl.where(key == largest, column, COLUMNS), axis=1)[:, None]
            best, where = tl.where(place == step, largest, best), tl.where(place == step, first, where)
            key = tl.where(column == first, -(2**31), key)
        index = tl.reshape(where + tl.arange(0, ROWS)[:, None] * COLUMNS, (ROWS * PLACES,))
        rank = _rank_in_pairs(tl.reshape(best, (ROWS * PLACES,)), index)
    return index, rank


@TritonKernel
def _rank_in_pairs(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """See `ranked`. Shapes: [C]."""
    is_equal = values[:, None] == values[None, :]
    before = (values[:, None] > values[None, :]) | (is_equal & (index[:, None] < index[None, :]))
    return tl.sum(before.to(tl.int32), axis=0)


@TritonKernel.with_options(do_not_specialize=("num_rows", "common"))
def _route_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, partial_ptr: tl.tensor, x_stride: int, num_rows: int,
    squares_ptr: tl.tensor, rows_ptr: tl.tensor, eps: float, bias_ptr: tl.tensor, experts_ptr: tl.tensor,
    weights_ptr: tl.tensor, share_ptr: tl.tensor, common: int, SIZE_K: tl.constexpr, EXPERTS: tl.constexpr,
    PARTS: tl.constexpr, SHARE: tl.constexpr, SQUARES: tl.constexpr, BLOCK_S: tl.constexpr, TOP_K: tl.constexpr,
    COMMON: tl.constexpr, EARLY: tl.constexpr, NORMALISED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The choice of a row; NaN is before all others. Programs: see `row_of_program`."""
    row = row_of_program(
        x_ptr, weight_ptr, partial_ptr, x_stride, num_rows, squares_ptr, rows_ptr, eps, experts_ptr, SIZE_K, EXPERTS,
        PARTS, SHARE, SQUARES, BLOCK_S, EARLY, BLOCK_K, PDL,
    )  # fmt: skip
    if row >= 0:
        first = add_common(
            x_ptr, x_stride, row, num_rows, squares_ptr, eps, experts_ptr, weights_ptr, share_ptr, common, SIZE_K,
            TOP_K, COMMON, SQUARES, BLOCK_S,
        )  # fmt: skip
        logits = logits_of_row(partial_ptr, row, num_rows, EXPERTS, PARTS, SHARE, BLOCK)
        expert = tl.arange(0, BLOCK)
        known = expert < EXPERTS
        if BIASED:
            logits += tl.load(bias_ptr + expert, mask=known, other=0.0).to(tl.float32)
        highest = tl.max(tl.where(known, logits, float("-inf")), axis=0)
        exponentials = tl.where(known, tl.exp(logits - highest), 0.0)
        probabilities = exponentials / tl.sum(exponentials, axis=0)
        order = tl.where(probabilities == probabilities, probabilities, 2.0)
        index, rank = ranked(tl.where(known, order, -1.0), TOP_K, BLOCK)
        is_chosen = rank < TOP_K
        tl.store(experts_ptr + first + rank, index.to(tl.int64), mask=is_chosen)
        weights = tl.gather(probabilities, index, 0)
        if NORMALISED:
            weights = weights / tl.sum(tl.where(is_chosen, weights, 0.0), axis=0)
        tl.store(weights_ptr + first + rank, weights, mask=is_chosen)
