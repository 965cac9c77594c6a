"""The kernel of quantised weights in fragment order for 9 rows of x or more, in CUDA C++: products of warpgroups.

64 rows of W are the left operand of a product, converted in registers while the product before it runs, and all rows of
x the right one. Warpgroups do not wait for each other, so that one multiplies while another one converts. (In Gluon all
warps of a program wait for each other at every stage.)

Of a weight in 8 bits, more than 128 rows of x are several blocks of rows, which take W from the L2 cache one after
another. W is converted for each of them. With very many rows that takes longer than to write W in 16 bits once, which a
BLAS then multiplies. (Of 4 bits it was not measured where that begins.)
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div, shared_zeros
from overlap_spec_kernels.linear.call import Call, num_columns, num_multiprocessors
from overlap_spec_kernels.linear.fragments import TILE_COLUMNS, TILE_ROWS
from overlap_spec_kernels.linear.packing import Order, Packing
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper, tensor_map

SOURCE = Path(__file__).parent / "cuda" / "packed_products.cu"
_LEAST_ROWS, _MOST_ROWS = 9, 128  # of x, in one block
_PADDED_ROWS = (32, 48, 64, 96, 128)
_MOST_OF_BLOCKS = 2048  # rows of x in 8 bits; with more, W in 16 bits is about as fast
_MOST_IN_PARTS = 512  # rows of x if all results are in parts: with more, parts that are added in registers are faster
# Of blocks of rows, by warpgroups and rows: what a stage of one matrix takes, us. A result takes as long as one stage
# beside its own, and an exchange of parts so long: choosing/blocks_of_rows_h200.txt.
_STAGE_US = {(2, 96): 0.64, (2, 128): 0.73, (2, 160): 0.95, (3, 96): 0.84, (3, 128): 1.03}
_EXCHANGE_US = 10
# With one order of sums:
_LEAST_PADDED = 16  # rows of x
_FEW_ROWS = 8  # of x, that a product of a warp takes
_EARLY_OF_FEW = 4  # stages that warps ask for before x, of a K without parts: more keep other reads waiting
_LARGE = 8 << 20  # bytes of the least weight whose K has parts, in 16 bits: wide_linear.py takes it
_PARTS, _MULTIPROCESSORS = 4, 132  # of K, and of an H200
_FEW_ITEMS = 96  # tiles of two warpgroups that leave too many multiprocessors without work
_DEPTH = 128  # columns of K of a stage
_BLOCK = 64  # columns of the result for which the kernel leaves a sum of squares
_GROUPS = (0, 32, 64, 128)
_STAGED_BYTES = 2 * 16 * 68 * 4  # of a warpgroup's results on their way
_SHARED_BYTES = 228 << 10  # of a multiprocessor
_OWN_BYTES = 5 << 10  # most of a program's own variables, with what the system takes
_MOST_STAGES = 8
_LEAST_STAGES = 4  # of a part of K
_LEAST_FAST_STAGES = 10  # where a stage takes less than an exchange of parts: 8 bits and up to 32 rows of x
_MOST_COUNTERS = 4096
_TARGET = 128  # bytes, at whose multiples copies of scales begin
_ROWS_BEHIND_W = 64  # more rows of x take so long that they must not wait behind W: choosing/layers_h200.txt


class _Work(ctypes.Structure):
    """`Work` of packed_products.cu."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("weighted", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("num_rows", ctypes.c_int),
        ("size_n", ctypes.c_int),
        ("size_k", ctypes.c_int),
        ("num_items", ctypes.c_int),
        ("whole", ctypes.c_int),
        ("splits", ctypes.c_int),
        ("row_blocks", ctypes.c_int),
        ("num_squares", ctypes.c_int),
        ("residual_stride", ctypes.c_int),
        ("is_float", ctypes.c_int),
    )


class Form(NamedTuple):
    """What of a weight the kernel is compiled for."""

    bits: int
    group: int
    scale: str  # `ScaleType` of packed_values.cuh
    zeros: bool
    gated: bool

    @property
    def matrices(self) -> int:
        """Gate and up, or one."""
        return 2 if self.gated else 1

    @property
    def group_bytes(self) -> int:
        """Of a group's scales and zero points, of 16 rows."""
        return _SCALE_BYTES[self.scale] + 32 * self.zeros


_SCALE_BYTES = {"ROW_FLOAT32": 0, "FLOAT32": 64, "BFLOAT16": 32, "FLOAT16": 32, "BLOCK_FLOAT32": 16}
_GROUP_SCALES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}


def form_of(packing: Packing, gated: bool) -> Form | None:
    """None for a weight that the kernel does not take."""
    scale = _GROUP_SCALES.get(packing.scales.dtype)
    if packing.group == 0 or packing.scale_rows > 1:
        named = "BLOCK_FLOAT32" if packing.group else "ROW_FLOAT32"
        scale = named if packing.scales.dtype == torch.float32 else None
    if scale is None or packing.group not in _GROUPS:
        return None
    return Form(packing.bits, packing.group, scale, packing.zeros is not None, gated)


class PackedProducts(NamedTuple):
    """How a linear is divided among programs and stages, chosen from shapes alone."""

    rows: int  # of x, padded
    blocks: int  # of 64 columns of the result, of a warpgroup
    stages: int
    splits: int = 1  # parts of K, of results behind the first `whole`
    warpgroups: int = 2
    cluster: int = 1  # programs that share the copies of x
    per_sm: int = 1  # programs of a multiprocessor
    early: int = _MOST_STAGES  # stages of W that are asked for before x
    row_blocks: int = 1  # of `rows`
    by_warps: bool = False  # products of warps, instead of warpgroups: of 8 bits with scales of rows
    few: bool = False  # up to 8 rows of x, by warps: products of the other rows are left out
    whole: int = 0  # results of a cluster whose K has no parts

    @property
    def block_n(self) -> int:
        """Columns of the result for which there is a sum of squares."""
        return _BLOCK

    @property
    def columns(self) -> int:
        """Columns of the result of a program."""
        return self.blocks * self.warpgroups * _BLOCK

    def num_results(self, size_n: int) -> int:
        """Tiles of W times blocks of rows of x, of a cluster."""
        return ceil_div(ceil_div(size_n, self.columns), self.cluster) * self.row_blocks

    def num_items(self, size_n: int) -> int:
        """Those, or their parts of K."""
        return self.whole + (self.num_results(size_n) - self.whole) * self.splits

    def num_programs(self, weight: Tensor, gated: bool) -> int:
        """`per_sm` programs per multiprocessor, or fewer if there are fewer tiles."""
        clusters = num_multiprocessors(weight.device) * self.per_sm // self.cluster
        return min(self.num_items(num_columns(weight, gated)), clusters) * self.cluster

    def run(self, call: Call, programs: int, packing: Packing) -> None:
        """Launch. Sync: never."""
        form = form_of(packing, call.gated)
        assert form is not None
        kernel = self.kernel(form, call.x.device)
        programs = min(programs, kernel.clusters_at_once(self.cluster) * self.cluster)
        assert self.splits <= programs // self.cluster, "parts of K wait for each other, so they run at once"
        assert (_FEW_ROWS if self.few else self.rows * self.row_blocks) >= len(call.x)
        parts = self.parts(call, form)
        arguments = (*self.maps(call, packing, form), self.work(call, packing, parts))
        for each in ways_of_blocks(form) if len(call.x) > _MOST_ROWS else ():
            each.kernel(form, call.x.device).load()  # what other numbers of rows take, so that none of them waits
        kernel.launch(programs, arguments)

    def kernel(self, form: Form, device: torch.device) -> CudaKernel:
        """The kernel, which is compiled at the first call; numbers of parts have the same."""
        return _kernel(self._replace(splits=1, row_blocks=1, whole=0), form, device)

    def maps(self, call: Call, packing: Packing, form: Form) -> tuple[ctypes.Structure, ...]:
        """Of x, W, scales and zero points; what is not there, W's."""
        tiles, weight = self.columns // TILE_ROWS, call.weight.view(torch.int64)
        of_rows = weight.view(weight.shape[0] // TILE_ROWS, -1)
        columns = _DEPTH // TILE_COLUMNS * 16 * form.bits
        w_map = tensor_map(of_rows, tiles, columns, swizzle=0)
        groups = _DEPTH // form.group if form.group else 0
        of_groups = (packing.scales if groups else None, packing.zeros)
        rest = [w_map if each is None else _map_of_groups(each, tiles, groups) for each in of_groups]
        return tensor_map(call.x, self.rows // self.cluster, TILE_COLUMNS), w_map, *rest

    def parts(self, call: Call, form: Form) -> Tensor | None:
        """Room for the sums of parts of K. Shapes: -> [results, splits, ..] f32."""
        if self.splits == 1:
            return None
        items = (self.num_items(num_columns(call.weight, call.gated)) - self.whole) * self.cluster
        return call.x.new_empty((items, form.matrices * self.columns, self.rows), dtype=torch.float32)

    def work(self, call: Call, packing: Packing, parts: Tensor | None) -> ctypes.Structure:
        """The other arguments."""
        size_n = num_columns(call.weight, call.gated)
        assert call.out is not None
        residual, norm = call.residual, call.norm
        return _Work(
            out=call.out.data_ptr(),
            weighted=_address(call.weighted),
            sums=_address(call.sums),
            residual=_address(residual),
            norm=None if norm is None else norm.weight.data_ptr(),
            squares=_address(call.squares),
            row_scales=None if packing.group else packing.scales.data_ptr(),
            parts=_address(parts),
            counters=None if parts is None else split_counters(call.x.device).data_ptr(),
            eps=call.eps,
            num_rows=call.x.shape[0],
            size_n=size_n,
            size_k=call.x.shape[1],
            num_items=self.num_items(size_n),
            whole=self.whole,
            splits=self.splits,
            row_blocks=self.row_blocks,
            num_squares=call.num_squares,
            residual_stride=0 if residual is None else residual.stride(0),
            is_float=call.out.dtype == torch.float32,
        )

    def defines(self, form: Form) -> tuple[str, ...]:
        """For the compiler."""
        names = {
            "BITS": form.bits,
            "GROUP": form.group,
            "SCALE": form.scale,
            "ZEROS": int(form.zeros),
            "GATED": int(form.gated),
            "ROWS": self.rows,
            "BLOCKS": self.blocks,
            "WARPGROUPS": self.warpgroups,
            "STAGES": self.stages,
            "EARLY": min(self.early, self.stages),
            "CLUSTER": self.cluster,
            "PER_SM": self.per_sm,
            "BY_WARPS": int(self.by_warps),
            "FEW": int(self.few),
        }
        return tuple(f"{name}={value}" for name, value in names.items())

    def shared_bytes(self, form: Form) -> int:
        """Of the ring and of results on their way."""
        return self.stages * self.stage_bytes(form) + self.warpgroups * _STAGED_BYTES

    def stage_bytes(self, form: Form) -> int:
        """Of x, W, scales and zero points, in whole KiB."""
        of_tiles = _DEPTH * TILE_ROWS * form.bits // 8
        if form.group:
            of_tiles += _DEPTH // form.group * form.group_bytes
        num_bytes = self.rows * _DEPTH * 2 + form.matrices * self.columns // TILE_ROWS * of_tiles
        return ceil_div(num_bytes, 1024) * 1024

    def scale_bytes(self, form: Form) -> int:
        """Of a stage of one matrix."""
        return self.columns // TILE_ROWS * (_DEPTH // form.group if form.group else 0) * _SCALE_BYTES[form.scale]

    def with_stages(self, form: Form) -> PackedProducts | None:
        """As many stages as shared memory has room for; None if there is no room for two, or scales do not fit."""
        if self.scale_bytes(form) % _TARGET:
            return None
        room = _SHARED_BYTES // self.per_sm - _OWN_BYTES - self.warpgroups * _STAGED_BYTES
        stages = min(room // self.stage_bytes(form), 2 * _MOST_STAGES if self.by_warps else _MOST_STAGES)
        return self._replace(stages=stages) if stages > 1 else None


def packed_products_for(x: Tensor, weight: Tensor, gated: bool, packing: Packing) -> PackedProducts | None:
    """The division for these shapes; None where the kernel does not apply."""
    num_rows, form, size_n = x.shape[0], form_of(packing, gated), num_columns(weight, gated)
    if packing.order is not Order.FRAGMENTS or form is None or not _LEAST_ROWS <= num_rows <= _MOST_OF_BLOCKS:
        return None
    if x.dtype != torch.bfloat16 or x.stride(0) % 8 or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    if size_n % TILE_ROWS or not runs_hopper(x.device):
        return None
    shape, multiprocessors = (size_n, x.shape[1]), num_multiprocessors(x.device)
    if num_rows <= _MOST_ROWS:
        return _division(padded(num_rows), form, shape, multiprocessors)
    return _blocks_of_rows(num_rows, form, shape, multiprocessors)


def products_in_one_order(x: Tensor, weight: Tensor, gated: bool, packing: Packing) -> PackedProducts | None:
    """The division for any number of rows from 1 on, with parts of K that follow from W; None where it does not apply.

    Up to 16 rows are multiplied by warps.
    """
    form, size_n = form_of(packing, gated), num_columns(weight, gated)
    if packing.order is not Order.FRAGMENTS or form is None or form.group or x.shape[0] > _MOST_OF_BLOCKS:
        return None
    if x.dtype != torch.bfloat16 or x.stride(0) % 8 or x.data_ptr() % 16 or size_n % TILE_ROWS:
        return None
    if x.shape[0] > _MOST_ROWS:
        if (parts := parts_in_one_order(size_n, x.shape[1], gated)) > 1 and x.shape[0] > _MOST_IN_PARTS:
            return None
        return _blocks_of_rows(x.shape[0], form, (size_n, x.shape[1]), num_multiprocessors(x.device), parts)
    rows = next(rows for rows in (_LEAST_PADDED, *_PADDED_ROWS) if rows >= x.shape[0])
    cut = PackedProducts(rows, 1, 0, parts_in_one_order(size_n, x.shape[1], gated))
    by_warps, early = rows <= _LEAST_PADDED, 1 if rows > _ROWS_BEHIND_W else 2 * _MOST_STAGES
    if by_warps and cut.splits == 1:
        early = _EARLY_OF_FEW
    cut = cut._replace(by_warps=by_warps, few=x.shape[0] <= _FEW_ROWS, early=early)
    return (cut if cut.num_items(size_n) >= _FEW_ITEMS else cut._replace(warpgroups=1)).with_stages(form)


def parts_in_one_order(size_n: int, size_k: int, gated: bool) -> int:
    """Of K, for any number of rows: several of a large weight whose tiles leave most multiprocessors without work."""
    large = 2 * size_n * size_k >= _LARGE and size_k % _DEPTH == 0
    return _PARTS if large and not gated and ceil_div(size_n, 2 * _BLOCK) * _PARTS <= _MULTIPROCESSORS else 1


def padded(num_rows: int) -> int:
    """Rows of x that products take."""
    return next(rows for rows in _PADDED_ROWS if rows >= num_rows)


def _division(rows: int, form: Form, shape: tuple[int, int], multiprocessors: int) -> PackedProducts | None:
    """The fastest one on an H200: benchmarks/results/choosing/packed_products_h200.json.

    Three warpgroups, in pairs of programs that share x, where two would leave multiprocessors without work.
    """
    two = PackedProducts(rows, 1, 0).with_stages(form)
    three = None if form.gated else PackedProducts(rows, 1, 0, warpgroups=3, cluster=2).with_stages(form)
    shares = [0 if way is None else _share(way, *shape, multiprocessors) for way in (two, three)]
    cut = three if shares[1] > 1.1 * shares[0] else two
    if cut is not None and rows > _ROWS_BEHIND_W:
        cut = cut._replace(early=1)
    least = _LEAST_FAST_STAGES if form.bits == 8 and rows <= 32 else _LEAST_STAGES
    return None if cut is None else in_parts(cut, *shape, multiprocessors, least)


def in_parts(
    cut: PackedProducts, size_n: int, size_k: int, multiprocessors: int, least: int = _LEAST_STAGES
) -> PackedProducts:
    """The same with as many parts of K as all run at once, of at least so many stages."""
    at_once = multiprocessors * cut.per_sm // cut.cluster // cut._replace(splits=1).num_items(size_n)
    return cut._replace(splits=max(min(at_once, ceil_div(size_k, _DEPTH) // least), 1))


def _blocks_of_rows(
    num_rows: int, form: Form, shape: tuple[int, int], multiprocessors: int, parts: int = 0
) -> PackedProducts | None:
    """The one that takes the least time, of several blocks of rows.

    `parts`: of K, of all results; 0: as many as the last round has programs for.
    """

    def blocks(way: PackedProducts) -> PackedProducts:
        cut = way._replace(row_blocks=ceil_div(num_rows, way.rows))
        return cut._replace(splits=parts) if parts else with_full_rounds(cut, *shape, multiprocessors)

    cuts = [blocks(way) for way in ways_of_blocks(form)]
    return min(cuts, key=lambda cut: _time(cut, shape, form.matrices, multiprocessors), default=None)


@functools.cache
def ways_of_blocks(form: Form) -> tuple[PackedProducts, ...]:
    """Those for several blocks of rows, of which three warpgroups share x."""
    ways = (
        PackedProducts(rows, 1, 0, warpgroups=groups, cluster=groups - 1, early=1).with_stages(form)
        for groups, rows in _STAGE_US
        if form.bits == 8 and (groups == 2 or not form.gated)
    )
    return tuple(way for way in ways if way is not None)


def with_full_rounds(cut: PackedProducts, size_n: int, size_k: int, multiprocessors: int) -> PackedProducts:
    """The same with as many parts of K of the last round's results as all run at once."""
    clusters, results = multiprocessors * cut.per_sm // cut.cluster, cut.num_results(size_n)
    rest = results % clusters or clusters
    splits = max(min(clusters // rest, ceil_div(size_k, _DEPTH) // _LEAST_STAGES), 1)
    return cut._replace(splits=splits, whole=results - rest if splits > 1 else 0)


def _time(cut: PackedProducts, shape: tuple[int, int], matrices: int, multiprocessors: int) -> float:
    """What all programs take, us, on an H200."""
    (size_n, size_k), clusters = shape, multiprocessors // cut.cluster
    rounds = ceil_div(cut.num_items(size_n) - cut.whole, clusters)
    stages = (cut.whole // clusters + rounds / cut.splits) * (ceil_div(size_k, _DEPTH) + 1)
    return stages * matrices * _STAGE_US[cut.warpgroups, cut.rows] + (rounds * _EXCHANGE_US if cut.splits > 1 else 0)


def _share(cut: PackedProducts, size_n: int, size_k: int, multiprocessors: int) -> float:
    """Of the rows of W that multiprocessors can multiply at once, those that there are."""
    whole = in_parts(cut, size_n, size_k, multiprocessors)
    rounds = ceil_div(whole.num_items(size_n) * cut.cluster, multiprocessors)
    return size_n * whole.splits / (cut.columns * multiprocessors * rounds)


def _map_of_groups(grouped: Tensor, tiles: int, groups: int) -> ctypes.Structure:
    """For the groups of a stage. Shapes: grouped [O / 16, groups, ..]."""
    return tensor_map(grouped.flatten(1), tiles, groups * grouped[0, 0].numel(), swizzle=0)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def split_counters(device: torch.device) -> Tensor:
    """Programs that have left their part of a tile; zero between kernels. Shapes: -> [tiles, warpgroups] i32."""
    return shared_zeros(_MOST_COUNTERS, device)


@functools.cache
def _kernel(cut: PackedProducts, form: Form, device: torch.device) -> CudaKernel:
    return CudaKernel(code_of(cut, form), "packed_products", 128 * (1 + cut.warpgroups), cut.shared_bytes(form))


def code_of(cut: PackedProducts, form: Form) -> CudaCode:
    """What the kernel is compiled from."""
    return CudaCode(SOURCE, cut.defines(form), (("wgmma.h", wgmma_header(cut.rows)),))


def wgmma_header(rows: int) -> str:
    """The text of `wgmma.h`, which packed_products.cu includes; it depends on a product's width."""
    sums = rows // 2
    registers = ", ".join(f"%{i}" for i in range(sums))
    operands = ", ".join(f'"+f"(sums[{i}])' for i in range(sums))
    w = ", ".join(f"%{sums + i}" for i in range(4))
    return f"""
__device__ __forceinline__ void multiply(float (&sums)[{sums}], const u32 (&w)[4], u64 x) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16 {{{registers}}}, {{{w}}}, %{sums + 4}, 1, 1, 1, 0;"
        : {operands} : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(x));
}}
"""
