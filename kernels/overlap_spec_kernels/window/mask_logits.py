"""Forbids tokens in a window's logits by bit masks, in place: what a grammar does not allow becomes -inf.

bits [S, W, n]    a bit for each token of a slot's row: 1 allowed        active [S]    0: the slot's rows are left alone

The bits may lie in pinned memory of the host. So every word of them is read once, in whole runs of a cache line's size,
and before the kernel waits for the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require, runs_triton

WORDS = 128  # of a program


def mask_logits(logits: Tensor, bits: Tensor, active: Tensor, slots: Tensor) -> None:
    """Put -inf where row r of a slot has a 0 for the column, in place; columns behind the last word are forbidden too.

    Slots whose `active` is 0 cost a read of that. Sync: never.
    Shapes: logits [B, R, V] float, bits [S, W, n] i32, R <= W, on the device or pinned, active [S] i32, slots [B] i64.
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
    rows = bits.to(logits.device)[slots, : logits.shape[1]].long()
    allowed = (rows[:, :, word] >> (columns % 32)) & (columns < 32 * bits.shape[2])
    forbidden = (allowed & 1 == 0) & (active[slots] != 0)[:, None, None]
    logits.masked_fill_(forbidden, -torch.inf)


def _mask_logits_triton(logits: Tensor, bits: Tensor, active: Tensor, slots: Tensor) -> None:
    batch, rows, columns = logits.shape
    _mask_logits_kernel[(batch * rows, ceil_div(columns, 32 * WORDS))](
        logits,
        bits,
        active,
        slots,
        rows,
        columns,
        bits.shape[1],
        bits.shape[2],
        WORDS=WORDS,
        num_warps=4,
        **dependent_launch(logits.device),
    )


@TritonKernel
def _mask_logits_kernel(
    logits_ptr: tl.tensor, bits_ptr: tl.tensor, active_ptr: tl.tensor, slots_ptr: tl.tensor, rows: int, columns: int,
    window_rows: int, words: int, WORDS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, words of its mask). Forbidden columns alone are written."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    slot = tl.load(slots_ptr + row // rows)  # no kernel of the same graph writes slots, `active` or masks
    is_active = tl.load(active_ptr + slot) != 0
    mask_row = bits_ptr + (slot * window_rows + row % rows) * words
    word = tl.load(mask_row + index, mask=(index < words) & is_active, other=0)
    wait_for_inputs(PDL)
    bit = tl.arange(0, 32)
    column = index[:, None] * 32 + bit[None, :]
    forbidden = is_active & (column < columns) & (((word[:, None] >> bit[None, :]) & 1) == 0)
    tl.store(logits_ptr + row * columns + column, float("-inf"), mask=forbidden)
