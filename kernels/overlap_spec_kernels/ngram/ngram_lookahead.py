"""What a window of n-gram guesses promised and what became of it, for the policy that chooses step widths.

The step may have looked at fewer columns than were guessed. Whether the guess after the run would have been accepted is
known all the same: the token that takes its place is known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton


def ngram_lookahead(
    guesses: Tensor,
    parents: Tensor,
    levels: Tensor,
    strength: Tensor,
    slots: Tensor,
    committed: Tensor,
    last: Tensor,
    out: Tensor,
) -> None:
    """Write of each slot's whole window its levels, its strength, and the column of the guess that was right next.

    Each window is told of once: its levels become -1 until the next one is proposed.
    Right next is a guess after the run of accepted ones; column 0: none was. `last` is the window column where the run
    ends, 0 the root; `committed` holds the tokens of the run, and then the token after it.
    Shapes: guesses, parents [S, K] i64, levels, strength [S] i64, slots, last [B] i64, committed [B, D] i64, padded
    with -1, out [B, 3] i64, rows of any stride.
    Raises: ValueError naming the argument. Sync: never.
    """
    for name, value in {"guesses": guesses, "parents": parents}.items():
        require(value.dim() == 2 and value.shape == guesses.shape, name, "[S, K]")
        require(value.dtype == slots.dtype and value.is_contiguous(), name, "int64, contiguous")
    require(committed.dim() == 2 and committed.is_contiguous(), "committed", "[B, D], contiguous")
    for name, value in {"slots": slots, "last": last}.items():
        require(value.shape == committed.shape[:1] and value.dtype == committed.dtype, name, "[B] int64")
        require(value.is_contiguous(), name, "contiguous")
    require(out.shape == (len(slots), 3) and out.dtype == torch.int64 and out.stride(1) == 1, "out", "[B, 3] int64")
    run = _ngram_lookahead_triton if runs_triton(slots) else ngram_lookahead_reference
    run(guesses, parents, levels, strength, slots, committed, last, out)


def ngram_lookahead_reference(
    guesses: Tensor,
    parents: Tensor,
    levels: Tensor,
    strength: Tensor,
    slots: Tensor,
    committed: Tensor,
    last: Tensor,
    out: Tensor,
) -> None:
    count = (committed >= 0).sum(1, keepdim=True)
    newest = committed.gather(1, (count - 1).clamp(min=0))
    found = levels[slots]
    right = (guesses[slots] == newest) & (parents[slots] == last[:, None]) & (found > 0)[:, None]
    column = (right * torch.arange(1, 1 + guesses.shape[1], device=slots.device)).amax(1)
    out.copy_(torch.stack((found, strength[slots], column), 1))
    levels[slots] = -1


def _ngram_lookahead_triton(
    guesses: Tensor,
    parents: Tensor,
    levels: Tensor,
    strength: Tensor,
    slots: Tensor,
    committed: Tensor,
    last: Tensor,
    out: Tensor,
) -> None:
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
        out.stride(0),
        BLOCK_K=next_power_of_2(num_guesses),
        BLOCK_D=next_power_of_2(longest),
        num_warps=1,
        **dependent_launch(slots.device),
    )


@TritonKernel
def _ngram_lookahead_kernel(
    guesses_ptr: tl.tensor, parents_ptr: tl.tensor, levels_ptr: tl.tensor, strength_ptr: tl.tensor,
    slots_ptr: tl.tensor, committed_ptr: tl.tensor, last_ptr: tl.tensor, out_ptr: tl.tensor,
    num_guesses: int, longest: int, out_stride: int,
    BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column, guess = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    run = tl.load(committed_ptr + row * longest + column, mask=column < longest, other=-1)
    count = tl.sum((run >= 0).to(tl.int32), axis=0)
    newest = tl.sum(tl.where(column == count - 1, run, 0), axis=0)
    inside = guess < num_guesses
    token = tl.load(guesses_ptr + slot * num_guesses + guess, mask=inside, other=-1)
    parent = tl.load(parents_ptr + slot * num_guesses + guess, mask=inside, other=-1)
    found = tl.load(levels_ptr + slot)
    right = inside & (token == newest) & (parent == tl.load(last_ptr + row)) & (found > 0)
    next_column = tl.max(tl.where(right, guess + 1, 0), axis=0).to(tl.int64)
    out_ptr += row * out_stride
    tl.store(out_ptr, found)
    tl.store(out_ptr + 1, tl.load(strength_ptr + slot))
    tl.store(out_ptr + 2, next_column)
    tl.store(levels_ptr + slot, -1)
