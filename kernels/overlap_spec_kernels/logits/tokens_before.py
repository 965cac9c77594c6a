"""A part of `process_logits`: the tokens before a row by position, committed ones and then guesses."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel
from overlap_spec_kernels.window.store_tokens import TokenRows, cache_rows


class RowHistory(NamedTuple):
    """What is before R rows of each of B requests: what is committed up to the root, then guesses."""

    store: TokenRows
    roots: Tensor  # [B] i64, positions
    positions: Tensor  # [B, R] i64, of the tokens that are drawn
    guesses: Tensor  # [B, R, D] i64, in order, -1 before the first of them
    counts: Tensor  # [B, V] i32, as `count_tokens` counts what is committed


def tokens_before(history: RowHistory, margin: int) -> Tensor:
    """By position, -1 from the row's own on; `margin`: places after the last position.

    Shapes: -> [B, R, T + margin] i64.
    """
    store, roots, positions, guesses, _ = history
    batch, rows, depth = guesses.shape
    size = store.page_table.shape[1] * store.page_size
    here = torch.arange(size, device=roots.device).expand(batch, -1)
    inside = here <= roots[:, None]
    found = store.pool[cache_rows(store.page_table, here.masked_fill(~inside, 0), store.page_size)].long()
    tokens = torch.full((batch, rows, size + margin), -1, device=roots.device)
    tokens[:, :, :size] = found.masked_fill(~inside, -1)[:, None]
    places = positions[:, :, None] - torch.arange(depth, 0, -1, device=roots.device)
    last = size + margin - 1  # a place of its own for what is no guess
    return tokens.scatter_(2, places.masked_fill(guesses < 0, last).clamp(0, last), guesses)


@TritonKernel
def token_before(
    pool_ptr: tl.tensor, pages_ptr: tl.tensor, ends_ptr: tl.tensor, here: tl.tensor, root: tl.tensor,
    position: tl.tensor, PAGE_SIZE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Tokens at places before a row's `position`: committed, then guesses; -1 elsewhere.

    `ends_ptr`: where the guess at position 0 would be.
    """
    is_committed, is_guess = (here >= 0) & (here <= root), (here > root) & (here < position)
    page = tl.load(pages_ptr + here // PAGE_SIZE, mask=is_committed, other=0).to(tl.int64)
    token = tl.load(pool_ptr + page * PAGE_SIZE + here % PAGE_SIZE, mask=is_committed, other=-1).to(tl.int64)
    return tl.where(is_guess, tl.load(ends_ptr + here, mask=is_guess, other=-1), token)
