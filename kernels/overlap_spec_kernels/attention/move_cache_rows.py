"""Moves the KV rows of a tree's accepted path to the cache rows of consecutive positions, all layers in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.attention.kv_format import EIGHT_BITS
from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_MAX_ROWS = 64  # rows of a request: one program holds them all
_BLOCK = 4096  # elements of K, and of V, that a program moves


def move_cache_rows(k: Tensor, v: Tensor | None, source: Tensor, target: Tensor) -> None:
    """Copy cache row source[b, i] to target[b, i] in K and V of every layer, in place, as if all were read first.

    `v`: None where K holds the values too.

    Sources and targets of one request may overlap; no row may be a target of two moves with different sources, or a
    target of one request and a source of another. Where source equals target nothing is read or written.
    Shapes: k, v [L, num_pages, page_size, nkv, d], source, target [B, D] i64 (cache row = page * page_size + offset).
    Raises: ValueError naming the argument. Sync: never.
    """
    require(k.dim() == 5 and k.is_contiguous(), "k", "[L, num_pages, page_size, nkv, d], contiguous")
    alike = v is None or (v.shape == k.shape and v.is_contiguous() and v.dtype == k.dtype)
    require(alike, "v", "shape and dtype of k, contiguous")
    require(source.dim() == 2 and source.dtype == torch.int64 and source.is_contiguous(), "source", "[B, D] int64")
    require(target.shape == source.shape and target.is_contiguous(), "target", "[B, D] as source")
    require(target.dtype == torch.int64, "target", "int64")
    require(target.shape[1] <= _MAX_ROWS, "target", "at most 64 rows of a request")
    run = _move_cache_rows_triton if runs_triton(k) else move_cache_rows_reference
    if k.dtype in EIGHT_BITS:
        k, v = k.view(torch.uint8), None if v is None else v.view(torch.uint8)
    run(k, v, source, target)


def move_cache_rows_reference(k: Tensor, v: Tensor | None, source: Tensor, target: Tensor) -> None:
    for cache in (k,) if v is None else (k, v):
        rows = cache.flatten(1, 2)
        rows[:, target.flatten()] = rows[:, source.flatten()]


def _move_cache_rows_triton(k: Tensor, v: Tensor | None, source: Tensor, target: Tensor) -> None:
    (num_layers, num_pages, page_size, num_kv_heads, head_dim), (num_requests, num_moved) = k.shape, source.shape
    row_size, block_d = num_kv_heads * head_dim, next_power_of_2(num_moved)
    block_c = min(next_power_of_2(row_size), _BLOCK // block_d)
    _move_cache_rows_kernel[(num_requests, ceil_div(row_size, block_c), num_layers)](
        k,
        k if v is None else v,
        source,
        target,
        num_pages * page_size,
        num_moved,
        ROW_SIZE=row_size,
        HAS_V=v is not None,
        BLOCK_D=block_d,
        BLOCK_C=block_c,
        num_warps=4,
        **dependent_launch(k.device, num_requests),
    )


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _move_cache_rows_kernel(
    k_ptr: tl.tensor, v_ptr: tl.tensor, source_ptr: tl.tensor, target_ptr: tl.tensor, num_rows: int, num_moved: int,
    ROW_SIZE: tl.constexpr, HAS_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (request, part of a row, layer). num_rows: cache rows of a layer.

    A program reads all rows of its part before it writes one: the barrier keeps a warp from writing rows that another
    warp still reads.
    """
    request = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    move = tl.arange(0, BLOCK_D)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    wait_for_inputs(PDL)
    source = tl.load(source_ptr + request * num_moved + move, mask=move < num_moved, other=0)
    target = tl.load(target_ptr + request * num_moved + move, mask=move < num_moved, other=0)
    mask = (source != target)[:, None] & (column < ROW_SIZE)[None, :]
    read = ((layer * num_rows + source) * ROW_SIZE)[:, None] + column[None, :]
    written = ((layer * num_rows + target) * ROW_SIZE)[:, None] + column[None, :]
    k = tl.load(k_ptr + read, mask=mask)
    if HAS_V:
        v = tl.load(v_ptr + read, mask=mask)
    tl.debug_barrier()
    tl.store(k_ptr + written, k, mask=mask)
    if HAS_V:
        tl.store(v_ptr + written, v, mask=mask)
