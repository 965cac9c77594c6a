"""What gpt-oss needs beside other mixtures, on a GPU: sinks, biases and bounds of experts, and random schedules.

Its pass is what a start on a GPU waits for (`load_target`).
"""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs, decode_inputs, to_device, tree_inputs
from overlap_spec_kernels import Biases, Clamp, Normed, Routing, experts_mlp, paged_attention, route, tree_attention
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.tree_attention import tree_attention_reference
from support.attention_cases import CLOSE, decode_reference
from support.random_schedules import run_schedules
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.layers.experts import MixtureMLP, MostProbable, Router, StackedExperts

DEVICE = "cuda"
PLACE = torch.device(DEVICE, 0)
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
ERROR = {BFLOAT: 1e-2, HALF: 2e-3, FLOAT: 1e-5}  # of the norm
DTYPES = [FLOAT, BFLOAT]
HEADS = HeadShape(64, 8, 64)  # of gpt-oss
CLAMP = Clamp(1.702, 7.0)
EXPERTS, TOP_K, HIDDEN, INNER = 32, 4, 2880, 2880


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    random = torch.Generator(PLACE).manual_seed(sum(shape))
    return (torch.randn(*shape, device=PLACE, generator=random) * scale).to(dtype)


def sinks_of(heads: HeadShape, dtype: torch.dtype) -> Tensor:
    """From one that takes nearly all weight to one that takes none."""
    return torch.linspace(8, -8, heads.num_heads).to(dtype)


def widened(values: Iterable[object]) -> list[Any]:
    return [value.float() if isinstance(value, Tensor) and value.is_floating_point() else value for value in values]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("width", [1, 4])
def test_decode_with_sinks(width: int, window: int | None, dtype: torch.dtype) -> None:
    inputs = decode_inputs(HEADS, width, [300, 0, 15, 9000], 16, dtype)
    sinks, (*tensors, scale) = sinks_of(HEADS, dtype), inputs
    expected, *_ = decode_reference(inputs, window=window, sinks=sinks.float())
    on_gpu = [to_device(value, DEVICE) for value in tensors]
    for num_programs in (None, 1, 1024):
        scratch = DecodeScratch.allocate(HEADS.head_dim, PLACE, num_programs)
        scratch.outputs.fill_(torch.nan)
        found = decode_attention(*on_gpu, scratch, scale, window=window, sinks=sinks.to(PLACE))
        torch.testing.assert_close(found.cpu().float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("requests", [[(0, 300)], [(9000, 3), (0, 3)], [(5000, 512)], [(70, 3), (0, 90), (15, 1)]])
def test_chunks_with_sinks(requests: list[tuple[int, int]], window: int | None, dtype: torch.dtype) -> None:
    inputs, sinks = attention_inputs(HEADS, requests, 16, dtype), sinks_of(HEADS, dtype)
    expected = paged_attention_reference(*widened(inputs[:6]), inputs.scale, window, sinks=sinks.float())
    on_gpu = [to_device(value, DEVICE) for value in inputs]
    found = paged_attention(*on_gpu, window=window, sinks=sinks.to(PLACE))
    torch.testing.assert_close(found.cpu().float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("num_requests", [1, 3, 32])
def test_trees_with_sinks(num_requests: int, window: int | None, dtype: torch.dtype) -> None:
    lengths = [(4000, 0, 17)[index % 3] for index in range(num_requests)]
    inputs, sinks = tree_inputs(HEADS, 8, 9, lengths, 16, dtype), sinks_of(HEADS, dtype)
    expected = tree_attention_reference(*widened(inputs), window, sinks=sinks.float())
    on_gpu = [to_device(value, DEVICE) for value in inputs]
    found = tree_attention(*on_gpu, window, sinks=sinks.to(PLACE))
    torch.testing.assert_close(found.cpu().float(), expected, **CLOSE[dtype])


def mixture_of(dtype: torch.dtype, hidden: int = HIDDEN, inner: int = INNER) -> MixtureMLP:
    biases = Biases(drawn(EXPERTS, 2 * inner, dtype=dtype), drawn(EXPERTS, hidden, dtype=dtype))
    stack = StackedExperts(
        drawn(EXPERTS, 2 * inner, hidden, dtype=dtype, scale=4 * hidden**-0.5),
        drawn(EXPERTS, hidden, inner, dtype=dtype, scale=inner**-0.5),
        biases,
        CLAMP,
    )
    weight = drawn(EXPERTS, hidden, dtype=dtype, scale=2 * hidden**-0.5)
    return MixtureMLP(Router(weight, MostProbable(TOP_K, True, drawn(EXPERTS, dtype=dtype))), stack)


@pytest.mark.parametrize("num_rows", [1, 5, 33, 700])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_experts_with_biases_and_bounds(dtype: torch.dtype, num_rows: int) -> None:
    mixture, x = mixture_of(dtype, 360, 200), drawn(num_rows, 360, dtype=dtype)
    stack, routing = mixture.experts, mixture.router(x)
    assert isinstance(stack, StackedExperts) and stack.biases is not None
    exact = Routing(routing.experts, routing.weights.double())
    wide = Biases(*(each.double() for each in stack.biases))
    expected = experts_mlp(x.double(), stack.gate_up.double(), stack.down.double(), exact, wide, CLAMP)
    found = stack(x, routing).double()
    assert float((found - expected).norm() / expected.norm()) < ERROR[dtype]


def test_routers_with_biases() -> None:
    x, weight, bias = (drawn(*shape, dtype=FLOAT) for shape in ((300, 64), (EXPERTS, 64), (EXPERTS,)))
    found = route(x, weight, TOP_K, True, bias)
    exact = route(x.double(), weight.double(), TOP_K, True, bias.double())
    torch.testing.assert_close(found.weights.double(), exact.weights, rtol=1e-4, atol=1e-5)
    assert (found.experts == exact.experts).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [BFLOAT, HALF], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    mixture, x = mixture_of(dtype), drawn(256, HIDDEN, dtype=dtype)
    alone = torch.cat([mixture(Normed(row[None], row[None])) for row in x])
    for num_rows in (1, 2, 5, 16, 33, 128, 256):
        order = torch.randperm(256, generator=torch.Generator().manual_seed(num_rows))[:num_rows].to(PLACE)
        assert torch.equal(mixture(Normed(x[order], x[order])), alone[order]), num_rows


@pytest.mark.parametrize("batch_sizes", [(), (1, 2, 4, 6)], ids=["eager", "graphs"])
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("NGRAM", 1)])
def test_random_schedules(codec: TextCodec, method: str, topk: int, batch_sizes: tuple[int, ...]) -> None:
    graphs = {"place": PLACE, "graph_batch_sizes": batch_sizes}
    run_schedules(20, codec, dtype=FLOAT, family="gpt oss", method=method, topk=topk, **graphs)
