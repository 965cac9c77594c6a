"""Linears of a quantised layer in one kernel for 9 to 128 rows, on a GPU: what kernels of one linear each compute."""

from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import QuantizedRun, compiling_together, linear_run
from overlap_spec_kernels.linear.packed_products import PackedProducts, linear_counters, split_counters
from test_quantized_run_cuda import (
    KINDS,
    LARGE,
    SMALL,
    assert_equal,
    assert_near,
    by_definition,
    inputs,
    one_by_one,
    pytestmark,
    run_of,
    tensors,
)
from torch import Tensor

__all__ = ["pytestmark"]  # the marks of these tests too
ROWS = (12, 32, 50, 128)
GPU = torch.device("cuda")


def compiled(*runs: QuantizedRun, rows: tuple[int, ...] = ROWS) -> None:
    """Many kernels at once."""
    with compiling_together(8):
        for run in runs:
            for count in rows:
                linear_run(*inputs(run, count), run)
                one_by_one(run, *inputs(run, count))


def assert_counters_at_zero() -> None:
    assert not linear_counters(GPU).any() and not (split_counters(GPU) & 0x7FFFFFFF).any()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_kernels_of_one_linear_compute(kind: str) -> None:
    large, small, to_down = run_of(kind, LARGE), run_of(kind, SMALL), run_of(kind, SMALL, reaches_qkv=False)
    compiled(large, small, to_down, rows=(32, 128))
    for run, counts in ((large, (32, 128)), (small, (30, 100)), (to_down, (17, 128))):
        for rows in counts:
            x, residual = inputs(run, rows)
            cuts = run.cuts(x)
            assert cuts is not None and isinstance(cuts[0], PackedProducts)
            found = linear_run(x, residual, run)
            assert_equal(found, one_by_one(run, x, residual))
            if run.reaches_qkv:
                after, qkv = by_definition(run, x, residual)
                assert found.projected is not None
                assert_near(found.values, after)
                assert_near(found.projected, qkv)
    assert_counters_at_zero()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=["large", "small"])
def test_a_row_does_not_depend_on_others(sizes: tuple[int, int, int, int], rows: int) -> None:
    run = run_of("fp8, rows", sizes)
    x, residual = inputs(run, rows)
    found = linear_run(x, residual, run)
    for row in (0, rows - 1):
        others, residuals = inputs(run, rows)
        others[row], residuals[row] = x[row], residual[row]
        mixed = linear_run(others, residuals, run)
        assert torch.equal(mixed.values[row], found.values[row])
        assert mixed.projected is not None and found.projected is not None
        assert torch.equal(mixed.projected[row], found.projected[row])


@pytest.mark.parametrize("rows", [12, 32, 128])
@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=["large", "small"])
def test_graphs_with_dependent_launches(sizes: tuple[int, int, int, int], rows: int) -> None:
    """Runs one after another, with kernels of one linear between them, replayed often: the same each time."""
    run = run_of("fp8, rows", sizes)
    last = replace(run, next_qkv=replace(run.next_qkv, data=run.next_qkv.data[:0]) if run.next_qkv else None)
    x, residual = inputs(run, rows)

    def layers() -> list[Tensor]:
        first = linear_run(x, residual, run)
        second = linear_run(x, first.values, run)
        third = one_by_one(run, x, second.values)
        return [*tensors(first), *tensors(second), *tensors(third), *tensors(linear_run(x, third.values, last))]

    expected = [each.clone() for each in layers()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for _ in range(20):
        for _ in range(20):
            graph.replay()
        assert all(map(torch.equal, found, expected))
    assert_counters_at_zero()
