"""Finds what top_k, top_p and min_p keep of each row of logits, without sorting it.

Each filter keeps the first columns in order: larger logits first, of equal ones the lower column. So what all of them
keep ends at one column, which is the cutoff. With p = softmax(logits / T), not renormalised in between:

    top_k    keeps a column if fewer than k are before it
    top_p    keeps a column if the mass of those before it is less than top_p
    min_p    keeps a column if its logit is at least the largest + T log(min_p)

The reference sorts, in float64. The kernels have weights in float32; their sums do not depend on other rows, nor on how
many there are. So both agree on a column unless the mass before it equals top_p to about 6 digits.
"""

from __future__ import annotations

from enum import IntEnum
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

_SLICE = 1 << 20  # logits that the reference sorts at once: bounds its workspace to a hundred MiB
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
    upto = weights.cumsum(1)
    whole = upto[:, -1:].clone()  # not `sum`: it adds up a single long row in another order than several
    before = upto.sub_(weights)
    kept = (before < top_p * whole) | (top_p >= 1)
    kept &= torch.arange(logits.shape[1], device=logits.device) < top_k
    kept &= (wide >= wide[:, :1] + scale * min_p.log()) | (min_p <= 0)
    kept |= temperature <= 0
    end = kept.sum(1, keepdim=True).clamp(min=1) - 1
    return ordered.gather(1, end), order.gather(1, end)


def _filter_cutoff_triton(logits: Tensor, temperature: Tensor, filters: Filters) -> Cutoff:
    search = CutoffSearch(logits, temperature, filters)
    search.begin()
    return search.finish()


class RowState(IntEnum):
    """What the next kernel does with a row."""

    OPEN = 0  # its column is not kept; another, before that, may be looked at
    SEARCHED = 1  # it has no column; its cutoff is found
    SETTLED = 2  # it keeps its column, and needs no cutoff


_STATES = {state.name: int(state) for state in RowState}


class CutoffSearch:
    """The kernels of `filter_cutoff`, whose arguments it takes.

    Whether a column is kept is known after one look at its row: it depends on what is before it alone. So a search can
    be spared where it is known which column is wanted: `begin` it with that, and rows that keep it are settled. Those
    that are open may be begun again with a column before that one, any number of times. `finish` finds the cutoffs of
    rows that are not settled.
    """

    def __init__(self, logits: Tensor, temperature: Tensor, filters: Filters) -> None:
        batch, rows, columns = logits.shape
        self._inputs = logits, temperature, filters
        num_rows, device = batch * rows, logits.device
        self._part = max(next_power_of_2(ceil_div(columns, _PARTS)), _SMALL_PART)
        self._grid = num_rows, ceil_div(columns, self._part)

        def floats(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        self._stats = floats(*self._grid, 4), floats(*self._grid), floats(*self._grid, 2)
        self._brackets = torch.empty(num_rows, 16, dtype=torch.float64, device=device)
        self._pivots, self._fill = floats(num_rows, _PIVOTS), torch.empty(num_rows, dtype=torch.int32, device=device)
        self._launch = dependent_launch(device, num_rows)
        self._began = False
        self.states = torch.empty_like(self._fill)  # [B * R] i32: `RowState`
        self.before = Cutoff(floats(batch, rows), torch.empty(batch, rows, dtype=torch.int64, device=device))

    def begin(self, wanted: Tensor | None = None) -> None:
        """Look at every row that is open. Where one does not keep its column, `before` ends before that.

        `wanted`: a column of each row, or a negative number. Shapes: [B, R] i64. Sync: never.
        """
        logits, temperature, filters = self._inputs
        sizes = *logits.shape[1:], temperature.stride(0)
        again = {"DRAWN": wanted is not None, "AGAIN": self._began, **self._launch}
        wanted = self.states if wanted is None else wanted
        num_parts = self._grid[1]
        part_stats_kernel[self._grid](
            logits, temperature, wanted, self.states, *self._stats, *sizes, QUARTER=self._part // 4, num_warps=8,
            **again,
        )  # fmt: skip
        first_bracket_kernel[self._grid[:1]](
            logits, temperature, *filters, wanted, *self._stats, self._brackets, self._pivots, self._fill,
            self.states, *self.before, *sizes, *(values.stride(0) for values in filters), num_parts,
            PARTS=next_power_of_2(num_parts), PIVOTS=_PIVOTS, num_warps=4, **_STATES, **again,
        )  # fmt: skip
        self._began = True

    def finish(self) -> Cutoff:
        """The cutoff of every row that is not settled; of the others, anything. Sync: never."""
        logits, temperature, _ = self._inputs
        (num_rows, num_parts), device = self._grid, logits.device
        rows, columns, t_stride = *logits.shape[1:], temperature.stride(0)
        counts, masses = torch.empty(2, *self._grid, _PIVOTS, dtype=torch.float32, device=device)
        listed = torch.empty(num_rows, _CAPACITY, dtype=torch.float32, device=device)
        listed_at = torch.empty_like(listed, dtype=torch.int32)
        found = Cutoff(*map(torch.empty_like, self.before))
        parts, launch = next_power_of_2(num_parts), self._launch
        for _ in range(_LEVELS):
            count_above_kernel[self._grid](
                logits, temperature, self._brackets, self._pivots, counts, masses, rows, columns, t_stride,
                PART=self._part, PIVOTS=_PIVOTS, num_warps=8, **launch,
            )  # fmt: skip
            narrow_bracket_kernel[(num_rows,)](
                self._brackets, self._pivots, counts, masses, num_parts,
                FEW=_FEW, PARTS=parts, PIVOTS=_PIVOTS, num_warps=1, **launch,
            )  # fmt: skip
        gather_bracket_kernel[self._grid](
            logits, self._brackets, self._fill, listed, listed_at, columns,
            CAPACITY=_CAPACITY, PART=self._part, num_warps=8, **launch,
        )  # fmt: skip
        select_cutoff_kernel[(num_rows,)](
            logits, temperature, self._brackets, self._fill, listed, listed_at, *found, rows, columns, t_stride,
            CAPACITY=_CAPACITY, BLOCK=_BLOCK, num_warps=8, **launch,
        )  # fmt: skip
        return found
