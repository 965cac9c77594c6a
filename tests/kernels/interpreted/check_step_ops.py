"""The ops around a decode step's forwards under the interpreter: exact for integers, a few roundings for norms."""

import pytest
import torch
from overlap_spec_kernels import Normed, PublishedColumns
from overlap_spec_kernels.norm.draft_input import _draft_input_triton, draft_input_reference
from overlap_spec_kernels.norm.embed_norm import _embed_norm_triton
from overlap_spec_kernels.norm.rms_norm import _rms_norm_triton
from overlap_spec_kernels.norm.select_rows import _select_rows_triton, select_rows_reference
from overlap_spec_kernels.window.gather_window import _gather_window_triton, gather_window_reference
from overlap_spec_kernels.window.judge_chain import _judge_chain_triton, judge_chain_reference
from overlap_spec_kernels.window.keep_row import (
    _keep_row_triton,
    _keep_states_triton,
    keep_row_reference,
    keep_states_reference,
)
from overlap_spec_kernels.window.place_guesses import _place_guesses_triton, place_guesses_reference
from overlap_spec_kernels.window.synthetic_accept import _synthetic_accept_triton, synthetic_accept_reference
from support.step_inputs import (
    DRAWS,
    PAGE_SIZES,
    SHAPES,
    SHAPES_WITH_GUESSES,
    VOCABULARY,
    covered_pages,
    draws,
    slot_state,
    step_limits,
    step_slots,
    token_rows,
)
from support.verdicts import UNWRITTEN, assert_same, unwritten

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
every_shape = pytest.mark.parametrize("num_rows, width, columns", SHAPES)


@pytest.mark.slow_but_every(5)
@every_shape
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_gather_window(page_size: int, num_rows: int, width: int, columns: int) -> None:
    check_gather(num_rows, width, columns, page_size, longest=200)


def test_gather_window_of_a_page_table_that_takes_several_programs() -> None:
    check_gather(7, 4, 4, page_size=1, longest=2500)


def check_gather(num_rows: int, width: int, columns: int, page_size: int, longest: int) -> None:
    state = slot_state(num_rows, columns, page_size, longest)
    state.window[::2, columns // 2 + 1 :] = -1
    slots = step_slots(state, num_rows)
    actual = _gather_window_triton(slots, *state, width, page_size)
    expected = gather_window_reference(slots, *state, width, page_size)
    covered = covered_pages(expected.lengths, columns, page_size, state.page_table.shape[1])
    assert covered.any(1).all()
    assert torch.equal(actual.page_table[covered], expected.page_table[covered])
    for name in set(actual._fields) - {"page_table"}:
        value, wanted = getattr(actual, name), getattr(expected, name)
        assert value.dtype == wanted.dtype and torch.equal(value, wanted), name


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(18)
@every_shape
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("given", [False, True])
def test_judge_chain(given: bool, kind: str, num_rows: int, width: int, columns: int) -> None:
    state = slot_state(num_rows, columns, page_size=16)
    expected_state = state.clone()
    slots = step_slots(state, num_rows)
    window, drawn = draws(kind, state.window[slots, :width])
    arguments = drawn, window, slots, state.length[slots]
    accept_len = torch.randint(0, columns, (num_rows,)) if given else None
    store = token_rows(slots, state) if kind != "no guesses" else None
    wanted_store = None if store is None else store._replace(pool=store.pool.clone())
    actual = _judge_chain_triton(*arguments, state.length, state.window, state.dummy, accept_len, store)
    expected = judge_chain_reference(
        *arguments, expected_state.length, expected_state.window, state.dummy, accept_len, wanted_store
    )
    if store is not None:
        assert torch.equal(store.pool[16:], wanted_store.pool[16:])
    assert_same(actual, expected)
    assert torch.equal(state.length, expected_state.length)
    assert torch.equal(state.window, expected_state.window)


@pytest.mark.parametrize("width", [1, 4])
def test_judge_chain_leaves_the_columns_of_others_alone(width: int) -> None:
    state, published = slot_state(7, width, page_size=16), PublishedColumns(width, is_self_drafting=True)
    slots = step_slots(state, 7)
    window, drawn = draws("by chance", state.window[slots])
    verdicts = []
    for judge in (_judge_chain_triton, judge_chain_reference):
        length, windows = state.length.clone(), state.window.clone()
        out = unwritten(7, published)
        assert judge(drawn, window, slots, state.length[slots], length, windows, state.dummy, None, None, out) is out
        verdicts.append(out)
    assert_same(*verdicts)
    rows = verdicts[0].published
    assert (rows.guess_report == UNWRITTEN).all() and not (rows.rows[:, :-3] == UNWRITTEN).any()


@pytest.mark.parametrize("num_rows, width, columns", SHAPES_WITH_GUESSES)
def test_place_guesses(num_rows: int, width: int, columns: int) -> None:
    state = slot_state(num_rows, columns, page_size=16)
    expected = state.window.clone()
    slots = step_slots(state, num_rows)
    guesses = torch.randint(-1, VOCABULARY, (width - 1, num_rows + 1))[:, :num_rows]  # rows with a stride
    rest = slots, guesses, step_limits(state, width), state.dummy
    _place_guesses_triton(state.window, *rest)
    place_guesses_reference(expected, *rest)
    assert torch.equal(state.window, expected)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("num_rows", [1, 3, 65])
@pytest.mark.parametrize("size", [60, 576, 4096])
def test_draft_input(size: int, num_rows: int) -> None:
    tokens, embedding, features = torch.randint(0, 11, (num_rows,)), torch.randn(11, size), torch.randn(num_rows, size)
    embed_norm, feature_norm = torch.randn(size), torch.randn(size)
    arguments = tokens, embedding, embed_norm, features, feature_norm, 1e-5
    actual = _draft_input_triton(*arguments)
    torch.testing.assert_close(actual, draft_input_reference(*arguments), **CLOSE)
    assert torch.equal(actual[:, :size], _rms_norm_triton(embedding[tokens], embed_norm, 1e-5))
    assert torch.equal(actual[:, size:], _rms_norm_triton(features, feature_norm, 1e-5))


def test_draft_input_of_16_bits_is_rounded_once() -> None:
    tokens, embedding, features = torch.randint(0, 11, (3,)), torch.randn(11, 576).half(), torch.randn(3, 576).half()
    norms = torch.randn(576).half(), torch.randn(576).half()
    actual = _draft_input_triton(tokens, embedding, norms[0], features, norms[1], 1e-5)
    expected = draft_input_reference(
        tokens, embedding.float(), norms[0].float(), features.float(), norms[1].float(), 1e-5
    )
    torch.testing.assert_close(actual.float(), expected, rtol=2**-11, atol=1e-7)


@pytest.mark.slow_but_every(5)
@every_shape
@pytest.mark.parametrize("size", [60, 576, 4096])
def test_select_rows(size: int, num_rows: int, width: int, columns: int) -> None:
    rows, index = torch.randn(num_rows, width, size + 7), torch.randint(0, width, (num_rows,))
    for own in (rows.contiguous(), rows[..., :size], rows[..., 7:]):
        assert torch.equal(_select_rows_triton(own, index), select_rows_reference(own, index))


@pytest.mark.parametrize("num_rows, size", [(1, 60), (5, 576), (3, 5000)])
def test_keep_row(size: int, num_rows: int) -> None:
    """Rows with a stride, at positions that have gone round the ring."""
    slots, positions = torch.randperm(7)[:num_rows], torch.randint(0, 40, (num_rows,))
    arguments = slots, positions, torch.randn(num_rows, size + 3)[:, :size], torch.randint(0, 99, (num_rows,))
    kept = torch.zeros(7, 16, size), torch.zeros(7, 16, dtype=torch.int64)
    expected = [tensor.clone() for tensor in kept]
    _keep_row_triton(*kept, *arguments)
    keep_row_reference(*expected, *arguments)
    assert all(map(torch.equal, kept, expected)) and kept[1].any()


@pytest.mark.parametrize("aux_size, size, num_parts", [(180, 60, 5), (0, 600, 0), (4100, 60, 1)])
def test_keep_states(aux_size: int, size: int, num_parts: int) -> None:
    """Of three slots one writes nowhere; of the others, windows lie within their bounds and beyond either."""
    places = torch.tensor([(0, 0, 40), (4, 9, -4), (0, 0, 40), (100, 109, -90)])
    slots, positions = torch.tensor([3, 1, 2]), torch.tensor([[104, 105], [8, 12], [5, 6]])
    values, aux = torch.randn(6, size).bfloat16(), torch.randn(6, aux_size + 3).bfloat16()[:, :aux_size]
    final = Normed(values, values * 2, torch.rand(num_parts, 6) * size, 1e-5) if num_parts else values
    kept = torch.zeros(41, aux_size).bfloat16(), torch.zeros(41, size).bfloat16()
    expected = tuple(tensor.clone() for tensor in kept)
    _keep_states_triton(kept, places, slots, positions, aux, final)
    keep_states_reference(expected, places, slots, positions, aux, final)
    assert torch.equal(kept[0][:40], expected[0][:40]) and kept[1][[5, 14, 15]].any(1).all()
    torch.testing.assert_close(kept[1][:40], expected[1][:40])


@pytest.mark.parametrize("num_rows, size", [(1, 60), (3, 576), (9, 4096)])
def test_embed_norm(size: int, num_rows: int) -> None:
    tokens, weight = torch.randint(0, 11, (num_rows,)), torch.randn(size)
    embedding = torch.randn(11, 2 * size)[:, :size]  # rows with a stride
    rows, y = _embed_norm_triton(tokens, embedding, weight, 1e-5)
    assert torch.equal(rows, embedding[tokens])
    assert torch.equal(y, _rms_norm_triton(rows, weight, 1e-5))


@pytest.mark.parametrize("num_slots", [1, 5, 130])
def test_synthetic_accept(num_slots: int) -> None:
    table, seeds = torch.randint(0, 4, (256,)), torch.randint(-(1 << 62), 1 << 62, (200, 3))[:, 1]
    slots, lengths = torch.randperm(200)[:num_slots], torch.randint(0, 1 << 20, (num_slots,))
    arguments = table, seeds, slots, lengths
    assert torch.equal(_synthetic_accept_triton(*arguments), synthetic_accept_reference(*arguments))
