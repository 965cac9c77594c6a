"""The experts of gpt-oss-20b in mxfp4 as calls of a step, with rows that choose their experts at random."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from overlap_spec_kernels import Biases, Clamp, Float4Matrices, Routing, experts_mlp
from torch import Tensor

from kernel_cases.shapes import DTYPE, assert_alike
from kernel_cases.step_cases import Place, StepCase

CLAMP = Clamp(1.702, 7.0)
GROUP, SCALE = 32, 127 - 7  # columns that share a power of two, with 127 added


class Mixture(NamedTuple):
    """Sizes of a layer."""

    experts: int
    top_k: int
    hidden: int
    inner: int


GPT_OSS_20B = Mixture(32, 4, 2880, 2880)


def expert_cases(model: str, sizes: Mixture, place: Place) -> Iterator[StepCase]:
    """One for each number of rows. Bytes are those of the experts that rows have, of weights and scales."""
    layers = [layer_of(sizes, place.device) for _ in range(place.copies(layer_bytes(sizes)))]
    for num_rows in place.num_rows:
        x = torch.randn(num_rows, sizes.hidden, device=place.device).to(DTYPE)
        routings = [routing_of(num_rows, sizes, place.device) for _ in layers]
        read = sum(len(routing.experts.unique()) for routing in routings) / len(routings)
        calls = [
            partial(experts_mlp, x, gate_up, down, routing, biases, CLAMP)
            for (gate_up, down, biases), routing in zip(layers, routings, strict=True)
        ]
        num_bytes = int(layer_bytes(sizes) * read / sizes.experts)
        check = partial(check_layer, x, layers[0], routings[0])
        yield StepCase("experts_mlp", model, f"mxfp4, {read:.1f} experts", num_rows, num_bytes, calls, check)


def layer_of(sizes: Mixture, device: str) -> tuple[Float4Matrices, Float4Matrices, Biases]:
    """Random experts: gate and up, down, biases."""
    gate_up = stack_of(sizes.experts, 2 * sizes.inner, sizes.hidden, 2, device)
    down = stack_of(sizes.experts, sizes.hidden, sizes.inner, 1, device)
    shapes = (sizes.experts, 2 * sizes.inner), (sizes.experts, sizes.hidden)
    return gate_up, down, Biases(*(torch.randn(shape, device=device).to(DTYPE) for shape in shapes))


def stack_of(count: int, rows: int, columns: int, parts: int, device: str) -> Float4Matrices:
    """Random values, all with one scale."""
    scales = torch.full((rows, columns // GROUP), SCALE, dtype=torch.uint8, device=device)
    every = (torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=device) for _ in range(count))
    return Float4Matrices.stacked([Float4Matrices.packed(values, scales, None, parts, DTYPE) for values in every])


def layer_bytes(sizes: Mixture) -> int:
    """Of all experts: 4 bits a weight, and 8 for each group."""
    return sizes.experts * 3 * sizes.hidden * sizes.inner * (4 * GROUP + 8) // (8 * GROUP)


def routing_of(num_rows: int, sizes: Mixture, device: str) -> Routing:
    """Each row has experts of its own, any of them with one probability."""
    weights, experts = torch.rand(num_rows, sizes.experts, device=device).topk(sizes.top_k)
    return Routing(experts, weights / weights.sum(1, keepdim=True))


def check_layer(x: Tensor, layer: tuple[Float4Matrices, Float4Matrices, Biases], routing: Routing) -> None:
    """Raises: AssertionError where the kernel and the reference differ, which computes in float64."""
    gate_up, down, biases = layer
    exact = Routing(routing.experts, routing.weights.double())
    wide = Biases(*(each.double() for each in biases))
    expected = experts_mlp(x.double(), gate_up, down, exact, wide, CLAMP)
    assert_alike(experts_mlp(x, gate_up, down, routing, biases, CLAMP), expected)
