"""The kernel of `paged_attention` for chunks of prompts on Hopper, in CUDA C++.

Triton's kernel waits for a tile's scores, then for its softmax, then for its sums. Here one warpgroup's softmax runs
beside another one's products, and the copy engine brings pages (paged_chunks.cu).
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, box_map, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "paged_chunks.cu"
_PAIRS = 128  # of a row and a head, of a program
_KEYS = 128  # of a tile
_THREADS = 3 * 128  # one warpgroup copies, two multiply
_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIMS = (64, 128)
_PAGE_UNIT = 16  # a page is a multiple of
_MIN_ROWS = 64
_MANY_REQUESTS, _SHORT_ROWS = (
    16,
    128,
)  # of more requests with so few rows, a program's beginning is longer than its work
_STAGES = 6  # of 32 KB with heads of 128
_MAX_SPLITS = 8  # so many are combined by a kernel for few
_USUAL_KEYS = 16384  # for which keys are divided, if a request may have as many
_KEY_NS = 13.5  # that a program takes for a key (benchmarks/results/choosing/chunks_first_h200.json, as is the next)
_COMBINE_NS = 0.5 / 128  # to write and combine sums, for a row, head, split and column
_LOG2_E = 1.4426950408889634


class _Work(ctypes.Structure):
    """`Work` of paged_chunks.cu."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("stats", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("row_starts", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("scale_log2", ctypes.c_float),
        ("q_row_stride", ctypes.c_int),
        ("q_head_stride", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("num_requests", ctypes.c_int),
        ("num_splits", ctypes.c_int),
        ("least_keys", ctypes.c_int),
        ("by_head", ctypes.c_int),
    )


class Chunks(NamedTuple):
    """Rows of requests and their pages, as `paged_attention` describes them."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    row_starts: Tensor
    positions: Tensor
    max_rows: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.q.shape[1] // self.k_cache.shape[2]


class Division(NamedTuple):
    """Of the keys of each tile that has at least so many."""

    num_splits: int
    least_keys: int = 0


class Sums(NamedTuple):
    """What splits leave to be combined."""

    sums: Tensor  # [T, nq, splits, d] float32, not divided by their weights
    stats: Tensor  # [T, nq, splits, 2] float32: a score, sum of weights relative to it; WHOLE of rows that are in `out`


class Cut(NamedTuple):
    """How rows and keys are divided among programs."""

    cluster: int = 2  # programs with the same keys, which share the copies of them
    division: Division | None = None  # None: chosen from shapes

    def attend(self, chunks: Chunks, scale: float) -> tuple[Tensor, Sums | None]:
        """The rows' attention [T, nq, d], of which some may yet have to be combined. Sync: never."""
        q, (num_rows, num_heads, head_dim) = chunks.q, chunks.q.shape
        division = self.division or self.divided(chunks)
        out, splits, sums = torch.empty_like(q, memory_format=torch.contiguous_format), division.num_splits, None
        if splits > 1:
            sums = Sums(
                q.new_empty((num_rows, num_heads, splits, head_dim), dtype=torch.float32),
                q.new_empty((num_rows, num_heads, splits, 2), dtype=torch.float32),
            )
        box = self._box(chunks.k_cache.shape[1])
        maps = (_pages_map(cache, box) for cache in (chunks.k_cache, chunks.v_cache))
        programs = self.programs_of_head(chunks, division) * chunks.k_cache.shape[2]
        work = _work(chunks, out, sums, scale, division, self.goes_by_head(chunks, division))
        self._kernel(chunks).launch(programs, (*maps, work))
        return out, sums

    def programs_of_head(self, chunks: Chunks, division: Division) -> int:
        """Of one KV head."""
        return self.num_tiles(chunks) * self.cluster * division.num_splits

    def goes_by_head(self, chunks: Chunks, division: Division) -> bool:
        """Whether all programs of a head begin before those of the next: where they fill the GPU by themselves.

        Tiles of several requests are not in the order of their keys: each head could end with the longest.
        """
        programs = self.programs_of_head(chunks, division)
        return chunks.page_table.shape[0] == 1 and programs >= _num_multiprocessors(chunks.q.device)

    def num_tiles(self, chunks: Chunks) -> int:
        """Most tiles that the requests may have, whatever their rows are. A cluster takes one."""
        num_rows, num_requests = chunks.q.shape[0], chunks.page_table.shape[0]
        rows = _PAIRS // chunks.group * self.cluster
        in_any_way = (num_rows + num_requests * (rows - 1)) // rows
        return min(in_any_way, num_requests * ceil_div(chunks.max_rows, rows))

    def divided(self, chunks: Chunks) -> Division:
        """The fastest for the usual number of keys, where one request has all rows; and from where it pays."""
        num_rows, num_heads, head_dim = chunks.q.shape
        programs = ceil_div(num_rows, _PAIRS // chunks.group * self.cluster) * self.cluster * chunks.k_cache.shape[2]
        most_keys = chunks.page_table.shape[1] * chunks.k_cache.shape[1]
        splits = range(1, min(_MAX_SPLITS, ceil_div(most_keys, _KEYS)) + 1)
        multiprocessors = _num_multiprocessors(chunks.q.device)
        of_key = [ceil_div(programs * each, multiprocessors) / each * _KEY_NS for each in splits]
        to_combine = [num_rows * num_heads * head_dim * each * _COMBINE_NS if each > 1 else 0.0 for each in splits]
        usual = min(most_keys, _USUAL_KEYS)
        best = min(range(len(splits)), key=lambda i: usual * of_key[i] + to_combine[i])
        return Division(best + 1, math.ceil(to_combine[best] / (of_key[0] - of_key[best])) if best else 0)

    def _box(self, page_size: int) -> int:
        """Keys of a copy: within a page, and at least one copy of a tile for each program of a cluster."""
        return math.gcd(page_size, _KEYS // self.cluster)

    def _kernel(self, chunks: Chunks) -> CudaKernel:
        _, page_size, kv_heads, head_dim = chunks.k_cache.shape
        defines = (
            f"GROUP={chunks.group}",
            f"KV_HEADS={kv_heads}",
            f"HEAD_DIM={head_dim}",
            f"PAGE_SIZE={page_size}",
            f"BOX={self._box(page_size)}",
            f"STAGES={_STAGES}",
            f"CLUSTER={self.cluster}",
        )
        return _kernel(defines, head_dim, chunks.q.dtype, chunks.q.device)


CUT = Cut()


def takes_heads(dtype: torch.dtype, k_cache: Tensor) -> bool:
    """Whether the kernel is for heads of this type in such a cache: of 16 bits and a usual size, on Hopper."""
    (_, page_size, _, head_dim), of_a_type = k_cache.shape, dtype in _DTYPES and k_cache.dtype == dtype
    return runs_hopper(k_cache.device) and of_a_type and head_dim in _HEAD_DIMS and page_size % _PAGE_UNIT == 0


def takes(chunks: Chunks, scale: float, window: int | None, sinks: Tensor | None = None) -> bool:
    """Whether the kernel computes this and is meant for it: many rows of a request, no window, no sinks."""
    q, cache = chunks.q, chunks.k_cache
    if not takes_heads(q.dtype, cache) or chunks.max_rows < _MIN_ROWS or window is not None or scale <= 0:
        return False
    if sinks is not None:
        return False
    if chunks.page_table.shape[0] > _MANY_REQUESTS and chunks.max_rows <= _SHORT_ROWS:
        return False
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (q, cache, chunks.v_cache))
    return aligned and chunks.group <= _PAIRS and q.stride(0) % 8 == 0 and q.stride(1) % 8 == 0


def _work(chunks: Chunks, out: Tensor, sums: Sums | None, scale: float, division: Division, by_head: bool) -> _Work:
    return _Work(
        q=chunks.q.data_ptr(),
        out=out.data_ptr(),
        sums=None if sums is None else sums.sums.data_ptr(),
        stats=None if sums is None else sums.stats.data_ptr(),
        page_table=chunks.page_table.data_ptr(),
        row_starts=chunks.row_starts.data_ptr(),
        positions=chunks.positions.data_ptr(),
        scale_log2=scale * _LOG2_E,
        q_row_stride=chunks.q.stride(0),
        q_head_stride=chunks.q.stride(1),
        table_stride=chunks.page_table.stride(0),
        num_requests=chunks.page_table.shape[0],
        num_splits=division.num_splits,
        least_keys=division.least_keys,
        by_head=by_head,
    )


def _pages_map(cache: Tensor, box: int) -> ctypes.Structure:
    """Boxes of whole keys of one head, in the order [8 keys][64 columns][8][64]: see paged_chunks.cu."""
    _, _, kv_heads, head_dim = cache.shape
    eights = cache.view(-1, 8, kv_heads * head_dim // 64, 64).transpose(1, 2)
    return box_map(eights, (box // 8, head_dim // 64, 8, 64))


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _kernel(defines: tuple[str, ...], head_dim: int, dtype: torch.dtype, device: torch.device) -> CudaKernel:
    code = CudaCode(SOURCE, defines, (("attention_products.h", products_header(head_dim, dtype)),))
    shared = _STAGES * _KEYS * head_dim * dtype.itemsize
    return CudaKernel(code, "attention_of_chunks", _THREADS, shared)


def products_header(head_dim: int, dtype: torch.dtype) -> str:
    """The text of `attention_products.h`: products of 64 pairs with keys, and of their weights with values."""
    kind, most = ("bf16", 2.0**30) if dtype == torch.bfloat16 else ("f16", 2.0**14)
    scores, sums = _KEYS // 2, head_dim // 2
    return f"""
constexpr float MOST = {most}f;  // that a thread's weights of a tile sum up to: {kind} has more

__device__ __forceinline__ void multiply_keys(float (&sums)[{scores}], const u32* q, u64 keys, bool add) {{
    asm volatile(
        "{{ .reg .pred add; setp.ne.b32 add, %{scores + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{_KEYS}k16.f32.{kind}.{kind} {{{_numbers(scores)}}}, "
        "{{{_numbers(4, scores)}}}, %{scores + 4}, add, 1, 1, 0; }}"
        : {_outputs(scores)}
        : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(keys), "r"(static_cast<int>(add)));
}}

// Values have a row for each key, across which they are read.
__device__ __forceinline__ void multiply_values(float (&sums)[{sums}], const u32* weights, u64 values) {{
    asm volatile(
        "{{ .reg .pred add; setp.ne.b32 add, %{sums + 5}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{head_dim}k16.f32.{kind}.{kind} {{{_numbers(sums)}}}, "
        "{{{_numbers(4, sums)}}}, %{sums + 4}, add, 1, 1, 1; }}"
        : {_outputs(sums)}
        : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values), "r"(1));
}}

__device__ __forceinline__ u32 round2(float low, float high) {{
    u32 both;
    asm("cvt.rn.{kind}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}}
"""


def _numbers(count: int, first: int = 0) -> str:
    return ", ".join(f"%{first + i}" for i in range(count))


def _outputs(count: int) -> str:
    return ", ".join(f'"+f"(sums[{i}])' for i in range(count))
