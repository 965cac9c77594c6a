"""4-bit floats on a GPU: what kernels compute, that rows do not depend on others, and that steps are captured."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from overlap_spec_kernels import (
    Biases,
    Clamp,
    Float4Matrices,
    Float4Weight,
    Norm,
    Routing,
    experts_add,
    experts_mlp,
    fused_linear,
    linear_logits,
    route,
)
from overlap_spec_kernels.experts.float4_streams import takes_float4_down, takes_float4_gate
from overlap_spec_kernels.nvrtc import runs_hopper
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.float4_weights import meaning_of, random_float4
from support.model_cells import DIFFERS, EQUAL, Cell, outcome_of
from support.random_schedules import run_seeds
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec

PLACE = torch.device("cuda", 0)
BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
ERROR = {BFLOAT: 4e-3, HALF: 5e-4, FLOAT: 1e-6}  # of the norm
# A kernel is compiled for each, so types other than bfloat16 have small ones.
LINEARS = [
    (32, (5760, 2880), BFLOAT),
    (16, (2048, 4096), BFLOAT),
    (32, (70, 96), HALF),
    (16, (70, 96), FLOAT),
]
ROWS = (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 128, 200, 255, 256)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=PLACE, generator=torch.Generator(PLACE).manual_seed(sum(shape))).to(dtype)


def linear_of(shape: tuple[int, int], group: int, dtype: torch.dtype) -> Float4Weight:
    return Float4Weight(Float4Matrices.packed(*random_float4(*shape, group, "cuda"), 1, dtype))


@pytest.mark.parametrize("num_rows", [1, 9, 100])
@pytest.mark.parametrize(("group", "shape", "dtype"), LINEARS, ids=str)
def test_linears(group: int, shape: tuple[int, int], dtype: torch.dtype, num_rows: int) -> None:
    weight, x = linear_of(shape, group, dtype), drawn(num_rows, shape[1], dtype=dtype)
    x = x * (0.1 if dtype == HALF else 1)
    expected = x.double() @ meaning_of(*random_float4(*shape, group, "cuda")).t()
    for found, most in ((fused_linear(x, weight), ERROR[dtype]), (linear_logits(x, weight), 1e-5)):
        assert float((found.double() - expected).norm() / expected.norm()) < most


@pytest.mark.parametrize(("group", "dtype"), [(32, BFLOAT), (16, BFLOAT), (32, FLOAT)], ids=str)
def test_every_value_with_every_scale(group: int, dtype: torch.dtype) -> None:
    """To the bit: a row of x is a column of the unit matrix, and no bit of a value and its scale is lost."""
    scales = torch.arange(8, 129 if group == 32 else 127, dtype=torch.uint8, device=PLACE)[:, None]
    values = torch.arange(16, dtype=torch.uint8, device=PLACE).repeat(len(scales), group // 16)
    factors = None if group == 32 else torch.ones(len(scales), device=PLACE)
    weight = Float4Weight(Float4Matrices.packed(values, scales, factors, 1, dtype))
    found = linear_logits(torch.eye(group, device=PLACE, dtype=dtype), weight)
    assert torch.equal(found.t().double(), meaning_of(values, scales, factors))


@pytest.mark.parametrize(("group", "shape", "dtype"), LINEARS, ids=str)
def test_a_row_does_not_depend_on_its_neighbours(group: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = linear_of(shape, group, dtype), drawn(256, shape[1], dtype=dtype) * 1e-2
    alone = torch.cat([linear_logits(row[None], weight) for row in x])
    for num_rows in ROWS:
        order = torch.randperm(256, generator=torch.Generator().manual_seed(num_rows))[:num_rows].to(PLACE)
        assert torch.equal(linear_logits(x[order], weight), alone[order]), num_rows
    many = drawn(2000, shape[1], dtype=dtype)
    many[1000:1256] = x
    assert torch.equal(linear_logits(many, weight)[1000:1256], alone)


@sync_mode_warns
def test_it_is_captured_and_asks_nothing_of_the_host() -> None:
    weight, x = linear_of((2048, 4096), 16, BFLOAT), drawn(4, 4096, dtype=BFLOAT)
    fused_linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_linear(x, weight)
    other = drawn(4, 4096, dtype=BFLOAT) * 3
    with synchronization_is_an_error():
        eager = fused_linear(other, weight)
        x.copy_(other)
        graph.replay()
    assert torch.equal(out, eager)


Sizes = tuple[int, int, int, int]  # experts, experts of a row, H, I
GPT_OSS, QWEN, SMALL = (8, 4, 2880, 2880), (128, 8, 2048, 768), (6, 3, 96, 96)  # the first with 8 of its 32 experts
MIXTURES = [(32, GPT_OSS, BFLOAT), (16, QWEN, BFLOAT), (16, SMALL, HALF), (32, SMALL, FLOAT)]
CLAMP = Clamp(1.702, 7.0)
Experts = tuple[Float4Matrices, Float4Matrices, Biases]


def experts_of(group: int, sizes: Sizes, dtype: torch.dtype) -> Experts:
    """Gate and up, down, and biases. Scales are such that sums are about as large as what goes in."""
    count, _, hidden, inner = sizes

    def stack(rows: int, columns: int, parts: int) -> Float4Matrices:
        every = []
        for seed in range(count):
            values, scales, factors = random_float4(rows, columns, group, "cuda", seed)
            factors = None if factors is None else factors * 0.02
            every.append(Float4Matrices.packed(values, scales, factors, parts, dtype))
        return Float4Matrices.stacked(every)

    return (
        stack(2 * inner, hidden, 2),
        stack(hidden, inner, 1),
        Biases(drawn(count, 2 * inner, dtype=dtype), drawn(count, hidden, dtype=dtype)),
    )


def routing_of(num_rows: int, sizes: Sizes) -> Routing:
    return route(drawn(num_rows, 64, dtype=FLOAT), drawn(sizes[0], 64, dtype=FLOAT), sizes[1], True)


@pytest.mark.parametrize("num_rows", [1, 5, 33, 700])
@pytest.mark.parametrize(("group", "sizes", "dtype"), MIXTURES, ids=str)
def test_experts(group: int, sizes: Sizes, dtype: torch.dtype, num_rows: int) -> None:
    """Against the reference in float64: of few rows, of tiles of listed places, and of large ones."""
    gate_up, down, biases = experts_of(group, sizes, dtype)
    x, routing = drawn(num_rows, sizes[2], dtype=dtype), routing_of(num_rows, sizes)
    exact = Routing(routing.experts, routing.weights.double())
    wide = Biases(*(each.double() for each in biases))
    expected = experts_mlp(x.double(), gate_up, down, exact, wide, CLAMP)
    found = experts_mlp(x, gate_up, down, routing, biases, CLAMP).double()
    assert float((found - expected).norm() / expected.norm()) < (1e-5 if dtype == FLOAT else 1e-2)


@pytest.mark.parametrize(("group", "sizes", "dtype"), MIXTURES, ids=str)
def test_a_row_of_experts_does_not_depend_on_its_neighbours(group: int, sizes: Sizes, dtype: torch.dtype) -> None:
    gate_up, down, biases = experts_of(group, sizes, dtype)
    x, routing = drawn(256, sizes[2], dtype=dtype) * 1e-2, routing_of(256, sizes)
    norm, own_kernels = Norm(drawn(sizes[2], dtype=dtype), 1e-5), runs_hopper(PLACE) and dtype == BFLOAT
    assert takes_float4_gate(x[:1], gate_up, routing.experts[:1]) is own_kernels
    assert takes_float4_down(x[:1], down, routing.experts[:1]) is own_kernels

    def run(rows: Tensor) -> Tensor:
        some = Routing(*(each[rows].contiguous() for each in routing))
        out = experts_add(x[rows], gate_up, down, some, x[rows], norm, biases, CLAMP)
        assert out.squares is not None
        results = experts_mlp(x[rows], gate_up, down, some, biases, CLAMP)
        return torch.cat((out.values.float(), out.weighted.float(), out.squares.t(), results.float()), dim=1)

    alone = torch.cat([run(torch.tensor([row], device=PLACE)) for row in range(256)])
    for num_rows in ROWS:
        order = torch.randperm(256, generator=torch.Generator().manual_seed(num_rows))[:num_rows].to(PLACE)
        assert torch.equal(run(order), alone[order]), num_rows
    many = torch.arange(256, device=PLACE).repeat(8)
    assert torch.equal(run(many), alone[many])


@sync_mode_warns
@pytest.mark.parametrize("num_rows", [1, 32])
def test_experts_are_captured_and_ask_nothing_of_the_host(num_rows: int) -> None:
    sizes = GPT_OSS
    gate_up, down, biases = experts_of(32, sizes, BFLOAT)
    x, routing = drawn(num_rows, sizes[2], dtype=BFLOAT), routing_of(num_rows, sizes)
    experts_mlp(x, gate_up, down, routing, biases, CLAMP)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_mlp(x, gate_up, down, routing, biases, CLAMP)
    other = drawn(num_rows, sizes[2], dtype=BFLOAT) * 3
    with synchronization_is_an_error():
        eager = experts_mlp(other, gate_up, down, routing, biases, CLAMP)
        x.copy_(other)
        graph.replay()
    assert torch.equal(out, eager)


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama in nvfp4", "EAGLE3"), ("qwen3 moe in nvfp4", "EAGLE3"), ("mixtral in mxfp4", "NGRAM")],
)
def test_random_schedules(codec: TextCodec, family: str, method: str) -> None:
    """Greedy and seeded tokens are plain decoding's, in float32, with steps as graphs."""
    engine: dict[str, Any] = {"place": PLACE, "graph_batch_sizes": (1, 2, 4, 6), "dtype": FLOAT}
    seen = run_seeds(range(4), codec, engine | {"family": family, "method": method, "topk": 1})
    assert seen["accepted"] and seen["rejected"] and seen["finished"], dict(seen)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("Qwen3MoeForCausalLM", "nvfp4"), ("MixtralForCausalLM", "nvfp4, modelopt"), ("LlamaForCausalLM", "mxfp4")],
)
def test_checkpoints(codec: TextCodec, architecture: str, kind: str) -> None:
    """Loaded from files: equal in float32, and in bfloat16 up to near-ties."""
    cell = Cell(architecture, kind, "EAGLE3")
    assert outcome_of(cell, codec, FLOAT, PLACE) == EQUAL
    assert outcome_of(replace(cell, method="NGRAM tree"), codec, BFLOAT, PLACE) != DIFFERS
