"""Puts tokens that must follow into windows, where the guesses of the draft do not begin with them already.

window  root a b c    forced a b     left as it is: the draft's window is longer
window  root a x c    forced a b     root a b -1
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton


def place_forced(window: Tensor, parents: Tensor | None, slots: Tensor, forced: Tensor) -> None:
    """Let the guesses of each slot begin with `forced`, in place. Sync: never.

    A slot without forced tokens (-1 in column 0) keeps its window. In a tree (`parents`) a path of the forced tokens
    from the root keeps it too; otherwise they become a chain. No slot may occur twice.
    Shapes: window, parents [S, N] i64, slots [B] i64, forced [B, F] i64, padded with -1, 1 <= F < N.
    Raises: ValueError naming the argument.
    """
    require(window.dim() == 2 and window.dtype == torch.int64 and window.is_contiguous(), "window", "[S, N] int64")
    if parents is not None:
        require(parents.shape == window.shape and parents.is_contiguous(), "parents", "[S, N] as window")
        require(parents.dtype == torch.int64, "parents", "int64")
    require(slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots", "[B] int64")
    require(forced.dim() == 2 and len(forced) == len(slots) and forced.is_contiguous(), "forced", "[B, F]")
    require(forced.dtype == torch.int64 and 1 <= forced.shape[1] < window.shape[1], "forced", "int64, 1 <= F < N")
    run = _place_forced_triton if runs_triton(window) else place_forced_reference
    run(window, parents, slots, forced)


def place_forced_reference(window: Tensor, parents: Tensor | None, slots: Tensor, forced: Tensor) -> None:
    rows, columns = window[slots], torch.arange(window.shape[1], device=window.device)
    above = (columns - 1).clamp(min=0).expand_as(rows) if parents is None else parents[slots]
    found, node = torch.ones_like(slots, dtype=torch.bool), torch.zeros_like(slots)
    for token in forced.unbind(1):
        fits = (rows == token[:, None]) & (above == node[:, None]) & (columns > 0)
        node = torch.where(token < 0, node, fits.int().argmax(1))
        found &= fits.any(1) | (token < 0)
    count = (forced >= 0).sum(1, keepdim=True)
    chain = torch.full_like(rows, -1)
    chain[:, 0] = rows[:, 0]
    chain[:, 1 : 1 + forced.shape[1]] = forced
    window[slots] = torch.where(found[:, None], rows, chain)
    if parents is not None:
        line = torch.where((columns > 0) & (columns <= count), columns - 1, 0)
        parents[slots] = torch.where(found[:, None], above, line)


def _place_forced_triton(window: Tensor, parents: Tensor | None, slots: Tensor, forced: Tensor) -> None:
    _place_forced_kernel[(len(slots),)](
        window,
        window if parents is None else parents,
        slots,
        forced,
        window.shape[1],
        forced.shape[1],
        TREE=parents is not None,
        BLOCK_N=next_power_of_2(window.shape[1]),
        num_warps=1,
        **dependent_launch(window.device),
    )


@TritonKernel.with_options(do_not_specialize=("num_forced",))
def _place_forced_kernel(
    window_ptr: tl.tensor, parents_ptr: tl.tensor, slots_ptr: tl.tensor, forced_ptr: tl.tensor, window_columns: int,
    num_forced: int, TREE: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per slot: follow the forced tokens down the window; where they leave it, they replace it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_N)
    inside = column < window_columns
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    place = slot * window_columns + column
    tokens = tl.load(window_ptr + place, mask=inside, other=-1)
    above = (tl.maximum(column, 1) - 1).to(tl.int64)
    if TREE:
        above = tl.load(parents_ptr + place, mask=inside, other=0)
    node = tl.zeros([], dtype=tl.int64)
    missing = tl.zeros([], dtype=tl.int64)
    count = tl.zeros([], dtype=tl.int64)
    for i in range(num_forced):
        token = tl.load(forced_ptr + row * num_forced + i)
        fits = inside & (column > 0) & (tokens == token) & (above == node)
        first = tl.min(tl.where(fits, column, BLOCK_N), axis=0).to(tl.int64)
        wanted = (token >= 0).to(tl.int64)
        missing += wanted * (first == BLOCK_N).to(tl.int64)
        node = tl.where(token >= 0, first, node)
        count += wanted
    if missing > 0:
        forced = (column > 0) & (column <= num_forced)
        chain = tl.load(forced_ptr + row * num_forced + column - 1, mask=forced, other=-1)
        tl.store(window_ptr + place, chain, mask=inside & (column > 0))
        if TREE:
            line = tl.where((column > 0) & (column <= count), column - 1, 0).to(tl.int64)
            tl.store(parents_ptr + place, line, mask=inside)
