"""Decode attention's Gluon kernel, launched by its op and interpreted, against the twin in float32.

Cache rows that no request owns, and those to be written, hold NaN, and so does shared memory before a copy arrives.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs
from overlap_spec_kernels import decode_attention as op
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.kv_format import KVScales
from overlap_spec_kernels.launch import ceil_div
from support.attention_cases import BFLOAT, CLOSE, FLOAT, HALF, Case, decode_twin, name
from support.eight_bits import E4M3, E5M2, assert_close_in_8_bits, in_8_bits

if TYPE_CHECKING:
    from support.gluon_interpreter.launch import Hopper

# A block is of 64 or 128 keys, which a warp takes by 16 or 32; a split is of at least 128.
LENGTHS = [300, 0, 15, 1, 17, 16, 63, 64, 65, 127, 128, 129]
SETTLED = {"positions_ptr", "page_table_ptr", "k_cache_ptr", "v_cache_ptr"}
SCALES = KVScales(0.04, 0.3)
CASES = [
    Case(HeadShape(2, 2, 64), 4, 64, BFLOAT),
    Case(HeadShape(9, 3, 64), 4, 16, BFLOAT),
    Case(HeadShape(9, 3, 64), 1, 16, HALF),
    Case(HeadShape(8, 2, 128), 4, 16, BFLOAT),
    Case(HeadShape(8, 2, 128), 1, 64, HALF),
    Case(HeadShape(16, 1, 128), 1, 16, BFLOAT),
    Case(HeadShape(3, 1, 64), 5, 1, HALF),
]


def check(gpu: Hopper, inputs: DecodeInputs, num_splits: int, read_before_wait: bool = False) -> None:
    """With the splits that as many programs make."""
    heads, dtype = inputs.k_cache.shape[2:], inputs.qkv.dtype
    out, k_cache, v_cache = decode_twin(inputs)
    scratch = DecodeScratch.allocate(heads[1], torch.device("cpu"), num_splits * len(inputs.page_table) * heads[0])
    scratch.outputs.fill_(torch.nan)
    if read_before_wait:
        gpu.read_before_wait |= SETTLED
    *tensors, scale = inputs
    actual = op(*tensors, scratch, scale, read_before_wait)
    assert (
        gpu.kernels == ["decode_attention_gluon_kernel"]
        and gpu.launches[0].constants["READ_BEFORE_WAIT"] == read_before_wait
    )
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.float(), out, **CLOSE[dtype])
    torch.testing.assert_close(inputs.k_cache, k_cache, equal_nan=True, **CLOSE[dtype])
    torch.testing.assert_close(inputs.v_cache, v_cache, equal_nan=True, rtol=0, atol=0)
    assert not scratch.counters.any()


@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_shapes(gpu: Hopper, case: Case, num_splits: int) -> None:
    inputs = decode_inputs(case.heads, case.width, LENGTHS, case.page_size, case.dtype)
    check(gpu, inputs, num_splits)
    splits = min(num_splits, ceil_div(inputs.page_table.shape[1] * case.page_size, 128))
    assert gpu.launches[0].grid == (case.heads.num_kv_heads * splits, len(LENGTHS), 1)


@pytest.mark.parametrize("heads", [HeadShape(3, 1, 64), HeadShape(4, 1, 128)])
def test_more_splits_than_are_combined_at_once(gpu: Hopper, heads: HeadShape) -> None:
    check(gpu, decode_inputs(heads, 4, [1300, 129], 16, BFLOAT), num_splits=10)


@pytest.mark.parametrize(("page_size", "num_splits"), [(16, 1), (64, 3), (1, 2)])
def test_many_blocks_of_a_split(gpu: Hopper, page_size: int, num_splits: int) -> None:
    """More than are loading at once, and than have their pages read ahead."""
    check(gpu, decode_inputs(HeadShape(4, 1, 128), 4, [1300, 513], page_size, BFLOAT), num_splits)


@pytest.mark.parametrize(
    ("length", "page_size", "num_programs"), [(2900, 16, 40), (2900, 16, 4), (1025, 1, 4), (127, 64, 4)]
)
def test_one_program_for_each_multiprocessor(gpu: Hopper, length: int, page_size: int, num_programs: int) -> None:
    """One request's full tiles have a deeper ring, of which only one fits."""
    check(gpu, decode_inputs(HeadShape(4, 1, 128), 4, [length], page_size, BFLOAT), num_programs)
    constants = gpu.launches[0].constants
    assert gpu.launches[0].grid == (min(num_programs // 2, ceil_div(length, 128) + 1), 1, 1)
    assert constants["WARPS"] * constants["KEYS"] * constants["STAGES"] * 128 * 2 * 2 > 114 * 1024


@pytest.mark.parametrize("heads", [HeadShape(3, 1, 64), HeadShape(4, 1, 128)])
def test_what_an_ordinary_launch_wrote_is_read_before_the_wait(gpu: Hopper, heads: HeadShape) -> None:
    check(gpu, decode_inputs(heads, 4, [300, 3], 16, BFLOAT), num_splits=2, read_before_wait=True)


def test_rows_of_a_wider_tensor(gpu: Hopper) -> None:
    inputs = decode_inputs(HeadShape(3, 1, 64), 2, [20], 16, HALF)
    check(gpu, inputs._replace(qkv=torch.cat((inputs.qkv, inputs.qkv), dim=1)[:, : inputs.qkv.shape[1]]), 1)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("lengths", "num_splits"),
    [([300], 1), ([300], 4), ([17], 2), ([0], 1), ([300, 0, 129], 3)],
    ids=["300", "300 in 4 splits", "17", "0", "several"],
)
@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[3]], ids=name)
def test_keys_of_8_bits(gpu: Hopper, case: Case, lengths: list[int], num_splits: int, kv_dtype: torch.dtype) -> None:
    """Written rows are the twin's, and attended to as they are rounded, like all others."""
    inputs = in_8_bits(decode_inputs(case.heads, case.width, lengths, case.page_size, case.dtype), kv_dtype, SCALES)
    out, k_cache, v_cache = decode_twin(inputs, SCALES)
    num_programs = max(2, len(lengths)) * num_splits * case.heads.num_kv_heads
    scratch = DecodeScratch.allocate(case.heads.head_dim, torch.device("cpu"), num_programs)
    scratch.outputs.fill_(torch.nan)
    *tensors, scale = inputs
    actual = op(*tensors, scratch, scale, scales=SCALES)
    assert gpu.kernels == ["decode_attention_8bit_kernel"]
    torch.testing.assert_close(actual.float(), out, **CLOSE[case.dtype])
    assert_close_in_8_bits(inputs.k_cache, k_cache)
    assert_close_in_8_bits(inputs.v_cache, v_cache)
    assert not scratch.counters.any()


def test_one_long_request_of_8_bits(gpu: Hopper) -> None:
    """A deeper ring, whose first stages are refilled several times."""
    inputs = in_8_bits(decode_inputs(HeadShape(4, 1, 128), 4, [2900], 16, BFLOAT), E4M3, SCALES)
    out, *_ = decode_twin(inputs, SCALES)
    *tensors, scale = inputs
    actual = op(*tensors, DecodeScratch.allocate(128, torch.device("cpu"), 4), scale, scales=SCALES)
    assert gpu.launches[0].constants["WARPS"] == 8
    torch.testing.assert_close(actual.float(), out, **CLOSE[BFLOAT])


class Elsewhere:
    """Takes the place of the Triton kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> NoReturn:
        raise LookupError("the Triton kernel is launched")


@pytest.mark.parametrize(
    ("heads", "width", "dtype", "window"),
    [
        (HeadShape(3, 1, 64), 4, BFLOAT, 8),
        (HeadShape(3, 1, 64), 4, FLOAT, None),
        (HeadShape(3, 1, 96), 4, BFLOAT, None),
        (HeadShape(3, 1, 64), 6, BFLOAT, None),
    ],
)
def test_the_triton_kernel_takes_the_rest(
    gpu: Hopper, monkeypatch: pytest.MonkeyPatch, heads: HeadShape, width: int, dtype: torch.dtype, window: int | None
) -> None:
    """A window, float32, a rare head dimension, or more than 16 rows and heads of a KV head."""
    module = importlib.import_module("overlap_spec_kernels.attention.decode_attention")
    monkeypatch.setattr(module, "decode_attention_kernel", Elsewhere())
    *tensors, scale = decode_inputs(heads, width, [20], 16, dtype)
    with pytest.raises(LookupError, match="Triton"):
        op(*tensors, DecodeScratch.allocate(128, torch.device("cpu")), scale, window=window)
    assert not gpu.launches
