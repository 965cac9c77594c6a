"""The kernels of one order under the interpreter: their references' results, and one row's bits in all companies.

Dots are as tensor cores do them (`dots_in_order`): what is left to find is a sum that is divided by the number of rows.
"""

import itertools

import numpy as np
import pytest
import torch
from kernel_cases.inputs import AttentionInputs, HeadShape, attention_inputs, decode_inputs
from overlap_spec_kernels.attention.kv_format import KVScales
from overlap_spec_kernels.attention.ordered_attention import (
    OrderedTiling,
    attend_in_order,
    begin_of_part,
    ordered_attention_reference,
    ordered_tiling,
    part_of,
)
from overlap_spec_kernels.attention.ordered_windows import attend_to_windows, ordered_windows_reference
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import _rope_kv_write_triton
from overlap_spec_kernels.linear.call import Addition, call_of
from overlap_spec_kernels.linear.dense import fused_linear_reference
from overlap_spec_kernels.linear.ordered import OrderedTiles, multiply_in_order, ordered_tiles_for, run_tiles
from overlap_spec_kernels.norm.normed import Norm, Normed
from support.dots_in_order import dots_in_order

CLOSE = {"rtol": 2e-5, "atol": 4e-6}
COUNTS = (1, 2, 3, 5, 16, 17, 33, 65, 130)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("size_k", [64, 200])
def test_linear_is_its_reference(size_k: int, gated: bool) -> None:
    x, weight = torch.randn(37, size_k + 8)[:, :size_k], torch.randn(90, size_k)
    out = multiply_in_order(x, weight, gated, torch.float32)
    torch.testing.assert_close(out, fused_linear_reference(x, weight, gated), rtol=1e-4, atol=1e-4)


def halves_added(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension."""
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x.squeeze(-1)


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """As the interpreter has it."""
    return torch.from_numpy(1 / np.sqrt(x.numpy()))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("size_k", "piece"), [(192, 32), (256, 64)])
def test_sums_of_a_small_weight(size_k: int, piece: int, gated: bool) -> None:
    """Every other piece of K in a sum, and the norms before and after it, to the last bit in any company."""
    size_n, most = 72, max(COUNTS)
    x, weight, squares = torch.randn(most, size_k), torch.randn(size_n, size_k) * 0.05, torch.rand(21, most)
    residual, norm = torch.randn(most, 2 * size_n)[:, :size_n], Norm(torch.rand(size_n) + 0.5, 0.1)
    sums = torch.zeros(2, most, size_n)
    for k in range(size_k):
        sums[k // piece % 2] += x[:, k, None] * weight[:, k]
    parts = torch.cat([squares, torch.zeros(3, most)]).view(3, 2, 4, most)  # of eight sums, in two warps
    of_eight = (parts[0] + parts[1] + parts[2]).permute(2, 0, 1)
    bias = None if gated else torch.randn(size_n)
    added = torch.zeros(()) if bias is None else bias
    scaled = (sums[0] + sums[1]) * rsqrt(halves_added(halves_added(of_eight)) / size_k + 0.1)[:, None] + added
    values = sums[0] + sums[1] + added + residual
    of_values = halves_added(torch.cat([values * values, torch.zeros(most, 8)], 1).unflatten(1, (-1, 16))).t()
    for count in COUNTS:
        some = slice(0, count)
        of_x = Normed(x[some], x[some], squares[:, some].contiguous(), 0.1)
        before = call_of(of_x, weight, gated, None, torch.float32, 16, bias)
        after = call_of(x[some], weight, False, Addition(residual[some], norm), torch.float32, 16, bias)
        with dots_in_order():
            for call in (before, after):
                tiles = ordered_tiles_for(count if count < most else 2048, size_n, call.gated, piece)
                run_tiles(call, tiles, piece=piece)
        gate, up = scaled[some].chunk(2, 1)
        wanted = gate / (1 + torch.exp(-gate)) * up if gated else scaled[some]
        torch.testing.assert_close(before.out, wanted, rtol=1e-5 * gated, atol=1e-5 * gated)
        assert after.out is not None and after.weighted is not None and after.sums is not None
        assert torch.equal(after.out, values[some]) and torch.equal(after.weighted, values[some] * norm.weight)
        assert torch.equal(after.sums, of_values[:, some])


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_of_a_linear_has_one_class_of_bits(gated: bool) -> None:
    """With the tiles for any number of rows, those that are too small for any but wide weights included."""
    weight, rows = torch.randn(64, 136), torch.randn(max(COUNTS), 136)
    tiles = {count: ordered_tiles_for(count, 64, gated) for count in COUNTS}
    tiles[max(COUNTS)] = OrderedTiles(128, 64, 64, 8, 3)
    with dots_in_order():
        found = [multiply_in_order(rows[:count], weight, gated, torch.float32, tiles[count])[0] for count in COUNTS]
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert len(set(tiles.values())) > 2


def attended(
    inputs: AttentionInputs, tiling: OrderedTiling, window: int | None = None, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    *tensors, _, scale, _ = inputs
    return attend_in_order(*tensors, scale, tiling, window, sinks=sinks)


def tilings(inputs: AttentionInputs) -> list[OrderedTiling]:
    """By a GPU of one multiprocessor, which takes no parts apart, and by one of many; and by two programs a tile."""
    given = inputs.q, inputs.k_cache, inputs.page_table, inputs.max_rows
    whole, apart = (ordered_tiling(*given, multiprocessors) for multiprocessors in (1, 10_000))
    assert whole.splits == 1 and apart.splits == apart.num_parts > 1
    return [whole, apart, apart._replace(splits=2)]


@pytest.mark.parametrize(
    ("requests", "window"),
    [([(300, 3), (0, 3), (15, 3)], None), ([(250, 9), (0, 5), (127, 1)], 70), ([(255, 2), (100, 40)], None)],
)
@pytest.mark.parametrize("heads", [HeadShape(6, 2, 16), HeadShape(3, 1, 24), HeadShape(2, 1, 512)], ids=str)
def test_attention_is_its_reference(requests: list[tuple[int, int]], window: int | None, heads: HeadShape) -> None:
    inputs = attention_inputs(heads, requests, 16, torch.float32)
    *tensors, _, scale, _ = inputs
    expected = ordered_attention_reference(*tensors, scale, window)
    for tiling in tilings(inputs):
        torch.testing.assert_close(attended(inputs, tiling, window), expected, **CLOSE)


SINKS = torch.tensor([0.7, -40.0, 3.0, 9.0, -1.0, 0.0])  # of heads whose scores are less, more, and alike


@pytest.mark.parametrize("window", [None, 70])
def test_sinks_are_a_logit_that_adds_nothing(window: int | None) -> None:
    """Those of `paged_attention`; and a head's only, in parts, at once, and beside other rows."""
    inputs = attention_inputs(HeadShape(6, 2, 16), [(300, 3), (0, 2)], 16, torch.float32)
    *tensors, _, scale, _ = inputs
    expected = paged_attention_reference(*tensors, scale, window, sinks=SINKS)
    plain = ordered_attention_reference(*tensors, scale, window)
    assert (plain - expected)[:, 3].abs().max() > 0.1 > (plain - expected)[:, 1].abs().max()
    torch.testing.assert_close(ordered_attention_reference(*tensors, scale, window, sinks=SINKS), expected, **CLOSE)
    for tiling in tilings(inputs):
        torch.testing.assert_close(attended(inputs, tiling, window, SINKS), expected, **CLOSE)


@pytest.mark.slow_but_every(1)
@pytest.mark.parametrize(
    ("window", "sinks", "head_dim", "begin"),
    [
        pytest.param(150, None, 16, 254, marks=pytest.mark.slow),
        *((None, None, 16, 254), (150, SINKS[:2], 16, 254)),
        pytest.param(None, None, 512, 126, marks=pytest.mark.slow),
    ],
)
def test_a_row_of_attention_has_one_class_of_bits(
    window: int | None, sinks: torch.Tensor | None, head_dim: int, begin: int
) -> None:
    """The rows of a prompt's end, one after another, in windows, in chunks, in parts and at once."""
    heads, count = HeadShape(2, 1, head_dim), 4
    whole = attention_inputs(heads, [(begin, count)], 16, torch.float32)
    found: list[torch.Tensor] = []
    with dots_in_order():
        for size in (1, 3, count):
            for apart in range(3):
                rows = []
                for first in range(0, count, size):
                    part = slice(first, min(first + size, count))
                    starts = torch.tensor([0, part.stop - first], dtype=torch.int32)
                    some = whole._replace(
                        q=whole.q[part], row_starts=starts, positions=whole.positions[part], max_rows=size
                    )
                    rows.append(attended(some, tilings(some)[apart], window, sinks))
                found.append(torch.cat(rows))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(
    ("lengths", "width", "window"),
    [
        *(((510, 0, 126), 3, None), ((250, 126), 9, 70), ((255, 1, 530, 130), 1, None), ((381, 130), 4, 200)),
        pytest.param((2430, 254), 3, None, marks=pytest.mark.slow),  # parts of two lengths
    ],
)
@pytest.mark.parametrize("heads", [HeadShape(3, 1, 24), HeadShape(6, 2, 16)], ids=str)
def test_windows_in_one_launch(lengths: tuple[int, ...], width: int, window: int | None, heads: HeadShape) -> None:
    """The bits of a launch that rotates and writes and of one that attends, whichever programs have the parts."""
    *tensors, scale = decode_inputs(heads, width, list(lengths), 16, torch.float32, 4)
    qkv, cos_sin, positions, page_table, *caches = tensors
    scales, count = KVScales(0.5, 3.0), len(lengths)
    expected = [cache.clone() for cache in caches]
    reference = ordered_windows_reference(*tensors[:4], *(each.clone() for each in caches), scale, window, scales)
    q, k, v = qkv.unflatten(1, (-1, heads.head_dim)).split((heads.num_heads, *[heads.num_kv_heads] * 2), dim=1)
    places = positions.view(count, -1)
    rows = (page_table.gather(1, places // 16) * 16 + places % 16).flatten().long()
    starts = torch.arange(count + 1, dtype=torch.int32) * width
    with dots_in_order():
        q = _rope_kv_write_triton(q, k, v, cos_sin, positions, rows, *expected)
        whole, apart = (ordered_tiling(q, caches[0], page_table, width, each) for each in (1, 10_000))
        wanted = attend_in_order(q, *expected, page_table, starts, positions, scale, whole, window, scales).flatten(1)
        torch.testing.assert_close(wanted, reference, **CLOSE)
        for tiling in (whole, apart, *(apart._replace(splits=splits) for splits in (5, 2, 1))):
            written = [cache.clone() for cache in caches]
            found = attend_to_windows(*tensors[:4], *written, scale, tiling, window=window, scales=scales)
            assert torch.equal(found, wanted)
            assert all(torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in zip(written, expected, strict=True))


def test_scales_of_8_bits() -> None:
    inputs = attention_inputs(HeadShape(4, 2, 16), [(200, 3)], 16, torch.float32)
    *tensors, _, scale, _ = inputs
    scales = KVScales(0.5, 3.0)
    expected = ordered_attention_reference(*tensors, scale, None, scales)
    for tiling in tilings(inputs):
        torch.testing.assert_close(attend_in_order(*tensors, scale, tiling, None, scales), expected, **CLOSE)


def test_parts_cover_all_positions_in_order() -> None:
    begins = [begin_of_part(part) for part in range(90)]
    assert begins[:18] == [*range(0, 2049, 128), 2304] and all(a < b for a, b in itertools.pairwise(begins))
    for part, (begin, end) in enumerate(itertools.pairwise(begins)):
        assert {part_of(begin), part_of((begin + end) // 2), part_of(end - 1)} == {part}
    assert part_of(131_071) == 63
