"""The references of the ops around a decode step's forwards, against definitions written out one row at a time."""

import pytest
import torch
from overlap_spec_kernels import Normed
from overlap_spec_kernels.norm.draft_input import draft_input
from overlap_spec_kernels.norm.embed_norm import embed_norm
from overlap_spec_kernels.norm.rms_norm import rms_norm
from overlap_spec_kernels.norm.select_rows import select_rows
from overlap_spec_kernels.window.gather_window import gather_window
from overlap_spec_kernels.window.judge_chain import judge_chain
from overlap_spec_kernels.window.keep_row import keep_row, keep_states
from overlap_spec_kernels.window.place_guesses import place_guesses
from overlap_spec_kernels.window.synthetic_accept import synthetic_accept
from support.step_inputs import (
    DRAWS,
    SHAPES,
    VOCABULARY,
    draws,
    slot_state,
    step_limits,
    step_slots,
    stored,
    token_rows,
)

every_shape = pytest.mark.parametrize("num_rows, width, columns", SHAPES)


@every_shape
def test_gather_window(num_rows: int, width: int, columns: int) -> None:
    state = slot_state(num_rows, columns, page_size=16)
    state.window[::2, columns // 2 + 1 :] = -1
    slots = step_slots(state, num_rows)
    gathered = gather_window(slots, *state, width, 16)
    for row, slot in enumerate(slots.tolist()):
        length, window = int(state.length[slot]), state.window[slot, :width].tolist()
        part = slice(row * width, (row + 1) * width)
        assert gathered.window_tokens[row].tolist() == window
        assert gathered.tokens[part].tolist() == [max(token, 0) for token in window]
        assert gathered.positions[part].tolist() == list(range(length, length + width))
        assert gathered.lengths[row] == length
        assert gathered.num_proposed[row] == sum(token >= 0 for token in window[1:])
        assert torch.equal(gathered.page_table[row], state.page_table[slot])


@pytest.mark.slow_but_every(4)
@every_shape
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("given", [False, True])
def test_judge_chain(given: bool, kind: str, num_rows: int, width: int, columns: int) -> None:
    state = slot_state(num_rows, columns, page_size=16)
    before = state.clone()
    slots = step_slots(state, num_rows)
    window_tokens, drawn_tokens = draws(kind, state.window[slots, :width])
    lengths = state.length[slots]
    wanted = torch.randint(0, columns, (num_rows,)) if given else None
    store = token_rows(slots, state)
    judged = judge_chain(
        drawn_tokens, window_tokens, slots, lengths, state.length, state.window, state.dummy, wanted, store
    )
    for row, slot in enumerate(slots.tolist()):
        drawn, guesses = drawn_tokens[row].tolist(), window_tokens[row, 1:].tolist()
        proposed, accepted = sum(guess >= 0 for guess in guesses), 0
        if wanted is not None:
            accepted = min(int(wanted[row]), proposed)
        else:
            while accepted < len(guesses) and guesses[accepted] == drawn[accepted]:
                accepted += 1
        tokens = [*guesses[:accepted], drawn[accepted], *[-1] * (width - 1 - accepted)]
        length = int(lengths[row]) + accepted + 1
        assert judged.tokens[row].tolist() == tokens
        assert judged.follow.view(-1, width)[row].tolist() == [max(token, 0) for token in tokens]
        assert judged.accept_len[row] == accepted
        assert judged.next_positions[:, row].tolist() == list(range(length, length + width))
        assert judged.published.tokens[row].tolist() == tokens
        assert judged.published.num_guesses[row] == proposed
        is_dummy = slot == state.dummy
        if not is_dummy:
            assert stored(store, row, int(lengths[row]), width) == tokens
        assert state.length[slot] == (0 if is_dummy else length)
        assert state.window[slot].tolist() == [0 if is_dummy else drawn[accepted], *[-1] * (columns - 1)]
    others = [slot for slot in range(state.dummy) if slot not in slots.tolist()]
    assert torch.equal(state.length[others], before.length[others])
    assert torch.equal(state.window[others], before.window[others])


@pytest.mark.parametrize("num_guesses", [1, 2, 4])
def test_place_guesses_leaves_no_guess_of_an_earlier_step(num_guesses: int) -> None:
    state = slot_state(7, 5, page_size=16)
    before, slots = state.clone(), step_slots(state, 7)
    guesses = torch.randint(-1, VOCABULARY, (num_guesses, 7))
    most_steps = step_limits(state, 4)
    place_guesses(state.window, slots, guesses, most_steps, state.dummy)
    placed = {slot: row for row, slot in enumerate(slots.tolist()) if slot != state.dummy}
    for slot, window in enumerate(state.window.tolist()):
        old = before.window[slot].tolist()
        row = placed.get(slot)
        if row is None:
            assert window == old
        else:
            kept = guesses[:, row].tolist()[: int(most_steps[slot])]
            assert window == [old[0], *kept, *[-1] * (4 - len(kept))]


def test_draft_input_is_two_norms_side_by_side() -> None:
    tokens, embedding, features = torch.randint(0, 11, (7,)), torch.randn(11, 60).bfloat16(), torch.randn(7, 60)
    embed_norm, feature_norm = torch.randn(60).bfloat16(), torch.randn(60).bfloat16()
    x = draft_input(tokens, embedding, embed_norm, features.bfloat16(), feature_norm, 1e-3)
    assert torch.equal(x[:, :60], rms_norm(embedding[tokens], embed_norm, 1e-3))
    assert torch.equal(x[:, 60:], rms_norm(features.bfloat16(), feature_norm, 1e-3))


def test_select_rows() -> None:
    every, index = torch.randn(7, 4, 60), torch.randint(0, 4, (7,))
    for rows in (every, every[..., :25], every[..., 25:]):  # gates are columns of what a linear gives
        selected = select_rows(rows, index)
        for row in range(7):
            assert torch.equal(selected[row], rows[row, index[row]])


def test_keep_row() -> None:
    rows, tokens = torch.randn(2, 5), torch.tensor([7, 8])
    kept_rows, kept_tokens = torch.zeros(3, 4, 5), torch.zeros(3, 4, dtype=torch.int64)
    keep_row(kept_rows, kept_tokens, torch.tensor([2, 0]), torch.tensor([9, 3]), rows, tokens)
    assert torch.equal(kept_rows[2, 1], rows[0]) and torch.equal(kept_rows[0, 3], rows[1])
    assert kept_tokens.tolist() == [[0, 0, 0, 8], [0, 0, 0, 0], [0, 7, 0, 0]]
    with pytest.raises(ValueError, match="rows"):
        keep_row(kept_rows, kept_tokens, torch.tensor([2, 0]), torch.tensor([9, 3]), rows.half(), tokens)


def test_keep_states() -> None:
    """Slot 1 keeps positions 4 to 6 from place 0 on; what lies on either side goes to the row before and behind."""
    kept = torch.zeros(7, 4), torch.zeros(7, 2)
    places, positions = torch.tensor([(0, 0, 6), (3, 7, -3)]), torch.tensor([[3, 4, 5], [9, 9, 9]])
    aux, values = torch.randn(6, 4), torch.randn(6, 2)
    final = Normed(values, values * 3, values.square().sum(1)[None], 1e-5)
    keep_states(kept, places, torch.tensor([1, 0]), positions, aux, final)
    assert torch.equal(kept[0][:3], aux[:3]) and not kept[0][3:6].any() and kept[0][6].any()
    assert torch.equal(kept[1][:3], final.normalised()[:3])
    keep_states(kept, places, torch.tensor([1, 0]), positions, aux, values)
    assert torch.equal(kept[1][:3], values[:3])
    with pytest.raises(ValueError, match="aux"):
        keep_states(kept, places, torch.tensor([1, 0]), positions, aux.half(), final)


@pytest.mark.parametrize(
    "argument, value",
    [("window_tokens", torch.zeros(2, 3)), ("slots", torch.zeros(2)), ("window", torch.zeros(5, 4)), ("drawn", None)],
)
def test_a_bad_argument_is_named(argument: str, value: torch.Tensor | None) -> None:
    arguments = {
        "drawn": torch.zeros(2, 4, dtype=torch.int64),
        "window_tokens": torch.zeros(2, 4, dtype=torch.int64),
        "slots": torch.arange(2),
        "lengths": torch.zeros(2, dtype=torch.int64),
        "length": torch.zeros(5, dtype=torch.int64),
        "window": torch.zeros(5, 4, dtype=torch.int64),
    }
    arguments[argument] = torch.zeros(2, 9) if value is None else value
    with pytest.raises(ValueError, match=f"^{argument}: "):
        judge_chain(**arguments, dummy=4)


def test_embed_norm_is_a_lookup_and_a_norm() -> None:
    tokens, embedding, weight = torch.randint(0, 11, (7,)), torch.randn(11, 60).bfloat16(), torch.randn(60).bfloat16()
    rows, y = embed_norm(tokens, embedding, weight, 1e-3)
    assert torch.equal(rows, embedding[tokens])
    assert torch.equal(y, rms_norm(rows, weight, 1e-3))


def test_synthetic_accept_wraps_around() -> None:
    table, seeds = torch.arange(8) * 10, torch.tensor([[3, 0], [1 << 62, 0], [-1, 0], [(1 << 63) - 1, 0]])[:, 0]
    slots, lengths = torch.tensor([3, 0, 2, 1]), torch.tensor([1, 6, 0, 13])
    assert synthetic_accept(table, seeds, slots, lengths).tolist() == [0, 10, 70, 50]
    with pytest.raises(ValueError, match="table"):
        synthetic_accept(table[:6], seeds, slots, lengths)
