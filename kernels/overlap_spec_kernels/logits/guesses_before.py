"""What is before a row: the guesses that lead to it in a window or in a level of a tree, and all tokens by position.

The second is a part of `process_logits`: committed tokens, and then guesses.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.window.store_tokens import TokenRows, cache_rows


def guesses_before(
    tokens: Tensor, parents: Tensor | None, nodes: Tensor | None, num_rows: int, depth: int, root: int
) -> Tensor:
    """The guesses before each row, in order, the last ones at the end; -1 before the first of them. Sync: never.

    `parents`: the node that each follows, below its own; None: the one before it. `nodes`: the node that each row
    follows; None: the last ones. `root`: the node that guesses follow; those from it down are none.
    Shapes: tokens, parents [B, G] i64, nodes [B, R] i64 -> [B, R, depth] i64. Raises: ValueError naming the argument.
    """
    require(tokens.dim() == 2 and tokens.dtype == torch.int64, "tokens", "[B, G] int64")
    require(
        parents is None or parents.shape == tokens.shape and parents.dtype == torch.int64, "parents", "[B, G] int64"
    )
    require(nodes is None or nodes.shape == (len(tokens), num_rows), "nodes", "[B, R]")
    require(nodes is None or nodes.dtype == torch.int64, "nodes", "int64")
    run = _guesses_before_triton if runs_triton(tokens) else guesses_before_reference
    return run(tokens, parents, nodes, num_rows, depth, root)


def guesses_before_reference(
    tokens: Tensor, parents: Tensor | None, nodes: Tensor | None, num_rows: int, depth: int, root: int
) -> Tensor:
    size, num_guesses = tokens.shape
    last = torch.arange(num_guesses - num_rows, num_guesses, device=tokens.device).expand(size, -1)
    node, found = last if nodes is None else nodes, [tokens.new_empty(size, num_rows, 0)]
    for _ in range(depth):
        is_guess, here = node > root, node.clamp(min=0)
        found.insert(0, tokens.gather(1, here).masked_fill(~is_guess, -1)[:, :, None])
        above = node - 1
        node = above if parents is None else torch.minimum(parents.gather(1, here), above)
    return torch.cat(found, 2)


def _guesses_before_triton(
    tokens: Tensor, parents: Tensor | None, nodes: Tensor | None, num_rows: int, depth: int, root: int
) -> Tensor:
    size = len(tokens)
    found = tokens.new_empty(size, num_rows, depth)
    of_parents, of_nodes = tokens if parents is None else parents, tokens if nodes is None else nodes
    _guesses_before_kernel[(size,)](
        tokens,
        of_parents,
        of_nodes,
        found,
        *tokens.stride(),
        *of_parents.stride(),
        *of_nodes.stride(),
        num_rows,
        tokens.shape[1] - num_rows,
        ROOT=root,
        DEPTH=depth,
        HAS_PARENTS=parents is not None,
        HAS_NODES=nodes is not None,
        BLOCK=next_power_of_2(num_rows),
        num_warps=1,
        **dependent_launch(tokens.device, size * num_rows),
    )
    return found


@TritonKernel
def _guesses_before_kernel(
    tokens_ptr: tl.tensor, parents_ptr: tl.tensor, nodes_ptr: tl.tensor, found_ptr: tl.tensor,
    tokens_stride: int, token_stride: int, parents_stride: int, parent_stride: int, nodes_stride: int, node_stride: int,
    num_rows: int, first_row: int,
    ROOT: tl.constexpr, DEPTH: tl.constexpr, HAS_PARENTS: tl.constexpr, HAS_NODES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per request: all rows go up at once."""
    batch = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    inside = row < num_rows
    wait_for_inputs(PDL)
    node = (first_row + row).to(tl.int64)
    if HAS_NODES:
        node = tl.load(nodes_ptr + batch * nodes_stride + row * node_stride, mask=inside, other=ROOT)
    for back in tl.static_range(DEPTH):
        is_guess = inside & (node > ROOT)
        token = tl.load(tokens_ptr + batch * tokens_stride + node * token_stride, mask=is_guess, other=-1)
        tl.store(found_ptr + (batch * num_rows + row) * DEPTH + DEPTH - 1 - back, token, mask=inside)
        above = node - 1
        if HAS_PARENTS:
            parent = tl.load(parents_ptr + batch * parents_stride + node * parent_stride, mask=is_guess, other=ROOT)
            above = tl.minimum(parent, above)
        node = above


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
