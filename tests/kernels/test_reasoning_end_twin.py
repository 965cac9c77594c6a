"""The twin of `reasoning_end` against plain Python, and which arguments it refuses."""

import random

import pytest
import torch
from overlap_spec_kernels import force_columns, reasoning_end
from support.reasoning_rows import RandomRows, by_hand


def test_random_rows() -> None:
    forced = 0
    for seed in range(300):
        rows = RandomRows(random.Random(seed))
        want = by_hand(rows)
        assert reasoning_end(*rows.arguments()).tolist() == want, seed
        forced += sum(token >= 0 for each in want for token in each)
    assert forced > 100


def test_arguments_are_checked() -> None:
    store, roots, positions, guesses, budgets, output_from = RandomRows(random.Random(1)).arguments()
    with pytest.raises(ValueError, match="^budgets"):
        reasoning_end(store, roots, positions, guesses, budgets[:, :-1], output_from)
    with pytest.raises(ValueError, match="^guesses"):
        reasoning_end(store, roots, positions, guesses[0], budgets, output_from)
    with pytest.raises(ValueError, match="^columns"):
        force_columns(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
