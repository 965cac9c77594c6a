"""Attention of rows of sequences on a CPU, in one call of a kernel in C++: rotation, writing of K and V, attention.

It computes what `rope_kv_write` and `paged_attention` do in float32, and for rows of trees what `tree_attention` does.
A row's result does not depend on the other rows of the forward, to the bit: a row of a tree has the result that it has
in a sequence of its ancestors.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import require
from overlap_spec_kernels.limits import MASK_BITS

LANES = 16
LARGEST_HEAD = 256


class NearKeys(NamedTuple):
    """The keys of rows of trees: a prefix of their request, and M other keys, ancestors before what follows them."""

    prefix: Tensor  # [B] i64: keys at places 0..prefix - 1, through the page table
    cache_rows: Tensor  # [B, M] i64
    positions: Tensor  # [B, M] i64
    mask: Tensor  # [B, R, ceil(M / 64)] i64: bit i % 64 of word i // 64: row r of the request attends to key i


class RowsArgument(ctypes.Structure):
    """`Rows` of the C++ source."""

    _fields_ = (
        ("positions", ctypes.c_void_p),
        ("cache_rows", ctypes.c_void_p),
        ("row_starts", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_requests", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("prefix", ctypes.c_void_p),
        ("near_rows", ctypes.c_void_p),
        ("near_positions", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("num_near", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
    )

    @classmethod
    def of(
        cls,
        positions: Tensor,
        cache_rows: Tensor,
        row_starts: Tensor,
        page_table: Tensor,
        page_size: int,
        near: NearKeys | None = None,
    ) -> RowsArgument:
        """`near`: of rows of trees. The structure holds addresses: its tensors must live as long as it is used.

        Shapes: positions, cache_rows [T] i64, row_starts [B + 1] i32, page_table [B, P] i32. Raises: ValueError.
        """
        require(page_table.dtype == torch.int32 and page_table.stride(1) == 1, "page_table", "int32 with dense rows")
        require(row_starts.dtype == torch.int32, "row_starts", "int32")
        places = (positions, cache_rows)
        require(all(each.dtype == torch.int64 and each.is_contiguous() for each in places), "positions", "int64")
        pointers = (each.data_ptr() for each in (*places, row_starts, page_table))
        rows = cls(*pointers, len(positions), len(row_starts) - 1, page_table.stride(0), page_size)
        if near is not None:
            rows.attend_near(near)
        return rows

    def attend_near(self, near: NearKeys) -> None:
        """Make the rows those of trees. Raises: ValueError."""
        for name, each in near._asdict().items():
            require(each.dtype == torch.int64 and each.is_contiguous(), f"near.{name}", "contiguous int64")
        num_requests, num_words = self.num_requests, near.mask.shape[-1]
        num_rows = self.num_rows // num_requests
        fits = near.mask.shape == (num_requests, num_rows, num_words) and num_rows * num_requests == self.num_rows
        require(fits and num_words * MASK_BITS >= near.cache_rows.shape[1], "near.mask", "[B, R, ceil(M / 64)]")
        require(near.prefix.shape == (num_requests,), "near.prefix", "[B]")
        require(near.cache_rows.shape == near.positions.shape, "near.positions", "[B, M], as near.cache_rows")
        require(len(near.cache_rows) == num_requests, "near.cache_rows", "[B, M]")
        addresses = (each.data_ptr() for each in (near.prefix, near.cache_rows, near.positions, near.mask))
        self.prefix, self.near_rows, self.near_positions, self.masks = addresses
        self.num_near, self.num_words = near.cache_rows.shape[1], num_words


class HeadsArgument(ctypes.Structure):
    """`Heads` of the C++ source."""

    _fields_ = (
        ("cos_sin", ctypes.c_void_p),
        ("k_cache", ctypes.c_void_p),
        ("v_cache", ctypes.c_void_p),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def of(
        cls, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, num_heads: int, scale: float, window: int | None
    ) -> HeadsArgument:
        """Shapes: cos_sin [positions, d] f32, caches [pages, size, nkv, d] f32. Raises: ValueError."""
        _, _, num_kv_heads, head_dim = k_cache.shape
        require(_takes(head_dim, k_cache) and k_cache.is_contiguous(), "k_cache", "float32, heads of 16 to 256")
        require(v_cache.dtype == k_cache.dtype and v_cache.is_contiguous(), "v_cache", "as k_cache")
        require(cos_sin.dtype == torch.float32 and cos_sin.is_contiguous(), "cos_sin", "contiguous float32")
        pointers = (each.data_ptr() for each in (cos_sin, k_cache, v_cache))
        return cls(*pointers, num_heads, num_kv_heads, head_dim, window or 0, scale)


def _takes(head_dim: int, cache: Tensor) -> bool:
    return head_dim % LANES == 0 and head_dim <= LARGEST_HEAD and cache.dtype == torch.float32 and not cache.is_cuda


class RowAttention:
    """The compiled kernel."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.paged_rows_attention
        self._run.argtypes = [*(5 * [ctypes.c_void_p]), ctypes.c_int32]
        self._run.restype = None

    def takes(self, head_dim: int, cache: Tensor) -> bool:
        """Whether it can attend over this cache."""
        return _takes(head_dim, cache)

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
        near: NearKeys | None = None,
    ) -> Tensor:
        """Write K and V of all rows, then let the row at position p attend to the keys 0..p of its request.

        `near`: what rows of trees attend to instead; one that sees nothing gets zeros.
        Shapes: qkv [T, (n + 2 nkv) d] f32, cos_sin [positions, d] f32, positions, cache_rows [T] i64, row_starts
        [B + 1] i32, page_table [B, P] i32, caches [pages, size, nkv, d] f32 -> [T, n d].
        Raises: ValueError naming the argument.
        """
        _, page_size, num_kv_heads, head_dim = k_cache.shape
        heads = HeadsArgument.of(cos_sin, k_cache, v_cache, num_heads, scale, window)
        rows = RowsArgument.of(positions, cache_rows, row_starts, page_table, page_size, near)
        require(qkv.dtype == torch.float32 and qkv.is_contiguous(), "qkv", "contiguous float32")
        require(qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim, "qkv", "[T, (n + 2 nkv) d]")
        queries, out = qkv.new_empty((2, qkv.shape[0], num_heads * head_dim)).unbind(0)
        pointers = (tensor.data_ptr() for tensor in (qkv, queries, out))
        self._run(ctypes.byref(heads), ctypes.byref(rows), *pointers, torch.get_num_threads())
        return out
