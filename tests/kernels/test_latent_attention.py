"""The references of latent attention against softmax written out, what its ops refuse, and tiles chosen from shapes."""

from typing import Any

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs, tree_inputs
from overlap_spec_kernels import LatentScratch, latent_attention, latent_tree_attention, rope_latent_write
from overlap_spec_kernels.attention import latent_decode
from overlap_spec_kernels.attention.kv_format import KVScales
from overlap_spec_kernels.attention.latent_attention import MOST_SCRATCH_BYTES, _Rows, _tiling
from overlap_spec_kernels.attention.latent_decode import Pieces, Windows
from torch import Tensor

F64, CPU = torch.float64, torch.device("cpu")
RANK, ROPE, HEADS, SCALE = 10, 6, 5, 0.3
SCRATCH = LatentScratch.allocate(HEADS, RANK, CPU, 1)
SHARED_BYTES = 227 * 1024


def attended(query: Tensor, keys: Tensor, scale: float = SCALE) -> Tensor:
    """Of one head of a row. Shapes: query [rank + rope], keys [n, rank + rope] -> [rank]."""
    return (keys @ query * scale).softmax(0) @ keys[:, :RANK]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("uniform", [True, False])
def test_a_row_attends_to_latents_up_to_its_own(uniform: bool, window: int | None) -> None:
    requests = [(7, 2), (0, 2)] if uniform else [(7, 3), (0, 1)]
    inputs = attention_inputs(HeadShape(HEADS, 1, RANK + ROPE), requests, 4, F64)
    starts = None if uniform else inputs.row_starts
    scales = KVScales(0.5, 0.25)
    found = latent_attention(
        inputs.q, inputs.k_cache, RANK, inputs.page_table, starts, inputs.positions, SCALE, SCRATCH, window, scales
    )
    keys = inputs.k_cache.flatten(0, 2)
    for row, (position, queries) in enumerate(zip(inputs.positions.tolist(), inputs.q, strict=True)):
        request = int(row >= inputs.row_starts[1])
        places = torch.arange(0 if window is None else max(position - window + 1, 0), position + 1)
        rows = keys[inputs.page_table[request][places // 4].long() * 4 + places % 4]
        expected = torch.stack([attended(query, rows, SCALE * 0.5) * 0.25 for query in queries])
        torch.testing.assert_close(found[row], expected, rtol=1e-12, atol=1e-12)


def test_a_row_of_a_tree_attends_to_its_prefix_and_its_bits() -> None:
    inputs = tree_inputs(HeadShape(HEADS, 1, RANK + ROPE), 4, 6, [7, 0], 4, F64)
    keys = (inputs.page_table, inputs.prefix, inputs.extra_rows, inputs.mask, inputs.positions)
    found = latent_tree_attention(inputs.q, inputs.k_cache, RANK, *keys, SCALE, SCRATCH).view(2, 4, HEADS, RANK)
    rows = inputs.k_cache.flatten(0, 2)
    for request, prefix in enumerate([7, 0]):
        places = torch.arange(prefix)
        before = rows[inputs.page_table[request][places // 4].long() * 4 + places % 4]
        for row in range(4):
            bits = [key for key in range(6) if int(inputs.mask[request, row, 0]) >> key & 1]
            seen = torch.cat((before, rows[inputs.extra_rows[request, bits]]))
            queries = inputs.q.view(2, 4, HEADS, -1)[request, row]
            expected = torch.stack([attended(query, seen) if len(seen) else query[:RANK] * 0 for query in queries])
            torch.testing.assert_close(found[request, row], expected, rtol=1e-12, atol=1e-12)


def test_queries_are_rotated_and_rows_written() -> None:
    heads, cos_sin = torch.randn(4, HEADS + 1, RANK + ROPE, dtype=F64), torch.randn(20, ROPE, dtype=F64)
    positions, table = torch.tensor([6, 7, 2, 3]), torch.tensor([[2, 5], [1, 0]], dtype=torch.int32)
    expected = heads.clone()
    for row, position in enumerate(positions.tolist()):
        cos, sin = cos_sin[position].split(ROPE // 2)
        for head in expected[row]:
            first, second = head[RANK:].clone().split(ROPE // 2)
            head[RANK:] = torch.cat((first * cos - second * sin, second * cos + first * sin))
    cache_rows = torch.tensor([5 * 4 + 2, 5 * 4 + 3, 1 * 4 + 2, 1 * 4 + 3])
    for places in (table, cache_rows):
        cache = torch.zeros(6, 4, 1, RANK + ROPE, dtype=F64)
        queries = rope_latent_write(heads.clone(), RANK, cos_sin, positions, places, cache)
        torch.testing.assert_close(queries, expected[:, :-1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(cache.flatten(0, 1)[cache_rows], expected[:, -1:], rtol=1e-12, atol=1e-12)
        assert cache.flatten(0, 1).any(dim=2).sum() == 4


@pytest.mark.parametrize(("changed", "value"), [
    ("q", torch.zeros(3, HEADS, RANK)), ("cache", torch.zeros(2, 4, 2, RANK + ROPE)), ("rank", RANK + ROPE),
    ("page_table", torch.zeros(2, 4, dtype=torch.int64)), ("positions", torch.zeros(3)), ("window", 0),
    ("row_starts", torch.zeros(2, dtype=torch.int32)),
])  # fmt: skip
def test_a_wrong_argument_is_named(changed: str, value: Any) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(4, HEADS, RANK + ROPE), "cache": torch.zeros(2, 4, 1, RANK + ROPE), "rank": RANK,
        "page_table": torch.zeros(2, 4, dtype=torch.int32), "row_starts": None,
        "positions": torch.zeros(4, dtype=torch.int64), "scale": SCALE, "scratch": SCRATCH, "window": None,
    }  # fmt: skip
    latent_attention(**given)
    name = "cache" if changed == "q" else changed
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
        latent_attention(**given | {changed: value})


def test_a_wrong_place_is_named() -> None:
    given = (torch.zeros(4, 2, RANK + ROPE), RANK, torch.zeros(9, ROPE), torch.zeros(4, dtype=torch.int64))
    for places in (torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 2)):
        with pytest.raises(ValueError, match=r"^places: expected"):
            rope_latent_write(*given, places, torch.zeros(2, 4, 1, RANK + ROPE))


@pytest.mark.parametrize("num_heads", [4, 20, 128])
def test_scratch_is_no_larger_than_is_counted(num_heads: int) -> None:
    scratch = LatentScratch.allocate(num_heads, 512, torch.device("meta"))
    assert scratch.sums.nbytes + scratch.stats.nbytes <= 1.01 * MOST_SCRATCH_BYTES


def windows(
    heads: int = 20, width: int = 1, requests: int = 1, columns: int = 576, dtype: torch.dtype = torch.bfloat16
) -> Windows:
    """Of a captured step."""
    q = torch.empty(requests * width, heads, columns, dtype=dtype, device="meta")
    cache = torch.empty(9, 16, 1, columns, dtype=dtype, device="meta")
    positions = torch.empty(requests * width, dtype=torch.int64, device="meta")
    return Windows(q, cache, torch.empty(requests, 7, dtype=torch.int32, device="meta"), positions)


def test_what_the_kernel_of_few_rows_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = LatentScratch.allocate(20, 512, torch.device("meta"))
    pieces, takes = Pieces(scratch.unit, scratch.sums, scratch.stats), latent_decode.takes
    assert not takes(windows(), 512, pieces), "no Hopper"
    monkeypatch.setattr(latent_decode, "runs_hopper", lambda device: True)
    assert takes(windows(), 512, pieces) and takes(windows(width=4, requests=256), 512, pieces)
    assert takes(windows(16, 5), 512, pieces) and not takes(windows(width=5), 512, pieces), "100 pairs"
    assert not takes(windows(128), 512, pieces) and not takes(windows(requests=257), 512, pieces)
    assert not takes(windows(columns=320), 256, pieces) and not takes(windows(columns=560), 496, pieces)
    assert not takes(windows(dtype=torch.float16), 512, pieces)
    few = Pieces(64, scratch.sums[: 2 * 24 * 512], scratch.stats)
    assert takes(windows(requests=2), 512, few) and not takes(windows(requests=3), 512, few), "a slot for each"
    unaligned = windows()._replace(q=torch.empty(1, 20, 580, dtype=torch.bfloat16, device="meta")[:, :, :576])
    assert not takes(unaligned, 512, pieces)
    assert [windows(heads).padded for heads in (20, 40, 41, 80)] == [24, 40, 48, 80]


def test_rings_fit_the_shared_memory_of_a_hopper() -> None:
    """Beside 5 KB, and 10 KB of 80 pairs, that the compiler counts."""
    for padded, boxes in ((8, 24), (24, 23), (40, 20), (80, 13)):
        assert latent_decode._boxes(padded) == boxes
        own = 2600 + 96 * padded + 16 * boxes
        assert 11 * 128 * padded + boxes * 64 * 128 + own <= SHARED_BYTES


def test_programs_that_add_pieces_bring_no_more_than_there_may_be() -> None:
    """Of 1,280 keys 18 pieces, of 32,768 keys 144."""
    assert [latent_decode._at_once(n, keys, 64) for n in (1, 3) for keys in (1280, 32768)] == [32, 144, 32, 112]
    assert latent_decode._at_once(3, 40000, 64) == 112 and latent_decode._at_once(9, 64, 64) == 16


@pytest.mark.parametrize(("dtype", "pairs", "expected"), [
    (torch.bfloat16, 1, (16, 2)), (torch.bfloat16, 20, (32, 2)), (torch.bfloat16, 80, (64, 2)),
    (torch.float32, 20, (16, 2)), (torch.float32, 2000, (16, 2)),
])  # fmt: skip
def test_tiles_fit_the_shared_memory_of_a_hopper(dtype: torch.dtype, pairs: int, expected: tuple[int, int]) -> None:
    """In float32 they have one size: without tensor cores, sums may depend on it."""
    q, nothing = torch.empty(1, 1, 576, dtype=dtype), torch.empty(0)
    rows = _Rows(q, q, 512, nothing, None, nothing)
    tiling = _tiling(rows, pairs, SHARED_BYTES)
    assert (tiling.block_h, tiling.stages) == expected and tiling.pairs == min(pairs, tiling.block_h)
    assert tiling.shared_bytes(q.element_size()) <= SHARED_BYTES
    assert _tiling(rows, pairs, 100 * 1024).shared_bytes(q.element_size()) <= 100 * 1024
