"""The levels and strength of a window of n-gram guesses, and the next guess that was right, in one number per row.

The scheduler's choice of step widths reads it. A step may verify fewer columns than were guessed. Whether the guess
after the accepted run was right is known even so, because the step commits the true token at that position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton

if TYPE_CHECKING:
    import triton.language as tl

LEVEL_BITS, STRENGTH_BITS = 8, 8  # the lowest bits of the number; the column is above them


def ngram_lookahead(
    guesses: Tensor, parents: Tensor, levels: Tensor, strength: Tensor, slots: Tensor, committed: Tensor, last: Tensor
) -> Tensor:
    """levels + (strength << 8) + (column << 16) of each slot's whole window.

    `column` is that of the guess after the accepted run whose token was right; 0: no such guess. `last` is the window
    column where the accepted run ends, 0 for the root; `committed` holds the tokens of the run and the token after it.
    Shapes: guesses, parents [S, K] i64, levels, strength [S] i64, slots, last [B] i64, committed [B, D] i64, padded
    with -1 -> [B] i64.
    Raises: ValueError naming the argument. Sync: never.
    """
    for name, value in {"guesses": guesses, "parents": parents}.items():
        require(value.dim() == 2 and value.shape == guesses.shape, name, "[S, K]")
        require(value.dtype == slots.dtype and value.is_contiguous(), name, "int64, contiguous")
    require(committed.dim() == 2 and committed.is_contiguous(), "committed", "[B, D], contiguous")
    for name, value in {"slots": slots, "last": last}.items():
        require(value.shape == committed.shape[:1] and value.dtype == committed.dtype, name, "[B] int64")
        require(value.is_contiguous(), name, "contiguous")
    run = _ngram_lookahead_triton if runs_triton(slots) else ngram_lookahead_reference
    return run(guesses, parents, levels, strength, slots, committed, last)


def ngram_lookahead_reference(
    guesses: Tensor, parents: Tensor, levels: Tensor, strength: Tensor, slots: Tensor, committed: Tensor, last: Tensor
) -> Tensor:
    count = (committed >= 0).sum(1, keepdim=True)
    newest = committed.gather(1, (count - 1).clamp(min=0))
    right = (guesses[slots] == newest) & (parents[slots] == last[:, None])
    column = (right * torch.arange(1, 1 + guesses.shape[1], device=slots.device)).amax(1)
    return levels[slots] + (strength[slots] << LEVEL_BITS) + (column << LEVEL_BITS + STRENGTH_BITS)


def _ngram_lookahead_triton(
    guesses: Tensor, parents: Tensor, levels: Tensor, strength: Tensor, slots: Tensor, committed: Tensor, last: Tensor
) -> Tensor:
    out = slots.new_empty(len(slots))
    num_guesses, longest = guesses.shape[1], committed.shape[1]
    _ngram_lookahead_kernel[(len(slots),)](
        guesses,
        parents,
        levels,
        strength,
        slots,
        committed,
        last,
        out,
        num_guesses,
        longest,
        LEVEL_BITS=LEVEL_BITS,
        STRENGTH_BITS=STRENGTH_BITS,
        BLOCK_K=next_power_of_2(num_guesses),
        BLOCK_D=next_power_of_2(longest),
        num_warps=1,
        **dependent_launch(slots.device),
    )
    return out


@TritonKernel
def _ngram_lookahead_kernel(
    guesses_ptr: tl.tensor,
    parents_ptr: tl.tensor,
    levels_ptr: tl.tensor,
    strength_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    committed_ptr: tl.tensor,
    last_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_guesses: int,
    longest: int,
    LEVEL_BITS: tl.constexpr,
    STRENGTH_BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column, guess = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + row)
    run = tl.load(committed_ptr + row * longest + column, mask=column < longest, other=-1)
    count = tl.sum((run >= 0).to(tl.int32), axis=0)
    newest = tl.sum(tl.where(column == count - 1, run, 0), axis=0)
    inside = guess < num_guesses
    token = tl.load(guesses_ptr + slot * num_guesses + guess, mask=inside, other=-1)
    parent = tl.load(parents_ptr + slot * num_guesses + guess, mask=inside, other=-1)
    right = inside & (token == newest) & (parent == tl.load(last_ptr + row))
    found = tl.max(tl.where(right, guess + 1, 0), axis=0).to(tl.int64) << (LEVEL_BITS + STRENGTH_BITS)
    tl.store(out_ptr + row, tl.load(levels_ptr + slot) + (tl.load(strength_ptr + slot) << LEVEL_BITS) + found)
