"""Attention over KV pages of 8 bits: a row's output is the same however its sequence was cut, in float64."""

import pytest
import torch
from overlap_spec_kernels.attention.kv_format import KVScales
from support.eight_bits import E4M3, E5M2
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TreeKeys
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import AttentionShape, kv_shape_of
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION
from overlap_spec.models.layers.latent import paged_attention_of
from overlap_spec.models.layers.rope import RopeConfig

PAGE, LENGTH, F64 = 4, 11, torch.float64
TABLE = torch.tensor([[3, 1, 2]], dtype=torch.int32)
ROPE = RopeConfig("default", 10000.0, 8, 64, {})


def rows_at(first: int, count: int) -> RowBatch:
    """A window of decode: kernels find the cache rows."""
    return RowBatch(torch.arange(first, first + count), None, TABLE, None, count, True)


def as_chunk(first: int, count: int) -> RowBatch:
    return rows_at(first, count).placed(PAGE)


def as_tree(first: int, count: int) -> RowBatch:
    """A chain whose guesses are attended to by a mask: row r sees keys 0..r of the window."""
    rows = as_chunk(first, count)
    assert rows.cache_rows is not None
    mask = torch.tensor([(1 << row + 1) - 1 for row in range(count)])[None, :, None]
    keys = TreeKeys(torch.tensor([first]), rows.cache_rows[None], mask, rows.positions[None], count)
    return RowBatch(rows.positions, rows.cache_rows, TABLE, None, count, True, keys)


def outputs(kv_dtype: torch.dtype, shape: AttentionShape, forwards: list[RowBatch]) -> tuple[Tensor, Tensor]:
    """The outputs of all rows, and what the cache then holds of their keys."""
    cache = KVCache.allocate(kv_shape_of([shape]), 4, PAGE, kv_dtype, torch.device("cpu"))
    attention = paged_attention_of([shape], F64, cache, 64, DEFAULT_ATTENTION)
    qkv = torch.randn(LENGTH, 8 * 8, dtype=F64, generator=torch.Generator().manual_seed(1))
    found = [attention(0, qkv[rows.positions], rows) for rows in forwards]
    return torch.cat(found), cache.k[0].double()


SHAPES = {
    "all keys": AttentionShape(4, 2, 8, 0.3, None, ROPE, KVScales(0.004, 0.3)),  # clamps a third of the keys
    "three keys": AttentionShape(4, 2, 8, 0.3, 3, ROPE, KVScales(0.004, 0.3)),
    "latents": AttentionShape(3, 1, 16, 0.3, None, ROPE, KVScales(0.004, 0.004), latent_rank=8),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_every_cut_gives_the_same(kv_dtype: torch.dtype, name: str) -> None:
    shape = SHAPES[name]
    whole, keys = outputs(kv_dtype, shape, [as_chunk(0, LENGTH)])
    for forwards in (
        [as_chunk(0, 4), as_chunk(4, 7)],
        [as_chunk(0, 7), rows_at(7, 1), rows_at(8, 3)],
        [as_chunk(0, 6), as_tree(6, 5)],
    ):
        cut, cut_keys = outputs(kv_dtype, shape, forwards)
        torch.testing.assert_close(cut, whole, rtol=1e-12, atol=1e-13)
        assert torch.equal(cut_keys, keys)
    exact, _ = outputs(F64, shape, [as_chunk(0, LENGTH)])
    assert (exact - whole).abs().max() > 0.01, "rounding shows"
