"""Verifies a chain of guesses, commits the accepted tokens to the slot rows and publishes them, in one launch.

window  root g1 g2 g3        g1 == d0, g2 == d1, g3 != d2: two guesses accepted
drawn    d0  d1 d2 d3        committed d0 d1 d2 (the bonus), -1; the next root is d2
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.window.store_tokens import (
    TokenRows,
    require_token_rows,
    store_token_run,
    store_tokens_reference,
)
from overlap_spec_kernels.window.verdict import PublishedColumns, Verdict, without_marks


def judge_chain(
    drawn: Tensor,
    window_tokens: Tensor,
    slots: Tensor,
    lengths: Tensor,
    length: Tensor,
    window: Tensor,
    dummy: int,
    accept_len: Tensor | None = None,
    store: TokenRows | None = None,
    out: Verdict | None = None,
) -> Verdict:
    """Accept guesses while window_tokens[:, 1:] == drawn[:, :-1], and advance the slots by what is committed.

    A token of `NO_TOKEN`, for which the target's logits were not finite, equals no guess. It is published, so that the
    host ends its request; everywhere else 0 takes its place.
    In place: length[slot] becomes the new length; window[slot] the bonus, then -1. Only the slot `dummy`, which pads
    a batch and may be in it several times, is put back to length 0 and root 0. No other slot may occur twice.
    `accept_len` is for a benchmark of synthetic acceptance: so many guesses are accepted whatever was drawn, at most as
    many as there are. With `store`, what is committed is written into the token pool too, at positions lengths + 1, ..
    `out`: where to write the verdict; published columns after `num_guesses` are left alone.
    Shapes: drawn, window_tokens [B, W] i64, slots, lengths [B] i64 (of `gather_window`), length [S] i64, window
    [S, N] i64, accept_len [B] i64. Raises: ValueError naming the argument. Sync: never.
    """
    require(drawn.dim() == 2 and drawn.dtype == torch.int64 and drawn.is_contiguous(), "drawn", "[B, W] int64")
    require(window_tokens.shape == drawn.shape and window_tokens.is_contiguous(), "window_tokens", "[B, W] as drawn")
    require(window_tokens.dtype == torch.int64, "window_tokens", "int64")
    rows = {"slots": slots, "lengths": lengths} | ({} if accept_len is None else {"accept_len": accept_len})
    for name, value in rows.items():
        require(value.shape == drawn.shape[:1] and value.is_contiguous(), name, "[B], contiguous")
        require(value.dtype == torch.int64, name, "int64")
    require(length.dim() == 1 and length.dtype == torch.int64 and length.is_contiguous(), "length", "[S] int64")
    require(window.dim() == 2 and window.shape[0] == length.shape[0], "window", "[S, N]")
    require(window.dtype == torch.int64 and window.stride(1) == 1, "window", "int64, a contiguous last dimension")
    require(1 <= drawn.shape[1] <= window.shape[1], "drawn", "at most as many columns as window")
    if store is not None:
        require_token_rows(store, drawn.shape[0])
    require(out is None or out.tokens.shape == drawn.shape, "out", "a verdict on as many windows of this width")
    run = _judge_chain_triton if runs_triton(drawn) else judge_chain_reference
    return run(drawn, window_tokens, slots, lengths, length, window, dummy, accept_len, store, out)


def judge_chain_reference(
    drawn: Tensor,
    window_tokens: Tensor,
    slots: Tensor,
    lengths: Tensor,
    length: Tensor,
    window: Tensor,
    dummy: int,
    accept_len: Tensor | None = None,
    store: TokenRows | None = None,
    out: Verdict | None = None,
) -> Verdict:
    guesses, columns = window_tokens[:, 1:], torch.arange(drawn.shape[1], device=drawn.device)
    num_proposed = (guesses >= 0).sum(1)
    if accept_len is None:
        accept_len = (guesses == drawn[:, :-1]).long().cumprod(1).sum(1)
    else:
        accept_len = torch.minimum(accept_len, num_proposed)
    # Accepted guesses equal the drawn tokens, unless accept_len was given.
    tokens = torch.where(columns < accept_len[:, None], torch.cat((guesses, drawn[:, -1:]), 1), drawn)
    tokens = tokens.masked_fill(columns > accept_len[:, None], -1)
    published, tokens = tokens, without_marks(tokens)
    new_lengths = lengths + accept_len + 1
    bonus = drawn.gather(1, accept_len[:, None]).squeeze(1).clamp(min=0)
    is_dummy = slots == dummy
    length[slots] = new_lengths.masked_fill(is_dummy, 0)
    window[slots, 0] = bonus.masked_fill(is_dummy, 0)
    window[slots, 1:] = -1
    if store is not None:
        store_tokens_reference(*store, lengths + 1, tokens, accept_len + 1)
    out = out or Verdict.allocate(len(drawn), PublishedColumns(drawn.shape[1]), drawn.device)
    out.tokens.copy_(tokens)
    out.follow.copy_(tokens.clamp(min=0).reshape(-1))
    out.accept_len.copy_(accept_len)
    out.next_positions.copy_(columns[:, None] + new_lengths)
    out.published.tokens.copy_(published)
    out.published.num_guesses.copy_(num_proposed)
    return out


def _judge_chain_triton(
    drawn: Tensor,
    window_tokens: Tensor,
    slots: Tensor,
    lengths: Tensor,
    length: Tensor,
    window: Tensor,
    dummy: int,
    accept_len: Tensor | None = None,
    store: TokenRows | None = None,
    out: Verdict | None = None,
) -> Verdict:
    num_slots, width = drawn.shape
    out = out or Verdict.allocate(num_slots, PublishedColumns(width), drawn.device)
    _judge_chain_kernel[(num_slots,)](
        drawn,
        window_tokens,
        slots,
        lengths,
        length,
        window,
        drawn if accept_len is None else accept_len,
        out.tokens,
        out.follow,
        out.accept_len,
        out.next_positions,
        out.published.rows,
        *(slots, slots, 0) if store is None else (store.pool, store.page_table, store.page_table.stride(0)),
        window.stride(0),
        window.shape[1],
        width,
        out.next_positions.stride(0),
        out.published.columns.row_size,
        dummy,
        GIVEN=accept_len is not None,
        STORE=store is not None,
        PAGE_SIZE=1 if store is None else store.page_size,
        BLOCK_W=next_power_of_2(width),
        BLOCK_N=next_power_of_2(window.shape[1]),
        num_warps=1,
        **dependent_launch(drawn.device),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("batch_stride",))
def _judge_chain_kernel(
    drawn_ptr: tl.tensor, window_tokens_ptr: tl.tensor, slots_ptr: tl.tensor, lengths_ptr: tl.tensor,
    length_ptr: tl.tensor, window_ptr: tl.tensor, given_ptr: tl.tensor, tokens_ptr: tl.tensor, follow_ptr: tl.tensor,
    accept_len_ptr: tl.tensor, next_positions_ptr: tl.tensor, published_ptr: tl.tensor, pool_ptr: tl.tensor,
    page_table_ptr: tl.tensor, table_stride: int, window_stride: int, window_columns: int, width: int,
    batch_stride: int, published_stride: int, dummy: int, GIVEN: tl.constexpr, STORE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row. All copies of the dummy slot write the same constants, so their order does not matter."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)
    inside = column < width
    guessed = inside & (column > 0)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    length = tl.load(lengths_ptr + row)
    drawn = tl.load(drawn_ptr + row * width + column, mask=inside, other=0)
    before = tl.load(drawn_ptr + row * width + column - 1, mask=guessed, other=0)
    guess = tl.load(window_tokens_ptr + row * width + column, mask=guessed, other=-1)
    num_proposed = tl.sum((guess >= 0).to(tl.int64), axis=0)
    accepted = drawn
    if GIVEN:
        accept_len = tl.minimum(tl.load(given_ptr + row), num_proposed)
        accepted = tl.load(window_tokens_ptr + row * width + column + 1, mask=column + 1 < width, other=-1)
    else:  # the first guess that differs from the drawn token ends the run
        accept_len = tl.min(tl.where(guessed & (guess != before), column - 1, width - 1), axis=0).to(tl.int64)
    tokens = tl.where(column < accept_len, accepted, tl.where(column == accept_len, drawn, -1))
    bonus = tl.maximum(tl.sum(tl.where(column == accept_len, drawn, 0), axis=0), 0)
    new_length = length + accept_len + 1
    published_ptr += row * published_stride
    tl.store(published_ptr + column, tokens, mask=inside)
    tl.store(published_ptr + width, num_proposed)
    tokens = tl.where(tokens < -1, 0, tokens)
    tl.store(tokens_ptr + row * width + column, tokens, mask=inside)
    tl.store(follow_ptr + row * width + column, tl.maximum(tokens, 0), mask=inside)
    tl.store(accept_len_ptr + row, accept_len)
    tl.store(next_positions_ptr + column.to(tl.int64) * batch_stride + row, new_length + column, mask=inside)
    if STORE:
        run = inside & (column <= accept_len)
        store_token_run(pool_ptr, page_table_ptr + row * table_stride, length + 1 + column, tokens, run, PAGE_SIZE)
    is_dummy = slot == dummy
    tl.store(length_ptr + slot, tl.where(is_dummy, 0, new_length))
    window_column = tl.arange(0, BLOCK_N)
    root = tl.where(is_dummy, 0, bonus)
    next_window = tl.where(window_column == 0, root, -1)
    tl.store(window_ptr + slot * window_stride + window_column, next_window, mask=window_column < window_columns)
