"""Writes a step's guesses into the windows of its slots."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton


def place_guesses(window: Tensor, slots: Tensor, guesses: Tensor, most_steps: Tensor, dummy: int) -> None:
    """Write guess i of a slot into column 1 + i of its window, and -1 into the columns after the last, in place.

    A slot takes no more than its `most_steps` guesses. The slot `dummy`, which pads a batch and may occur several
    times, keeps its window. No other slot may occur twice.
    Shapes: window [S, N] i64, slots [B] i64, guesses [K, B] i64 (a row per draft step), 1 <= K < N, most_steps [S] i64
    of any stride.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(window.dim() == 2 and window.dtype == torch.int64 and window.stride(1) == 1, "window", "[S, N] int64")
    require(slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots", "[B] int64")
    require(guesses.dim() == 2 and guesses.shape[1] == slots.shape[0], "guesses", "[K, B]")
    require(guesses.dtype == torch.int64, "guesses", "int64")
    require(guesses.stride(1) == 1 or guesses.shape[1] == 1, "guesses", "a contiguous last dimension")
    require(1 <= guesses.shape[0] < window.shape[1], "guesses", "1 row to one less than the columns of window")
    require(most_steps.shape == window.shape[:1] and most_steps.dtype == torch.int64, "most_steps", "[S] int64")
    run = _place_guesses_triton if runs_triton(window) else place_guesses_reference
    run(window, slots, guesses, most_steps, dummy)


def place_guesses_reference(window: Tensor, slots: Tensor, guesses: Tensor, most_steps: Tensor, dummy: int) -> None:
    num_guesses = guesses.shape[0]
    is_dummy = (slots == dummy)[:, None]
    rows = window[slots, 1:]
    placed = torch.full_like(rows, -1)
    step = torch.arange(num_guesses, device=window.device)
    placed[:, :num_guesses] = guesses.t().masked_fill(step >= most_steps[slots, None], -1)
    window[slots, 1:] = torch.where(is_dummy, rows, placed)


def _place_guesses_triton(window: Tensor, slots: Tensor, guesses: Tensor, most_steps: Tensor, dummy: int) -> None:
    _place_guesses_kernel[(slots.shape[0],)](
        window,
        slots,
        guesses,
        most_steps,
        window.stride(0),
        window.shape[1],
        guesses.shape[0],
        guesses.stride(0),
        most_steps.stride(0),
        dummy,
        BLOCK_N=next_power_of_2(window.shape[1]),
        num_warps=1,
        **dependent_launch(window.device),
    )


@TritonKernel.with_options(do_not_specialize=("batch_stride",))
def _place_guesses_kernel(
    window_ptr: tl.tensor, slots_ptr: tl.tensor, guesses_ptr: tl.tensor, most_steps_ptr: tl.tensor, window_stride: int,
    window_columns: int, num_guesses: int, batch_stride: int, most_steps_stride: int, dummy: int, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row of the batch."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    guessed = (column > 0) & (column <= num_guesses)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    guessed &= column <= tl.load(most_steps_ptr + slot * most_steps_stride)
    guess = tl.load(guesses_ptr + (column - 1).to(tl.int64) * batch_stride + row, mask=guessed, other=-1)
    placed = (column > 0) & (column < window_columns) & (slot != dummy)
    tl.store(window_ptr + slot * window_stride + column, guess, mask=placed)
