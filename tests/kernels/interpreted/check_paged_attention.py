"""Paged attention under the interpreter, float32. Every cache row that no request owns holds NaN."""

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs
from overlap_spec_kernels.attention.paged_attention import _paged_attention_triton, paged_attention_reference

CLOSE = {"rtol": 1e-5, "atol": 2e-6}
DECODE = [[(0, 1)], [(70, 3), (0, 3), (15, 3)]]
PREFILL = [[(0, 65)], [(5, 7), (0, 33), (19, 1)]]  # from the start, and from the middle of a page
HEADS = [HeadShape(2, 2, 8), HeadShape(9, 3, 64), HeadShape(8, 1, 96), HeadShape(3, 1, 128)]


def check(
    requests: list[tuple[int, int]],
    heads: HeadShape,
    page_size: int,
    num_splits: int,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    inputs = attention_inputs(heads, requests, page_size, torch.float32)
    *tensors, max_rows, scale, _ = inputs
    if window is not None:
        for pages, (first, _) in zip(inputs.page_table, requests, strict=True):
            pages[: max(first - window + 1, 0) // page_size] = 0  # a page of NaN: nobody's
    out = _paged_attention_triton(*tensors, max_rows, scale, num_splits, window, sinks=sinks)
    torch.testing.assert_close(out, paged_attention_reference(*tensors, scale, window, sinks=sinks), **CLOSE)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(12)
@pytest.mark.parametrize("requests", DECODE)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode(requests: list[tuple[int, int]], heads: HeadShape, page_size: int, num_splits: int) -> None:
    check(requests, heads, page_size, num_splits)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("requests", PREFILL)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill(requests: list[tuple[int, int]], heads: HeadShape, page_size: int) -> None:
    check(requests, heads, page_size, num_splits=1)


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("requests", [DECODE[1], [(100, 17), (0, 5)]])
@pytest.mark.parametrize("window", [1, 6, 50])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_window(requests: list[tuple[int, int]], window: int, num_splits: int) -> None:
    check(requests, HeadShape(6, 3, 64), 4, num_splits, window)


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("window", [None, 20])
def test_wide_heads(window: int | None) -> None:
    """Eight query heads of a KV head, of 512 columns: two rows of a tile."""
    check([(40, 5), (0, 3)], HeadShape(8, 1, 512), 16, 3, window)


@pytest.mark.parametrize(("num_splits", "window"), [(3, None), (3, 6), (1, None)])
def test_sinks(num_splits: int, window: int | None) -> None:
    """From one that takes all weight to one that takes none."""
    sinks = torch.tensor([80.0, 2.0, 0.5, -1.0, -80.0, -torch.inf])
    check([(270, 3), (0, 7), (15, 3)], HeadShape(6, 3, 8), 4, num_splits, window, sinks)


@pytest.mark.slow
def test_prefill_in_splits() -> None:
    check([(140, 33), (0, 5)], HeadShape(9, 3, 8), page_size=4, num_splits=2)


def test_a_window_that_fills_more_than_one_tile() -> None:
    check([(150, 9), (3, 9)], HeadShape(8, 1, 16), page_size=16, num_splits=2)
