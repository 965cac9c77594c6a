"""Which rows have to draw the next token of a closing marker, because a request's reasoning has used up its budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overlap_spec_kernels.launch import TritonKernel, dependent_launch, require, runs_triton
from overlap_spec_kernels.window.store_tokens import TokenRows, cache_rows, require_token_rows

if TYPE_CHECKING:
    import triton.language as tl

MARKER = 8  # tokens of a marker, at most
# Columns of a budget: tokens (-1: no budget), whether the output begins inside the reasoning, the lengths of the
# opening and of the closing marker, and their tokens.
BUDGET_WIDTH = 4 + 2 * MARKER
_BLOCK = 128


def reasoning_end(
    store: TokenRows, roots: Tensor, positions: Tensor, guesses: Tensor, budgets: Tensor, output_from: Tensor
) -> Tensor:
    """The token that each row has to draw, -1 where any may be drawn. Sync: never.

    Reasoning begins with the output, or after the opening marker if the output begins with that. If it is not closed
    within its budget of tokens, the closing marker follows, token by token. What is before a row is committed up to the
    root, then guesses.

    Shapes: roots, output_from [B] i64, positions [B, R] i64, guesses [B, R, D] i64 (in order, -1 before the first),
    budgets [B, 4 + 2 * 8] i64 -> [B, R] i64. Raises: ValueError naming the argument.
    """
    require_token_rows(store, roots.shape[0])
    require(positions.dim() == 2 and positions.shape[0] == roots.shape[0], "positions", "[B, R]")
    require(guesses.dim() == 3 and guesses.shape[:2] == positions.shape, "guesses", "[B, R, D]")
    require(budgets.shape == (roots.shape[0], BUDGET_WIDTH), "budgets", f"[B, {BUDGET_WIDTH}]")
    for name, value in {"roots": roots, "output_from": output_from, "positions": positions, "guesses": guesses}.items():
        require(value.dtype == torch.int64, name, "int64")
    run = _reasoning_end_triton if runs_triton(store.pool) else reasoning_end_reference
    return run(store, roots, positions, guesses, budgets, output_from)


def reasoning_end_reference(
    store: TokenRows, roots: Tensor, positions: Tensor, guesses: Tensor, budgets: Tensor, output_from: Tensor
) -> Tensor:
    tokens = _tokens_before(store, roots, positions, guesses)  # [B, R, T + MARKER]
    budget, is_open, opening_len, closing_len = budgets[:, :4, None].unbind(1)
    opening, closing = budgets[:, None, 4 : 4 + MARKER], budgets[:, None, 4 + MARKER :]
    each = torch.arange(MARKER, device=roots.device)
    first = tokens.gather(2, (output_from[:, None, None] + each).expand(*positions.shape, -1))
    opens = ((first == opening) | (each >= opening_len[:, :, None])).all(2) & (opening_len > 0)
    begin = output_from[:, None] + torch.where(opens, opening_len, 0)
    end = begin + budget
    num_positions = tokens.shape[2] - MARKER
    here = torch.arange(num_positions, device=roots.device)
    closes = torch.ones_like(tokens[:, :, :num_positions], dtype=torch.bool)
    for index in range(MARKER):
        token = tokens[:, :, index : index + num_positions]
        closes &= (token == closing[:, :, index, None]) | (index >= closing_len)[:, :, None]
    inside = (here >= begin[:, :, None]) & (here + closing_len[:, :, None] <= end[:, :, None])
    offset = positions - end
    due = (budget >= 0) & ((is_open > 0) | opens) & (offset >= 0) & (offset < closing_len)
    forced = closing.expand(*positions.shape, -1).gather(2, offset.clamp(0, MARKER - 1)[:, :, None])[:, :, 0]
    return torch.where(due & ~(closes & inside).any(2), forced, -1)


def _tokens_before(store: TokenRows, roots: Tensor, positions: Tensor, guesses: Tensor) -> Tensor:
    """The tokens before each row by position, -1 from its own position on. Shapes: -> [B, R, T + MARKER] i64."""
    batch, rows, depth = guesses.shape
    size = store.page_table.shape[1] * store.page_size
    here = torch.arange(size, device=roots.device).expand(batch, -1)
    inside = here <= roots[:, None]
    found = store.pool[cache_rows(store.page_table, here.masked_fill(~inside, 0), store.page_size)].long()
    tokens = torch.full((batch, rows, size + MARKER), -1, device=roots.device)
    tokens[:, :, :size] = found.masked_fill(~inside, -1)[:, None]
    places = positions[:, :, None] - torch.arange(depth, 0, -1, device=roots.device)
    last = size + MARKER - 1  # a place of its own for what is no guess
    return tokens.scatter_(2, places.masked_fill(guesses < 0, last).clamp(0, last), guesses)


def _reasoning_end_triton(
    store: TokenRows, roots: Tensor, positions: Tensor, guesses: Tensor, budgets: Tensor, output_from: Tensor
) -> Tensor:
    forced = torch.empty_like(positions, memory_format=torch.contiguous_format)
    if positions.numel():
        _reasoning_end_kernel[positions.shape](
            store.pool,
            store.page_table,
            roots.contiguous(),
            positions.contiguous(),
            guesses.contiguous(),
            budgets.contiguous(),
            output_from.contiguous(),
            forced,
            store.page_table.stride(0),
            positions.shape[1],
            guesses.shape[2],
            PAGE_SIZE=store.page_size,
            MARKER=MARKER,
            BLOCK=_BLOCK,
            num_warps=1,
            **dependent_launch(store.pool.device),
        )
    return forced


@TritonKernel
def _reasoning_end_kernel(
    pool_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    roots_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    guesses_ptr: tl.tensor,
    budgets_ptr: tl.tensor,
    output_from_ptr: tl.tensor,
    forced_ptr: tl.tensor,
    table_stride: int,
    num_rows: int,
    depth: int,
    PAGE_SIZE: tl.constexpr,
    MARKER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One program per row. The history is read only where the budget ends: elsewhere any token may be drawn."""
    slot, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cell = slot * num_rows + row
    budget_ptr = budgets_ptr + slot * (4 + 2 * MARKER)
    budget, is_open = tl.load(budget_ptr), tl.load(budget_ptr + 1)
    opening_len, closing_len = tl.load(budget_ptr + 2), tl.load(budget_ptr + 3)
    output_from, position = tl.load(output_from_ptr + slot), tl.load(positions_ptr + cell)
    forced = tl.full((), -1, tl.int64)
    used = position - output_from
    if (budget >= 0) & (used >= budget) & (used < budget + opening_len + closing_len):
        root, pages_ptr = tl.load(roots_ptr + slot), page_table_ptr + slot * table_stride
        ends_ptr = guesses_ptr + (cell + 1) * depth - position  # where the token at position 0 would be
        each = tl.arange(0, MARKER)
        first = token_before(pool_ptr, pages_ptr, ends_ptr, output_from + each, root, position, PAGE_SIZE)
        other = (first != tl.load(budget_ptr + 4 + each)) & (each < opening_len)
        opens = (tl.sum(other.to(tl.int32)) == 0) & (opening_len > 0)
        begin = output_from + tl.where(opens, opening_len, 0)
        end = begin + budget
        offset = position - end
        if (opens | (is_open > 0)) & (offset >= 0) & (offset < closing_len):
            num_closed = 0
            for start in range(begin, end - closing_len + 1, BLOCK):
                here = start + tl.arange(0, BLOCK)
                closes = here + closing_len <= end
                for index in tl.static_range(MARKER):
                    token = token_before(pool_ptr, pages_ptr, ends_ptr, here + index, root, position, PAGE_SIZE)
                    wanted = tl.load(budget_ptr + 4 + MARKER + index)
                    closes = closes & ((token == wanted) | (index >= closing_len))
                num_closed += tl.sum(closes.to(tl.int32))
            if num_closed == 0:
                forced = tl.load(budget_ptr + 4 + MARKER + offset)
    tl.store(forced_ptr + cell, forced)


@TritonKernel
def token_before(
    pool_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    here: tl.tensor,
    root: tl.tensor,
    position: tl.tensor,
    PAGE_SIZE: tl.constexpr,
) -> tl.tensor:
    """A part of kernels: tokens at places before a row's `position`: committed, then guesses; -1 elsewhere."""
    is_committed, is_guess = here <= root, (here > root) & (here < position)
    page = tl.load(pages_ptr + here // PAGE_SIZE, mask=is_committed, other=0).to(tl.int64)
    token = tl.load(pool_ptr + page * PAGE_SIZE + here % PAGE_SIZE, mask=is_committed, other=-1).to(tl.int64)
    return tl.where(is_guess, tl.load(ends_ptr + here, mask=is_guess, other=-1), token)
