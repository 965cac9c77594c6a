"""Each quantised linear of a layer knows which one comes next, if there is anything to ask for."""

from typing import Any

import pytest
import torch
from overlap_spec_kernels import Following, QuantizedWeight
from overlap_spec_kernels.linear import packed_stream
from support.quantized_cases import Case, weight_of

from overlap_spec.models.layers.decoder import PreNormLayer, SelfAttention
from overlap_spec.models.layers.following import AHEAD, BEFORE, AheadBytes, linked
from overlap_spec.models.layers.linear import make_linear
from overlap_spec.models.layers.mlp import GatedMLP, GeluMLP
from overlap_spec.models.quantization.linear import QuantizedLinear

ALL = AheadBytes(1 << 20, 2 << 20, 3 << 20, 4 << 20)
NOTHING: Any = None  # a layer's norms and heads


def weight(size_n: int, size_k: int) -> QuantizedWeight:
    return weight_of(Case(1, size_n, size_k, 8)).in_fragments()


def layer_of(mlp: type[GatedMLP] = GatedMLP) -> PreNormLayer:
    qkv, output, gate_up, down = (QuantizedLinear(weight(*size)) for size in ((96, 64), (64, 64), (256, 64), (64, 128)))
    return PreNormLayer(NOTHING, SelfAttention(qkv, output, NOTHING), NOTHING, mlp(gate_up, down))


def operands(layer: Any) -> list[Any]:
    linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    return [linear.operand for linear in linears]


def test_it_is_off_until_it_is_measured() -> None:
    layers = [layer_of()]
    assert linked(layers) is layers and not any(AHEAD)


def test_each_linear_knows_the_next() -> None:
    layers = [layer_of(), layer_of()]
    first, last = (operands(layer) for layer in linked(layers, ALL))
    expected = [*operands(layers[0]), *operands(layers[1])]
    for place, (found, num_bytes) in enumerate(zip([*first, *last[:3]], [*ALL, *ALL[:3]], strict=True)):
        assert found.data is expected[place].data
        assert found.following == Following(expected[place + 1], place % 4 == 1, num_bytes, BEFORE)
    assert last[3].following is None


def test_only_the_linears_that_have_something_to_ask_for() -> None:
    (layer,) = linked([layer_of()], AheadBytes(qkv=1 << 20))
    assert [operand.following is not None for operand in operands(layer)] == [True, False, False, False]


def test_other_layers_stay_as_they_are() -> None:
    dense = PreNormLayer(
        NOTHING,
        SelfAttention(make_linear(torch.ones(96, 64)), QuantizedLinear(weight(64, 64)), NOTHING),
        NOTHING,
        layer_of().mlp,
    )
    layers = [layer_of(GeluMLP), dense, layer_of()]
    found = linked(layers, ALL)
    assert found[0] is layers[0] and found[1] is dense and found[2] is not layers[2]


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the division of the linear that comes next, for as many rows; nothing where it has another kernel."""
    monkeypatch.setattr(packed_stream, "num_multiprocessors", lambda device: 132)
    down = weight(4096, 64)
    found = [Following(down, gated, 1 << 20).ahead(4) for gated in (False, True)]
    assert [(each.weight is down.data, each.gated, each.clusters, each.num_bytes) for each in found if each] == [
        (True, False, 132, 1 << 20),
        (True, True, 128, 1 << 20),
    ]
    assert Following(down, False, 1 << 20).ahead(17) is None
    assert Following(weight_of(Case(1, 96, 64, 8)), False, 1 << 20).ahead(1) is None
