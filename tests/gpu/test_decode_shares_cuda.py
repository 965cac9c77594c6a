"""Decode attention of uneven batches on a GPU, divided by the requests' lengths, against its reference on the CPU."""

import inspect
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs, to_device
from overlap_spec_kernels.attention import decode_attention as op
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention, divide_keys
from overlap_spec_kernels.attention.decode_shares import Division, decode_shares, decode_shares_reference
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales
from support.attention_cases import BFLOAT, CLOSE, FLOAT, LLAMA, SMOL, Case, decode_reference, name
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.eight_bits import E4M3, assert_close_in_8_bits, in_8_bits
from support.plain_oracle import PlainOracle
from support.random_schedules import Counting, random_requests, run_requests
from support.ring import RingConfig, tiny_loaded
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.layers import attention as layers

SCALES = KVScales(0.04, 0.3)
HEADS = HeadShape(8, 2, 128)
CASES = [
    Case(HEADS, 1, 16, BFLOAT),
    Case(HEADS, 4, 16, BFLOAT),
    Case(SMOL, 4, 64, BFLOAT),
    Case(HEADS, 16, 16, BFLOAT),  # the Triton kernel from here
    Case(HeadShape(8, 2, 96), 4, 16, BFLOAT),
    Case(HEADS, 4, 16, FLOAT),
]
AT_ONCE = 33  # programs for each KV head: as many as 8 heads have on a GPU
BATCHES = {
    "2": [500, 12_000],
    "9 of 16": [*[500] * 4, 9000, *[500] * 4, *[0] * 7],
    "64": [*[150] * 31, 7000, *[300] * 30, 3000, 0],
}


def scratch_for(inputs: DecodeInputs, num_programs: int | None = None) -> DecodeScratch:
    _, _, num_kv_heads, head_dim = inputs.k_cache.shape
    scratch = DecodeScratch.allocate(head_dim, torch.device("cuda"), num_programs or AT_ONCE * num_kv_heads)
    scratch.outputs.fill_(torch.nan)
    scratch.weights.fill_(torch.nan)
    return scratch


def divided(inputs: DecodeInputs, lengths: Sequence[int], scratch: DecodeScratch) -> Tensor:
    num_requests, (_, _, num_kv_heads, head_dim) = len(inputs.page_table), inputs.k_cache.shape
    num_heads = inputs.qkv.shape[1] // head_dim - 2 * num_kv_heads
    places = torch.tensor(lengths, device="cuda"), inputs.page_table, inputs.k_cache
    shares = divide_keys(*places, num_heads, len(inputs.positions) // num_requests, inputs.qkv.dtype, scratch)
    assert shares is not None
    return shares


def on_gpu(inputs: DecodeInputs) -> DecodeInputs:
    return DecodeInputs(*(to_device(value, "cuda") for value in inputs))


def check(case: Case, lengths: list[int], kv_dtype: torch.dtype | None = None) -> None:
    """With the step's own table, and with one of the same lengths in another order."""
    spare_pages = 40_000 // case.page_size
    inputs = decode_inputs(case.heads, case.width, lengths, case.page_size, case.dtype, spare_pages)
    scales = NO_SCALES if kv_dtype is None else SCALES
    inputs = inputs if kv_dtype is None else in_8_bits(inputs, kv_dtype, scales)
    out, k_cache, v_cache = decode_reference(inputs, scales)
    close = CLOSE[case.dtype if kv_dtype is None else BFLOAT]
    for of_table in (lengths, random.Random(0).sample(lengths, len(lengths))):
        given = on_gpu(inputs)
        scratch = scratch_for(given)
        shares = divided(given, of_table, scratch)
        *tensors, scale = given
        actual = decode_attention(*tensors, scratch, scale, scales=scales, shares=shares)
        atol = close["atol"] * (1 if kv_dtype is None else 2)
        torch.testing.assert_close(actual.cpu().float(), out, rtol=close["rtol"], atol=atol)
        if kv_dtype is None:
            torch.testing.assert_close(given.k_cache.cpu(), k_cache, equal_nan=True, **close)
            torch.testing.assert_close(given.v_cache.cpu(), v_cache, equal_nan=True, rtol=0, atol=0)
        else:
            assert_close_in_8_bits(given.k_cache.cpu(), k_cache)
            assert_close_in_8_bits(given.v_cache.cpu(), v_cache)
        assert not scratch.counters.any()


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("case", CASES, ids=name)
def test_uneven_batches(case: Case, lengths: list[int]) -> None:
    check(case, lengths)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("case", CASES[:4], ids=name)
def test_uneven_batches_over_8_bits(case: Case, lengths: list[int]) -> None:
    check(case, lengths, E4M3)


def test_a_long_request_of_a_large_model() -> None:
    """With as many programs as the op takes on this GPU."""
    inputs = decode_inputs(LLAMA, 4, [*[500] * 8, 30_000, *[0] * 7], 16, BFLOAT, spare_pages=1000)
    out, *_ = decode_reference(inputs)
    given = on_gpu(inputs)
    scratch = DecodeScratch.allocate(128, torch.device("cuda"))
    shares = divided(given, inputs.positions[::4].tolist(), scratch)
    assert int((shares & 65535).max()) >= len(shares) // 2
    *tensors, scale = given
    torch.testing.assert_close(
        decode_attention(*tensors, scratch, scale, shares=shares).cpu().float(), out, **CLOSE[BFLOAT]
    )


@pytest.mark.parametrize("num_requests", [2, 9, 16, 33, 64, 128, 500, 1000])
def test_tables_are_the_references(num_requests: int) -> None:
    for at_once, longest in ((33, 200), (66, 5000), (2000, 100_000)):
        lengths = torch.randint(longest, (num_requests,))
        lengths[num_requests // 2] = 20 * longest
        equal = max(at_once // num_requests, 1)
        num_shares = equal * num_requests + (at_once // 2 if equal == 1 else 0)
        division = Division(num_shares, at_once, 128)
        shares = decode_shares(lengths.cuda(), division)
        assert torch.equal(shares.cpu(), decode_shares_reference(lengths, division))


@sync_mode_warns
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_one_capture_serves_every_division(kv_dtype: torch.dtype | None) -> None:
    """A table of the step's lengths, and two layers that read it before their wait; no value reaches the host.

    Of equal arguments, the output is the same bit by bit, whichever split arrives last.
    """
    batches = ([500, 30, 9000, 0], [4000, 4000, 4000, 4000], [0, 0, 0, 0], [9000, 1, 1, 1])
    drawn = [decode_inputs(HEADS, 4, lengths, 16, BFLOAT, (20_000 - max(lengths)) // 16) for lengths in batches]
    drawn = [inputs if kv_dtype is None else in_8_bits(inputs, kv_dtype, SCALES) for inputs in drawn]
    scales = NO_SCALES if kv_dtype is None else SCALES
    most_pages = max(len(inputs.k_cache) for inputs in drawn)
    columns, num_angles = max(inputs.page_table.shape[1] for inputs in drawn), max(len(i.cos_sin) for i in drawn)
    first = on_gpu(drawn[0])
    static = first._replace(
        k_cache=first.k_cache.new_zeros(most_pages, *first.k_cache.shape[1:]),
        v_cache=first.v_cache.new_zeros(most_pages, *first.v_cache.shape[1:]),
        page_table=first.page_table.new_zeros(4, columns),
        cos_sin=first.cos_sin.new_zeros(num_angles, 128),
    )
    scratch, lengths = scratch_for(static), torch.zeros(4, dtype=torch.int64, device="cuda")
    qkv = torch.empty_like(static.qkv)
    *_, scale = static

    def step() -> list[Tensor]:
        shares = divide_keys(lengths, static.page_table, static.k_cache, 8, 4, BFLOAT, scratch)
        assert shares is not None
        torch.add(static.qkv, 0, out=qkv)  # an ordinary launch
        tensors = (qkv, *static[1:-1])
        return [decode_attention(*tensors, scratch, scale, True, None, scales, shares) for _ in range(2)]

    step()  # compiles
    with synchronization_is_an_error():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for inputs in (*drawn, drawn[0]):
        for target, value in zip(static[:-1], inputs[:-1], strict=True):
            target[tuple(slice(0, n) for n in value.shape)].copy_(value)
        lengths.copy_(inputs.positions[::4])
        graph.replay()
        expected = outs[0].clone()
        torch.testing.assert_close(expected.cpu().float(), decode_reference(inputs, scales)[0], rtol=2**-7, atol=8e-3)
        for _ in range(50):
            graph.replay()
            assert all(torch.equal(out, expected) for out in outs)
    assert not scratch.counters.any()


@sync_mode_warns
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_ring_whose_steps_all_have_a_table(codec: TextCodec, num_steps: int) -> None:
    """Target and draft, with graphs, in float32: its short requests have a split each, so answers are exact."""
    place = torch.device("cuda", 0)
    config = RingConfig(
        page_size=4, num_pages=46, num_slots=6, chunk_tokens=64, max_len=120, place=place, dtype=FLOAT, warm=True
    )
    config = replace(config, num_steps=num_steps, graph_batch_sizes=(1, 2, 4, 6), widths_seed=1 if num_steps else None)
    calls: set[tuple[int, int, bool]] = set()  # requests, a layer's cache, whether there is a table

    def noting(*arguments: Any) -> Tensor:
        given = inspect.signature(decode_attention).bind(*arguments).arguments
        calls.add((len(given["page_table"]), given["k_cache"].data_ptr(), given["shares"] is not None))
        return decode_attention(*arguments)

    requests = random_requests(random.Random("shares"), 60, True, False)
    counting = Counting(PlainOracle(20, codec, FLOAT, place))
    with patch.object(op, "_UNEVEN", 0), patch.object(layers, "decode_attention", noting):
        run_requests(requests, tiny_loaded(20, num_steps, FLOAT, place), config, codec, counting, "shares")
    assert not counting.wrong, counting.wrong
    divided_calls = [(count, cache) for count, cache, has_table in calls if has_table]
    assert {count for count, _ in divided_calls} >= {2, 4, 6}
    assert {cache for _, cache in divided_calls} == {cache for count, cache, _ in calls if count > 1}
