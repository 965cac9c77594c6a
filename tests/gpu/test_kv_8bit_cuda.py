"""Ops over KV pages of 8 bits on a GPU, against their references on the CPU.

References attend in float32 to the rounded values that the kernels read, so what is left to a kernel is the rounding of
its weights and outputs. What is written may differ by one step of the format where the rotation, rounded differently,
falls on the other side of a boundary.
"""

from dataclasses import replace

import pytest
import torch
from kernel_cases.inputs import (
    DecodeInputs,
    HeadShape,
    attention_inputs,
    decode_inputs,
    rope_inputs,
    to_device,
    tree_inputs,
)
from overlap_spec_kernels import decode_attention, move_cache_rows, paged_attention, rope_kv_write, tree_attention
from overlap_spec_kernels.attention.chunk_attention import chunk_attention, takes_long_chunks
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.gather_keys import gather_keys, gather_keys_reference
from overlap_spec_kernels.attention.kv_format import KVScales
from overlap_spec_kernels.attention.move_cache_rows import move_cache_rows_reference
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference
from overlap_spec_kernels.attention.tree_attention import tree_attention_reference
from support.attention_cases import BFLOAT, CLOSE, FLOAT, HALF, LLAMA, SMOL, Case, decode_reference, name
from support.eight_bits import E4M3, E5M2, answers, assert_close_in_8_bits, in_8_bits
from support.poisoned_memory import NANS, poison_shared_memory
from support.ring import RingConfig

from overlap_spec.frontend.codec import TextCodec

SCALES = KVScales(0.04, 0.3)
LENGTHS = [300, 0, 15, 1, 17, 16, 700]
CASES = [
    Case(LLAMA, 4, 16, BFLOAT),
    Case(LLAMA, 1, 16, BFLOAT),
    Case(LLAMA, 4, 64, HALF),
    Case(LLAMA, 3, 1, BFLOAT),
    Case(SMOL, 4, 16, BFLOAT),
    Case(SMOL, 1, 64, HALF),
    Case(HeadShape(16, 1, 128), 1, 16, BFLOAT),
    Case(SMOL, 16, 16, BFLOAT),  # the Triton kernel from here
    Case(LLAMA, 11, 64, BFLOAT),
    Case(HeadShape(8, 1, 96), 1, 64, HALF),
    Case(LLAMA, 4, 16, FLOAT),
]
FORMATS = pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


def check(
    inputs: DecodeInputs, kv_dtype: torch.dtype, num_programs: int | None = None, scales: KVScales = SCALES
) -> None:
    inputs = in_8_bits(inputs, kv_dtype, scales)
    dtype = inputs.qkv.dtype
    out, k_cache, v_cache = decode_reference(inputs, scales)
    tensors = [to_device(value, "cuda") for value in inputs]
    scratch = DecodeScratch.allocate(inputs.k_cache.shape[3], torch.device("cuda"), num_programs)
    scratch.outputs.fill_(torch.nan)
    *given, scale = tensors
    actual = decode_attention(*given, scratch, scale, scales=scales)
    assert actual.dtype == dtype
    close = CLOSE[BFLOAT if dtype == FLOAT else dtype]  # one new key may be rounded to the value beside the reference's
    torch.testing.assert_close(actual.cpu().float(), out, rtol=close["rtol"], atol=2 * close["atol"])
    assert_close_in_8_bits(given[4].cpu(), k_cache)
    assert_close_in_8_bits(given[5].cpu(), v_cache)
    assert not scratch.counters.any()


@FORMATS
@pytest.mark.parametrize("case", CASES, ids=name)
def test_decode(case: Case, kv_dtype: torch.dtype) -> None:
    inputs = decode_inputs(case.heads, case.width, LENGTHS, case.page_size, case.dtype)
    for num_programs in (None, 1, 1024):
        check(inputs, kv_dtype, num_programs)


@FORMATS
@pytest.mark.parametrize("num_requests", [1, 2, 5, 16, 64, 130])
def test_shared_memory_full_of_nan(num_requests: int, kv_dtype: torch.dtype) -> None:
    """And tiles that are filled in part. Of 130 requests, the number of the last ones is NaN as a value of 8 bits."""
    for width, page_size in ((1, 16), (3, 1), (4, 16), (5, 64)):
        lengths = [300, *torch.randint(400, (num_requests - 1,)).tolist()]
        for heads, value in zip((HeadShape(6, 2, 128), HeadShape(3, 1, 64)), NANS.values(), strict=True):
            poison_shared_memory(value)
            check(decode_inputs(heads, width, lengths, page_size, BFLOAT), kv_dtype)


@FORMATS
@pytest.mark.parametrize("length", [5, 129, 2900, 40_000])
def test_decode_of_one_request(length: int, kv_dtype: torch.dtype) -> None:
    check(decode_inputs(LLAMA, 4, [length], 16, BFLOAT), kv_dtype)
    check(decode_inputs(LLAMA, 1, [length], 16, BFLOAT), kv_dtype)


def test_what_is_too_large_is_clamped() -> None:
    """By a scale so small that most values are."""
    for kv_dtype in (E4M3, E5M2):
        inputs = in_8_bits(decode_inputs(LLAMA, 4, [300], 16, BFLOAT), kv_dtype, KVScales(2**-16, 2**-16))
        given = [to_device(value, "cuda") for value in inputs[:-1]]
        for scales in (KVScales(2**-16, 2**-16), KVScales(2**-20, 2**-20)):
            out = decode_attention(
                *given, DecodeScratch.allocate(128, torch.device("cuda")), inputs.scale, scales=scales
            )
            assert out.isfinite().all()
            rows = given[4].float()[~given[4].float().isnan()]
            assert rows.abs().max() == torch.finfo(kv_dtype).max


@FORMATS
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT])
def test_paged_attention(dtype: torch.dtype, window: int | None, kv_dtype: torch.dtype) -> None:
    inputs = in_8_bits(attention_inputs(LLAMA, [(0, 40), (300, 7), (900, 130)], 16, dtype), kv_dtype, SCALES)
    wide = inputs._replace(q=inputs.q.float())
    expected = paged_attention_reference(*wide[:6], inputs.scale, window, SCALES)
    actual = paged_attention(*(to_device(value, "cuda") for value in inputs), window=window, scales=SCALES)
    torch.testing.assert_close(actual.cpu().float(), expected, **CLOSE[dtype])


@FORMATS
@pytest.mark.parametrize("window", [None, 100])
def test_tree_attention(window: int | None, kv_dtype: torch.dtype) -> None:
    for width, num_extra, lengths in ((8, 8, [300, 20]), (60, 60, [900, 17])):
        inputs = in_8_bits(tree_inputs(LLAMA, width, num_extra, lengths, 16, BFLOAT), kv_dtype, SCALES)
        wide = inputs._replace(q=inputs.q.float())
        expected = tree_attention_reference(*wide, window, SCALES)
        actual = tree_attention(*(to_device(value, "cuda") for value in inputs), window, scales=SCALES)
        torch.testing.assert_close(actual.cpu().float(), expected, **CLOSE[BFLOAT])


@FORMATS
def test_chunk_attention(kv_dtype: torch.dtype) -> None:
    """Keys are gathered into bfloat16, and cuDNN attends to them."""
    inputs = in_8_bits(attention_inputs(LLAMA, [(3000, 1600)], 16, BFLOAT), kv_dtype, SCALES)
    given = [to_device(value, "cuda") for value in inputs]
    assert takes_long_chunks(32, BFLOAT, given[1], given[2])
    expected = paged_attention(*given, scales=SCALES)
    actual = chunk_attention(given[0], given[1], given[2], given[3][0], 3000, inputs.scale, scales=SCALES)
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=8e-3)


@FORMATS
@pytest.mark.parametrize("dtype", [BFLOAT, HALF, FLOAT])
def test_rows_are_written_gathered_and_moved(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    inputs = in_8_bits(rope_inputs(LLAMA, 40, 16, dtype), kv_dtype, SCALES)
    given = [to_device(value, "cuda") for value in inputs]
    q = rope_kv_write(*given, SCALES)
    expected = rope_kv_write_reference(*inputs, SCALES)
    torch.testing.assert_close(q.cpu(), expected, **CLOSE[dtype])
    k_cache, v_cache = given[6].cpu(), given[7].cpu()
    assert_close_in_8_bits(k_cache, inputs.k_cache)
    assert_close_in_8_bits(v_cache, inputs.v_cache)
    pages = torch.arange(given[6].shape[0], dtype=torch.int32)
    k, v = gather_keys(given[6], given[7], pages.cuda(), 3, 40, 64, dtype)
    for found, wanted in zip((k, v), gather_keys_reference(k_cache, v_cache, pages, 3, 40, 64, dtype), strict=True):
        assert torch.equal(found.cpu().nan_to_num(9.0), wanted.nan_to_num(9.0))
    source, target = torch.tensor([[5, 9, 11]]), torch.tensor([[3, 4, 5]])
    caches = k_cache[None].contiguous(), v_cache[None].contiguous()
    on_gpu = [cache.cuda() for cache in caches]
    move_cache_rows(*on_gpu, source.cuda(), target.cuda())
    move_cache_rows_reference(*(cache.view(torch.uint8) for cache in caches), source, target)
    assert all(torch.equal(a.cpu().view(torch.uint8), b.view(torch.uint8)) for a, b in zip(on_gpu, caches, strict=True))


@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1)])
def test_speculation_changes_no_token(codec: TextCodec, method: str, topk: int) -> None:
    """A whole ring in float32, with chunks of prompts; graphs too."""
    plain = RingConfig(num_steps=0, dtype=FLOAT, kv_dtype=E4M3, place=torch.device("cuda", 0), graph_batch_sizes=(1, 4))
    guessing = replace(plain, num_steps=3, method=method, topk=topk)
    assert answers(codec, guessing)[0] == answers(codec, plain)[0]


@FORMATS
def test_100_launches_agree_bit_by_bit(kv_dtype: torch.dtype) -> None:
    inputs = in_8_bits(decode_inputs(LLAMA, 4, [3000, 700], 16, BFLOAT), kv_dtype, SCALES)
    *given, scale = (to_device(value, "cuda") for value in inputs)
    scratch = DecodeScratch.allocate(128, torch.device("cuda"))
    first = decode_attention(*given, scratch, scale, scales=SCALES)
    assert first.isfinite().all()
    assert all(torch.equal(decode_attention(*given, scratch, scale, scales=SCALES), first) for _ in range(100))
