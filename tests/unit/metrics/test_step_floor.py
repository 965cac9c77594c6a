"""The bound of a step, against figures computed by hand."""

import msgspec
import pytest

from overlap_spec.messages import ForwardShape, Guessing, Roofline
from overlap_spec.metrics.step_floor import H200, forward_floor, known_ceiling, step_floor

TARGET = ForwardShape(weight_bytes=1000, kv_bytes=10, row_flop=2000, head_flop=500, pair_flop=4)
EXTEND = ForwardShape(weight_bytes=300, kv_bytes=2, row_flop=400, head_flop=100, pair_flop=1)
DRAFT = ForwardShape(weight_bytes=200, kv_bytes=2, row_flop=300, head_flop=100, pair_flop=1)


def test_a_forward_is_bound_by_bytes_or_by_operations() -> None:
    slow_memory = Roofline(bytes_per_s=100.0, flop_per_s=1e6)
    assert forward_floor(slow_memory, TARGET, rows=2, logits=2, keys=50, pairs=100) == (1000 + 10 * 50) / 100
    slow_compute = Roofline(bytes_per_s=1e6, flop_per_s=100.0)
    computed = 2000 * 2 + 500 * 2 + 4 * 100
    assert forward_floor(slow_compute, TARGET, rows=2, logits=2, keys=50, pairs=100) == computed / 100


def test_plain_decoding_is_one_forward() -> None:
    roofline = Roofline(100.0, 0.0, TARGET, EXTEND, DRAFT)
    assert step_floor(roofline, batch=3, width=1, context=70) == (1000 + 700) / 100


def test_a_chain_of_three_extends_and_drafts_twice_more() -> None:
    """Guess 1 follows from the extend; guesses 2 and 3 are a draft step each."""
    roofline = Roofline(100.0, 0.0, TARGET, EXTEND, DRAFT)
    want = (1000 + 700) + (300 + 2 * 70) + 2 * (200 + 2 * 70)
    assert step_floor(roofline, batch=3, width=4, context=70) == pytest.approx(want / 100)


def test_rows_of_a_wide_step_compute_more() -> None:
    roofline = Roofline(0.0, 1000.0, TARGET, EXTEND, DRAFT)
    rows = 2 * 4
    target = 2000 * rows + 500 * rows + 4 * 70 * 4
    extend = 400 * rows + 100 * 2 + 1 * 70 * 4
    drafts = 2 * (300 * 2 + 100 * 2 + 1 * 70)
    assert step_floor(roofline, batch=2, width=4, context=70) == pytest.approx((target + extend + drafts) / 1000)


def test_a_tree_extends_its_longest_path_and_drafts_a_level_at_once() -> None:
    """Of 16 columns in three levels of four nodes: level 1 follows from the extend."""
    roofline = Roofline(0.0, 1000.0, TARGET, EXTEND, DRAFT, longest=4, draft_rows=4)
    target = 2000 * 32 + 500 * 32 + 4 * 70 * 16
    extend = 400 * 2 * 4 + 100 * 2 + 1 * 70 * 4
    drafts = 2 * (300 * 8 + 100 * 8 + 1 * 70 * 4)
    assert step_floor(roofline, batch=2, width=16, context=70) == pytest.approx((target + extend + drafts) / 1000)
    narrow = 2000 * 4 + 500 * 4 + 4 * 70 * 2 + 400 * 4 + 100 * 2 + 70 * 2
    assert step_floor(roofline, batch=2, width=2, context=70) == pytest.approx(narrow / 1000)


def test_a_block_is_one_forward_behind_keys_and_values() -> None:
    """Absorbing reads no keys. The block has as many rows in every step; of a window of 3, two of them guess."""
    for width, guesses in ((5, 4), (3, 2)):
        seconds = step_floor(Roofline(100.0, 0.0, TARGET, EXTEND, DRAFT, 0, 6, Guessing.BLOCK), 2, width, 70)
        assert seconds == pytest.approx(((1000 + 700) + 300 + (200 + 2 * 70)) / 100)
        target = 2000 * 2 * width + 500 * 2 * width + 4 * 70 * width
        block = 400 * 2 * width + (300 * 12 + 100 * 2 * guesses + 70 * 6)
        seconds = step_floor(Roofline(0.0, 1000.0, TARGET, EXTEND, DRAFT, 0, 6, Guessing.BLOCK), 2, width, 70)
        assert seconds == pytest.approx((target + block) / 1000)


def test_masks_run_with_the_rows_that_are_absorbed() -> None:
    """Of a window of 4: the first guess follows from the committed tokens, the others from two masks."""
    seconds = step_floor(Roofline(100.0, 0.0, TARGET, EXTEND, DRAFT, guessing=Guessing.MASKS), 3, 4, 70)
    assert seconds == pytest.approx(((1000 + 700) + (300 + 2 * 70)) / 100)
    target = 2000 * 8 + 500 * 8 + 4 * 70 * 4
    extend = 400 * 2 * 6 + 100 * 2 * 3 + 70 * 6
    seconds = step_floor(Roofline(0.0, 1000.0, TARGET, EXTEND, DRAFT, guessing=Guessing.MASKS), 2, 4, 70)
    assert seconds == pytest.approx((target + extend) / 1000)


def test_guesses_of_n_grams_take_no_draft_step() -> None:
    roofline = Roofline(100.0, 0.0, TARGET, EXTEND, DRAFT, longest=8, most_guesses=3)
    want = (1000 + 700) + (300 + 2 * 70) + 2 * (200 + 2 * 70)
    assert step_floor(roofline, batch=3, width=11, context=70) == pytest.approx(want / 100)


def test_states_are_read_and_written() -> None:
    """Once for each slot, whatever the window."""
    target = msgspec.structs.replace(TARGET, state_bytes=50)
    for width in (1, 2):
        plain = step_floor(Roofline(100.0, 0.0, TARGET, EXTEND, DRAFT), batch=3, width=width, context=70)
        found = step_floor(Roofline(100.0, 0.0, target, EXTEND, DRAFT), batch=3, width=width, context=70)
        assert found - plain == pytest.approx(2 * 50 * 3 / 100)


def test_without_ceilings_nothing_is_bound() -> None:
    assert step_floor(Roofline(0.0, 0.0, TARGET, EXTEND, DRAFT), batch=1, width=4, context=70) == 0.0


def test_the_table_knows_what_was_measured() -> None:
    known = known_ceiling(H200, "bfloat16")
    assert known is not None and (known.bytes_per_s, known.flop_per_s) == (4.23e12, 790e12)
    assert known_ceiling("NVIDIA H200 NVL", "bfloat16") is None
    assert known_ceiling("cpu", "float32") is None
