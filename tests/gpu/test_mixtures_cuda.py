"""Mixtures on a GPU beside what `test_experts_cuda.py` has: experts in 8 and 4 bits, the sum with the residual and its
norm, large tiles, trees, and engines whose tokens are plain decoding's.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from overlap_spec_kernels import (
    ExpertWeight,
    Grouping,
    Normed,
    QuantizedStack,
    Routing,
    best_of_groups,
    experts_add,
    experts_mlp,
)
from overlap_spec_kernels.experts.best_of_groups import best_of_groups_reference, sigmoid_scores, softmax_scores
from overlap_spec_kernels.experts.products import places_of, tile_of
from overlap_spec_kernels.experts.quantized_products import (
    multiply_quantized,
    multiply_tiles,
    quantized_tile,
    takes_tiles,
)
from overlap_spec_kernels.experts.quantized_streams import streams_gate, streams_sum
from overlap_spec_kernels.experts.route import Common
from overlap_spec_kernels.experts.sum_of_experts import takes_gate
from overlap_spec_kernels.linear.packing import Packing, part_of
from overlap_spec_kernels.norm.normed import normalised_reference
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.model_cells import DIFFERS, EQUAL, Cell, outcome_of
from support.random_schedules import run_seeds
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.layers.experts import MixtureMLP, MostProbable, Router, StackedExperts
from overlap_spec.models.layers.norm import RMSNorm, WideRMSNorm

PLACE = torch.device("cuda", 0)
BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
QWEN, MIXTRAL = (128, 8, 2048, 768), (8, 2, 1024, 3584)  # experts, experts of a row, H, I
GLM = (64, 4, 2048, 1536)
Format = tuple[int, int, int, bool]  # bits, columns of a group, rows of a scale, zero points
FORMATS: dict[str, Format | None] = {
    "16 bits": None,
    "fp8 by row": (8, 0, 1, False),
    "fp8 by block": (8, 128, 128, False),
    "int4": (4, 128, 1, False),
    "awq": (4, 128, 1, True),
    "gptq, groups of 32": (4, 32, 1, True),
}
ERROR = {BFLOAT: 1e-2, HALF: 3e-3, FLOAT: 2e-5}  # of the norm
ROWS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 255, 256)


def drawn(*shape: int, dtype: torch.dtype = FLOAT, scale: float = 1.0) -> Tensor:
    random = torch.Generator(PLACE).manual_seed(sum(shape))
    return (torch.randn(*shape, device=PLACE, generator=random) * scale).to(dtype)


def eye(size: int) -> Tensor:
    """A router whose logits are its rows."""
    return torch.eye(size, device=PLACE)


def weight_of(experts: int, rows: int, columns: int, stored: Format | None, dtype: torch.dtype) -> ExpertWeight:
    """Random values of any bits but NaN, scales and zero points of different sizes."""
    if stored is None:
        return drawn(experts, rows, columns, dtype=dtype, scale=columns**-0.5)
    bits, group, per_scale, has_zeros = stored
    random, groups = torch.Generator(PLACE).manual_seed(rows + columns), columns // group if group else 1
    data = torch.randint(0, 256, (experts, rows, columns * bits // 8), device=PLACE, generator=random).to(torch.uint8)
    shape = (experts, groups, -(-rows // per_scale))
    scales = (0.5 + torch.rand(shape, device=PLACE, generator=random)) * columns**-0.5 * (0.01 if bits == 8 else 0.2)
    zeros = None
    if has_zeros:
        zeros = 128.0 + torch.randint(0, 16, (experts, groups, rows), device=PLACE, generator=random)
    part = part_of(bits, group, columns)
    assert part is not None
    return QuantizedStack(data & 0xF7 if bits == 8 else data, Packing(scales, zeros, bits, part, group, per_scale))


def mixture_of(sizes: tuple[int, int, int, int], stored: Format | None, dtype: torch.dtype) -> MixtureMLP:
    experts, top_k, hidden, inner = sizes
    gate_up, down = (weight_of(experts, *shape, stored, dtype) for shape in ((2 * inner, hidden), (hidden, inner)))
    router = Router(drawn(experts, hidden, dtype=dtype, scale=2 * hidden**-0.5), MostProbable(top_k, True))
    return MixtureMLP(router, StackedExperts(gate_up, down))


def normed_of(num_rows: int, hidden: int, dtype: torch.dtype) -> Normed:
    """As a linear writes a residual: with sums of squares of its parts."""
    values = drawn(num_rows, hidden, dtype=dtype)
    squares = values.float().unflatten(1, (32, -1)).square().sum(2).t().contiguous()
    return Normed(values, values * 1.5, squares, 1e-5)


def some(x: Normed, rows: Tensor) -> Normed:
    assert x.squares is not None
    return Normed(x.values[rows], x.weighted[rows], x.squares[:, rows].contiguous(), x.eps)


def norm_of(hidden: int, dtype: torch.dtype) -> RMSNorm:
    return RMSNorm(1 + drawn(hidden, dtype=dtype, scale=0.3), 1e-5)


@pytest.mark.parametrize("num_rows", [1, 5, 17, 40, 700, 2500])
@pytest.mark.parametrize(
    ("stored", "dtype"), [*((name, BFLOAT) for name in FORMATS), ("awq", HALF), ("fp8 by row", HALF)]
)
@pytest.mark.parametrize("sizes", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
def test_experts(sizes: tuple[int, int, int, int], stored: str, dtype: torch.dtype, num_rows: int) -> None:
    """Against the reference in float64, of the same choice; in tiles of every size."""
    mixture, x = mixture_of(sizes, FORMATS[stored], dtype), drawn(num_rows, sizes[2], dtype=dtype)
    stack, routing = mixture.experts, mixture.router(x)
    assert isinstance(stack, StackedExperts)
    exact = Routing(routing.experts, routing.weights.double())
    weights = (each.double() if isinstance(each, Tensor) else each for each in (stack.gate_up, stack.down))
    expected = experts_mlp(x.double(), *weights, exact)  # type: ignore[call-arg, arg-type]  # two of them
    found = stack(x, routing).double()
    assert expected.norm() > 0 and float((found - expected).norm() / expected.norm()) < ERROR[dtype]


# (experts, of a row, groups, kept, experts that rate one): DeepSeek-V3, V2, GLM-4.5-Air
@pytest.mark.parametrize("score", [sigmoid_scores, softmax_scores])
@pytest.mark.parametrize("sizes", [(256, 8, 8, 4, 2), (160, 6, 8, 3, 1), (128, 8, 1, 1, 2)])
def test_choices_of_groups(sizes: tuple[int, int, int, int, int], score: Callable[[Tensor], Tensor]) -> None:
    """Against the reference on the same device, with rows that are NaN or zero."""
    num_experts, top_k, groups, kept, rated_by = sizes
    logits, correction = drawn(300, num_experts, scale=2.0), drawn(num_experts, scale=0.1)
    logits[3], logits[4] = torch.nan, 0.0
    given = logits, eye(num_experts), top_k, True, Grouping(score, groups, kept, rated_by, 2.5), correction
    found, expected = best_of_groups(*given), best_of_groups_reference(*given)
    assert (found.experts == expected.experts).all(dim=1).float().mean() > 0.99
    assert torch.equal(found.experts[3], expected.experts[3]) and torch.equal(found.experts[4], expected.experts[4])
    same = (found.experts == expected.experts).all(dim=1)
    torch.testing.assert_close(found.weights[same], expected.weights[same], equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(64, 4, 2048, 1), (256, 8, 7168, 8), (384, 8, 1000, 1)])
def test_a_choice_of_groups_does_not_depend_on_neighbours(sizes: tuple[int, int, int, int]) -> None:
    """GLM-4.7-Flash, DeepSeek-V3, more experts than are compared in pairs. In one launch, in two, in tiles of any size;
    one launch after another, whose counters are zero again."""
    num_experts, top_k, hidden, groups = sizes
    weight, many = (drawn(rows, hidden, dtype=BFLOAT, scale=hidden**-0.25) for rows in (num_experts, 4096))
    given = top_k, True, Grouping(sigmoid_scores, groups, max(groups // 2, 1), 2, 2.5), drawn(num_experts, scale=0.1)
    alone = [best_of_groups(many[row : row + 1], weight, *given) for row in range(1000, 1256)]
    for num_rows in (*ROWS, 511, 512, 3096):
        found = best_of_groups(many[1000 : 1000 + num_rows], weight, *given)
        for row in range(min(num_rows, 256)):
            assert torch.equal(found.experts[row], alone[row].experts[0]), (num_rows, row)
            assert torch.equal(found.weights[row], alone[row].weights[0]), (num_rows, row)


def test_tiles_of_every_size_are_met() -> None:
    rows = {tile_of(num_rows * sizes[1], sizes[0], True).rows for sizes in (QWEN, MIXTRAL) for num_rows in (1, 700)}
    assert rows == {16, 64, 128}
    narrow = {
        quantized_tile(num_rows * sizes[1], sizes[0], True, bits).rows
        for sizes in (QWEN, MIXTRAL)
        for num_rows in (1, 700)
        for bits in (8, 4)
    }
    assert narrow == {16, 64, 128}


@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT], ids=str)
def test_the_sum_with_the_residual_is_the_one_without(dtype: torch.dtype) -> None:
    mixture, x = mixture_of(MIXTRAL, None, dtype), normed_of(40, MIXTRAL[2], dtype)
    norm, stack = norm_of(MIXTRAL[2], dtype), mixture.experts
    assert isinstance(stack, StackedExperts) and x.squares is not None
    torch.testing.assert_close(x.normalised(), normalised_reference(x, x.squares))
    routing = mixture.router(x.normalised())
    found = experts_add(x.normalised(), stack.gate_up, stack.down, routing, x.values, norm)
    assert torch.equal(found.values, x.values + stack(x.normalised(), routing))
    torch.testing.assert_close(found.normalised(), norm(found.values))
    shared = drawn(40, MIXTRAL[2], dtype=dtype)
    beside = experts_add(x.normalised(), stack.gate_up, stack.down, routing, x.values, norm, shared=shared)
    assert torch.equal(beside.values, x.values + (stack(x.normalised(), routing) + shared))
    again = mixture.add(x, norm)
    assert torch.equal(found.values, again.values) and torch.equal(found.weighted, again.weighted)


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("sizes", [QWEN, MIXTRAL], ids=["qwen", "mixtral"])
def test_a_row_does_not_depend_on_its_neighbours(sizes: tuple[int, int, int, int], stored: str) -> None:
    """Norm, router, experts, residual and next norm, to the bit, for any number of rows, in tiles of any size."""
    mixture, norm = mixture_of(sizes, FORMATS[stored], BFLOAT), norm_of(sizes[2], BFLOAT)
    many = normed_of(4096, sizes[2], BFLOAT)
    x = some(many, torch.arange(1000, 1256, device=PLACE))

    def run(rows: Normed) -> Tensor:
        out = mixture.add(rows, norm)
        assert out.squares is not None
        return torch.cat((out.values.float(), out.weighted.float(), out.squares.t()), dim=1)

    alone = torch.cat([run(some(x, torch.tensor([row], device=PLACE))) for row in range(256)])
    for num_rows in ROWS:
        order = torch.randperm(256, generator=torch.Generator().manual_seed(num_rows))[:num_rows].to(PLACE)
        assert torch.equal(run(some(x, order)), alone[order]), num_rows
    assert torch.equal(run(many)[1000:1256], alone)


@pytest.mark.parametrize("is_wide", [False, True], ids=["norm in bfloat16", "norm in float32"])
@pytest.mark.parametrize("sizes", [(64, 10, 2048, 512), QWEN, GLM, (40, 3, 512, 1152), (4, 1, 256, 17408)])
@pytest.mark.parametrize(
    ("stored", "dtype"), [("fp8 by block", BFLOAT), ("16 bits", BFLOAT), ("16 bits", HALF), ("int4", BFLOAT)]
)
def test_few_rows_have_the_bits_of_more(
    sizes: tuple[int, int, int, int], stored: str, dtype: torch.dtype, is_wide: bool
) -> None:
    """With an expert that all rows have, and in turns a result beside: 33 rows are in listed tiles, or in Triton's.

    One row in float8 has a first product of its own, but for the last sizes, whose tiles are too many. In 16 bits these
    have a second product of which no three stages fit, and those before, of more than four rows; in 4 bits that has
    whole lines of 256 columns, six at most.
    """
    experts, top_k, hidden, inner = sizes
    shapes = (2 * inner, hidden), (hidden, inner)
    gate_up, down = (weight_of(experts + 1, *shape, FORMATS[stored], dtype) for shape in shapes)
    common = Common(experts, drawn(1, hidden, dtype=dtype, scale=hidden**-0.5))
    stack = StackedExperts(gate_up, down, common=common)
    router = Router(drawn(experts, hidden, dtype=dtype, scale=2 * hidden**-0.5), MostProbable(top_k, True))
    norm, x, residual = norm_of(hidden, dtype), *(drawn(rows, hidden, dtype=dtype)[-33:] for rows in (33, 34))
    if is_wide:
        norm = WideRMSNorm(norm.weight.float(), norm.eps)
    chosen, own_kernel = router(x[:2], common).experts, inner < 17408
    if stored == "16 bits":
        assert streams_sum(x, down, chosen) is own_kernel
    elif stored == "int4":
        assert streams_sum(x, down, chosen) is (inner % 256 == 0 and own_kernel) and streams_gate(x, gate_up, chosen)
    else:
        assert takes_gate(x[:1], gate_up, chosen[:1]) is own_kernel
    for shared in (None, drawn(35, hidden, dtype=dtype)[-33:]):

        def add(begin: int, end: int, shared: Tensor | None = shared) -> list[Tensor]:
            own = None if shared is None else shared[begin:end]
            out = stack.add(x[begin:end], router(x[begin:end], stack.common), residual[begin:end], norm, own)
            assert out.squares is not None
            return [out.values, out.weighted, out.squares.t()]

        whole = add(0, 33)
        for count in (1, 2, 4, 7, 8, 9, 12, 16, 17, 24, 31, 32):
            for one, other in zip(add(3 % (34 - count), 3 % (34 - count) + count), whole, strict=True):
                assert torch.equal(one, other[3 % (34 - count) :][:count]), count


@sync_mode_warns
@pytest.mark.parametrize("num_rows", [1, 4, 32])
@pytest.mark.parametrize("stored", ["16 bits", "fp8 by block", "awq"])
def test_it_is_captured_and_asks_nothing_of_the_host(stored: str, num_rows: int) -> None:
    mixture, norm = mixture_of(QWEN, FORMATS[stored], BFLOAT), norm_of(QWEN[2], BFLOAT)
    x = normed_of(num_rows, QWEN[2], BFLOAT)
    mixture.add(x, norm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture.add(x, norm)
    others = [replace_values(x, drawn(num_rows, QWEN[2], dtype=BFLOAT, scale=scale)) for scale in (0.5, 1.0, 2.0)]
    with synchronization_is_an_error():
        eager = [mixture.add(each, norm).weighted for each in others]
        replayed = []
        for each in others:
            for target, source in zip(x[:3], each[:3], strict=True):
                assert isinstance(target, Tensor) and isinstance(source, Tensor)
                target.copy_(source)
            graph.replay()
            replayed.append(out.weighted.clone())
    assert all(torch.equal(one, other) for one, other in zip(eager, replayed, strict=True))
    assert not torch.equal(eager[0], eager[1])


def replace_values(x: Normed, values: Tensor) -> Normed:
    squares = values.float().unflatten(1, (32, -1)).square().sum(2).t().contiguous()
    return x._replace(values=values, weighted=values * 1.5, squares=squares)


@pytest.mark.parametrize(
    ("family", "method", "topk"),
    [
        ("qwen3 moe", "EAGLE3", 3),
        ("mixtral", "EAGLE3", 3),
        ("qwen3 moe in fp8", "EAGLE3", 1),
        ("qwen3 moe in fp8", "EAGLE3", 3),
        ("mixtral in int4", "NGRAM", 1),
        ("mixtral in int4", "EAGLE3", 1),
        ("glm 4.5", "EAGLE3", 3),
        ("glm 4.5", "NEXTN in DeepSeek's layout", 1),
        ("glm 4.5", "NEXTN in DeepSeek's layout", 3),
    ],
)
def test_random_schedules(codec: TextCodec, family: str, method: str, topk: int) -> None:
    """Greedy and seeded tokens are plain decoding's, in float32, with steps as graphs."""
    engine: dict[str, Any] = {"place": PLACE, "graph_batch_sizes": (1, 2, 4, 6), "dtype": FLOAT}
    seen = run_seeds(range(6), codec, engine | {"family": family, "method": method, "topk": topk})
    assert seen["accepted"] and seen["rejected"] and seen["finished"], dict(seen)


@pytest.mark.parametrize("kind", ["fp8 by tensor", "fp8 by row", "fp8 by block", "awq", "gptq", "int4"])
@pytest.mark.parametrize(
    "architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM", "Glm4MoeForCausalLM", "Qwen3NextForCausalLM"]
)
def test_checkpoints_in_few_bits(codec: TextCodec, architecture: str, kind: str) -> None:
    """Loaded from files: equal in float32; in bfloat16, where linears have kernels of their own, up to near-ties."""
    cell = Cell(architecture, kind, "EAGLE3")
    assert outcome_of(cell, codec, FLOAT, PLACE) == EQUAL
    assert outcome_of(replace(cell, method="NGRAM tree"), codec, BFLOAT, PLACE) != DIFFERS


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 512), (640, 384)])
def test_tiles_of_many_rows_have_the_bits_of_others(hidden: int, inner: int, seed: int) -> None:
    """An expert of no row, and experts of all numbers near those of a tile."""
    counts = (0, 1, 64, 65, 127, 129, 160, 161, 176, 177, 352, 353, 600)
    experts = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[torch.randperm(sum(counts))]
    experts = torch.stack((experts, torch.full_like(experts, len(counts))), dim=1).to(PLACE)
    places, x = places_of(experts, len(counts) + 1), drawn(len(experts), hidden + 8, dtype=BFLOAT)[:, :hidden]
    gate_up, down = (
        weight_of(len(counts) + 1, *shape, FORMATS["fp8 by block"], BFLOAT)
        for shape in ((2 * inner, hidden), (hidden, inner))
    )
    assert takes_tiles(x, gate_up, down, places)
    middle = multiply_quantized(x, gate_up, None, places, True, True, None)
    expected = multiply_quantized(middle, down, None, places, False, False, None)
    found = multiply_tiles(x, gate_up, down, places)
    assert torch.equal(found, expected)
    assert found.isfinite().all() and float(found.float().std()) > 0
