"""Writes tokens of each request into the token pool, which has a row for each row of the KV cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton


class TokenRows(NamedTuple):
    """The token pool, and the pages in it of a batch's requests."""

    pool: Tensor  # [R] i32
    page_table: Tensor  # [B, P] i32
    page_size: int


def require_token_rows(store: TokenRows, num_rows: int) -> None:
    """Raises: ValueError naming the argument."""
    pool, page_table, _ = store
    require(pool.dim() == 1 and pool.dtype == torch.int32 and pool.is_contiguous(), "pool", "[R] int32")
    require(page_table.dim() == 2 and page_table.dtype == torch.int32, "page_table", "[B, P] int32")
    require(page_table.stride(1) == 1, "page_table", "contiguous rows")
    require(page_table.shape[0] == num_rows, "page_table", "[B, P]")


def cache_rows(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Rows of the token pool, for positions clamped to the page table. Shapes: [B, P] i32, [B, R] i64 -> [B, R]."""
    positions = positions.clamp(0, page_table.shape[1] * page_size - 1)
    return page_table.gather(1, positions // page_size).long() * page_size + positions % page_size


def store_tokens(
    pool: Tensor, page_table: Tensor, page_size: int, starts: Tensor, tokens: Tensor, counts: Tensor
) -> None:
    """Write the first `counts` tokens of each row at positions starts, starts + 1, .., in place.

    Page 0 belongs to no request, and may be written as well.
    Shapes: pool [R] i32, page_table [B, P] i32, starts, counts [B] i64, tokens [B, n] i64.
    Raises: ValueError naming the argument. Sync: never.
    """
    require_token_rows(TokenRows(pool, page_table, page_size), tokens.shape[0])
    require(tokens.dim() == 2 and tokens.dtype == torch.int64 and tokens.is_contiguous(), "tokens", "[B, n] int64")
    for name, value in {"starts": starts, "counts": counts}.items():
        require(value.shape == tokens.shape[:1] and value.is_contiguous(), name, "[B], contiguous")
        require(value.dtype == torch.int64, name, "int64")
    run = _store_tokens_triton if runs_triton(pool) else store_tokens_reference
    run(pool, page_table, page_size, starts, tokens, counts)


def store_tokens_reference(
    pool: Tensor, page_table: Tensor, page_size: int, starts: Tensor, tokens: Tensor, counts: Tensor
) -> None:
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    inside = columns < counts[:, None]
    positions = torch.where(inside, starts[:, None] + columns, 0)
    pool[cache_rows(page_table, positions, page_size).masked_fill(~inside, 0)] = tokens.int()


def _store_tokens_triton(
    pool: Tensor, page_table: Tensor, page_size: int, starts: Tensor, tokens: Tensor, counts: Tensor
) -> None:
    num_rows, most = tokens.shape
    _store_tokens_kernel[(num_rows,)](
        pool,
        page_table,
        starts,
        tokens,
        counts,
        page_table.stride(0),
        most,
        PAGE_SIZE=page_size,
        BLOCK=next_power_of_2(most),
        num_warps=1,
        **dependent_launch(pool.device),
    )


@TritonKernel
def _store_tokens_kernel(
    pool_ptr: tl.tensor, page_table_ptr: tl.tensor, starts_ptr: tl.tensor, tokens_ptr: tl.tensor, counts_ptr: tl.tensor,
    table_stride: int, most: int, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    inside = (column < most) & (column < tl.load(counts_ptr + row))
    position = tl.load(starts_ptr + row) + column
    token = tl.load(tokens_ptr + row * most + column, mask=inside, other=0)
    store_token_run(pool_ptr, page_table_ptr + row * table_stride, position, token, inside, PAGE_SIZE)


@TritonKernel
def store_token_run(
    pool_ptr: tl.tensor, pages_ptr: tl.tensor, position: tl.tensor, token: tl.tensor, inside: tl.tensor,
    PAGE_SIZE: tl.constexpr,
) -> None:  # fmt: skip
    """A part of kernels: write a request's tokens at `position`. `pages_ptr`: the request's row of the page table."""
    page = tl.load(pages_ptr + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    tl.store(pool_ptr + page * PAGE_SIZE + position % PAGE_SIZE, token.to(tl.int32), mask=inside)
