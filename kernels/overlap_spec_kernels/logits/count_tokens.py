"""Counts the tokens of each request's history, in the token pool."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, require, runs_triton
from overlap_spec_kernels.window.store_tokens import TokenRows, cache_rows, require_token_rows

IN_PROMPT = 1 << 30  # in a count: the token is in the prompt
_BLOCK = 1024  # positions per program


def count_tokens(rows: TokenRows, roots: Tensor, output_from: Tensor, vocab_size: int) -> Tensor:
    """How often each token is in the output, plus `IN_PROMPT` where it is in the prompt.

    The output is at positions output_from .. root of a request, the prompt before it. Entries of the page table past
    the root are not followed. What is no token of the vocabulary, as padding may write, is not counted.
    Shapes: roots, output_from [B] i64 -> [B, V] i32. Raises: ValueError naming the argument. Sync: never.
    """
    require_token_rows(rows, len(roots))
    for name, value in {"roots": roots, "output_from": output_from}.items():
        require(value.dim() == 1 and value.dtype == torch.int64, name, "[B] int64")
    run = _count_tokens_triton if runs_triton(rows.pool) else count_tokens_reference
    return run(rows, roots, output_from, vocab_size)


def count_tokens_reference(rows: TokenRows, roots: Tensor, output_from: Tensor, vocab_size: int) -> Tensor:
    pool, page_table, page_size = rows
    positions = torch.arange(page_table.shape[1] * page_size, device=pool.device)
    inside, is_output = positions <= roots[:, None], positions >= output_from[:, None]
    at = cache_rows(page_table, positions.masked_fill(~inside, 0), page_size)
    tokens = pool[at].long().masked_fill(~inside, -1)
    inside &= (tokens >= 0) & (tokens < vocab_size)
    tokens = tokens.masked_fill(~inside, 0)
    counts = torch.zeros(len(roots), vocab_size, dtype=torch.int32, device=pool.device)
    counts.scatter_reduce_(1, tokens, torch.where(inside & ~is_output, IN_PROMPT, 0).int(), "amax")
    return counts.scatter_add_(1, tokens, (inside & is_output).int())


def _count_tokens_triton(rows: TokenRows, roots: Tensor, output_from: Tensor, vocab_size: int) -> Tensor:
    pool, page_table, page_size = rows
    counts = torch.zeros(len(roots), vocab_size, dtype=torch.int32, device=pool.device)
    blocks = ceil_div(page_table.shape[1] * page_size, _BLOCK)
    _count_tokens_kernel[(len(roots), blocks)](
        pool,
        page_table,
        roots,
        output_from,
        counts,
        page_table.stride(0),
        roots.stride(0),
        output_from.stride(0),
        vocab_size,
        PAGE_SIZE=page_size,
        BLOCK=_BLOCK,
        PROMPT=IN_PROMPT,
    )
    return counts


@TritonKernel
def _count_tokens_kernel(
    pool_ptr: tl.tensor, page_table_ptr: tl.tensor, roots_ptr: tl.tensor, output_from_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    table_stride: int, roots_stride: int, output_stride: int, vocab_size: int,
    PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PROMPT: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and block of positions; those past the root do nothing."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = position <= tl.load(roots_ptr + row * roots_stride)
    is_output = position >= tl.load(output_from_ptr + row * output_stride)
    page = tl.load(page_table_ptr + row * table_stride + position // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    token = tl.load(pool_ptr + page * PAGE_SIZE + position % PAGE_SIZE, mask=inside, other=0)
    inside &= (token >= 0) & (token < vocab_size)
    count_ptr = counts_ptr + row * vocab_size + token
    tl.atomic_add(count_ptr, 1, mask=inside & is_output)
    tl.atomic_or(count_ptr, PROMPT, mask=inside & ~is_output)
