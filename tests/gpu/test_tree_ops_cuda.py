"""The ops on trees of guesses on a GPU, against their references on the CPU: alone, and chained in a graph."""

from typing import Any

import pytest
import torch
from kernel_cases.inputs import to_device
from overlap_spec_kernels import (
    Candidates,
    TokenRows,
    add_children,
    expand_tree,
    gather_tree,
    judge_tree,
    marginal_tree,
    move_cache_rows,
    place_tree,
    select_tree,
    top_tokens,
)
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.step_inputs import PAGE_SIZES, covered_pages, step_limits, token_rows
from support.tree_inputs import (
    DRAWS,
    SHAPES,
    VOCABULARY,
    TreeState,
    candidate_trees,
    child_inputs,
    draws,
    earlier_columns,
    level_inputs,
    moves,
    random_caches,
    random_logs,
    step_slots,
    tied_logits,
    tied_logs,
    tree_state,
)
from support.verdicts import assert_same, tensors_of
from torch import Tensor

PAGE_SIZE = 16
every_shape = pytest.mark.parametrize("num_rows, width, columns, depth", [*SHAPES, (200, 32, 32, 6)])


def on_gpu(*values: Any) -> tuple[Any, ...]:
    return tuple(to_device(value, "cuda") for value in values)


def same(actual: Tensor, expected: Tensor, name: str) -> None:
    assert actual.dtype == expected.dtype and torch.equal(actual.cpu(), expected), name


@every_shape
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("longest", [200, 9000])
def test_gather_tree(longest: int, page_size: int, num_rows: int, width: int, columns: int, depth: int) -> None:
    state = tree_state(num_rows, columns, page_size, longest)
    state.window[::2, columns // 2 + 1 :] = -1
    slots = step_slots(state, num_rows)
    actual = gather_tree(*on_gpu(slots, *state), width, page_size)
    expected = gather_tree(slots, *state, width, page_size)
    covered = covered_pages(expected.lengths, columns, page_size, state.page_table.shape[1])
    same(actual.page_table.cpu()[covered], expected.page_table[covered], "page_table")
    for name in set(actual._fields) - {"page_table"}:
        same(getattr(actual, name), getattr(expected, name), name)


@every_shape
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("given", [False, True])
def test_judge_tree(given: bool, kind: str, num_rows: int, width: int, columns: int, depth: int) -> None:
    state = tree_state(num_rows, columns, PAGE_SIZE)
    slots = step_slots(state, num_rows)
    parents = state.parents[slots, :width]
    window, drawn = draws(kind, state.window[slots, :width], parents)
    accept_len = torch.randint(0, depth + 1, (num_rows,)) if given else None
    arguments = (drawn, window, parents, slots, state.length[slots], state.length, state.window, state.dummy, depth)
    moved = on_gpu(*arguments)
    store = token_rows(slots, state)
    on_device = TokenRows(*on_gpu(store.pool, store.page_table), store.page_size)
    actual = judge_tree(*moved, *on_gpu(accept_len), on_device)
    expected = judge_tree(*arguments, accept_len, store)
    same(on_device.pool[store.page_size :], store.pool[store.page_size :], "pool")
    assert_same(actual, expected)
    same(moved[5], state.length, "length")
    same(moved[6], state.window, "window")


@pytest.mark.parametrize(("num_rows", "num_guesses", "columns"), [(1, 3, 4), (7, 1, 5), (64, 31, 32), (100, 15, 64)])
def test_place_tree(num_rows: int, num_guesses: int, columns: int) -> None:
    state = tree_state(num_rows, columns, PAGE_SIZE)
    slots = step_slots(state, num_rows)
    guesses = torch.randint(-1, VOCABULARY, (num_guesses, num_rows))
    placed = guesses, earlier_columns(num_guesses, num_rows), step_limits(state, num_guesses)
    arguments = state.window, state.parents, slots, *placed, state.dummy
    moved = on_gpu(*arguments)
    place_tree(*moved)
    place_tree(*arguments)
    same(moved[0], state.window, "window")
    same(moved[1], state.parents, "parents")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "depth"), [((3, 64), 6), ((8, 128), 6), ((5, 7), 4), ((2, 96), 33), ((1, 8), 1)])
def test_move_cache_rows(heads: tuple[int, int], depth: int, dtype: torch.dtype) -> None:
    """Many times, for a race would not show every time."""
    for num_requests in (1, 33):
        k, v = random_caches(5, num_requests * 4, 16, heads, dtype)
        for _ in range(5):
            source, target = moves(num_requests, depth, num_requests * 4, 16)
            moved = on_gpu(k, v, source, target)
            move_cache_rows(*moved)
            move_cache_rows(k, v, source, target)
            same(moved[0], k, "k")
            same(moved[1], v, "v")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [20, 1000, 8192, 32000, 49152, 1 << 18])
@pytest.mark.parametrize(("num_rows", "k"), [(1, 8), (4, 20), (33, 1), (256, 4)])
def test_top_tokens(num_rows: int, k: int, size: int, dtype: torch.dtype) -> None:
    num_rows = min(num_rows, 16) if size > 50000 else num_rows
    wider = torch.randn(num_rows, size + 3).to(dtype) * 5
    for logits in (tied_logits(num_rows, size).to(dtype), wider[:, :size]):
        actual, expected = top_tokens(*on_gpu(logits), k), top_tokens(logits, k)
        same(actual.columns, expected.columns, "columns")
        assert (actual.log_probs <= 0).all(), "a child has the log-prob no more than its parent"
        torch.testing.assert_close(actual.log_probs.cpu(), expected.log_probs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(("num_rows", "k", "size"), [(4, 8, 8192), (64, 4, 49152), (2, 16, 1 << 18), (1, 16, 16)])
def test_top_tokens_of_float64(num_rows: int, k: int, size: int) -> None:
    for logits in (tied_logits(num_rows, size).double(), torch.randn(num_rows, size, dtype=torch.float64)):
        actual, expected = top_tokens(logits.cuda(), k), top_tokens(logits, k)
        same(actual.columns, expected.columns, "columns")
        assert (actual.log_probs <= 0).all(), "a child has the log-prob no more than its parent"
        torch.testing.assert_close(actual.log_probs.cpu(), expected.log_probs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("topk", "levels", "num_guesses"), [(1, 3, 3), (2, 1, 1), (8, 5, 31), (4, 5, 63), (16, 8, 63)])
def test_select_tree(topk: int, levels: int, num_guesses: int) -> None:
    for num_rows, dtype in ((1, torch.float32), (64, torch.float32), (5, torch.float64)):
        scores, *rest = candidate_trees(num_rows, topk, levels)
        candidates = scores.to(dtype), *rest
        actual, expected = select_tree(*on_gpu(*candidates), num_guesses), select_tree(*candidates, num_guesses)
        for name, value, wanted in zip(actual._fields, actual, expected, strict=True):
            same(value, wanted, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_nodes", "topk", "size"), [(1, 4, 576), (3, 3, 600), (8, 8, 4096), (16, 16, 7)])
def test_expand_tree(num_nodes: int, topk: int, size: int, dtype: torch.dtype) -> None:
    for num_rows in (1, 33):
        inputs = level_inputs(num_rows, num_nodes, topk, size, num_words=2)
        inputs = inputs._replace(features=inputs.features.to(dtype))
        if num_rows == 1:  # as sampled drafts give it
            inputs = inputs._replace(log_probs=inputs.worth_in(torch.float64))
        actual, expected = expand_tree(*on_gpu(*inputs), 11), expand_tree(*inputs, 11)
        for name, value, wanted in zip(actual._fields, actual, expected, strict=True):
            same(value, wanted, name)


@pytest.mark.parametrize(
    ("levels", "topk", "num_guesses"), [(1, 1, 1), (3, 2, 9), (7, 4, 15), (15, 4, 63), (8, 16, 63)]
)
def test_marginal_tree(levels: int, topk: int, num_guesses: int) -> None:
    for num_rows in (1, 64):
        for logs in (tied_logs(levels, num_rows, topk), random_logs(levels, num_rows, topk)):
            columns, ids = torch.randint(0, 50, logs.shape), torch.randperm(50)
            actual = marginal_tree(*on_gpu(logs, columns, ids), num_guesses)
            expected = marginal_tree(logs, columns, ids, num_guesses)
            for name, value, wanted in zip(actual._fields, actual, expected, strict=True):
                same(value, wanted, name)


@pytest.mark.parametrize(("num_nodes", "num_children"), [(1, 1), (1, 8), (3, 5), (16, 16)])
def test_add_children(num_nodes: int, num_children: int) -> None:
    for num_rows, dtype in ((1, torch.float32), (65, torch.float32), (3, torch.float64)):
        candidates, *inputs = child_inputs(num_rows, num_nodes, num_children, dtype)
        moved = Candidates(*on_gpu(*candidates))
        add_children(moved, *on_gpu(*inputs))
        add_children(candidates, *inputs)
        for name, value, wanted in zip(moved._fields, moved, candidates, strict=True):
            same(value, wanted, name)


def run_step(state: TreeState, slots: Tensor, drawn: Tensor, scores: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Gather, judge, move, draw, select and place: the order of a step. Each starts before the one before it ends."""
    gathered = gather_tree(slots, *state, width=8, page_size=PAGE_SIZE)
    judged = judge_tree(
        drawn, gathered.window_tokens, gathered.parents, slots, gathered.lengths, state.length, state.window,
        state.dummy, 4,
    )  # fmt: skip
    rows = gathered.extra_rows % (k.shape[1] * k.shape[2])
    move_cache_rows(k, v, rows.gather(1, judged.path), rows[:, :4].contiguous())
    log_probs, columns, _ = top_tokens(scores, 8)
    parents = torch.full_like(columns, -1)
    guesses, guess_parents = select_tree(log_probs, columns, parents, 7)
    place_tree(
        state.window, state.parents, slots, guesses, guess_parents, torch.full_like(state.length, 2), state.dummy
    )
    outs = [*gathered[:5], *gathered[6:], *tensors_of(judged).values()]
    return [*outs, columns, state.length, state.window, state.parents, k, v]


@sync_mode_warns
def test_a_captured_step_equals_the_references() -> None:
    state = tree_state(6, 8, PAGE_SIZE)
    # Pages of its own for each slot, so that no move touches another's rows.
    state.page_table.copy_(torch.randperm(state.page_table.numel()).view_as(state.page_table))
    slots = torch.randperm(6)
    drawn, scores = torch.randint(0, VOCABULARY, (6, 8)), torch.randn(6, 5000)
    k, v = random_caches(2, state.page_table.numel(), PAGE_SIZE, (2, 16), torch.bfloat16)
    moved_state, moved = TreeState(*on_gpu(*state.clone())), on_gpu(slots, drawn, scores, k, v)
    warm = TreeState(*(tensor.clone() for tensor in moved_state))
    with synchronization_is_an_error():
        run_step(warm, *moved[:3], moved[3].clone(), moved[4].clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run_step(moved_state, *moved)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        for index, (out, wanted) in enumerate(zip(outs, run_step(state, slots, drawn, scores, k, v), strict=True)):
            same(out, wanted, str(index))
