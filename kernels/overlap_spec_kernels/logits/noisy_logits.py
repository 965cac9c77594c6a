"""What a drawn token is the largest of, for every column: logits / T + noise.

A tree takes several children of a node, where `gumbel_argmax` finds one column. In torch's operations, most of which
read and write 64 bits a column, this takes some thirty launches; the kernel reads the logits once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require, runs_triton
from overlap_spec_kernels.logits.filter_cutoff import Cutoff, kept_columns
from overlap_spec_kernels.logits.gumbel_argmax import Draws, _mix64, _row_key, _token_key, _value
from overlap_spec_kernels.logits.noise import gumbel

_PART = 1024  # columns of a program
_GROUP = 4  # rows of a program, for which it computes the tokens' keys once
_MANY_ROWS = 64  # with fewer, a program has one


def noisy_logits(draws: Draws, cutoff: Cutoff | None = None) -> Tensor:
    """logits / T + noise, as `gumbel_argmax` compares them; -inf for what `cutoff` drops; of greedy slots the logits.

    Shapes: see `gumbel_argmax` -> [B, R, N] f64. Raises: ValueError naming the argument. Sync: never.
    """
    logits, positions, temperature, seed, token_ids = draws
    require(logits.dim() == 3 and logits.is_floating_point(), "logits", "[B, R, N], floating point")
    require(logits.is_contiguous() and logits.shape[2] > 0, "logits", "contiguous, at least one column")
    require(positions.shape == logits.shape[:2] and positions.dtype == torch.int64, "positions", "[B, R] int64")
    require(temperature.shape == logits.shape[:1] and temperature.dtype == torch.float64, "temperature", "[B] float64")
    require(seed.shape == logits.shape[:1] and seed.dtype == torch.int64, "seed", "[B] int64")
    require(token_ids.shape == logits.shape[2:] and token_ids.dtype == torch.int64, "token_ids", "[N] int64")
    return _noisy_logits_triton(draws, cutoff) if runs_triton(logits) else noisy_logits_reference(draws, cutoff)


def noisy_logits_reference(draws: Draws, cutoff: Cutoff | None = None) -> Tensor:
    logits, positions, temperature, seed, token_ids = draws
    wide = logits.double()
    scaled = wide / temperature[:, None, None].clamp(min=1e-6)
    if cutoff is not None:
        scaled = scaled.masked_fill(~kept_columns(logits, cutoff), -torch.inf)
    noise = gumbel(seed.repeat_interleave(logits.shape[1]), positions.reshape(-1), token_ids)
    return torch.where(temperature[:, None, None] > 0, scaled + noise.view_as(scaled), wide)


def _noisy_logits_triton(draws: Draws, cutoff: Cutoff | None = None) -> Tensor:
    logits, positions, temperature, seed, _ = draws
    batch, rows, columns = logits.shape
    num_rows = batch * rows
    out = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
    group = _GROUP if num_rows >= _MANY_ROWS else 1
    _noisy_logits_kernel[(ceil_div(num_rows, group), ceil_div(columns, _PART))](
        *draws,
        *((logits, positions) if cutoff is None else cutoff),
        out,
        num_rows,
        rows,
        columns,
        *positions.stride(),
        temperature.stride(0),
        seed.stride(0),
        PART=_PART,
        GROUP=group,
        CUT=cutoff is not None,
        num_warps=4,
        **dependent_launch(logits.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows", "rows", "position_batch_stride", "position_row_stride"))
def _noisy_logits_kernel(
    logits_ptr: tl.tensor, positions_ptr: tl.tensor, temperature_ptr: tl.tensor, seed_ptr: tl.tensor,
    token_ids_ptr: tl.tensor, least_ptr: tl.tensor, last_ptr: tl.tensor, noisy_ptr: tl.tensor,
    num_rows: int, rows: int, columns: int, position_batch_stride: int, position_row_stride: int,
    temperature_stride: int, seed_stride: int,
    PART: tl.constexpr, GROUP: tl.constexpr, CUT: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, part) writes the part of GROUP rows."""
    column = tl.program_id(1) * PART + tl.arange(0, PART)
    inside = column < columns
    wait_for_inputs(PDL)
    token_keys = _token_key(tl.load(token_ids_ptr + column, mask=inside, other=0))
    first = tl.program_id(0) * GROUP
    for row in range(first, tl.minimum(first + GROUP, num_rows)):
        row = tl.cast(row, tl.int64)
        slot = row // rows
        temperature = tl.load(temperature_ptr + slot * temperature_stride)
        logits = tl.load(logits_ptr + row * columns + column, mask=inside, other=float("-inf"))
        value = logits.to(tl.float64)
        if temperature > 0:
            place = positions_ptr + slot * position_batch_stride + (row - slot * rows) * position_row_stride
            row_key = _row_key(tl.load(seed_ptr + slot * seed_stride), tl.load(place))
            value = _value(logits, temperature, _mix64(row_key ^ token_keys))
            if CUT:
                least, last = tl.load(least_ptr + row), tl.load(last_ptr + row)
                kept = (logits > least) | ((logits == least) & (column <= last))
                value = tl.where(kept, value, float("-inf"))
        tl.store(noisy_ptr + row * columns + column, value, mask=inside)
