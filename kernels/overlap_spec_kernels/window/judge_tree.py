"""Verifies a tree of guesses, commits the accepted path to the slot rows and publishes it, in one launch.

column   0     1  2  3  4      the walk: d0 == g2, d2 == g4, column 4 has no child
token    root g1 g2 g3 g4      path      0  2  4, accept_len 2
parent   -     0  0  1  2      committed d0 d2 d4 (the bonus), which is the next root
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.launch import dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.limits import MAX_TREE_WIDTH
from overlap_spec_kernels.window._judge_tree_kernel import judge_tree_kernel
from overlap_spec_kernels.window.store_tokens import TokenRows, require_token_rows, store_tokens_reference
from overlap_spec_kernels.window.verdict import PublishedColumns, Verdict, without_marks


def judge_tree(
    drawn: Tensor,
    window_tokens: Tensor,
    parents: Tensor,
    slots: Tensor,
    lengths: Tensor,
    length: Tensor,
    window: Tensor,
    dummy: int,
    depth: int,
    accept_len: Tensor | None = None,
    store: TokenRows | None = None,
    out: Verdict | None = None,
) -> Verdict:
    """Walk from the root to the child whose token equals what was drawn, and advance the slots by what is committed.

    D = depth nodes at most, the root included: num_steps + 1, and no more than there are columns. A guess of -1 is
    no node; of equal siblings, which there should not be, the lower column counts. Nodes below depth D - 1 are
    not reached. A path ends in columns that stay where they are (column i in place i), so that moving them moves
    nothing. In place: length[slot] becomes the new length; window[slot] the bonus, then -1. Only the slot `dummy`,
    which pads a batch and may be in it several times, is put back to length 0 and root 0. No other slot may occur
    twice. With `accept_len`, the walk goes to the lowest child instead, whatever was drawn, so many times or while
    there is one; the guesses on it are committed, then what was drawn after the last. With `store`, what is committed
    is written into the token pool too, at positions lengths + 1, .. in a row.
    The published path tells what narrower windows would have committed: those of its columns that they have, if there
    was a guess as far as `last_guess`.
    `NO_TOKEN` in `drawn` means what it means to `judge_chain`.
    `out`: where to write the verdict; published columns after the path are left alone.
    Shapes: drawn, window_tokens, parents [B, W] i64, W <= 64, slots, lengths [B] i64 (of `gather_tree`), length [S]
    i64, window [S, N] i64, accept_len [B] i64. Raises: ValueError naming the argument. Sync: never.
    """
    require(drawn.dim() == 2 and drawn.dtype == torch.int64 and drawn.is_contiguous(), "drawn", "[B, W] int64")
    for name, value in {"window_tokens": window_tokens, "parents": parents}.items():
        require(value.shape == drawn.shape and value.is_contiguous(), name, "[B, W] as drawn")
        require(value.dtype == torch.int64, name, "int64")
    rows = {"slots": slots, "lengths": lengths} | ({} if accept_len is None else {"accept_len": accept_len})
    for name, value in rows.items():
        require(value.shape == drawn.shape[:1] and value.is_contiguous(), name, "[B], contiguous")
        require(value.dtype == torch.int64, name, "int64")
    require(length.dim() == 1 and length.dtype == torch.int64 and length.is_contiguous(), "length", "[S] int64")
    require(window.dim() == 2 and window.shape[0] == length.shape[0], "window", "[S, N]")
    require(window.dtype == torch.int64 and window.stride(1) == 1, "window", "int64, a contiguous last dimension")
    require(1 <= drawn.shape[1] <= window.shape[1], "drawn", "at most as many columns as window")
    require(drawn.shape[1] <= MAX_TREE_WIDTH, "drawn", "at most 64 columns")
    require(1 <= depth <= drawn.shape[1], "depth", "1 to the columns of drawn")
    if store is not None:
        require_token_rows(store, drawn.shape[0])
    fits = out is None or (out.path is not None and out.path.shape == (len(drawn), depth))
    require(fits, "out", "a verdict on as many trees of this depth")
    run = _judge_tree_triton if runs_triton(drawn) else judge_tree_reference
    return run(drawn, window_tokens, parents, slots, lengths, length, window, dummy, depth, accept_len, store, out)


def judge_tree_reference(
    drawn: Tensor,
    window_tokens: Tensor,
    parents: Tensor,
    slots: Tensor,
    lengths: Tensor,
    length: Tensor,
    window: Tensor,
    dummy: int,
    depth: int,
    accept_len: Tensor | None = None,
    store: TokenRows | None = None,
    out: Verdict | None = None,
) -> Verdict:
    path, walked = _walk(drawn, window_tokens, parents, depth, accept_len)
    step, column = (torch.arange(size, device=drawn.device) for size in (depth, drawn.shape[1]))
    tokens = drawn.gather(1, path)
    if accept_len is not None:  # commits guesses even if they were not drawn
        following = window_tokens.gather(1, path)[:, 1:]
        tokens[:, :-1] = torch.where(step[:-1] < walked[:, None], following, tokens[:, :-1])
    tokens = tokens.masked_fill(step > walked[:, None], -1)
    published, tokens = tokens, without_marks(tokens)
    new_lengths = lengths + walked + 1
    bonus = drawn.gather(1, path.gather(1, walked[:, None])).squeeze(1).clamp(min=0)
    deepest = _depths(window_tokens, parents, depth).amax(1)
    is_dummy = slots == dummy
    length[slots] = new_lengths.masked_fill(is_dummy, 0)
    window[slots, 0] = bonus.masked_fill(is_dummy, 0)
    window[slots, 1:] = -1
    if store is not None:
        store_tokens_reference(*store, lengths + 1, tokens, walked + 1)
    out = out or _allocate(len(drawn), depth, drawn.device)
    assert out.path is not None
    out.tokens.copy_(tokens)
    out.follow.copy_(tokens.clamp(min=0).reshape(-1))
    out.path.copy_(path)
    out.accept_len.copy_(walked)
    out.next_positions.copy_(step[:, None] + new_lengths)
    out.published.tokens.copy_(published)
    out.published.num_guesses.copy_(deepest)
    out.published.last_guess.copy_(torch.where(window_tokens >= 0, column, 0).amax(1))
    out.published.path.copy_(path.masked_fill(step > walked[:, None], -1)[:, 1:])
    return out


def _allocate(num_slots: int, depth: int, device: torch.device) -> Verdict:
    return Verdict.allocate(num_slots, PublishedColumns(depth, is_tree=True), device)


def _walk(
    drawn: Tensor, window_tokens: Tensor, parents: Tensor, depth: int, accept_len: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Shapes: -> path [B, D], number of accepted guesses [B]."""
    num_rows, width = drawn.shape
    column = torch.arange(width, device=drawn.device)
    node, walked = drawn.new_zeros(num_rows, 1), drawn.new_zeros(num_rows, 1)
    path = [node]
    for step in range(1, depth):
        child = (column > 0) & (parents == node) & (window_tokens >= 0) & (walked == step - 1)
        child &= window_tokens == drawn.gather(1, node) if accept_len is None else (accept_len >= step)[:, None]
        found = child.any(1, keepdim=True)
        node = torch.where(found, child.long().argmax(1, keepdim=True), node)
        walked = walked + found
        path.append(torch.where(found, node, step))
    return torch.cat(path, 1), walked.squeeze(1)


def _depths(window_tokens: Tensor, parents: Tensor, depth: int) -> Tensor:
    """Number of edges from each guess to the root, at most depth - 1; 0 where there is no guess. Shapes: -> [B, W]."""
    column = torch.arange(parents.shape[1], device=parents.device)
    node = torch.where(window_tokens >= 0, column, 0)
    node[:, 0] = 0
    depths = torch.zeros_like(parents)
    for _ in range(depth - 1):
        depths += node > 0
        node = torch.where(node > 0, parents.gather(1, node), 0)
    return depths


def _judge_tree_triton(
    drawn: Tensor,
    window_tokens: Tensor,
    parents: Tensor,
    slots: Tensor,
    lengths: Tensor,
    length: Tensor,
    window: Tensor,
    dummy: int,
    depth: int,
    accept_len: Tensor | None = None,
    store: TokenRows | None = None,
    out: Verdict | None = None,
) -> Verdict:
    num_slots, width = drawn.shape
    out = out or _allocate(num_slots, depth, drawn.device)
    judge_tree_kernel[(num_slots,)](
        drawn,
        window_tokens,
        parents,
        slots,
        lengths,
        length,
        window,
        drawn if accept_len is None else accept_len,
        out.tokens,
        out.follow,
        out.path,
        out.accept_len,
        out.next_positions,
        out.published.rows,
        *(slots, slots, 0) if store is None else (store.pool, store.page_table, store.page_table.stride(0)),
        window.stride(0),
        window.shape[1],
        width,
        depth,
        out.next_positions.stride(0),
        out.published.columns.row_size,
        dummy,
        GIVEN=accept_len is not None,
        STORE=store is not None,
        PAGE_SIZE=1 if store is None else store.page_size,
        BLOCK_W=next_power_of_2(width),
        BLOCK_D=next_power_of_2(depth),
        BLOCK_N=next_power_of_2(window.shape[1]),
        num_warps=1,
        **dependent_launch(drawn.device),
    )
    return out
