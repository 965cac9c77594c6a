"""Tree attention under the interpreter, float32. Cache rows that no request owns, or that no row sees, hold NaN."""

import pytest
import torch
from kernel_cases.inputs import HeadShape, TreeInputs, tree_inputs
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.tree_attention import _tree_attention_triton, tree_attention_reference

CLOSE = {"rtol": 1e-5, "atol": 2e-6}
HEADS = [HeadShape(2, 2, 8), HeadShape(9, 3, 64), HeadShape(8, 1, 96)]
SPLIT = 160  # programs that a launch aims at: several splits of the longer requests


def run(
    inputs: TreeInputs, num_programs: int, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    scratch = DecodeScratch.allocate(inputs.k_cache.shape[3] * 2, torch.device("cpu"), num_programs)
    scratch.outputs.fill_(torch.nan)
    out = _tree_attention_triton(*inputs, window, scratch, sinks=sinks)
    assert not scratch.counters.any()
    return out


def check(
    inputs: TreeInputs, num_programs: int = SPLIT, window: int | None = None, sinks: torch.Tensor | None = None
) -> None:
    expected = tree_attention_reference(*inputs, window, sinks=sinks)
    torch.testing.assert_close(run(inputs, num_programs, window, sinks), expected, **CLOSE)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(24)
@pytest.mark.parametrize(("page_size", "num_programs"), [(1, SPLIT), (16, 1), (16, SPLIT)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("width", "num_extra"), [(1, 1), (4, 9), (16, 16), (10, 65)])
def test_trees(width: int, num_extra: int, heads: HeadShape, page_size: int, num_programs: int) -> None:
    """The request without a prefix has rows that see nothing at all."""
    check(tree_inputs(heads, width, num_extra, [300, 0, 17], page_size, torch.float32), num_programs)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("heads", [HeadShape(3, 1, 7), HeadShape(4, 2, 128), HeadShape(7, 1, 80)])
def test_other_heads(heads: HeadShape) -> None:
    check(tree_inputs(heads, 5, 12, [270, 64], 64, torch.float32))


@pytest.mark.slow
def test_64_rows() -> None:
    check(tree_inputs(HeadShape(8, 2, 16), 64, 64, [130, 5], 16, torch.float32))


def test_more_splits_than_are_combined_at_once() -> None:
    check(tree_inputs(HeadShape(2, 1, 128), 2, 7, [1300, 129], 16, torch.float32), num_programs=20)


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(("window", "width"), [(1, 4), (3, 16), (100, 1), (100, 4), (290, 4)])
def test_window(window: int, width: int) -> None:
    """Pages before it may belong to others."""
    inputs = tree_inputs(HeadShape(4, 2, 8), width, 11, [400, 0, 17], 16, torch.float32)
    for pages, at in zip(inputs.page_table, inputs.positions.view(3, width), strict=True):
        pages[: min(max(int(at.min()) - window + 1, 0), 384) // 16] = 0  # a page of NaN
    check(inputs, window=window)


@pytest.mark.parametrize(("num_programs", "window"), [(SPLIT, None), (SPLIT, 100), (1, None)])
def test_sinks(num_programs: int, window: int | None) -> None:
    """From one that takes all weight to one that takes none; rows that see nothing stay zero."""
    sinks = torch.tensor([80.0, 2.0, 0.5, -1.0, -80.0, -torch.inf])
    inputs = tree_inputs(HeadShape(6, 2, 8), 4, 9, [300, 0, 17], 16, torch.float32)
    check(inputs, num_programs, window, sinks)


def test_16_bit_tiles_that_share_nothing() -> None:
    """As many programs as make the tiles as large as they get, and fewer."""
    inputs = tree_inputs(HeadShape(8, 2, 16), 32, 32, [90, 7], 16, torch.float16)
    expected = tree_attention_reference(*inputs)
    for num_programs in (1, 4, 1000):
        torch.testing.assert_close(run(inputs, num_programs), expected, rtol=2**-9, atol=2e-3)


def test_rows_of_a_wider_tensor() -> None:
    inputs = tree_inputs(HeadShape(3, 1, 8), 4, 5, [20], 16, torch.float32)
    check(inputs._replace(q=torch.cat((inputs.q, inputs.q), dim=1)[:, :3]))
