"""Finds what top_k, top_p and min_p keep of each row of logits, without sorting it.

Each filter keeps the first columns in order: larger logits first, of equal ones the lower column. So what all of them
keep ends at one column, which is the cutoff. With p = softmax(logits / T), not renormalised in between:

    top_k    keeps a column if fewer than k are before it
    top_p    keeps a column if the mass of those before it is less than top_p
    min_p    keeps a column if its logit is at least the largest + T log(min_p)

The twin sorts, in float64. The kernels have weights in float32; their sums do not depend on other rows, nor on how many
there are. So both agree on a column unless the mass before it equals top_p to about 6 digits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.logits._filter_kernels import (
    count_above_kernel,
    first_bracket_kernel,
    gather_bracket_kernel,
    narrow_bracket_kernel,
    part_stats_kernel,
    select_cutoff_kernel,
)

_SLICE = 1 << 20  # logits that the twin sorts at once: bounds its workspace to a hundred MiB
_PARTS = 32  # of a row, at most
_SMALL_PART = 256  # fewest columns of a part
_PIVOTS = 8  # of a level
_LEVELS = 3
_FEW = 1024  # a bracket of so many columns is not made smaller by another pass
_CAPACITY = 8192  # columns that the bisection has a list for
_BLOCK = 1024  # columns that it looks at together


class Filters(NamedTuple):
    """What B requests ask for. A value of V, 1 and 0 leaves a filter out."""

    top_k: Tensor  # [B] i64
    top_p: Tensor  # [B] f64
    min_p: Tensor  # [B] f64


class Cutoff(NamedTuple):
    """Kept are the columns with larger logits than `least`, and of those that equal it the columns up to `last`."""

    least: Tensor  # [B, R], of the logits' type
    last: Tensor  # [B, R] i64


class Search(NamedTuple):
    """What `search_cutoff` has found for B slots of R rows."""

    cutoff: Cutoff
    settled: Tensor  # [B * R] i32: 1 where the filters keep the drawn column, so that the row has no cutoff


def filter_cutoff(logits: Tensor, temperature: Tensor, filters: Filters) -> Cutoff:
    """Where the filters end each row. A greedy slot's rows keep everything.

    Shapes: logits [B, R, N], temperature [B] f64 (0: greedy). Raises: ValueError naming the argument. Sync: never.
    """
    require(logits.dim() == 3 and logits.dtype in (torch.float32, torch.float64), "logits", "[B, R, N], f32 or f64")
    require(logits.is_contiguous() and 0 < logits.shape[2] <= 1 << 18, "logits", "contiguous, 1 to 2^18 columns")
    require(filters.top_k.shape == logits.shape[:1] and filters.top_k.dtype == torch.int64, "top_k", "[B] int64")
    for name, value in {"temperature": temperature, "top_p": filters.top_p, "min_p": filters.min_p}.items():
        require(value.shape == logits.shape[:1] and value.dtype == torch.float64, name, "[B] float64")
    run = _filter_cutoff_triton if runs_triton(logits) else filter_cutoff_reference
    return run(logits, temperature, filters)


def kept_columns(logits: Tensor, cutoff: Cutoff) -> Tensor:
    """Which columns a cutoff keeps. Shapes: [B, R, N] -> bool [B, R, N]."""
    least, last = cutoff.least[..., None], cutoff.last[..., None]
    column = torch.arange(logits.shape[-1], device=logits.device)
    return (logits > least) | ((logits == least) & (column <= last))


def filter_cutoff_reference(logits: Tensor, temperature: Tensor, filters: Filters) -> Cutoff:
    batch, rows, columns = logits.shape
    of_rows = [values.repeat_interleave(rows)[:, None] for values in (temperature, *filters)]
    step = max(1, _SLICE // columns)
    parts = (slice(first, first + step) for first in range(0, batch * rows, step))
    found = [_cutoff_by_sort(logits.view(-1, columns)[part], *(values[part] for values in of_rows)) for part in parts]
    least, last = (torch.cat(values).view(batch, rows) for values in zip(*found, strict=True))
    return Cutoff(least, last)


def _cutoff_by_sort(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """The last column in order that every filter keeps. Shapes: [R, N], [R, 1] .. -> [R, 1], [R, 1]."""
    ordered, order = logits.sort(dim=1, descending=True, stable=True)  # equal ones by ascending columns
    scale, wide = temperature.clamp(min=1e-6), ordered.double()
    weights = (wide - wide[:, :1]).div_(scale).exp_()
    before = weights.cumsum(1).sub_(weights)
    kept = (before < top_p * weights.sum(1, keepdim=True)) | (top_p >= 1)
    kept &= torch.arange(logits.shape[1], device=logits.device) < top_k
    kept &= (wide >= wide[:, :1] + scale * min_p.log()) | (min_p <= 0)
    kept |= temperature <= 0
    end = kept.sum(1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, end), order.gather(1, end)


def _filter_cutoff_triton(logits: Tensor, temperature: Tensor, filters: Filters) -> Cutoff:
    return search_cutoff(logits, temperature, filters).cutoff


def search_cutoff(logits: Tensor, temperature: Tensor, filters: Filters, drawn: Tensor | None = None) -> Search:
    """The kernels of `filter_cutoff`, whose arguments they take. Sync: never.

    `drawn`: a column of each row (negative: none). The rows whose filters keep it are not searched. Whether they do
    is known after one look at the row: only what is before that column counts.

    Shapes: drawn [B, R] i64.
    """
    batch, rows, columns = logits.shape
    num_rows, device = batch * rows, logits.device
    part = max(next_power_of_2(ceil_div(columns, _PARTS)), _SMALL_PART)
    num_parts = ceil_div(columns, part)

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    maxima, sums, before = floats(num_rows, num_parts, 4), floats(num_rows, num_parts), floats(num_rows, num_parts, 2)
    brackets = torch.empty(num_rows, 16, dtype=torch.float64, device=device)
    pivots, fill = floats(num_rows, _PIVOTS), torch.empty(num_rows, dtype=torch.int32, device=device)
    counts, masses = floats(num_rows, num_parts, _PIVOTS), floats(num_rows, num_parts, _PIVOTS)
    listed = floats(num_rows, _CAPACITY)
    listed_at = torch.empty_like(listed, dtype=torch.int32)
    cutoff = Cutoff(floats(batch, rows), torch.empty(batch, rows, dtype=torch.int64, device=device))
    settled = torch.empty_like(fill)
    launch, grid = dependent_launch(device, num_rows), (num_rows, num_parts)
    parts, t_stride = next_power_of_2(num_parts), temperature.stride(0)
    of_drawn = {"DRAWN": drawn is not None, **launch}
    drawn = settled if drawn is None else drawn
    part_stats_kernel[grid](
        logits, temperature, drawn, maxima, sums, before, rows, columns, t_stride, QUARTER=part // 4, num_warps=8,
        **of_drawn,
    )  # fmt: skip
    first_bracket_kernel[(num_rows,)](
        logits, temperature, *filters, drawn, maxima, sums, before, brackets, pivots, fill, settled, rows, columns,
        t_stride, *(values.stride(0) for values in filters), num_parts, PARTS=parts, PIVOTS=_PIVOTS, num_warps=4,
        **of_drawn,
    )  # fmt: skip
    for _ in range(_LEVELS):
        count_above_kernel[grid](
            logits, temperature, brackets, pivots, counts, masses, rows, columns, t_stride,
            PART=part, PIVOTS=_PIVOTS, num_warps=8, **launch,
        )  # fmt: skip
        narrow_bracket_kernel[(num_rows,)](
            brackets, pivots, counts, masses, num_parts, FEW=_FEW, PARTS=parts, PIVOTS=_PIVOTS, num_warps=1, **launch
        )
    gather_bracket_kernel[grid](
        logits, brackets, fill, listed, listed_at, columns, CAPACITY=_CAPACITY, PART=part, num_warps=8, **launch
    )
    select_cutoff_kernel[(num_rows,)](
        logits, temperature, brackets, fill, listed, listed_at, *cutoff, rows, columns, t_stride,
        CAPACITY=_CAPACITY, BLOCK=_BLOCK, num_warps=8, **launch,
    )  # fmt: skip
    return Search(cutoff, settled)
