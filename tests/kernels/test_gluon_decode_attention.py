"""Decode attention's Gluon kernel, launched by its op and interpreted, against the reference in float32.

Cache rows that no request owns, and those to be written, hold NaN, and so does shared memory before a copy arrives.
"""

from __future__ import annotations

import importlib
import itertools
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs
from overlap_spec_kernels import decode_attention as op
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, divide_keys
from overlap_spec_kernels.attention.kv_format import KVScales
from overlap_spec_kernels.launch import ceil_div
from support.attention_cases import BFLOAT, CLOSE, FLOAT, HALF, Case, decode_reference, name
from support.eight_bits import E4M3, E5M2, assert_close_in_8_bits, in_8_bits

if TYPE_CHECKING:
    from emulators.gluon.launch import Hopper

# A block is of 64 or 128 keys, which a warp takes by 16 or 32; a split is of at least 128.
LENGTHS = [300, 0, 15, 1, 17, 16, 63, 64, 65, 127, 128, 129]
SETTLED = {"positions_ptr", "page_table_ptr", "k_cache_ptr", "v_cache_ptr", "shares_ptr"}
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
    out, k_cache, v_cache = decode_reference(inputs)
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


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(15)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_shapes(gpu: Hopper, case: Case, num_splits: int) -> None:
    inputs = decode_inputs(case.heads, case.width, LENGTHS, case.page_size, case.dtype)
    check(gpu, inputs, num_splits)
    splits = min(num_splits, ceil_div(inputs.page_table.shape[1] * case.page_size, 128))
    assert gpu.launches[0].grid == (case.heads.num_kv_heads * splits, len(LENGTHS), 1)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [HeadShape(3, 1, 64), HeadShape(4, 1, 128)])
def test_more_splits_than_are_combined_at_once(gpu: Hopper, heads: HeadShape) -> None:
    check(gpu, decode_inputs(heads, 4, [1300, 129], 16, BFLOAT), num_splits=10)


@pytest.mark.slow
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


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    ("lengths", "num_splits"),
    [([300], 1), ([300], 4), ([17], 2), ([0], 1), ([300, 0, 129], 3)],
    ids=["300", "300 in 4 splits", "17", "0", "several"],
)
@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[3]], ids=name)
def test_keys_of_8_bits(gpu: Hopper, case: Case, lengths: list[int], num_splits: int, kv_dtype: torch.dtype) -> None:
    """Written rows are the reference's, and attended to as they are rounded, like all others."""
    inputs = in_8_bits(decode_inputs(case.heads, case.width, lengths, case.page_size, case.dtype), kv_dtype, SCALES)
    out, k_cache, v_cache = decode_reference(inputs, SCALES)
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
    out, *_ = decode_reference(inputs, SCALES)
    *tensors, scale = inputs
    actual = op(*tensors, DecodeScratch.allocate(128, torch.device("cpu"), 4), scale, scales=SCALES)
    assert gpu.launches[0].constants["WARPS"] == 8
    torch.testing.assert_close(actual.float(), out, **CLOSE[BFLOAT])


UNEVEN = [3, 1300, 0, 260, 17]


def shares_of(inputs: DecodeInputs, lengths: list[int], scratch: DecodeScratch) -> torch.Tensor:
    """The table of a step in which requests had these lengths."""
    num_requests = len(inputs.page_table)
    width, num_columns = len(inputs.positions) // num_requests, inputs.qkv.shape[1] // inputs.k_cache.shape[3]
    num_heads = num_columns - 2 * inputs.k_cache.shape[2]
    cached = torch.tensor(lengths)
    shares = divide_keys(cached, inputs.page_table, inputs.k_cache, num_heads, width, inputs.qkv.dtype, scratch)
    assert shares is not None
    return shares


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(18)
@pytest.mark.parametrize("programs", [11, 5], ids=["two splits if equal", "one split if equal"])
@pytest.mark.parametrize("lengths", [UNEVEN, [1300, 0, 5000, 1, 1], [0] * 5], ids=["of the step", "others", "none"])
@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[3]], ids=name)
def test_shares_by_length(gpu: Hopper, case: Case, lengths: list[int], programs: int) -> None:
    """Whatever the lengths are that the table was made of. Programs of entries left over end at once."""
    inputs = decode_inputs(case.heads, case.width, UNEVEN, case.page_size, case.dtype, spare_pages=100)
    out, k_cache, v_cache = decode_reference(inputs)
    scratch = DecodeScratch.allocate(case.heads.head_dim, torch.device("cpu"), programs * case.heads.num_kv_heads)
    scratch.outputs.fill_(torch.nan)
    gpu.read_before_wait |= SETTLED
    shares = shares_of(inputs, lengths, scratch)
    *tensors, scale = inputs
    actual = op(*tensors, scratch, scale, read_before_wait=True, shares=shares)
    assert gpu.launches[0].constants["UNEVEN"]
    assert gpu.launches[0].grid == (case.heads.num_kv_heads, 10 if programs == 11 else 7, 1)
    torch.testing.assert_close(actual.float(), out, **CLOSE[case.dtype])
    torch.testing.assert_close(inputs.k_cache, k_cache, equal_nan=True, **CLOSE[case.dtype])
    torch.testing.assert_close(inputs.v_cache, v_cache, equal_nan=True, rtol=0, atol=0)
    assert not scratch.counters.any()


@pytest.mark.slow
@pytest.mark.parametrize("programs", [11, 5])
def test_shares_by_length_over_8_bits(gpu: Hopper, programs: int) -> None:
    inputs = decode_inputs(CASES[3].heads, 4, UNEVEN, 16, BFLOAT, spare_pages=100)
    inputs = in_8_bits(inputs, E4M3, SCALES)
    out, k_cache, _ = decode_reference(inputs, SCALES)
    scratch = DecodeScratch.allocate(128, torch.device("cpu"), programs * 2)
    scratch.outputs.fill_(torch.nan)
    *tensors, scale = inputs
    actual = op(*tensors, scratch, scale, scales=SCALES, shares=shares_of(inputs, UNEVEN, scratch))
    assert gpu.kernels == ["decode_attention_8bit_kernel"] and gpu.launches[0].constants["UNEVEN"]
    torch.testing.assert_close(actual.float(), out, **CLOSE[BFLOAT])
    assert_close_in_8_bits(inputs.k_cache, k_cache)
    assert not scratch.counters.any()


def test_scratch_too_small_for_the_shares(gpu: Hopper) -> None:
    """As a draft with more KV heads than its target would have it: every request gets the same."""
    inputs = decode_inputs(HeadShape(4, 1, 128), 1, UNEVEN, 16, BFLOAT, spare_pages=100)
    shares = shares_of(inputs, UNEVEN, DecodeScratch.allocate(128, torch.device("cpu"), 11))
    *tensors, scale = inputs
    actual = op(*tensors, DecodeScratch.allocate(128, torch.device("cpu"), 9), scale, shares=shares)
    assert not gpu.launches[0].constants["UNEVEN"]
    torch.testing.assert_close(actual.float(), decode_reference(inputs)[0], **CLOSE[BFLOAT])


@pytest.mark.parametrize("pages", [1, 1000])
def test_where_a_table_cannot_pay(gpu: Hopper, pages: int) -> None:
    """For one request, and where no request can be much longer than a split."""
    inputs = decode_inputs(HeadShape(4, 1, 128), 1, [20] if pages > 1 else [20, 30], 16, BFLOAT, spare_pages=pages)
    scratch = DecodeScratch.allocate(128, torch.device("cpu"), 40)
    lengths, heads = inputs.positions.clone(), inputs.k_cache
    assert divide_keys(lengths, inputs.page_table, heads, 4, 1, BFLOAT, scratch) is None
    assert divide_keys(lengths.repeat(2), inputs.page_table.repeat(2, 500), heads, 4, 1, BFLOAT, scratch) is not None


def test_a_table_has_spare_entries(gpu: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of requests and programs; those of requests with several splits fit the scratch."""
    module = importlib.import_module("overlap_spec_kernels.attention.decode_attention")
    monkeypatch.setattr(module, "decode_shares", lambda lengths, division: division)
    inputs = decode_inputs(HeadShape(4, 1, 128), 1, [20], 16, BFLOAT, spare_pages=1000)
    for num_programs, num_requests in itertools.product(range(1, 40), range(2, 40)):
        table = inputs.page_table.expand(num_requests, -1)
        scratch = DecodeScratch.allocate(128, torch.device("cpu"), num_programs)
        lengths = inputs.positions.expand(num_requests)
        division: Any = divide_keys(lengths, table, inputs.k_cache, 4, 1, BFLOAT, scratch)
        if division is not None:
            spare = division.num_shares - num_requests
            assert spare > 0 and min(division.num_shares, 2 * spare) <= num_programs


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
