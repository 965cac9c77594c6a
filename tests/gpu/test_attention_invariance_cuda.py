"""On a GPU: a row of attention has the same bits alone, in a window of any width, beside others, and in a prompt.

`BY_ROWS` names the kernels where it has not; --enable-deterministic-inference uses none of them.
"""

import random
from collections.abc import Callable

import pytest
import torch
from kernel_cases.inputs import (
    AttentionInputs,
    DecodeInputs,
    HeadShape,
    attention_inputs,
    decode_inputs,
    to_device,
)
from overlap_spec_kernels import (
    DecodeScratch,
    decode_attention,
    ordered_attention,
    ordered_windows,
    paged_attention,
    rope_kv_write,
)
from support.invariance import judge
from torch import Tensor

BFLOAT, HALF, EIGHT = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HEADS = {"SmolLM2": HeadShape(9, 3, 64), "1B": HeadShape(32, 8, 64), "8B": HeadShape(32, 8, 128)}
IN_ORDER = {"tiny": HeadShape(4, 2, 16), **HEADS, "Gemma 4": HeadShape(16, 2, 512)}
WINDOWS = [model for model, heads in IN_ORDER.items() if heads.head_dim <= 256]  # which one launch takes
LENGTHS = (700, 3, 130, 15, 2047, 900, 64, 1)


def some(inputs: DecodeInputs, requests: list[int], last: bool) -> DecodeInputs:
    """Requests of a step; `last`: only their last rows, whose keys before are in the cache."""
    count = len(inputs.page_table)
    index = torch.tensor(requests, device=inputs.qkv.device)
    parts = [each.unflatten(0, (count, -1))[index] for each in (inputs.qkv, inputs.positions)]
    qkv, positions = (part[:, -1:] if last else part for part in parts)
    return inputs._replace(
        qkv=qkv.flatten(0, 1).contiguous(),
        positions=positions.flatten().contiguous(),
        page_table=inputs.page_table[index].contiguous(),
    )


def classes_of_attention(
    attend: Callable[[DecodeInputs], Tensor], heads: HeadShape, width: int, dtype: torch.dtype = BFLOAT
) -> list[int]:
    """How many results the last row of a request has: alone, in a window, beside 1 to 63 others."""
    drawn_inputs = decode_inputs(heads, width, list(LENGTHS), 16, dtype, 128)
    inputs = DecodeInputs(*(to_device(value, "cuda") for value in drawn_inputs))
    attend(inputs)  # writes the keys of all rows
    found: list[Tensor] = []
    for others in (0, 1, 3, 7, 15, 31, 63):
        for last in (False, True):
            requests = [0, *(1 + i % (len(LENGTHS) - 1) for i in range(others))]
            chosen = some(inputs, requests, last)
            row = attend(chosen).unflatten(0, (len(requests), -1))[0, -1].clone()
            assert row.isfinite().all()
            if not any(torch.equal(row, each) for each in found):
                found.append(row)
    return list(range(len(found)))


@pytest.mark.parametrize("model", HEADS)
def test_decode_attention(model: str) -> None:
    scratch = DecodeScratch.allocate(HEADS[model].head_dim, torch.device("cuda"))

    def attend(inputs: DecodeInputs) -> Tensor:
        *tensors, scale = inputs
        return decode_attention(*tensors, scratch, scale)

    judge("decode attention", [classes_of_attention(attend, HEADS[model], width) for width in (2, 4, 8)])


@pytest.mark.parametrize("model", HEADS)
def test_paged_attention(model: str) -> None:
    heads = HEADS[model]

    def attend(inputs: DecodeInputs) -> Tensor:
        count, width = len(inputs.page_table), len(inputs.positions) // len(inputs.page_table)
        q = inputs.qkv.view(len(inputs.positions), -1, heads.head_dim)[:, : heads.num_heads].contiguous()
        starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * width
        caches = (inputs.k_cache.nan_to_num(), inputs.v_cache.nan_to_num())
        given = (inputs.page_table, starts, inputs.positions, width, inputs.scale, True)
        return paged_attention(q, *caches, *given).flatten(1)

    judge("paged attention", [classes_of_attention(attend, heads, width) for width in (4, 64)])


@pytest.mark.parametrize(("dtype", "kept"), [(BFLOAT, None), (HALF, None), (HALF, EIGHT)], ids=str)
@pytest.mark.parametrize("model", IN_ORDER)
def test_attention_in_one_order(model: str, dtype: torch.dtype, kept: torch.dtype | None) -> None:
    heads = IN_ORDER[model]

    def attend(inputs: DecodeInputs) -> Tensor:
        return in_order(inputs, len(inputs.positions) // len(inputs.page_table), heads, kept)

    judge("attention in one order", [classes_of_attention(attend, heads, width, dtype) for width in (1, 4, 16, 64)])


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("dtype", "kept"), [(BFLOAT, None), (HALF, None), (HALF, EIGHT)], ids=str)
@pytest.mark.parametrize("model", WINDOWS)
def test_windows_in_one_launch(model: str, dtype: torch.dtype, kept: torch.dtype | None, window: int | None) -> None:
    """It writes the keys and has the bits of two launches, whichever programs have the parts, again and again."""
    heads = IN_ORDER[model]
    for width, requests, early in ((1, 1, True), (1, 8, False), (1, 80, True), (4, 8, True), (16, 1, False)):
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(requests)]
        drawn_inputs = decode_inputs(heads, width, lengths, 16, dtype, 128)
        qkv, cos_sin, positions, page_table, *caches, scale = (to_device(each, "cuda") for each in drawn_inputs)
        caches = caches if kept is None else [cache.to(kept) for cache in caches]
        written = [cache.clone() for cache in caches]
        sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        q, k, v = qkv.unflatten(1, (-1, heads.head_dim)).split(sizes, dim=1)
        places = positions.view(requests, -1)
        rows = (page_table.gather(1, places // 16).long() * 16 + places % 16).flatten()
        q = rope_kv_write(q, k, v, cos_sin, positions, rows, *caches)
        starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda") * width
        places = (*caches, page_table, starts, positions)
        expected = ordered_attention(q, *places, width, scale, window).flatten(1)
        assert expected.isfinite().all()
        for turn in range(5):
            found = ordered_windows(qkv, cos_sin, positions, page_table, *written, scale, early, window)
            assert torch.equal(found, expected), (width, requests, turn)
        keys = zip(written, caches, strict=True)
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in keys)


def in_order(inputs: DecodeInputs, width: int, heads: HeadShape, kept: torch.dtype | None = None) -> Tensor:
    count = len(inputs.page_table)
    q = inputs.qkv.view(len(inputs.positions), -1, heads.head_dim)[:, : heads.num_heads].contiguous()
    starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * width
    caches = [cache.nan_to_num() for cache in (inputs.k_cache, inputs.v_cache)]
    caches = caches if kept is None else [cache.to(kept) for cache in caches]
    given = (inputs.page_table, starts, inputs.positions, width, inputs.scale)
    return ordered_attention(q, *caches, *given).flatten(1)


@pytest.mark.parametrize("window", [None, 1000])
@pytest.mark.parametrize(("dtype", "kept"), [(BFLOAT, None), (HALF, None), (HALF, EIGHT)], ids=str)
@pytest.mark.parametrize("model", IN_ORDER)
def test_rows_of_a_prompt_have_the_bits_of_rows_alone(
    model: str, dtype: torch.dtype, kept: torch.dtype | None, window: int | None
) -> None:
    assert_bits_of_a_prompt(IN_ORDER[model], dtype, kept, window)


@pytest.mark.parametrize(("window", "kept"), [(None, None), (128, None), (128, EIGHT)], ids=str)
@pytest.mark.parametrize("heads", [HeadShape(64, 8, 64), HeadShape(4, 2, 16)], ids=["gpt-oss", "tiny"])
def test_rows_with_sinks_have_the_bits_of_rows_alone(
    heads: HeadShape, window: int | None, kept: torch.dtype | None
) -> None:
    sinks = torch.randn(heads.num_heads, device="cuda") * 3
    assert_bits_of_a_prompt(heads, BFLOAT if kept is None else HALF, kept, window, sinks.to(BFLOAT))


def assert_bits_of_a_prompt(
    heads: HeadShape, dtype: torch.dtype, kept: torch.dtype | None, window: int | None, sinks: Tensor | None = None
) -> None:
    """A prompt at once, in chunks, and its rows in windows of 1 to 16, each with a page table as short as it may be."""
    length, size = 5000, 16
    given = attention_inputs(heads, [(0, length)], size, dtype)
    whole = AttentionInputs(*(to_device(value, "cuda") for value in given))
    if kept is not None:
        whole = whole._replace(k_cache=whole.k_cache.to(kept), v_cache=whole.v_cache.to(kept))

    def attend(first: int, count: int) -> Tensor:
        part, pages = slice(first, first + count), -(-(first + count) // size)
        starts = torch.tensor([0, count], dtype=torch.int32, device="cuda")
        places = (whole.page_table[:, :pages].contiguous(), starts, whole.positions[part], count, whole.scale, window)
        return ordered_attention(whole.q[part], whole.k_cache, whole.v_cache, *places, sinks=sinks)

    expected = attend(0, length)
    assert expected.isfinite().all() and expected[-1].abs().max() > 0
    reference = paged_attention(*whole[:6], length, whole.scale, True, window, sinks=sinks)
    torch.testing.assert_close(expected, reference, rtol=0.02, atol=0.01)
    rng = random.Random(str(heads))
    for count in (1, 2, 4, 7, 16, 33, 64, 100, 700):
        for first in [*rng.sample(range(length - count), 12), length - count, 0, max(2048 - count, 0)]:
            assert torch.equal(attend(first, count), expected[first : first + count]), (count, first)
