"""`top_tokens` for float64: two launches too, but a logit and its column do not fit into one integer.

So the kernels find the largest logit first, then the lowest column that has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2


def wide_top_tokens(logits: Tensor, k: int, part: int) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes: logits [R, V] f64 -> logs [R, k], columns [R, k] i64, log totals [R]. `part`: columns of a program."""
    num_rows, size = logits.shape
    num_parts = ceil_div(size, part)
    values, columns = logits.new_empty(num_rows, num_parts * k), logits.new_empty(num_rows, k, dtype=torch.int64)
    at = columns.new_empty(values.shape, dtype=torch.int32)
    sums, logs = logits.new_empty(num_rows, num_parts, 2), logits.new_empty(num_rows, k)
    log_totals = logits.new_empty(num_rows)
    launch = dependent_launch(logits.device, num_rows)
    _wide_top_of_part_kernel[(num_rows, num_parts)](
        logits, values, at, sums, logits.stride(0), size, K=k, BLOCK=part, num_warps=4, **launch
    )
    _wide_top_of_row_kernel[(num_rows,)](
        values,
        at,
        sums,
        logs,
        columns,
        log_totals,
        num_parts,
        K=k,
        BLOCK=next_power_of_2(num_parts * k),
        BLOCK_P=next_power_of_2(num_parts),
        num_warps=4,
        **launch,
    )
    return logs, columns, log_totals


@TritonKernel
def _wide_top_of_part_kernel(
    logits_ptr: tl.tensor, values_ptr: tl.tensor, at_ptr: tl.tensor, sums_ptr: tl.tensor, row_stride: int, size: int,
    K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part) finds its K largest logits with columns, and its maximum and sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    left = column < size
    wait_for_inputs(PDL)
    logits = tl.load(logits_ptr + row * row_stride + column, mask=left, other=float("-inf"))
    logits = tl.where(logits == logits, logits, float("-inf"))
    highest = tl.maximum(tl.max(logits, axis=0), -1.0e300)  # finite even if all logits are -inf
    tl.store(sums_ptr + part * 2, highest)
    tl.store(sums_ptr + part * 2 + 1, tl.sum(tl.exp(logits - highest), axis=0))
    for i in range(K):
        best, at = _first_of_largest(logits, column, left)
        tl.store(values_ptr + part * K + i, best)
        tl.store(at_ptr + part * K + i, at)
        left = left & (column != at)


@TritonKernel
def _wide_top_of_row_kernel(
    values_ptr: tl.tensor, at_ptr: tl.tensor, sums_ptr: tl.tensor, logs_ptr: tl.tensor, columns_ptr: tl.tensor,
    log_totals_ptr: tl.tensor, num_parts: int, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    candidate, part = tl.arange(0, BLOCK), tl.arange(0, BLOCK_P)
    left = candidate < num_parts * K
    wait_for_inputs(PDL)
    sum_ptrs = sums_ptr + (row * num_parts + part) * 2
    highest = tl.load(sum_ptrs, mask=part < num_parts, other=-1.0e300)
    total = tl.load(sum_ptrs + 1, mask=part < num_parts, other=0.0)
    value = tl.load(values_ptr + row * num_parts * K + candidate, mask=left, other=float("-inf"))
    column = tl.load(at_ptr + row * num_parts * K + candidate, mask=left, other=0x7FFFFFFF)
    top = tl.max(highest, axis=0)
    log_total = top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
    tl.store(log_totals_ptr + row, log_total)
    for i in range(K):
        best, at = _first_of_largest(value, column, left)
        tl.store(logs_ptr + row * K + i, tl.where(log_total > float("-inf"), best - log_total, float("-inf")))
        tl.store(columns_ptr + row * K + i, at.to(tl.int64))
        left = left & (column != at)


@TritonKernel
def _first_of_largest(value: tl.tensor, column: tl.tensor, left: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest remaining value and the lowest column that has it; a column past the end if none remains."""
    best = tl.max(tl.where(left, value, float("-inf")), axis=0)
    return best, tl.min(tl.where(left & (value == best), column, 0x7FFFFFFF), axis=0)
