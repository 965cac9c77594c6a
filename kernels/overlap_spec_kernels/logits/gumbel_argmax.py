"""Draws a token for each row: the largest of logits / T + noise, in two launches that read the logits once.

The noise is Gumbel noise keyed by (seed, position, token id) (`noise.py`). It is computed where it is added, so no
array of the logits' size is written. Values are float64; which column of a part of a row has the largest one is found
in float32 where that is certain. Of what filters keep (`filter_cutoff.py`), if they are asked for. A greedy slot's rows
take the largest logit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.limits import NO_TOKEN
from overlap_spec_kernels.logits.columns import largest_columns
from overlap_spec_kernels.logits.filter_cutoff import Cutoff, kept_columns
from overlap_spec_kernels.logits.noise import gumbel

_PART = 1024  # columns of a program
_NUM_WARPS = 4
_MANY_ROWS = 64  # from here on a program draws for several rows, for which it computes the tokens' keys once
_GROUP = 4  # so many
FEW = 64  # of so many columns, which top_k keeps, the last is found as soon as it is known whether one is kept
_SLICE = 1 << 22  # logits that the reference draws from at once: bounds its float64 workspace to a few hundred MiB


class Draws(NamedTuple):
    """What is drawn from, and by which noise: the arguments of `gumbel_argmax`."""

    logits: Tensor
    positions: Tensor
    temperature: Tensor
    seed: Tensor
    token_ids: Tensor


class Skipped(NamedTuple):
    """Rows that are not drawn for: those of at least that state."""

    states: Tensor  # [B * R] i32
    least: int


def gumbel_argmax(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    token_ids: Tensor,
    cutoff: Cutoff | None = None,
) -> Tensor:
    """The column that each row draws for its position, of those that `cutoff` keeps; of equal ones the first.

    `NO_TOKEN` where the largest logit is NaN or infinite, or nothing is kept. (Of a row with other numbers beside NaN
    the kernels may draw one of those.)
    `token_ids`: of the columns.

    Shapes: logits [B, R, N], positions [B, R] i64, temperature [B] f64 (0: greedy), seed [B] i64, token_ids [N] i64
    -> [B, R] i64. Raises: ValueError naming the argument. Sync: never.
    """
    require(logits.dim() == 3 and logits.is_floating_point(), "logits", "[B, R, N], floating point")
    require(logits.is_contiguous() and logits.shape[2] > 0, "logits", "contiguous, at least one column")
    require(positions.shape == logits.shape[:2] and positions.dtype == torch.int64, "positions", "[B, R] int64")
    require(temperature.shape == logits.shape[:1] and temperature.dtype == torch.float64, "temperature", "[B] float64")
    require(seed.shape == logits.shape[:1] and seed.dtype == torch.int64, "seed", "[B] int64")
    require(token_ids.shape == logits.shape[2:] and token_ids.dtype == torch.int64, "token_ids", "[N] int64")
    run = _gumbel_argmax_triton if runs_triton(logits) else gumbel_argmax_reference
    return run(logits, positions, temperature, seed, token_ids, cutoff)


def gumbel_argmax_reference(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    token_ids: Tensor,
    cutoff: Cutoff | None = None,
) -> Tensor:
    batch, rows, columns = logits.shape
    step = max(1, _SLICE // (rows * columns))
    drawn = []
    for part in (slice(first, first + step) for first in range(0, batch, step)):
        scaled = logits[part].double() / temperature[part, None, None].clamp(min=1e-6)
        if cutoff is not None:
            kept = kept_columns(logits[part], Cutoff(*(values[part] for values in cutoff)))
            scaled = scaled.masked_fill(~kept, -torch.inf)
        noise = gumbel(seed[part].repeat_interleave(rows), positions[part].reshape(-1), token_ids)
        drawn.append(largest_columns(scaled + noise.view_as(scaled)))
    return torch.where(temperature[:, None] > 0, torch.cat(drawn), largest_columns(logits))


def _gumbel_argmax_triton(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    seed: Tensor,
    token_ids: Tensor,
    cutoff: Cutoff | None = None,
) -> Tensor:
    out = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    return draw_columns(Draws(logits, positions, temperature, seed, token_ids), out, cutoff)


def draw_columns(
    draws: Draws,
    out: Tensor,
    cutoff: Cutoff | None = None,
    skipped: Skipped | None = None,
    top_k: Tensor | None = None,
) -> Tensor:
    """The kernels of `gumbel_argmax`. Sync: never.

    Of rows that are skipped `out` stays as it is. Slots that are not greedy, of a `top_k` up to `FEW`, draw `NO_TOKEN`.
    Shapes: out [B, R] i64, top_k [B] i64.
    """
    logits, positions, temperature, seed, token_ids = draws
    batch, rows, columns = logits.shape
    num_rows, num_parts = batch * rows, ceil_div(columns, _PART)
    group = _GROUP if num_rows >= _MANY_ROWS else 1
    at = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    launch = dependent_launch(logits.device, num_rows)
    sizes = (rows, columns, num_parts, *positions.stride(), temperature.stride(0), seed.stride(0))
    states, least = (at, 0) if skipped is None else skipped
    skips = {"SKIPPED": int(least), "NOTHING": NO_TOKEN, **launch}
    top_k_of = (positions, 0) if top_k is None else (top_k, top_k.stride(0))
    _best_of_part_kernel[(ceil_div(num_rows, group), num_parts)](
        *draws,
        *((logits, at) if cutoff is None else cutoff),
        states,
        *top_k_of,
        at,
        num_rows,
        *sizes,
        PART=_PART,
        GROUP=group,
        CUT=cutoff is not None,
        FEW=0 if top_k is None else FEW,
        num_warps=_NUM_WARPS,
        **skips,
    )
    _best_of_row_kernel[(num_rows,)](
        *draws,
        states,
        at,
        out,
        *sizes,
        BLOCK=next_power_of_2(num_parts),
        num_warps=1 if num_parts <= 64 else 4,
        **skips,
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows", "rows", "position_batch_stride", "position_row_stride"))
def _best_of_part_kernel(
    logits_ptr: tl.tensor, positions_ptr: tl.tensor, temperature_ptr: tl.tensor, seed_ptr: tl.tensor,
    token_ids_ptr: tl.tensor, least_ptr: tl.tensor, last_ptr: tl.tensor, state_ptr: tl.tensor, top_k_ptr: tl.tensor,
    top_k_stride: int, at_ptr: tl.tensor, num_rows: int, rows: int, columns: int, num_parts: int,
    position_batch_stride: int, position_row_stride: int, temperature_stride: int, seed_stride: int, PART: tl.constexpr,
    GROUP: tl.constexpr, CUT: tl.constexpr, FEW: tl.constexpr, SKIPPED: tl.constexpr, NOTHING: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, part): the column of the part that each of GROUP rows would draw; -1 where it has none.

    Of an infinite logit NOTHING; of NaN, as of what is not kept, -1.
    """
    part = tl.program_id(1)
    column = part * PART + tl.arange(0, PART)
    inside = column < columns
    wait_for_inputs(PDL)
    token_keys = _token_key(tl.load(token_ids_ptr + column, mask=inside, other=0))
    first = tl.program_id(0) * GROUP
    for row in range(first, tl.minimum(first + GROUP, num_rows)):
        row = tl.cast(row, tl.int64)
        slot = row // rows
        temperature = tl.load(temperature_ptr + slot * temperature_stride)
        there = inside
        if SKIPPED:
            there = inside & (tl.load(state_ptr + row) < SKIPPED)
        if FEW:
            there = inside & ((tl.load(top_k_ptr + slot * top_k_stride) > FEW) | (temperature <= 0))
        logits = tl.load(logits_ptr + row * columns + column, mask=there, other=float("-inf")).to(tl.float32)
        if CUT:
            least, last = tl.load(least_ptr + row), tl.load(last_ptr + row)
            kept = (logits > least) | ((logits == least) & (column <= last))
            logits = tl.where(kept, logits, float("-inf"))
        largest = tl.max(logits, axis=0)
        at = tl.full([], -1, tl.int32)
        if largest > float("-inf"):
            if temperature > 0:
                place = positions_ptr + slot * position_batch_stride + (row - slot * rows) * position_row_stride
                row_key = _row_key(tl.load(seed_ptr + slot * seed_stride), tl.load(place))
                at = _drawn_of_part(logits, largest, temperature, _mix64(row_key ^ token_keys), column)
            else:
                at = tl.min(tl.where(logits == largest, column, columns), axis=0)
            at = tl.where(largest < float("inf"), at, NOTHING)
        tl.store(at_ptr + row * num_parts + part, at)


@TritonKernel
def _drawn_of_part(
    logits: tl.tensor, largest: tl.tensor, temperature: tl.tensor, bits: tl.tensor, column: tl.tensor
) -> tl.tensor:
    """The column of the largest logit / T + noise. `largest`: of the logits, finite.

    exp(logit / T + noise) is w / e, with w = exp(logit / T) and e = -log of a number u in (0, 1). In float32, and with
    32 of the 53 bits of u, each w / e is right to 1.3e-3, but where 1 - u is below 2^-23 or e is above 13. So if
    one column is ahead of all others by 4e-3, it is the one. Else, in a part of a hundred, all are computed in float64.
    """
    rest = (((bits >> 32) & 0xFFFFFFFF) ^ 0xFFFFFFFF).to(tl.uint32)  # of 1 - u
    missing = rest.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 2 ** -32, 2 ** -33
    series = missing * (1 + missing * (0.5 + missing * (0.33333333 + missing * 0.25)))
    e = tl.where(missing < 0.015625, series, -tl.log(tl.maximum(1 - missing, 1.1641532182693481e-10)))
    value = tl.exp((logits - largest) * (1.0 / tl.maximum(temperature, 1e-6)).to(tl.float32)) / e
    best = tl.max(value, axis=0)
    near = (value >= best * 0.996) | ((rest < 512) & (value > 0))
    found = tl.sum(tl.where(near, column.to(tl.int64) + 0x100000000, 0), axis=0)  # how many, and the column of one
    at = found.to(tl.int32)
    if (found >= 0x200000000) | (best < 0.08):
        exact = _value(logits, temperature, bits)
        at = tl.min(tl.where(exact == tl.max(exact, axis=0), column, 0x7FFFFFFF), axis=0)
    return at


@TritonKernel.with_options(do_not_specialize=("rows", "position_batch_stride", "position_row_stride"))
def _best_of_row_kernel(
    logits_ptr: tl.tensor, positions_ptr: tl.tensor, temperature_ptr: tl.tensor, seed_ptr: tl.tensor,
    token_ids_ptr: tl.tensor, state_ptr: tl.tensor, at_ptr: tl.tensor, out_ptr: tl.tensor,
    rows: int, columns: int, num_parts: int, position_batch_stride: int, position_row_stride: int,
    temperature_stride: int, seed_stride: int,
    BLOCK: tl.constexpr, SKIPPED: tl.constexpr, NOTHING: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row: the best of what its parts would draw, in float64; NOTHING if none would, or one cannot."""
    row = tl.program_id(0).to(tl.int64)
    slot = row // rows
    part = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    at = tl.load(at_ptr + row * num_parts + part, mask=part < num_parts, other=-1)
    temperature = tl.load(temperature_ptr + slot * temperature_stride)
    logits = tl.load(logits_ptr + row * columns + at, mask=at >= 0, other=float("-inf"))
    value = logits.to(tl.float64)
    if temperature > 0:
        place = positions_ptr + slot * position_batch_stride + (row - slot * rows) * position_row_stride
        row_key = _row_key(tl.load(seed_ptr + slot * seed_stride), tl.load(place))
        token_keys = _token_key(tl.load(token_ids_ptr + at, mask=at >= 0, other=0))
        value = _value(logits, temperature, _mix64(row_key ^ token_keys))
    drawn = (value == tl.max(value, axis=0)) & (at >= 0)
    first = tl.min(tl.where(drawn, at, 0x7FFFFFFF), axis=0)
    has_drawn = (first < columns) & (tl.min(at, axis=0) > NOTHING)
    is_asked = row >= 0
    if SKIPPED:
        is_asked = tl.load(state_ptr + row) < SKIPPED
    tl.store(out_ptr + row, tl.where(has_drawn, first, NOTHING).to(tl.int64), mask=is_asked)


@TritonKernel
def _value(logits: tl.tensor, temperature: tl.tensor, bits: tl.tensor) -> tl.tensor:
    """logit / T + noise."""
    unit = (((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2 ** -53
    return logits.to(tl.float64) / tl.maximum(temperature, 1e-6) - tl.log(-tl.log(unit))


@TritonKernel
def _row_key(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """What `noise.gumbel` makes of a row's seed and position."""
    gamma = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer
    return _mix64(_mix64(seed + gamma) ^ (position * gamma))


@TritonKernel
def _token_key(token_ids: tl.tensor) -> tl.tensor:
    """What `noise.gumbel` makes of a token's id."""
    return _mix64(token_ids * -0x61C8864680B583EB + 1)


@TritonKernel
def _mix64(x: tl.tensor) -> tl.tensor:
    """`noise.mix64`. A shift to the right copies the sign, which the mask takes away."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
