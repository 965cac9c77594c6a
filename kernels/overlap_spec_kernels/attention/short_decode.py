"""The kernel of `decode_attention` for few requests with few keys, on Hopper, in CUDA C++ (short_decode.cu).

A short page table has room for few keys, or a window leaves few. Attention to these takes as long as its steps wait for
each other. In the other kernels splits combine through global memory and a counter, which is most of it; here the
programs of a cluster send each other their sums.

How a request's keys are divided, and so how its sums are rounded, follows from the number of requests, as in the other
kernels, and from the width of the page table; not from the rows of a request. A window of one request that has twice
the rows a program has places for goes as two, the second behind the first one's keys.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div
from overlap_spec_kernels.norm.norm_heads import HeadNorms
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "short_decode.cu"
_WARPS = 4
_STAGES = {64: 3, 128: 3, 256: 2}  # by head size: of 8 KB a warp with 128; with q, new rows and inbox 116 of 227 KB
_FEW_HEADS, _FEW_STAGES = 4, 2  # KV heads of one request with norms, beside which there is room for a linear's program
_PAIRS = 16  # of a row and a head, of a program
_CHUNK = 16  # keys that a warp attends to at once; a page is a multiple of it
_MOST_KEYS = 2048  # with more, reading keys takes longer than combining sums: the other kernels read faster
_MOST_ROWS = 32  # the next kernel begins after all keys are asked for, which does not pay with more rows
_CLUSTERS = (8, 4, 2)
# By head size: with more, smaller clusters are faster (choosing/short_decode_h200.txt).
_PROGRAMS = {64: 128, 128: 64, 256: 64}
_MOST_PROGRAMS = 128  # one for each multiprocessor
_LOG2_E = 1.4426950408889634


class _Work(ctypes.Structure):
    """`Work` of short_decode.cu."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("prefix", ctypes.c_void_p),
        ("mask", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("scale_log2", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("qkv_stride", ctypes.c_int),
        ("table_stride", ctypes.c_int),
        ("table_columns", ctypes.c_int),
    )


class Step(NamedTuple):
    """New rows of requests and their pages, as `decode_attention` describes them."""

    qkv: Tensor
    cos_sin: Tensor
    positions: Tensor
    page_table: Tensor
    k_cache: Tensor
    v_cache: Tensor

    @property
    def width(self) -> int:
        """Rows of a request."""
        return self.qkv.shape[0] // self.page_table.shape[0]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        _, _, kv_heads, head_dim = self.k_cache.shape
        return self.qkv.shape[1] // (kv_heads * head_dim) - 2

    @property
    def capacity(self) -> int:
        """Keys that the page table has room for."""
        return self.page_table.shape[1] * self.k_cache.shape[1]


class Tree(NamedTuple):
    """The rows of a step are columns of trees, as `tree_windows` describes them."""

    prefix: Tensor  # [B] i64
    mask: Tensor  # [B, W, 1] i64

    def of(self, columns: slice) -> Tree:
        """Some columns of one request's tree, or all of every request's."""
        return Tree(self.prefix, self.mask[:, columns])


def takes(step: Step, window: int | None, sinks: Tensor | None = None) -> bool:
    """Whether the kernel computes this and is meant for it. Shapes alone decide: a captured step has one kernel."""
    most_keys = step.capacity if window is None else min(window, step.capacity)
    if not runs_hopper(step.qkv.device) or most_keys > _MOST_KEYS or sinks is not None:
        return False
    (_, page_size, _, head_dim), dtypes = step.k_cache.shape, {step.qkv.dtype, step.k_cache.dtype}
    if dtypes != {torch.bfloat16} or step.cos_sin.dtype != torch.float32:
        return False
    if head_dim not in _STAGES or page_size % _CHUNK:
        return False
    read_by_16_bytes = (step.qkv, step.cos_sin, step.k_cache, step.v_cache)
    aligned = step.qkv.stride(0) % 8 == 0 and all(tensor.data_ptr() % 16 == 0 for tensor in read_by_16_bytes)
    few = step.width * step.group <= _PAIRS and step.qkv.shape[0] <= _MOST_ROWS and step.width <= most_keys
    return aligned and few and cluster_size(step) is not None


def parts_of(step: Step) -> tuple[Step, ...]:
    """The step, or the two halves of one request's window."""
    most = _PAIRS // step.group
    if step.page_table.shape[0] > 1 or not most < step.width <= 2 * most:
        return (step,)
    halves = slice(0, most), slice(most, step.width)
    return tuple(step._replace(qkv=step.qkv[rows], positions=step.positions[rows]) for rows in halves)


def cluster_size(step: Step) -> int | None:
    """Programs that share a request's keys for a KV head: as many as pays. None: too many requests.

    It halves where requests double, so steps of 1, 2, 4, .. requests load the kernels of every batch size.
    """
    units, most = step.page_table.shape[0] * step.k_cache.shape[2], _PROGRAMS[step.k_cache.shape[3]]
    size = next((size for size in _CLUSTERS if units * size <= most), _CLUSTERS[-1])
    return size if units * size <= _MOST_PROGRAMS else None


def attend(
    parts: Sequence[Step], scale: float, read_before_wait: bool, norms: HeadNorms | None = None,
    window: int | None = None, tree: Tree | None = None,
) -> Tensor:  # fmt: skip
    """Write the rows' k and v, and attend, as `decode_attention`, or `tree_windows`. Shapes: -> [T, nq * d].

    Sync: never.
    """
    first, counts = parts[0], [len(part.qkv) for part in parts]
    _, _, kv_heads, head_dim = first.k_cache.shape
    out = first.qkv.new_empty((sum(counts), kv_heads * first.group * head_dim))
    begin = 0
    for part, rows in zip(parts, out.split(counts), strict=True):  # keys of a part before are written until the wait
        own = None if tree is None else tree.of(slice(begin, begin + part.width))
        _attend(part, rows, scale, read_before_wait and part is first, norms, window, own, begin)
        begin += part.width
    return out


def _attend(
    step: Step, out: Tensor, scale: float, read_before_wait: bool, norms: HeadNorms | None, window: int | None,
    tree: Tree | None, first: int,
) -> None:  # fmt: skip
    """`first`: of a tree's columns. Shapes: out [T, nq * d]."""
    num_requests, (_, page_size, kv_heads, head_dim) = step.page_table.shape[0], step.k_cache.shape
    size, stages = cluster_size(step), _STAGES[head_dim]
    assert size is not None, "`takes` is asked first"
    if norms is not None and num_requests * kv_heads <= _FEW_HEADS:
        stages = min(stages, _FEW_STAGES, ceil_div(step.capacity, _CHUNK * _WARPS * size))  # of a warp's chunks
    defines = (
        f"WIDTH={step.width}",
        f"GROUP={step.group}",
        f"KV_HEADS={kv_heads}",
        f"HEAD={head_dim}",
        f"PAGE_SIZE={page_size}",
        f"WARPS={_WARPS}",
        f"STAGES={stages}",
        f"CLUSTER={size}",
        f"WINDOW={0 if window is None or window >= step.capacity else window}",
        f"READ_BEFORE_WAIT={int(read_before_wait)}",
        f"NORMED={0 if norms is None else 8 * norms.query.element_size()}",
        f"TREE={int(tree is not None)}",
        f"FIRST={0 if tree is None else first}",
    )
    optional = (*(tree or (None, None)), *((None, None) if norms is None else (norms.query, norms.key)))
    work = _Work(
        *(None if tensor is None else tensor.data_ptr() for tensor in (*step, out, *optional)),
        eps=0.0 if norms is None else norms.eps,
        scale_log2=scale * _LOG2_E,
        qkv_stride=step.qkv.stride(0),
        table_stride=step.page_table.stride(0),
        table_columns=step.page_table.shape[1],
    )
    _kernel(defines, head_dim, stages).launch(num_requests * kv_heads * size, (work,))


@functools.cache
def _kernel(defines: tuple[str, ...], head_dim: int, stages: int) -> CudaKernel:
    """With q, k and v of the new rows, the ring, and the inbox in shared memory."""
    heads = 2 * _CHUNK * head_dim
    shared = 3 * heads + _WARPS * stages * 2 * heads + 2 * heads
    return CudaKernel(CudaCode(SOURCE, defines), "short_decode", 32 * _WARPS, shared)
