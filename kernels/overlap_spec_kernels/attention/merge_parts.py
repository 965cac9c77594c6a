"""Joins the attention of the same rows to two sets of keys into their attention to both."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, next_power_of_2, require, runs_triton, warps_for

_BLOCK = 4096  # elements that a program merges


class AttentionPart(NamedTuple):
    """The attention of n rows to some keys, and the logarithm of each softmax's denominator."""

    out: Tensor  # [n, nq, d]
    lse: Tensor  # [nq, n] f32 (f64 for float64)

    def of_rows(self, first: int, num_rows: int) -> AttentionPart:
        """That of some rows, as views."""
        end = first + num_rows
        return AttentionPart(self.out[first:end], self.lse[:, first:end])


def merge_parts(one: AttentionPart, other: AttentionPart, dtype: torch.dtype) -> AttentionPart:
    """The attention to the keys of both, in `dtype`: exp(lse - total) of each, added up in float32 (or float64).

    Shapes: parts of the same n rows; last dimensions are contiguous. Raises: ValueError naming the argument.
    Sync: never.
    """
    require(one.out.shape == other.out.shape, "other", "as many rows and heads")
    for name, part in {"one": one, "other": other}.items():
        num_rows, num_heads, _ = part.out.shape
        require(part.lse.shape == (num_heads, num_rows), name, "a logarithm for each row and head")
        require(part.out.stride(2) == 1 and part.lse.stride(1) == 1, name, "contiguous last dimensions")
    return (_merge_parts_triton if runs_triton(one.out) else merge_parts_reference)(one, other, dtype)


def merge_parts_reference(one: AttentionPart, other: AttentionPart, dtype: torch.dtype) -> AttentionPart:
    total = torch.logaddexp(one.lse, other.lse)
    weighted = (part.out.to(total.dtype) * (part.lse - total).exp().T[:, :, None] for part in (one, other))
    return AttentionPart(sum(weighted, start=torch.zeros((), dtype=total.dtype)).to(dtype), total)


def _merge_parts_triton(one: AttentionPart, other: AttentionPart, dtype: torch.dtype) -> AttentionPart:
    num_rows, num_heads, head_dim = one.out.shape
    out = torch.empty((num_rows, num_heads, head_dim), dtype=dtype, device=one.out.device)
    lse = torch.empty((num_heads, num_rows), dtype=one.lse.dtype, device=one.out.device)
    block_d = next_power_of_2(head_dim)
    block_r = max(_BLOCK // block_d, 1)
    _merge_parts_kernel[(ceil_div(num_rows, block_r), num_heads)](
        one.out,
        one.lse,
        other.out,
        other.lse,
        out,
        lse,
        num_rows,
        *(*one.out.stride()[:2], one.lse.stride(0)),
        *(*other.out.stride()[:2], other.lse.stride(0)),
        HEAD_DIM=head_dim,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=warps_for(_BLOCK),
    )
    return AttentionPart(out, lse)


@TritonKernel.with_options(
    do_not_specialize=("num_rows", "one_lse_ptr", "other_lse_ptr", "lse_ptr", "one_lse_stride", "other_lse_stride")
)
def _merge_parts_kernel(
    one_ptr: tl.tensor, one_lse_ptr: tl.tensor, other_ptr: tl.tensor, other_lse_ptr: tl.tensor, out_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    num_rows: int, one_row_stride: int, one_head_stride: int, one_lse_stride: int, other_row_stride: int,
    other_head_stride: int, other_lse_stride: int,
    HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, head)."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK_D)[None, :]
    live = row < num_rows
    mask = live[:, None] & (column < HEAD_DIM)
    one_lse = tl.load(one_lse_ptr + head * one_lse_stride + row, mask=live, other=0.0)
    other_lse = tl.load(other_lse_ptr + head * other_lse_stride + row, mask=live, other=0.0)
    one_places = (row * one_row_stride + head * one_head_stride)[:, None] + column
    other_places = (row * other_row_stride + head * other_head_stride)[:, None] + column
    one = tl.load(one_ptr + one_places, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(other_ptr + other_places, mask=mask, other=0.0).to(tl.float32)
    highest = tl.maximum(one_lse, other_lse)
    one_weight, other_weight = tl.exp(one_lse - highest), tl.exp(other_lse - highest)
    sum_of_weights = one_weight + other_weight
    merged = (one * one_weight[:, None] + other * other_weight[:, None]) / sum_of_weights[:, None]
    out_places = ((row * tl.num_programs(1) + head) * HEAD_DIM)[:, None] + column
    tl.store(out_ptr + out_places, merged, mask=mask)
    tl.store(lse_ptr + head.to(tl.int64) * num_rows + row, highest + tl.log(sum_of_weights), mask=live)
