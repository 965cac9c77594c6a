"""Forbids tokens in a window's logits by bit masks, in place: what a grammar does not allow becomes -inf.

bits [S, W, n]    a bit for each token of a slot's row: 1 allowed        active [S]    0: the slot's rows are left alone
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 1024  # logits of a program


def mask_logits(logits: Tensor, bits: Tensor, active: Tensor, slots: Tensor) -> None:
    """Put -inf where row r of a slot has a 0 for the column, in place; columns behind the last word are forbidden too.

    Slots whose `active` is 0 cost a read of that. Sync: never.
    Shapes: logits [B, R, V] float, bits [S, W, n] i32, R <= W, active [S] i32, slots [B] i64.
    Raises: ValueError naming the argument.
    """
    require(logits.dim() == 3 and logits.is_contiguous(), "logits", "[B, R, V], contiguous")
    require(bits.dim() == 3 and bits.dtype == torch.int32 and bits.is_contiguous(), "bits", "[S, W, n] int32")
    require(bits.shape[1] >= logits.shape[1], "bits", "a row for each row of logits")
    require(active.shape == bits.shape[:1] and active.dtype == torch.int32, "active", "[S] int32")
    require(slots.shape == logits.shape[:1] and slots.dtype == torch.int64, "slots", "[B] int64")
    run = _mask_logits_triton if runs_triton(logits) else mask_logits_reference
    run(logits, bits, active, slots)


def mask_logits_reference(logits: Tensor, bits: Tensor, active: Tensor, slots: Tensor) -> None:
    columns = torch.arange(logits.shape[2], device=logits.device)
    word = (columns // 32).clamp(max=bits.shape[2] - 1)
    rows = bits[slots, : logits.shape[1]].long()
    allowed = (rows[:, :, word] >> (columns % 32)) & (columns < 32 * bits.shape[2])
    forbidden = (allowed & 1 == 0) & (active[slots] != 0)[:, None, None]
    logits.masked_fill_(forbidden, -torch.inf)


def _mask_logits_triton(logits: Tensor, bits: Tensor, active: Tensor, slots: Tensor) -> None:
    batch, rows, columns = logits.shape
    _mask_logits_kernel[(batch * rows, ceil_div(columns, BLOCK))](
        logits,
        bits,
        active,
        slots,
        rows,
        columns,
        bits.shape[1],
        bits.shape[2],
        BLOCK=BLOCK,
        num_warps=4,
        **dependent_launch(logits.device),
    )


@TritonKernel
def _mask_logits_kernel(
    logits_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    active_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    rows: int,
    columns: int,
    window_rows: int,
    words: int,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, part of its columns). Forbidden columns alone are written."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + row // rows)
    if tl.load(active_ptr + slot) != 0:
        mask_row = bits_ptr + (slot * window_rows + row % rows) * words
        word = tl.load(mask_row + column // 32, mask=column // 32 < words, other=0)
        forbidden = (column < columns) & (((word >> (column % 32)) & 1) == 0)
        tl.store(logits_ptr + row * columns + column, float("-inf"), mask=forbidden)
