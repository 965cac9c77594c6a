"""The kernels that close a reasoning, under the interpreter, against their twins: exact."""

import random

import pytest
import torch
from overlap_spec_kernels import TokenRows
from overlap_spec_kernels.sampling.force_columns import _force_columns_triton, force_columns_reference
from overlap_spec_kernels.sampling.reasoning_end import _reasoning_end_triton
from support.reasoning_rows import RandomRows, by_hand

SEEDS = 12


@pytest.mark.parametrize("seed", range(SEEDS))
def test_reasoning_end(seed: int) -> None:
    rows = RandomRows(random.Random(seed))
    assert _reasoning_end_triton(*rows.arguments()).tolist() == by_hand(rows)


def test_reasoning_end_over_several_blocks() -> None:
    rows = RandomRows(random.Random(0), most_positions=400, budgets=(300, 390))
    assert _reasoning_end_triton(*rows.arguments()).tolist() == by_hand(rows)
    assert isinstance(rows.arguments()[0], TokenRows)


@pytest.mark.parametrize("num_columns", [1, 30, 1024, 2100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_force_columns(num_columns: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, num_columns).to(dtype)
    columns = torch.tensor([-1, 0, num_columns - 1, num_columns, num_columns // 2])
    expected = logits.clone()
    force_columns_reference(expected, columns)
    _force_columns_triton(logits, columns)
    assert torch.equal(logits, expected)
    assert (expected[[1, 2, 4]] == 0).sum(1).tolist() == [1, 1, 1]
