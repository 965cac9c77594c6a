"""The k largest log-probabilities of each row of logits, without writing the others.

Two launches: each part of a row finds its k largest logits and its sum of exponentials, then a program per row puts the
parts together. A logit and its column are one 64-bit integer, which is larger if the logit is, or, of equal
logits, if the column is lower: so a maximum decides ties, and the result does not depend on which program computes it.
float64, which drafts that are sampled give, has kernels of its own, also on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.limits import MAX_TOP_TOKENS

_MAX_COLUMNS = 1 << 18
_PART = 2048  # columns per program
_SMALL_PART = 512  # fewest columns per program, for short rows
_GROUP = 8  # columns in a group; a part compares its groups' maxima first


class TopTokens(NamedTuple):
    """The largest logits in descending order; of equal logits, the lower column first."""

    log_probs: Tensor  # [R, k] f32 (f64 for f64)
    columns: Tensor  # [R, k] i64
    log_totals: Tensor  # [R], of the type of log_probs: a logit less this is its log-prob, to the bit


def top_tokens(logits: Tensor, k: int) -> TopTokens:
    """log_softmax of each row, and its k largest values with their columns.

    NaN counts as -inf, so that every column exists; of a row of -inf alone all log-probs are -inf. Sums are float32
    (float64 for float64).
    Shapes: logits [R, V] -> [R, k], [R, k], [R]; 1 <= k <= 20, k <= V <= 2^18. Raises: ValueError naming the argument.
    Sync: never.
    """
    require(logits.dim() == 2 and logits.is_floating_point(), "logits", "[R, V], floating point")
    require(logits.stride(1) == 1 and logits.shape[1] <= _MAX_COLUMNS, "logits", "contiguous rows of at most 2^18")
    require(1 <= k <= min(MAX_TOP_TOKENS, logits.shape[1]), "k", "1 to 20, and at most the columns of logits")
    if logits.is_cuda and logits.dtype == torch.float64:
        return _top_tokens_in_float64(logits, k)
    return _top_tokens_triton(logits, k) if runs_triton(logits) else top_tokens_reference(logits, k)


def top_tokens_reference(logits: Tensor, k: int) -> TopTokens:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logits = logits.masked_fill(logits.isnan(), -torch.inf)
    columns = _columns_on_a_cpu(logits, k) if logits.is_cpu else _first_columns(logits, k)
    values, order = torch.sort(logits.gather(1, columns), dim=1, descending=True, stable=True)
    log_totals = _log_totals(logits)
    log_probs = torch.where(log_totals[:, None] > -torch.inf, values - log_totals[:, None], -torch.inf)
    return TopTokens(log_probs, columns.gather(1, order), log_totals)


def _log_totals(logits: Tensor) -> Tensor:
    """logsumexp of each row, in parts of one size: torch divides the sum over a single long row among its threads, in
    another order than where there are several rows. Rows that are shorter than a part have one that is hardly longer.
    Shapes: [R, V] -> [R].
    """
    part = min(next_power_of_2(logits.shape[1]), _PART)
    parts: Tensor = F.pad(logits, (0, -logits.shape[1] % part), value=-torch.inf).unflatten(1, (-1, part))
    totals: Tensor = parts.logsumexp(2).logsumexp(1)
    return totals


def _columns_on_a_cpu(logits: Tensor, k: int) -> Tensor:
    """`_first_columns` in a fifth of the time: only rows with a tie at the k-th value need it. Shapes: as there."""
    values, columns = logits.topk(k)
    tied = (logits >= values[:, -1:]).sum(1) > k
    if tied.any():
        columns[tied] = _first_columns(logits[tied], k)
    return columns.sort(1).values


def _first_columns(logits: Tensor, k: int) -> Tensor:
    """The columns of the k largest values, ascending; of equal values the first ones. Shapes: [R, V] -> [R, k].

    `topk` does not specify which of equal values it takes.
    """
    least = logits.topk(k).values[:, -1:]
    larger, equal = logits > least, logits == least
    chosen = larger | (equal & (equal.cumsum(1) <= k - larger.sum(1, keepdim=True)))
    size = logits.shape[1]
    from_last = torch.arange(size, 0, -1, device=logits.device)
    return size - torch.where(chosen, from_last, 0).topk(k).values


def _top_tokens_triton(logits: Tensor, k: int) -> TopTokens:
    num_rows, size = logits.shape
    part = min(max(next_power_of_2(size), _SMALL_PART), _PART)
    num_parts = ceil_div(size, part)
    keys = torch.empty((num_rows, num_parts * k), dtype=torch.int64, device=logits.device)
    sums = torch.empty((num_rows, num_parts, 2), dtype=torch.float32, device=logits.device)
    launch = dependent_launch(logits.device, num_rows)
    _top_of_part_kernel[(num_rows, num_parts)](
        logits,
        keys,
        sums,
        logits.stride(0),
        size,
        K=k,
        BLOCK_K=next_power_of_2(k),
        GROUPS=part // _GROUP,
        GROUP=_GROUP,
        num_warps=1,
        **launch,
    )
    out = TopTokens(sums.new_empty(num_rows, k), keys.new_empty(num_rows, k), sums.new_empty(num_rows))
    block = next_power_of_2(num_parts * k)
    _top_of_row_kernel[(num_rows,)](
        keys,
        sums,
        *out,
        num_parts,
        K=k,
        BLOCK=block,
        BLOCK_P=next_power_of_2(num_parts),
        num_warps=1 if block <= 256 else 4,
        **launch,
    )
    return out


def _top_tokens_in_float64(logits: Tensor, k: int) -> TopTokens:
    """Two launches too, but a logit and its column do not fit into one integer: kernels find the largest logit first,
    then the lowest column that has it. Shapes: logits [R, V] f64 -> [R, k].
    """
    num_rows, size = logits.shape
    num_parts = ceil_div(size, _PART)
    values, columns = logits.new_empty(num_rows, num_parts * k), logits.new_empty(num_rows, k, dtype=torch.int64)
    at = columns.new_empty(values.shape, dtype=torch.int32)
    sums, logs = logits.new_empty(num_rows, num_parts, 2), logits.new_empty(num_rows, k)
    log_totals = logits.new_empty(num_rows)
    launch = dependent_launch(logits.device, num_rows)
    _wide_top_of_part_kernel[(num_rows, num_parts)](
        logits, values, at, sums, logits.stride(0), size, K=k, BLOCK=_PART, num_warps=4, **launch
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
    return TopTokens(logs, columns, log_totals)


@TritonKernel
def _top_of_part_kernel(
    logits_ptr: tl.tensor, keys_ptr: tl.tensor, sums_ptr: tl.tensor, row_stride: int, size: int, K: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part) finds the keys of its K largest logits, and its maximum and sum of exponentials.

    A group is GROUP consecutive columns. The K largest logits are in the K groups with the largest maxima (of equal
    maxima, the first groups): a logit of any other group has K better ones. So only those K groups are searched.
    """
    row = tl.program_id(0).to(tl.int64)
    part = row * tl.num_programs(1) + tl.program_id(1)
    begin = tl.program_id(1) * (GROUPS * GROUP)
    group, inner, rank = tl.arange(0, GROUPS), tl.arange(0, GROUP), tl.arange(0, BLOCK_K)
    column = begin + group[:, None] * GROUP + inner[None, :]
    wait_for_inputs(PDL)
    logits_ptr += row * row_stride
    logits = tl.load(logits_ptr + column, mask=column < size, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    largest = tl.max(logits, axis=1)
    highest = tl.maximum(tl.max(largest, axis=0), -3.0e38)  # finite even if all logits are -inf
    tl.store(sums_ptr + part * 2, highest)
    tl.store(sums_ptr + part * 2 + 1, tl.sum(tl.sum(tl.exp(logits - highest), axis=1), axis=0))
    value = _ordered_float(largest)
    best_groups = tl.zeros([BLOCK_K], tl.int32)
    for i in tl.static_range(K):
        best = tl.max(value, axis=0)
        at = tl.min(tl.where(value == best, group, 0x7FFFFFFF), axis=0)
        best_groups = tl.where(rank == i, at, best_groups)
        value = tl.where(group == at, -0x80000000, value)
    chosen = (rank < K)[:, None]
    column = begin + best_groups[:, None] * GROUP + inner[None, :]
    logits = tl.load(logits_ptr + column, mask=chosen & (column < size), other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    column = tl.reshape(tl.where(chosen, column, 0x7FFFFFFF), [BLOCK_K * GROUP])
    value = _ordered_float(tl.reshape(logits, [BLOCK_K * GROUP]))
    for i in tl.static_range(K):
        best = tl.max(value, axis=0)
        at = tl.min(tl.where(value == best, column, 0x7FFFFFFF), axis=0)
        tl.store(keys_ptr + part * K + i, (best.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64))
        value = tl.where(column == at, -0x80000000, value)


@TritonKernel
def _top_of_row_kernel(
    keys_ptr: tl.tensor, sums_ptr: tl.tensor, log_probs_ptr: tl.tensor, columns_ptr: tl.tensor,
    log_totals_ptr: tl.tensor, num_parts: int, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    candidate, part = tl.arange(0, BLOCK), tl.arange(0, BLOCK_P)
    wait_for_inputs(PDL)
    sum_ptrs = sums_ptr + (row * num_parts + part) * 2
    highest = tl.load(sum_ptrs, mask=part < num_parts, other=-3.0e38)
    total = tl.load(sum_ptrs + 1, mask=part < num_parts, other=0.0)
    num_keys = num_parts * K
    key = tl.load(keys_ptr + row * num_keys + candidate, mask=candidate < num_keys, other=-0x8000000000000000)
    top = tl.max(highest, axis=0)
    log_total = top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
    tl.store(log_totals_ptr + row, log_total)
    for i in range(K):
        best = tl.max(key, axis=0)
        logit = _ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        log_prob = tl.where(log_total > float("-inf"), logit - log_total, float("-inf"))
        tl.store(log_probs_ptr + row * K + i, log_prob)
        tl.store(columns_ptr + row * K + i, 0x7FFFFFFF - (best & 0xFFFFFFFF))
        key = tl.where(key == best, -0x8000000000000000, key)


@TritonKernel
def _ordered_float(x: tl.tensor) -> tl.tensor:
    """Map float32 to integers with the same order; -0 equals 0."""
    return _ordered(tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True))


@TritonKernel
def _ordered(bits: tl.tensor) -> tl.tensor:
    """Map a float's bits to an integer with the float's order. The map is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


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
