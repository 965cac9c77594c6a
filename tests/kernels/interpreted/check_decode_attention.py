"""Decode attention under the interpreter, float32. Cache rows that no request owns, and those to be written, hold NaN.

The interpreter runs programs one after another: who arrives last is the last split, and races are the GPU tests' care.
"""

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs
from overlap_spec_kernels.attention.decode_attention import (
    DecodeScratch,
    _decode_attention_triton,
    decode_attention_reference,
)
from overlap_spec_kernels.attention.decode_shares import Division, decode_shares

CLOSE = {"rtol": 1e-5, "atol": 2e-6}
HEADS = [HeadShape(2, 2, 8), HeadShape(9, 3, 64), HeadShape(8, 1, 96)]
SPLIT = 160  # programs that a launch aims at: several splits of the longer requests


def run(
    inputs: DecodeInputs, num_programs: int, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    scratch = DecodeScratch.allocate(inputs.k_cache.shape[3], torch.device("cpu"), num_programs)
    scratch.outputs.fill_(torch.nan)
    *tensors, scale = inputs
    out = _decode_attention_triton(*tensors, scratch, scale, window=window, sinks=sinks)
    assert not scratch.counters.any()
    return out


def check(
    inputs: DecodeInputs, num_programs: int, window: int | None = None, sinks: torch.Tensor | None = None
) -> None:
    expected = inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    out = decode_attention_reference(*expected, window, sinks=sinks)
    torch.testing.assert_close(run(inputs, num_programs, window, sinks), out, **CLOSE)
    torch.testing.assert_close(inputs.k_cache, expected.k_cache, equal_nan=True, **CLOSE)
    torch.testing.assert_close(inputs.v_cache, expected.v_cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(24)
@pytest.mark.parametrize(("page_size", "num_programs"), [(1, SPLIT), (16, 1), (16, SPLIT)])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("width", [1, 3, 4, 16])
def test_decode(width: int, heads: HeadShape, page_size: int, num_programs: int) -> None:
    """Lengths around the edge of a page, so that windows cross it; 300 keys are two or three splits of 128."""
    check(decode_inputs(heads, width, [300, 0, 15, 1, 17, 16], page_size, torch.float32), num_programs)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("heads", [HeadShape(3, 1, 80), HeadShape(4, 2, 128), HeadShape(7, 1, 16)])
def test_other_heads(heads: HeadShape) -> None:
    check(decode_inputs(heads, 2, [270, 64, 63], 64, torch.float32), SPLIT)


@pytest.mark.slow
def test_more_splits_than_are_combined_at_once() -> None:
    check(decode_inputs(HeadShape(2, 1, 128), 2, [1300, 129], 16, torch.float32), num_programs=20)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("heads", [HeadShape(4, 2, 8), HeadShape(3, 1, 64)])
@pytest.mark.parametrize(("window", "width"), [(1, 4), (3, 16), (100, 1), (100, 4), (290, 4)])
def test_window(window: int, width: int, heads: HeadShape) -> None:
    """Shorter than a page, than the new rows, than a split; pages before it may belong to others."""
    inputs = decode_inputs(heads, width, [400, 0, 17], 16, torch.float32)
    for request, pages in enumerate(inputs.page_table):
        pages[: max(int(inputs.positions[request * width]) - window + 1, 0) // 16] = 0  # a page of NaN
    check(inputs, SPLIT, window)


@pytest.mark.parametrize(("num_programs", "window"), [(SPLIT, None), (SPLIT, 100), (1, None)])
def test_sinks(num_programs: int, window: int | None) -> None:
    """From one that takes all weight to one that takes none."""
    sinks = torch.tensor([80.0, 2.0, 0.5, -1.0, -80.0, -torch.inf])
    check(decode_inputs(HeadShape(6, 2, 8), 3, [300, 0, 17], 16, torch.float32), num_programs, window, sinks)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("heads", [HeadShape(2, 1, 512), HeadShape(4, 2, 256)])
@pytest.mark.parametrize("window", [None, 30])
def test_wide_heads_then_queries_alone(heads: HeadShape, window: int | None) -> None:
    """Queries alone attend to what rows with keys have written: to the same numbers."""
    inputs = decode_inputs(heads, 3, [130, 0, 15], 16, torch.float32)
    check(inputs, 12, window)
    expected = run(inputs, 12, window)
    scratch = DecodeScratch.allocate(512, torch.device("cpu"), 12)
    *tensors, scale = inputs
    queries, kept = tensors[0][:, : heads.num_heads * heads.head_dim], tensors[-2].clone()
    by = {"window": window, "writes": False}
    for found in (
        _decode_attention_triton(queries, *tensors[1:], scratch, scale, **by),
        decode_attention_reference(queries, *tensors[1:], scale, **by),
    ):
        torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(tensors[-2], kept, equal_nan=True, rtol=0, atol=0)


def test_16_bit_heads() -> None:
    """q and k are rounded as the reference rounds them; what is left is the rounding of weights before they meet V."""
    wide, lengths = HeadShape(8, 1, 512), [300, 5]
    large = HeadShape(8, 2, 256), [300], 140
    for heads, cached, window in (
        (HeadShape(6, 2, 64), lengths, None),
        (wide, lengths, 140),
        (wide, lengths, None),
        large,
    ):
        inputs = decode_inputs(heads, 3, cached, 16, torch.float16)
        expected = inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
        out = run(inputs, SPLIT, window)
        torch.testing.assert_close(out, decode_attention_reference(*expected, window), rtol=2**-10, atol=1e-3)
        torch.testing.assert_close(inputs.k_cache, expected.k_cache, equal_nan=True, rtol=2**-10, atol=0)


def test_rows_of_a_wider_tensor() -> None:
    inputs = decode_inputs(HeadShape(3, 1, 8), 2, [20], 16, torch.float32)
    check(inputs._replace(qkv=torch.cat((inputs.qkv, inputs.qkv), dim=1)[:, : inputs.qkv.shape[1]]), 1)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize(("num_shares", "at_once"), [(8, 8), (6, 4)])
@pytest.mark.parametrize("width", [1, 16])
def test_shares_by_length(width: int, num_shares: int, at_once: int) -> None:
    """Of 4 requests, the longest of which gets 3 to 5 splits; and from a table of other lengths."""
    heads = HeadShape(10, 2, 8)
    num_tiles = 1 if width == 1 else 6  # of 3 rows
    for of_table in ([3, 700, 0, 150], [700, 0, 0, 150]):
        inputs = decode_inputs(heads, width, [3, 700, 0, 150], 16, torch.float32)
        expected = inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
        shares = decode_shares(torch.tensor(of_table), Division(num_shares, at_once, 16))
        assert (shares & 65535).max() > num_shares // 4 + 1
        scratch = DecodeScratch.allocate(8, torch.device("cpu"), at_once * 2 * num_tiles)
        scratch.outputs.fill_(torch.nan)
        *tensors, scale = inputs
        out = _decode_attention_triton(*tensors, scratch, scale, shares=shares)
        torch.testing.assert_close(out, decode_attention_reference(*expected), **CLOSE)
        torch.testing.assert_close(inputs.k_cache, expected.k_cache, equal_nan=True, **CLOSE)
        assert not scratch.counters.any()
