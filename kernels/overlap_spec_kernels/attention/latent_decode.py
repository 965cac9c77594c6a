"""The kernels of `latent_attention` for few rows of each request, on Hopper, in CUDA C++.

latent_decode.cu attends to pieces of keys, latent_pieces.cu adds what it has found. Both compute what the kernels of
_latent_attention_kernel.py do, in the same order, so with the same bits: a row may be in a window of decode here, and
in a chunk of a prompt or a tree there.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "latent_decode.cu"
PIECES_SOURCE = SOURCE.with_name("latent_pieces.cu")
_RANK, _ROPE = 512, 64
_MOST_PAIRS = 80  # of a row and a head, in one request: their sums fill the registers of two warpgroups
_MOST_TOGETHER = 40  # more are divided between the warpgroups
_PART, _SPLIT_PART = 8, 16  # pairs of a program where pieces are few: the fewest, of one warpgroup and of two
_MOST_REQUESTS = 256  # whose lengths are in shared memory
_SHARED_BYTES = 227 * 1024
_BOX_BYTES = 64 * 128  # 64 columns of 64 keys
_MOST_BOXES = 24
_ADDED = 128  # numbers of a piece that a program adds
_BYTES_AT_ONCE = 4 * _ADDED + 128  # and its factors
_AT_ONCE = {1: 160, 2: 160, 3: 112, 4: 80}  # pieces that are brought together, by programs on a multiprocessor
_FEWEST_AT_ONCE = 64
_RUNS = 16  # of which a program's threads compute the factors
_LOG2_E = 1.4426950408889634


class _Work(ctypes.Structure):
    """`Work` of latent_decode.cu."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("cache", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("stats", ctypes.c_void_p),
        ("scale_log2", ctypes.c_float),
        ("q_row_stride", ctypes.c_int),
        ("q_head_stride", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("num_requests", ctypes.c_int),
        ("num_slots", ctypes.c_int),
    )


class _PiecesWork(ctypes.Structure):
    """`Work` of latent_pieces.cu."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("stats", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("num_requests", ctypes.c_int),
        ("num_slots", ctypes.c_int),
    )


class Windows(NamedTuple):
    """Rows of requests that have as many each, and their pages, as `latent_attention` describes them."""

    q: Tensor
    cache: Tensor
    page_table: Tensor
    positions: Tensor

    @property
    def width(self) -> int:
        """Rows of a request."""
        return len(self.q) // len(self.page_table)

    @property
    def pairs(self) -> int:
        """Of a row and a head, in one request."""
        return self.width * self.q.shape[1]

    @property
    def padded(self) -> int:
        """Pairs of a product, or two."""
        unit = 8 if self.pairs <= _MOST_TOGETHER else 16
        return ceil_div(self.pairs, unit) * unit


class Pieces(NamedTuple):
    """Into which keys are divided (latent_attention.py)."""

    unit: int
    sums: Tensor  # memory for what they find, float32
    stats: Tensor

    def num_slots(self, padded: int) -> int:
        """Pieces of one request that there is memory for."""
        return min(len(self.sums) // (padded * _RANK), len(self.stats) // (2 * padded))


def takes(windows: Windows, rank: int, pieces: Pieces) -> bool:
    """Whether the kernels compute this. Shapes alone decide: a captured step has one kernel."""
    q, cache = windows.q, windows.cache
    if not runs_hopper(q.device) or {q.dtype, cache.dtype} != {torch.bfloat16}:
        return False
    num_requests = len(windows.page_table)
    fits = windows.pairs <= _MOST_PAIRS and num_requests <= min(_MOST_REQUESTS, pieces.num_slots(windows.padded))
    aligned = all(stride % 8 == 0 for stride in q.stride()[:2]) and q.data_ptr() % 16 == cache.data_ptr() % 16 == 0
    return rank == _RANK and q.shape[2] == _RANK + _ROPE and fits and aligned


def attend(windows: Windows, scale: float, pieces: Pieces, num_programs: int, read_before_wait: bool) -> Tensor:
    """As `latent_attention`. Shapes: -> [T, n, rank]. Sync: never."""
    q, cache, page_table, positions = windows
    out = torch.empty((*q.shape[:2], _RANK), dtype=q.dtype, device=q.device)
    padded = windows.padded
    sizes = {"num_requests": len(page_table), "num_slots": pieces.num_slots(padded)}
    found = {"positions": positions.data_ptr(), "sums": pieces.sums.data_ptr(), "stats": pieces.stats.data_ptr()}
    work = _Work(
        q=q.data_ptr(),
        cache=cache.data_ptr(),
        page_table=page_table.data_ptr(),
        scale_log2=scale * _LOG2_E,
        q_row_stride=q.stride(0),
        q_head_stride=q.stride(1),
        table_stride=page_table.stride(0),
        **sizes,
        **found,
    )
    division = (
        f"WIDTH={windows.width}",
        f"HEADS={q.shape[1]}",
        f"UNIT={pieces.unit}",
        f"READ_BEFORE_WAIT={int(read_before_wait)}",
    )
    _attention(division, cache.shape[1], padded).launch(num_programs, (work,))
    parts = len(page_table) * padded * _RANK // _ADDED
    at_once = _at_once(ceil_div(parts, num_programs), page_table.shape[1] * cache.shape[1], pieces.unit)
    _addition(division, padded, at_once).launch(parts, (_PiecesWork(out=out.data_ptr(), **sizes, **found),))
    return out


def _at_once(num_programs: int, num_keys: int, unit: int) -> int:
    """Pieces that come to a program together, of so many on a multiprocessor.

    No more than there may be: memory that they leave is free for the kernel behind, which asks for weights early.
    """
    ends = (0, 16 * unit, 32 * unit, 512 * unit, num_keys)
    spans = zip(ends[:-1], ends[1:], (unit, 2 * unit, 4 * unit, 8 * unit), strict=True)
    most = sum(ceil_div(max(min(end, num_keys) - begin, 0), size) for begin, end, size in spans)
    return min(_AT_ONCE.get(num_programs, _FEWEST_AT_ONCE), ceil_div(most, _RUNS) * _RUNS)


def _boxes(padded: int) -> int:
    """That the ring has room for, beside queries, weights and what else a program keeps."""
    queries_and_weights = (9 + 2) * padded * 128
    others = 4096 + padded * 96
    return min((_SHARED_BYTES - queries_and_weights - others) // _BOX_BYTES, _MOST_BOXES)


@functools.cache
def _attention(division: tuple[str, ...], page_size: int, padded: int) -> CudaKernel:
    boxes = _boxes(padded)
    defines = (*division, f"PAGE_SIZE={page_size}", f"BOXES={boxes}")
    code = CudaCode(SOURCE, defines, (("latent_products.h", products_header(padded)),))
    return CudaKernel(code, "latent_decode", 384, (9 + 2) * padded * 128 + boxes * _BOX_BYTES)


@functools.cache
def _addition(division: tuple[str, ...], padded: int, at_once: int) -> CudaKernel:
    defines = (*division, f"PADDED={padded}", f"AT_ONCE={at_once}")
    return CudaKernel(CudaCode(PIECES_SOURCE, defines), "latent_pieces", _ADDED, at_once * _BYTES_AT_ONCE)


def products_header(padded: int) -> str:
    """The text of `latent_products.h`: products of 64 keys, or columns of values, with all pairs and with a part."""
    is_split = padded > _MOST_TOGETHER
    part = _SPLIT_PART if is_split else _PART
    sizes = f"constexpr int PADDED = {padded}, PART = {part};\n"
    return sizes + "".join(_products(pairs, pairs // 2 if is_split else pairs) for pairs in sorted({part, padded}))


def _products(pairs: int, of_keys: int) -> str:
    return f"""
__device__ __forceinline__ void multiply_keys(float (&sums)[{of_keys // 2}], u64 keys, u64 q, bool add) {{
    {_product(of_keys, "0")} "l"(keys), "l"(q), "r"(static_cast<int>(add)));
}}

// Values have a row for each key, across which they are read.
__device__ __forceinline__ void multiply_values(float (&sums)[{pairs // 2}], u64 values, u64 weights) {{
    {_product(pairs, "1")} "l"(values), "l"(weights), "r"(1));
}}
"""


def _product(pairs: int, across: str) -> str:
    """Up to its inputs."""
    count = pairs // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(sums[{i}])' for i in range(count))
    return f"""asm volatile(
        "{{ .reg .pred add; setp.ne.b32 add, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{pairs}k16.f32.bf16.bf16 {{{registers}}}, "
        "%{count}, %{count + 1}, add, 1, 1, {across}, 0; }}"
        : {outputs} :"""
