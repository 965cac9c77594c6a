"""Linears of a quantised layer in one kernel for 9 to 128 rows, on a GPU: what kernels of one linear each compute."""

from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import QuantizedRun, compiling_together, linear_run
from overlap_spec_kernels.linear.packed_products import PackedProducts, linear_counters, split_counters
from support.quantized_runs import run_by_definition
from test_quantized_run_cuda import (
    KINDS,
    LARGE,
    SMALL,
    assert_equal,
    assert_near,
    inputs,
    one_by_one,
    pytestmark,
    run_of,
    tensors,
)
from torch import Tensor

__all__ = ["pytestmark"]  # the marks of these tests too
GPU = torch.device("cuda")
SIZES = {"large": (LARGE, True), "small": (SMALL, True), "small, to down": (SMALL, False)}
ROWS = (12, 32, 100, 128)
Runs = dict[tuple[str, str], QuantizedRun]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """By kind and size; their kernels are compiled together."""
    torch.manual_seed(0)
    made = {(kind, size): run_of(kind, *SIZES[size]) for kind in KINDS for size in SIZES}
    with compiling_together(12):
        for (_, size), run in made.items():
            for rows in ROWS if size != "small, to down" else ROWS[1:]:
                linear_run(*inputs(run, rows), run)
                one_by_one(run, *inputs(run, rows))
    return made


def assert_counters_at_zero() -> None:
    assert not linear_counters(GPU).any() and not (split_counters(GPU) & 0x7FFFFFFF).any()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_kernels_of_one_linear_compute(kind: str, size: str, runs: Runs) -> None:
    run = runs[kind, size]
    for rows in (32, 100, 128):
        x, residual = inputs(run, rows)
        cuts = run.cuts(x)
        assert cuts is not None and isinstance(cuts[0], PackedProducts)
        found = linear_run(x, residual, run)
        assert_equal(found, one_by_one(run, x, residual))
        expected = run_by_definition(run, x, residual)
        assert_near(found.values, expected[0])
        if found.projected is not None:
            assert_near(found.projected, expected[2])
    assert_counters_at_zero()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", ["large", "small"])
def test_a_row_does_not_depend_on_others(size: str, rows: int, runs: Runs) -> None:
    run = runs["fp8, rows", size]
    x, residual = inputs(run, rows)
    found = linear_run(x, residual, run)
    for row in (0, rows - 1):
        others, residuals = inputs(run, rows)
        others[row], residuals[row] = x[row], residual[row]
        mixed = linear_run(others, residuals, run)
        assert torch.equal(mixed.values[row], found.values[row])
        assert mixed.projected is not None and found.projected is not None
        assert torch.equal(mixed.projected[row], found.projected[row])


@pytest.mark.parametrize("kind", ["fp8, rows", "int4, zero points"])
@pytest.mark.parametrize("rows", [12, 32, 128])
@pytest.mark.parametrize("size", ["large", "small"])
def test_graphs_with_dependent_launches(size: str, rows: int, kind: str, runs: Runs) -> None:
    """Runs one after another, with kernels of one linear between them, replayed often: the same each time."""
    run = replace(runs[kind, size], ahead=runs[kind, size].output)
    assert run.next_qkv is not None
    last = replace(run, next_qkv=replace(run.next_qkv, data=run.next_qkv.data[:0]))
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
