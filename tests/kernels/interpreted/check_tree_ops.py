"""The ops on trees of guesses under the interpreter: exact but for the logs of probabilities."""

import pytest
import torch
from overlap_spec_kernels import PublishedColumns
from overlap_spec_kernels.attention.move_cache_rows import _move_cache_rows_triton, move_cache_rows_reference
from overlap_spec_kernels.tree.add_children import Candidates, _add_children_triton, add_children_reference
from overlap_spec_kernels.tree.expand_tree import _expand_tree_triton, expand_tree_reference
from overlap_spec_kernels.tree.marginal_tree import _marginal_tree_triton, marginal_tree_reference
from overlap_spec_kernels.tree.select_tree import _select_tree_triton, select_tree_reference
from overlap_spec_kernels.tree.top_tokens import _top_tokens_in_float64, _top_tokens_triton, top_tokens_reference
from overlap_spec_kernels.window.gather_tree import _gather_tree_triton, gather_tree_reference
from overlap_spec_kernels.window.judge_tree import _judge_tree_triton, judge_tree_reference
from overlap_spec_kernels.window.place_tree import _place_tree_triton, place_tree_reference
from support.step_inputs import covered_pages, step_limits, token_rows
from support.tree_inputs import (
    DRAWS,
    SHAPES,
    VOCABULARY,
    ChildInputs,
    LevelInputs,
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
from support.verdicts import UNWRITTEN, assert_same, unwritten

every_shape = pytest.mark.parametrize("num_rows, width, columns, depth", SHAPES)


@pytest.mark.slow_but_every(3)
@every_shape
@pytest.mark.parametrize("page_size", [1, 16])
def test_gather_tree(page_size: int, num_rows: int, width: int, columns: int, depth: int) -> None:
    state = tree_state(num_rows, columns, page_size)
    state.window[::2, columns // 2 + 1 :] = -1
    slots = step_slots(state, num_rows)
    actual = _gather_tree_triton(slots, *state, width, page_size)
    expected = gather_tree_reference(slots, *state, width, page_size)
    covered = covered_pages(expected.lengths, columns, page_size, state.page_table.shape[1])
    assert torch.equal(actual.page_table[covered], expected.page_table[covered])
    for name in set(actual._fields) - {"page_table"}:
        value, wanted = getattr(actual, name), getattr(expected, name)
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(14)
@every_shape
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("given", [False, True])
def test_judge_tree(given: bool, kind: str, num_rows: int, width: int, columns: int, depth: int) -> None:
    state = tree_state(num_rows, columns, page_size=16)
    expected_state = state.clone()
    slots = step_slots(state, num_rows)
    parents = state.parents[slots, :width]
    window, drawn = draws(kind, state.window[slots, :width], parents)
    arguments = drawn, window, parents, slots, state.length[slots]
    accept_len = torch.randint(0, depth + 1, (num_rows,)) if given else None
    rest = state.dummy, depth, accept_len
    store = token_rows(slots, state) if kind != "no guesses" else None
    wanted_store = None if store is None else store._replace(pool=store.pool.clone())
    actual = _judge_tree_triton(*arguments, state.length, state.window, *rest, store)
    expected = judge_tree_reference(*arguments, expected_state.length, expected_state.window, *rest, wanted_store)
    if store is not None:
        assert torch.equal(store.pool[16:], wanted_store.pool[16:])
    assert_same(actual, expected)
    assert torch.equal(state.length, expected_state.length)
    assert torch.equal(state.window, expected_state.window)


@pytest.mark.parametrize(("width", "depth"), [(2, 2), (9, 4), (16, 16)])
def test_judge_tree_leaves_the_columns_of_others_alone(width: int, depth: int) -> None:
    state, published = tree_state(7, width, page_size=16), PublishedColumns(depth, True, is_self_drafting=True)
    slots = step_slots(state, 7)
    window, drawn = draws("by chance", state.window[slots], state.parents[slots])
    verdicts = []
    for judge in (_judge_tree_triton, judge_tree_reference):
        length, windows, out = state.length.clone(), state.window.clone(), unwritten(7, published)
        rows = (drawn, window, state.parents[slots], slots, state.length[slots], length, windows, state.dummy)
        assert judge(*rows, depth, None, None, out) is out
        verdicts.append(out)
    assert_same(*verdicts)
    rows = verdicts[0].published
    assert (rows.guess_report == UNWRITTEN).all() and not (rows.rows[:, :-3] == UNWRITTEN).any()


@pytest.mark.parametrize(("num_rows", "num_guesses", "columns"), [(1, 3, 4), (7, 1, 5), (33, 15, 16)])
def test_place_tree(num_rows: int, num_guesses: int, columns: int) -> None:
    state = tree_state(num_rows, columns, page_size=16)
    expected = state.clone()
    slots = step_slots(state, num_rows)
    guesses = torch.randint(-1, VOCABULARY, (num_guesses, num_rows))
    rest = slots, guesses, earlier_columns(num_guesses, num_rows), step_limits(state, num_guesses), state.dummy
    _place_tree_triton(state.window, state.parents, *rest)
    place_tree_reference(expected.window, expected.parents, *rest)
    assert torch.equal(state.window, expected.window) and torch.equal(state.parents, expected.parents)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "depth"), [((3, 7), 4), ((2, 96), 6), ((8, 128), 9), ((1, 8), 1)])
def test_move_cache_rows(heads: tuple[int, int], depth: int, dtype: torch.dtype) -> None:
    k, v = random_caches(num_layers=3, num_pages=30, page_size=4, heads=heads, dtype=dtype)
    expected = k.clone(), v.clone()
    source, target = moves(num_requests=5, depth=depth, num_pages=30, page_size=4)
    _move_cache_rows_triton(k, v, source, target)
    move_cache_rows_reference(*expected, source, target)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "k"), [(16, 16), (100, 1), (4100, 20), (9000, 3)])
def test_top_tokens(size: int, k: int, dtype: torch.dtype) -> None:
    for logits in (tied_logits(5, size).to(dtype), torch.randn(3, size + 5).to(dtype)[:, :size] * 9):
        actual, expected = _top_tokens_triton(logits, k), top_tokens_reference(logits, k)
        assert torch.equal(actual.columns, expected.columns)
        assert (actual.log_probs <= 0).all(), "a child has the log-prob no more than its parent"
        torch.testing.assert_close(actual.log_probs, expected.log_probs, rtol=1e-5, atol=1e-5)
        own = logits.float().gather(1, actual.columns) - actual.log_totals[:, None]
        assert torch.equal(own, actual.log_probs)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("size", "k"), [(16, 16), (100, 1), (4100, 8)])
def test_top_tokens_of_float64(size: int, k: int) -> None:
    for logits in (tied_logits(5, size).double(), torch.randn(3, size + 5, dtype=torch.float64)[:, :size] * 9):
        logs, columns, log_totals = _top_tokens_in_float64(logits, k)
        expected = top_tokens_reference(logits, k)
        assert torch.equal(columns, expected.columns)
        assert (logs <= 0).all(), "a child has the log-prob no more than its parent"
        torch.testing.assert_close(logs, expected.log_probs, rtol=1e-12, atol=1e-12)
        assert torch.equal(logits.gather(1, columns) - log_totals[:, None], logs)


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("topk", "levels", "num_guesses"), [(1, 3, 3), (2, 1, 1), (3, 4, 9), (8, 5, 31), (4, 2, 20)])
def test_select_tree(dtype: torch.dtype, topk: int, levels: int, num_guesses: int) -> None:
    scores, *rest = candidate_trees(6, topk, levels)
    candidates = scores.to(dtype), *rest
    actual, expected = _select_tree_triton(*candidates, num_guesses), select_tree_reference(*candidates, num_guesses)
    assert torch.equal(actual.guesses, expected.guesses) and torch.equal(actual.parents, expected.parents)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("levels", "topk", "num_guesses"), [(7, 4, 15), (1, 4, 4), (3, 2, 9), (8, 16, 63), (1, 1, 1)])
def test_marginal_tree(levels: int, topk: int, num_guesses: int) -> None:
    for logs in (tied_logs(levels, 3, topk), random_logs(levels, 3, topk)):
        inputs = logs, torch.randint(0, 50, logs.shape), torch.randperm(50), num_guesses
        actual, expected = _marginal_tree_triton(*inputs), marginal_tree_reference(*inputs)
        assert torch.equal(actual.guesses, expected.guesses) and torch.equal(actual.parents, expected.parents)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(
    ("num_nodes", "topk", "size"), [(1, 1, 60), (1, 4, 600), (3, 3, 512), (8, 8, 1100), (5, 20, 7), (2, 3, 0)]
)
def test_expand_tree(num_nodes: int, topk: int, size: int) -> None:
    inputs = level_inputs(5, num_nodes, topk, size, num_words=2)
    check_level(inputs)
    check_level(inputs._replace(log_probs=inputs.worth_in(torch.float64)))


def check_level(inputs: LevelInputs) -> None:
    actual, expected = _expand_tree_triton(*inputs, 11), expand_tree_reference(*inputs, 11)
    for name, value, wanted in zip(actual._fields, actual, expected, strict=True):
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name


@pytest.mark.parametrize(("num_nodes", "num_children"), [(1, 1), (1, 8), (3, 5), (16, 16)])
def test_add_children(num_nodes: int, num_children: int) -> None:
    for dtype in (torch.float32, torch.float64):
        check_children(child_inputs(5, num_nodes, num_children, dtype))


def check_children(inputs: ChildInputs) -> None:
    expected = Candidates(*(part.clone() for part in inputs.candidates))
    _add_children_triton(*inputs)
    add_children_reference(expected, *inputs[1:])
    for name, value, wanted in zip(expected._fields, inputs.candidates, expected, strict=True):
        assert torch.equal(value, wanted), name
