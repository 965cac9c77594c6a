"""What drafts have missed is counted by the worker: a step catches up before it is wide, or before a ring is full."""

import random

import pytest

from overlap_spec.worker.inputs import DraftLag


def test_a_wide_step_catches_up_with_all_slots_of_the_batch() -> None:
    lag = DraftLag(4)
    for slots in ((0,), (0, 2), (0, 2)):
        assert lag.before(slots, 1) == []
        lag.after(slots, 1, False)
    assert lag.before((1,), 4) == [] and lag.before((2, 1, 0), 4) == [2, 0, 3]
    lag.after((2, 1, 0), 4, True)
    assert lag.before((0, 1, 2), 4) == []


def test_a_full_ring_is_caught_up_with_and_the_step_defers_again() -> None:
    lag = DraftLag(2)
    for expected in ([], [], [2], [], [2]):
        assert lag.before((5,), 1) == expected
        lag.after((5,), 1, bool(expected))
    assert lag.before((5,), 2) == [1]


def test_a_slot_that_was_left_out_has_missed_nothing_and_has_caught_up() -> None:
    lag = DraftLag(4)
    lag.after((0, 1), 1, False, {1})
    assert lag.before((0, 1), 2) == [1, 0]
    lag.after((0, 1), 2, True, {0})
    assert lag.before((0, 1), 2) == []


def test_a_new_request_has_missed_nothing() -> None:
    lag = DraftLag(4)
    lag.after((0, 1), 1, False)
    lag.forget([1, 7])
    assert lag.before((0, 1), 2) == [1, 0]


def test_the_root_of_a_prompt_that_proposed_nothing_is_missed_where_it_has_a_row() -> None:
    lag, other = DraftLag(4, counts_roots=True), DraftLag(4)
    for each in (lag, other):
        each.after_prompts((0, 2))
        each.after((0, 1), 1, False)
    assert lag.before((0, 1, 2), 2) == [2, 1, 1]
    assert other.before((0, 1, 2), 2) == [1, 1, 0]


def test_without_rows_that_are_kept_nothing_is_counted() -> None:
    lag = DraftLag(0, counts_roots=True)
    lag.after_prompts((0,))
    lag.after((0,), 1, False)
    assert lag.before((0,), 4) == lag.before((0,), 1) == []


@pytest.mark.parametrize("seed", range(20))
def test_no_ring_holds_more_than_it_can_whatever_the_steps(seed: int) -> None:
    rng, most = random.Random(seed), 3
    lag, missed = DraftLag(most, counts_roots=True), [0] * 4
    slots = [0]
    for _ in range(400):
        if rng.random() < 0.3:
            slots = rng.sample(range(4), rng.randint(1, 4))
        width = rng.choice((1, 1, 1, 1, 2))
        left_out = set(rng.sample(slots, rng.randint(0, len(slots) - 1))) if rng.random() < 0.3 else set[int]()
        if rng.random() < 0.1:
            lag.forget(slots[:1])
            if missed[slots[0]] % 2:
                lag.after_prompts(slots[:1])
            missed[slots[0]] %= 2
        counts = lag.before(slots, width)
        wanted = max(missed[slot] for slot in slots) >= (most if width == 1 else 1)
        assert counts == ([missed[slot] for slot in slots] if wanted else [])
        for slot in slots:
            missed[slot] = 0 if counts else missed[slot]
            assert width == 1 or missed[slot] == 0
            missed[slot] += width == 1 and slot not in left_out
            assert missed[slot] <= most
        lag.after(slots, width, bool(counts), left_out)
