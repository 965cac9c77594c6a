"""Writes a step's tree of guesses into the windows of its slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton


def place_tree(
    window: Tensor,
    parents: Tensor,
    slots: Tensor,
    guesses: Tensor,
    guess_parents: Tensor,
    most_steps: Tensor,
    dummy: int,
) -> None:
    """Write guess i of a slot, and its parent's column, into column 1 + i of its window and parents, in place.

    Columns after the last guess get -1, and parent 0, and so do guesses on a level below `most_steps` of the slot: a
    child of the root is on level 1. The slot `dummy`, which pads a batch and may occur several times, keeps its window.
    No other slot may occur twice.
    Shapes: window, parents [S, N] i64, slots [B] i64, guesses, guess_parents [K, B] i64 (parents in columns before
    their children), 1 <= K < N, most_steps [S] i64 of any stride.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(window.dim() == 2 and window.dtype == torch.int64 and window.is_contiguous(), "window", "[S, N] int64")
    require(parents.shape == window.shape and parents.is_contiguous(), "parents", "[S, N] as window")
    require(parents.dtype == torch.int64, "parents", "int64")
    require(slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots", "[B] int64")
    require(guesses.dim() == 2 and guesses.shape[1] == slots.shape[0], "guesses", "[K, B]")
    require(guesses.dtype == torch.int64 and guesses.is_contiguous(), "guesses", "int64, contiguous")
    require(guess_parents.shape == guesses.shape, "guess_parents", "[K, B] as guesses")
    require(guess_parents.dtype == torch.int64 and guess_parents.is_contiguous(), "guess_parents", "int64, contiguous")
    require(1 <= guesses.shape[0] < window.shape[1], "guesses", "1 row to one less than the columns of window")
    require(most_steps.shape == window.shape[:1] and most_steps.dtype == torch.int64, "most_steps", "[S] int64")
    run = _place_tree_triton if runs_triton(window) else place_tree_reference
    run(window, parents, slots, guesses, guess_parents, most_steps, dummy)


def place_tree_reference(
    window: Tensor,
    parents: Tensor,
    slots: Tensor,
    guesses: Tensor,
    guess_parents: Tensor,
    most_steps: Tensor,
    dummy: int,
) -> None:
    num_guesses = guesses.shape[0]
    is_dummy = (slots == dummy)[:, None]
    too_deep = _levels(guess_parents) > most_steps[slots]
    for rows, new, rest in ((window, guesses, -1), (parents, guess_parents, 0)):
        placed = torch.full_like(rows[slots, 1:], rest)
        placed[:, :num_guesses] = new.masked_fill(too_deep, rest).t()
        rows[slots, 1:] = torch.where(is_dummy, rows[slots, 1:], placed)


def _levels(guess_parents: Tensor) -> Tensor:
    """Distance of each guess from the root, by doubling it. Shapes: [K, B] i64, window columns -> [K, B]."""
    above = F.pad(guess_parents, (0, 0, 1, 0))  # of every window column, the root's its own
    levels = F.pad(torch.ones_like(guess_parents), (0, 0, 1, 0))  # from a column to the one above it
    for _ in range(len(guess_parents).bit_length()):
        levels = levels + levels.gather(0, above)
        above = above.gather(0, above)
    return levels[1:]


def _place_tree_triton(
    window: Tensor,
    parents: Tensor,
    slots: Tensor,
    guesses: Tensor,
    guess_parents: Tensor,
    most_steps: Tensor,
    dummy: int,
) -> None:
    _place_tree_kernel[(slots.shape[0],)](
        window,
        parents,
        slots,
        guesses,
        guess_parents,
        most_steps,
        window.shape[1],
        guesses.shape[0],
        slots.shape[0],
        most_steps.stride(0),
        dummy,
        BLOCK_N=next_power_of_2(window.shape[1]),
        num_warps=1,
        **dependent_launch(window.device),
    )


@TritonKernel.with_options(do_not_specialize=("batch_stride",))
def _place_tree_kernel(
    window_ptr: tl.tensor, parents_ptr: tl.tensor, slots_ptr: tl.tensor, guesses_ptr: tl.tensor,
    guess_parents_ptr: tl.tensor, most_steps_ptr: tl.tensor,
    window_columns: int, num_guesses: int, batch_stride: int, most_steps_stride: int, dummy: int,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row of the batch."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    guessed = (column > 0) & (column <= num_guesses)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    most_steps = tl.load(most_steps_ptr + slot * most_steps_stride)
    if most_steps < num_guesses:  # a guess stays that is at the root after so many edges
        node = tl.where(guessed, column, 0).to(tl.int64)
        for _ in range(most_steps):
            node = tl.load(guess_parents_ptr + (node - 1) * batch_stride + row, mask=node > 0, other=0)
        guessed &= node == 0
    source = (column - 1).to(tl.int64) * batch_stride + row
    guess = tl.load(guesses_ptr + source, mask=guessed, other=-1)
    parent = tl.load(guess_parents_ptr + source, mask=guessed, other=0)
    placed = (column > 0) & (column < window_columns) & (slot != dummy)
    target = slot * window_columns + column
    tl.store(window_ptr + target, guess, mask=placed)
    tl.store(parents_ptr + target, parent, mask=placed)
