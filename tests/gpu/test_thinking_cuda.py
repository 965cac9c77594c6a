"""The kernels of a thinking budget against plain Python and their twins."""

import random

import pytest
import torch
from overlap_spec_kernels import TokenRows, force_columns, reasoning_end
from overlap_spec_kernels.sampling.force_columns import force_columns_reference
from support.reasoning_rows import RandomRows, by_hand

CUDA = torch.device("cuda")


@pytest.mark.parametrize("seed", range(50))
def test_reasoning_end(seed: int) -> None:
    long = {"most_positions": 3000, "budgets": (2000, 2990)} if seed % 5 == 0 else {}
    rows = RandomRows(random.Random(seed), **long)
    (pool, table, page_size), *others = rows.arguments()
    store = TokenRows(pool.to(CUDA), table.to(CUDA), page_size)
    assert reasoning_end(store, *(each.to(CUDA) for each in others)).tolist() == by_hand(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_columns", [1000, 128_256])
def test_force_columns(dtype: torch.dtype, num_columns: int) -> None:
    logits = torch.randn(64, num_columns, device=CUDA).to(dtype)
    columns = torch.randint(-1, num_columns + 1, (64,), device=CUDA)
    columns[:8] = torch.tensor([-1, num_columns] * 4, device=CUDA)
    expected = logits.clone()
    force_columns_reference(expected, columns)
    force_columns(logits, columns)
    assert torch.equal(logits, expected)
