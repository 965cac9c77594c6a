"""Attention of rows of sequences on a CPU, in one call of a kernel in C++: rotation, writing of K and V, attention.

It computes what `rope_kv_write` and `paged_attention` do in float32. A row's result does not depend on the other rows
of the forward, to the bit.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from overlap_spec_kernels.launch import require

LANES = 16
LARGEST_HEAD = 256

_POINTERS = ("qkv", "cos_sin", "positions", "cache_rows", "row_starts", "pages", "k_cache", "v_cache", "queries", "out")
_SIZES = ("num_rows", "num_requests", "page_stride", "page_size", "num_heads", "num_kv_heads", "head_dim", "window")


class _Call(ctypes.Structure):
    """`Attention` of the C++ source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("threads", ctypes.c_int32),
    )


class RowAttention:
    """The compiled kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.paged_rows_attention
        self._run.argtypes = [ctypes.c_void_p]
        self._run.restype = None

    def takes(self, head_dim: int, cache: Tensor) -> bool:
        """Whether it can attend over this cache."""
        return head_dim % LANES == 0 and head_dim <= LARGEST_HEAD and cache.dtype == torch.float32 and not cache.is_cuda

    def __call__(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        cache_rows: Tensor,
        row_starts: Tensor,
        page_table: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        num_heads: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Write K and V of all rows, then let the row at position p attend to the keys 0..p of its request.

        Shapes: qkv [T, (n + 2 nkv) d] f32, cos_sin [positions, d] f32, positions, cache_rows [T] i64, row_starts
        [B + 1] i32, page_table [B, P] i32, caches [pages, size, nkv, d] f32 -> [T, n d].
        Raises: ValueError naming the argument.
        """
        _, page_size, num_kv_heads, head_dim = k_cache.shape
        require(self.takes(head_dim, k_cache) and k_cache.is_contiguous(), "k_cache", "float32, heads of 16 to 256")
        require(v_cache.dtype == k_cache.dtype and v_cache.is_contiguous(), "v_cache", "as k_cache")
        require(qkv.dtype == torch.float32 and qkv.is_contiguous(), "qkv", "contiguous float32")
        require(qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, "qkv", "[T, (n + 2 nkv) d]")
        require(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin", "contiguous float32")
        require(page_table.dtype == torch.int32 and page_table.stride(1) == 1, "page_table", "int32 with dense rows")
        require(row_starts.dtype == torch.int32, "row_starts", "int32")
        places = (positions, cache_rows)
        require(all(each.dtype == torch.int64 and each.is_contiguous() for each in places), "positions", "int64")
        num_rows = qkv.shape[0]
        queries, out = qkv.new_empty((2, num_rows, num_heads * head_dim)).unbind(0)
        tensors = (qkv, cos_sin, positions, cache_rows, row_starts, page_table, k_cache, v_cache, queries, out)
        sizes = (num_rows, len(row_starts) - 1, page_table.stride(0), page_size, num_heads, num_kv_heads, head_dim)
        call = _Call(*(t.data_ptr() for t in tensors), *sizes, window or 0, scale, torch.get_num_threads())
        self._run(ctypes.byref(call))
        return out
