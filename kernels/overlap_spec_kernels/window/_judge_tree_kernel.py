"""The Triton functions of `judge_tree`: one program per row of the batch."""

from __future__ import annotations

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel
from overlap_spec_kernels.window.store_tokens import store_token_run


@TritonKernel.with_options(do_not_specialize=("batch_stride",))
def judge_tree_kernel(
    drawn_ptr: tl.tensor, window_tokens_ptr: tl.tensor, parents_ptr: tl.tensor, slots_ptr: tl.tensor,
    lengths_ptr: tl.tensor, length_ptr: tl.tensor, window_ptr: tl.tensor, given_ptr: tl.tensor, tokens_ptr: tl.tensor,
    follow_ptr: tl.tensor, path_ptr: tl.tensor, accept_len_ptr: tl.tensor, next_positions_ptr: tl.tensor,
    published_ptr: tl.tensor, pool_ptr: tl.tensor, page_table_ptr: tl.tensor,
    table_stride: int, window_stride: int, window_columns: int, width: int, depth: int, batch_stride: int,
    published_stride: int, dummy: int,
    GIVEN: tl.constexpr, STORE: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row. All copies of the dummy slot write the same constants, so their order does not matter."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_W)
    guessed = (column > 0) & (column < width)
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row)
    length = tl.load(lengths_ptr + row)
    drawn_ptr += row * width
    window_tokens_ptr += row * width
    parents_ptr += row * width
    guess = tl.load(window_tokens_ptr + column, mask=guessed, other=-1)
    parent = tl.load(parents_ptr + column, mask=guessed, other=-1)
    deepest = tl.max(_depths(parents_ptr, tl.where(guess >= 0, column, 0), depth), axis=0)
    step = tl.arange(0, BLOCK_D)
    walked, node, path, committed = _walk(
        guess, parent, column, step, drawn_ptr, window_tokens_ptr, given_ptr + row, depth, GIVEN, BLOCK_W
    )
    inside = step < depth
    tokens = tl.load(drawn_ptr + path, mask=inside, other=0)
    if GIVEN:
        tokens = tl.where(step < walked, committed, tokens)
    tokens = tl.where(step <= walked, tokens, -1)
    new_length = length + walked + 1
    last_guess = tl.max(tl.where(guess >= 0, column, 0), axis=0)
    accepted = tl.where(step <= walked, path, -1).to(tl.int64)
    published_ptr += row * published_stride
    tl.store(published_ptr + step, tokens, mask=inside)
    tl.store(published_ptr + depth, deepest.to(tl.int64))
    tl.store(published_ptr + depth + 1, last_guess.to(tl.int64))
    tl.store(published_ptr + depth + 1 + step, accepted, mask=inside & (step > 0))
    tokens = tl.where(tokens < -1, 0, tokens)
    tl.store(tokens_ptr + row * depth + step, tokens, mask=inside)
    tl.store(follow_ptr + row * depth + step, tl.maximum(tokens, 0), mask=inside)
    tl.store(path_ptr + row * depth + step, path.to(tl.int64), mask=inside)
    tl.store(accept_len_ptr + row, walked.to(tl.int64))
    tl.store(next_positions_ptr + step.to(tl.int64) * batch_stride + row, new_length + step, mask=inside)
    if STORE:
        run = inside & (step <= walked)
        store_token_run(pool_ptr, page_table_ptr + row * table_stride, length + 1 + step, tokens, run, PAGE_SIZE)
    tl.store(length_ptr + slot, tl.where(slot == dummy, 0, new_length))
    root = tl.where(slot == dummy, 0, tl.maximum(tl.load(drawn_ptr + node), 0))
    window_column = tl.arange(0, BLOCK_N)
    window_ptr += slot * window_stride + window_column
    tl.store(window_ptr, tl.where(window_column == 0, root, -1), mask=window_column < window_columns)


@TritonKernel
def _depths(parents_ptr: tl.tensor, node: tl.tensor, depth: int) -> tl.tensor:
    """Number of edges between each node and the root, at most depth - 1."""
    depths = tl.zeros_like(node)
    for _ in range(1, depth):
        below = node > 0
        depths += below.to(tl.int32)
        node = tl.load(parents_ptr + node, mask=below, other=0).to(tl.int32)
    return depths


@TritonKernel
def _walk(
    guess: tl.tensor, parent: tl.tensor, column: tl.tensor, step: tl.tensor, drawn_ptr: tl.tensor,
    window_tokens_ptr: tl.tensor, given_ptr: tl.tensor, depth: int, GIVEN: tl.constexpr, BLOCK_W: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Returns the number of accepted guesses, the last node, the path and, with synthetic acceptance, its tokens."""
    walked, node, path = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), step
    committed = tl.zeros_like(step).to(tl.int64)  # only with synthetic acceptance
    for at in range(1, depth):
        is_child = (guess >= 0) & (parent == node)
        if GIVEN:
            is_child &= at <= tl.load(given_ptr)
        else:
            is_child &= guess == tl.load(drawn_ptr + node)
        child = tl.min(tl.where(is_child, column, BLOCK_W), axis=0)
        found = (child < BLOCK_W) & (walked == at - 1)
        node = tl.where(found, child, node)
        path = tl.where(found & (step == at), node, path)
        if GIVEN:
            committed = tl.where(found & (step == at - 1), tl.load(window_tokens_ptr + node), committed)
        walked += found.to(tl.int32)
    return walked, node, path, committed
