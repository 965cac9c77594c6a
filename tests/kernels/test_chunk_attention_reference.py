"""Attention of a long chunk in parts, in float64 on a CPU: what `paged_attention` computes, wherever keys are cut.

Tolerance: float64 sums in another order.
"""

from collections.abc import Callable

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs
from overlap_spec_kernels.attention.chunk_attention import CUTS, ChunkCuts, chunk_attention, takes_long_chunks
from overlap_spec_kernels.attention.gather_keys import gather_keys
from overlap_spec_kernels.attention.merge_parts import AttentionPart, merge_parts
from overlap_spec_kernels.attention.paged_attention import _even_splits, paged_attention_reference

CLOSE = {"rtol": 1e-12, "atol": 1e-13}
SMALL = ChunkCuts(row_unit=4, key_unit=8, most_keys=16)
# First position and rows: without a prefix; with less than a unit of it; whole units; several parts and a rest.
PLACES = [(0, 1), (0, 8), (0, 13), (7, 5), (8, 8), (16, 3), (37, 21), (64, 16)]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_parts_are_one_attention(place: tuple[int, int], page_size: int) -> None:
    """Cache rows of others hold NaN, and so do pages that the table has beyond the last key."""
    inputs = attention_inputs(HeadShape(6, 2, 8), [place], page_size, torch.float64)
    expected = paged_attention_reference(*inputs[:6], inputs.scale)
    caches, pages = (inputs.k_cache, inputs.v_cache), inputs.page_table[0]
    torch.testing.assert_close(
        chunk_attention(inputs.q, *caches, pages, place[0], inputs.scale, SMALL), expected, **CLOSE
    )


def test_sixteen_bits_are_merged_in_32() -> None:
    """Of 32 parts; merged in 16 bits they would be off by 0.0065."""
    inputs = attention_inputs(HeadShape(4, 2, 16), [(256, 9)], 4, torch.bfloat16)
    wide = [value.double() for value in inputs[:3]]
    expected = paged_attention_reference(*wide, *inputs[3:6], inputs.scale)
    caches, pages = (inputs.k_cache, inputs.v_cache), inputs.page_table[0]
    out = chunk_attention(inputs.q, *caches, pages, 256, inputs.scale, ChunkCuts(4, 8, 8))
    assert out.dtype == torch.bfloat16
    assert (out.double() - expected).norm() < 0.004 * expected.norm()


def test_shapes_are_few() -> None:
    """A library prepares a plan for each: of any prompts with chunks of up to 8,192 rows some 500, mostly fewer."""
    sides = {CUTS.side(start % CUTS.key_unit, rows) for start in range(0, 3000, 7) for rows in range(1, 8193, 61)}
    lengths = {length for start in range(0, 150_000, 111) for _, length in CUTS.prefixes(start)}
    assert len(sides) <= 8192 // 512 + 2
    assert len(lengths) == 32 and max(lengths) == 32768
    assert max(sides) <= CUTS.most_gathered(8192, 0)


@pytest.mark.parametrize("highest", [1.0, 1000.0])
def test_merging_does_not_overflow(highest: float) -> None:
    logits, values = torch.randn(3, 5, 12).double() * highest, torch.randn(12, 3, 2).double()
    parts = [
        AttentionPart(
            torch.einsum("hnk,khd->nhd", logits[..., keys].softmax(-1), values[keys]), logits[..., keys].logsumexp(-1)
        )
        for keys in (slice(0, 4), slice(4, 12), slice(0, 12))
    ]
    merged = merge_parts(parts[0], parts[1], torch.float64)
    torch.testing.assert_close(merged.out, parts[2].out, **CLOSE)
    torch.testing.assert_close(merged.lse, parts[2].lse, **CLOSE)


def test_keys_are_gathered_in_order_and_followed_by_zeros() -> None:
    inputs = attention_inputs(HeadShape(2, 1, 4), [(9, 2)], 4, torch.float64)
    pages = inputs.page_table[0]
    k, v = gather_keys(inputs.k_cache, inputs.v_cache, pages, 3, 11, 10)
    for place in range(3, 11):
        assert torch.equal(k[place - 3], inputs.k_cache[pages[place // 4], place % 4])
        assert torch.equal(v[place - 3], inputs.v_cache[pages[place // 4], place % 4])
    assert not k[8:].any() and not v[8:].any()


def test_a_cpu_has_no_fast_kernel() -> None:
    cache = torch.zeros(2, 16, 2, 64, dtype=torch.bfloat16)
    assert not takes_long_chunks(4, cache.dtype, cache, cache)


CACHE, PAGES = torch.zeros(3, 4, 2, 8), torch.zeros(3, dtype=torch.int32)
PART = AttentionPart(torch.zeros(3, 2, 4), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("q", lambda: chunk_attention(torch.zeros(2, 3, 8), CACHE, CACHE, PAGES, 0, 1.0)),
        ("q", lambda: chunk_attention(torch.zeros(4, 2, 8).transpose(0, 1), CACHE, CACHE, PAGES, 0, 1.0)),
        ("k_cache", lambda: chunk_attention(torch.zeros(2, 2, 16), CACHE, CACHE, PAGES, 0, 1.0)),
        ("end", lambda: chunk_attention(torch.zeros(9, 2, 8), CACHE, CACHE, PAGES, 4, 1.0)),
        ("k_cache", lambda: gather_keys(CACHE[0], CACHE, PAGES, 0, 1, 1)),
        ("v_cache", lambda: gather_keys(CACHE, CACHE[:1], PAGES, 0, 1, 1)),
        ("v_cache", lambda: gather_keys(CACHE, CACHE.double(), PAGES, 0, 1, 1)),
        ("pages", lambda: gather_keys(CACHE, CACHE, PAGES.long(), 0, 1, 1)),
        ("num_keys", lambda: gather_keys(CACHE, CACHE, PAGES, 0, 5, 4)),
        ("other", lambda: merge_parts(PART, PART.of_rows(0, 2), torch.float32)),
        ("one", lambda: merge_parts(PART._replace(lse=torch.zeros(3, 2)), PART, torch.float32)),
    ],
)
def test_arguments_are_named(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{argument}:"):
        call()


def test_splits_share_long_programs_evenly_and_are_few() -> None:
    """On 132 multiprocessors: chunks of 256 to 1,024 rows in tiles of 32, for eight heads of K."""
    programs = {rows: rows // 32 * 8 for rows in (256, 384, 512, 640, 768, 896, 1024, 8192)}
    chosen = {rows: _even_splits(count, 132) for rows, count in programs.items()}
    assert chosen == {256: 4, 384: 4, 512: 2, 640: 2, 768: 2, 896: 1, 1024: 1, 8192: 1}
