"""Draws a token for each row: the largest of logits / T + noise, in two launches that read the logits once.

The noise is Gumbel noise keyed by (seed, position, token id) (`noise.py`). It is computed where it is added, so no
array of the logits' size is written. A greedy slot's rows take the largest logit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.logits.noise import gumbel

if TYPE_CHECKING:
    import triton.language as tl

_PART = 1024  # columns of a program
_SLICE = 1 << 22  # logits that the twin draws from at once: bounds its float64 workspace to a few hundred MiB


def gumbel_argmax(logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, token_ids: Tensor) -> Tensor:
    """The column that each row draws for its position; of equal ones the first. `token_ids`: of the columns.

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
    return run(logits, positions, temperature, seed, token_ids)


def gumbel_argmax_reference(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, token_ids: Tensor
) -> Tensor:
    batch, rows, columns = logits.shape
    step = max(1, _SLICE // (rows * columns))
    drawn = []
    for part in (slice(first, first + step) for first in range(0, batch, step)):
        scaled = logits[part].double() / temperature[part, None, None].clamp(min=1e-6)
        noise = gumbel(seed[part].repeat_interleave(rows), positions[part].reshape(-1), token_ids)
        drawn.append((scaled + noise.view_as(scaled)).argmax(-1))
    return torch.where(temperature[:, None] > 0, torch.cat(drawn), logits.argmax(-1))


def _gumbel_argmax_triton(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, token_ids: Tensor
) -> Tensor:
    batch, rows, columns = logits.shape
    num_parts = ceil_div(columns, _PART)
    best = torch.empty(batch * rows, num_parts, dtype=torch.float64, device=logits.device)
    at = torch.empty(batch * rows, num_parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(batch, rows, dtype=torch.int64, device=logits.device)
    launch = dependent_launch(logits.device, batch * rows)
    _best_of_part_kernel[(batch * rows, num_parts)](
        logits,
        positions,
        temperature,
        seed,
        token_ids,
        best,
        at,
        rows,
        columns,
        positions.stride(0),
        positions.stride(1),
        temperature.stride(0),
        seed.stride(0),
        PART=_PART,
        num_warps=4,
        **launch,
    )
    _best_of_row_kernel[(batch * rows,)](
        best, at, out, num_parts, columns, BLOCK=next_power_of_2(num_parts), num_warps=1, **launch
    )
    return out


@TritonKernel.with_options(do_not_specialize=("position_batch_stride", "position_row_stride"))
def _best_of_part_kernel(
    logits_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    best_ptr: tl.tensor,
    at_ptr: tl.tensor,
    rows: int,
    columns: int,
    position_batch_stride: int,
    position_row_stride: int,
    temperature_stride: int,
    seed_stride: int,
    PART: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, part): the largest value of the part, and the first column that has it."""
    row = tl.program_id(0).to(tl.int64)
    slot = row // rows
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < columns
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(logits_ptr + row * columns + column, mask=inside, other=float("-inf")).to(tl.float64)
    temperature = tl.load(temperature_ptr + slot * temperature_stride)
    if temperature > 0:
        seed = tl.load(seed_ptr + slot * seed_stride)
        place = positions_ptr + slot * position_batch_stride + (row - slot * rows) * position_row_stride
        token_ids = tl.load(token_ids_ptr + column, mask=inside, other=0)
        value = value / tl.maximum(temperature, 1e-6) + _gumbel(seed, tl.load(place), token_ids)
    best = tl.max(value, axis=0)
    at = tl.min(tl.where(value == best, column, columns - 1), axis=0)
    part = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + part, best)
    tl.store(at_ptr + part, at)


@TritonKernel
def _best_of_row_kernel(
    best_ptr: tl.tensor,
    at_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_parts: int,
    columns: int,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    value = tl.load(best_ptr + row * num_parts + part, mask=part < num_parts, other=float("-inf"))
    at = tl.load(at_ptr + row * num_parts + part, mask=part < num_parts, other=0x7FFFFFFF)
    first = tl.min(tl.where(value == tl.max(value, axis=0), at, 0x7FFFFFFF), axis=0)
    tl.store(out_ptr + row, tl.minimum(first, columns - 1).to(tl.int64))


@TritonKernel
def _gumbel(seed: tl.tensor, position: tl.tensor, token_ids: tl.tensor) -> tl.tensor:
    """`noise.gumbel` of one row."""
    gamma = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed integer
    row = _mix64(_mix64(seed + gamma) ^ (position * gamma))
    bits = _mix64(row ^ _mix64(token_ids * gamma + 1))
    unit = (((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2 ** -53
    return -tl.log(-tl.log(unit))


@TritonKernel
def _mix64(x: tl.tensor) -> tl.tensor:
    """`noise.mix64`. A shift to the right copies the sign, which the mask takes away."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
