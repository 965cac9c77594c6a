"""A thinking budget's closing marker, as the kernel finds it under the interpreter: exact."""

import random

import pytest
import torch
from overlap_spec_kernels.logits.process_logits import _process_logits_triton
from support.reasoning_rows import RandomRows, by_hand

SEEDS = 12


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_closing_markers(seed: int) -> None:
    rows = RandomRows(random.Random(seed))
    assert rows.forced(_process_logits_triton) == by_hand(rows)


def test_closing_markers_over_several_blocks() -> None:
    rows = RandomRows(random.Random(0), most_positions=400, budgets=(300, 390))
    assert rows.forced(_process_logits_triton) == by_hand(rows)


def test_a_marker_without_a_column_is_not_forced() -> None:
    seed = next(seed for seed in range(300) if max(map(max, by_hand(RandomRows(random.Random(seed))))) >= 3)
    rows = RandomRows(random.Random(seed))
    assert rows.processed(_process_logits_triton, torch.tensor([0, 1, 2, 9])).isfinite().all()
