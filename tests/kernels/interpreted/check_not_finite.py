"""NaN and infinity under the interpreter: a row that nothing can be drawn from is marked, and every column exists."""

import pytest
import torch
from overlap_spec_kernels import NO_TOKEN, gumbel_argmax
from overlap_spec_kernels.linear.linear_argmax import _best_kernel
from overlap_spec_kernels.logits.filter_cutoff import Filters, filter_cutoff_reference
from overlap_spec_kernels.logits.gumbel_argmax import _gumbel_argmax_triton, gumbel_argmax_reference
from overlap_spec_kernels.tree.top_tokens import _top_tokens_in_float64, _top_tokens_triton, top_tokens_reference
from overlap_spec_kernels.window.judge_chain import _judge_chain_triton, judge_chain_reference
from overlap_spec_kernels.window.judge_tree import _judge_tree_triton, judge_tree_reference
from support import step_inputs, tree_inputs
from support.not_finite import check_ranked, drawing_rows, marked, ranked_rows
from support.verdicts import assert_same

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of logs of 0


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("columns", [100, 2500])
def test_nothing_is_drawn_from_what_is_no_number(columns: int, temperature: float) -> None:
    arguments, nothing = drawing_rows(columns, temperature, CPU)
    expected = gumbel_argmax_reference(*arguments)
    assert torch.equal(expected[:, 0] == NO_TOKEN, nothing)
    assert torch.equal(_gumbel_argmax_triton(*arguments), expected)
    keep_all = Filters(torch.full((5,), 50), torch.full((5,), 0.95).double(), torch.zeros(5).double())
    cutoff = filter_cutoff_reference(arguments[0], arguments[2].clamp(min=0.1), keep_all)
    found = _gumbel_argmax_triton(*arguments, cutoff), gumbel_argmax(*arguments, cutoff)
    assert torch.equal(*found) and torch.equal(found[0][:, 0] == NO_TOKEN, nothing)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("mapped", [False, True])
def test_the_best_of_nan_is_nothing_and_a_guess_is_some_token(mapped: bool, by_row: bool) -> None:
    """A program that has seen NaN alone has found -inf, or NaN, at any place."""
    best = torch.tensor([[1.0, -torch.inf, torch.nan, torch.inf]]).repeat(5, 1)
    best_at = torch.tensor([[3, 0x7FFFFFFF, 0, 5]]).repeat(5, 1).int()
    if by_row:
        best, best_at = best.t().contiguous().t(), best_at.t().contiguous().t()
    ids, out = torch.arange(10, 20), torch.empty(4, dtype=torch.int64)
    options = {"MAPPED": mapped, "NOTHING": NO_TOKEN, "PDL": False, "BLOCK": 8}
    _best_kernel[(4,)](best, best_at, ids, out, 5, *best.stride(), **options)
    assert out.tolist() == ([13, 10, 10, 10] if mapped else [3, NO_TOKEN, NO_TOKEN, NO_TOKEN])


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("kind", step_inputs.DRAWS)
def test_a_chain_publishes_the_mark_and_keeps_a_token(kind: str) -> None:
    state = step_inputs.slot_state(9, 4, page_size=16)
    slots = step_inputs.step_slots(state, 9)
    window, drawn = step_inputs.draws(kind, state.window[slots])
    check_judged(state, slots, (marked(drawn, 3), window, slots, state.length[slots]), (), "chain")


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("kind", tree_inputs.DRAWS)
def test_a_tree_publishes_the_mark_and_keeps_a_token(kind: str) -> None:
    state = tree_inputs.tree_state(9, 9, page_size=16)
    slots = tree_inputs.step_slots(state, 9)
    parents = state.parents[slots]
    window, drawn = tree_inputs.draws(kind, state.window[slots], parents)
    check_judged(state, slots, (marked(drawn, 2), window, parents, slots, state.length[slots]), (4,), "tree")


def check_judged(state, slots, arguments, depth, kind) -> None:
    judges = {
        "chain": (_judge_chain_triton, judge_chain_reference),
        "tree": (_judge_tree_triton, judge_tree_reference),
    }
    verdicts = []
    for judge in judges[kind]:
        own = state.clone()
        store = step_inputs.token_rows(slots, own)
        store = store._replace(pool=store.pool.clone())
        verdict = judge(*arguments, own.length, own.window, own.dummy, *depth, None, store)
        assert (own.window >= -1).all() and (own.window[:, 0] >= 0).all() and (store.pool >= -1).all()
        verdicts.append((verdict, own))
    (actual, own), (expected, wanted) = verdicts
    assert_same(actual, expected)
    assert torch.equal(own.window, wanted.window) and torch.equal(own.length, wanted.length)
    run, published = actual.tokens, actual.published.tokens
    ends = published.gather(1, actual.accept_len[:, None]).squeeze(1)
    assert (run >= -1).all() and (actual.follow >= 0).all()
    assert (ends == NO_TOKEN).any() and ((published == NO_TOKEN).sum(1) == (ends == NO_TOKEN)).all(), "the last alone"
    assert torch.equal(published.clamp(min=-1)[run > 0], run[run > 0])


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("columns", "k"), [(16, 8), (100, 4), (4100, 20)])
def test_every_ranked_column_exists(columns: int, k: int) -> None:
    logits = ranked_rows(columns, torch.float32, CPU)
    for found in (_top_tokens_triton(logits, k), top_tokens_reference(logits, k)):
        check_ranked(found.log_probs, found.columns, columns)
    logs, at, _ = _top_tokens_in_float64(logits.double(), k)
    check_ranked(logs, at, columns)
