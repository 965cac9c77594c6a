"""Tells each quantised linear of a model which one comes next, so that its kernel asks for the next one's weight.

Memory is read while one kernel ends and the next one begins, and while attention runs.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from overlap_spec_kernels import Following

from overlap_spec.models.layers.decoder import DecoderLayer, PreNormLayer, SelfAttention
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.quantization.linear import QuantizedLinear


class AheadBytes(NamedTuple):
    """How much of the next linear's weight each linear of a layer asks for; 0: nothing."""

    qkv: int = 0
    output: int = 0
    gate_up: int = 0
    down: int = 0


# They wait for a measurement: benchmarks/quantized_layer.py.
AHEAD = AheadBytes()
BEFORE = 1  # stages of its own that a program has yet to read when it asks


def linked(layers: Sequence[DecoderLayer], ahead: AheadBytes = AHEAD) -> Sequence[DecoderLayer]:
    """The same layers, with what follows each linear. Those that are not made of Llama's parts stay as they are."""
    if not any(ahead):
        return layers
    return [_linked(layer, after, ahead) for layer, after in zip_longest(layers, layers[1:])]


def _linked(layer: DecoderLayer, after: DecoderLayer | None, ahead: AheadBytes) -> DecoderLayer:
    """`after`: the next layer; None for the last one."""
    linears, next_linears = _linears(layer), _linears(after)
    if linears is None or not isinstance(layer, PreNormLayer) or not isinstance(layer.attention, SelfAttention):
        return layer
    qkv, output, gate_up, down = linears
    next_qkv = next_linears[0] if next_linears else None
    mlp = GatedMLP(_told(gate_up, down, ahead.gate_up), _told(down, next_qkv, ahead.down))
    told = _told(qkv, output, ahead.qkv), _told(output, gate_up, ahead.output, gated=True)
    return replace(layer, attention=SelfAttention(*told, layer.attention.shape), mlp=mlp)


def _linears(layer: DecoderLayer | None) -> tuple[QuantizedLinear, ...] | None:
    """The four in their order; None if one of them is something else, or another operation lies between them."""
    if type(layer) is not PreNormLayer or type(layer.mlp) is not GatedMLP or type(layer.attention) is not SelfAttention:
        return None
    linears = (layer.attention.qkv, layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    quantised = tuple(linear for linear in linears if isinstance(linear, QuantizedLinear))
    return quantised if len(quantised) == len(linears) else None


def _told(
    linear: QuantizedLinear, after: QuantizedLinear | None, num_bytes: int, gated: bool = False
) -> QuantizedLinear:
    """The linear that asks for so many bytes of the next one."""
    if after is None or num_bytes == 0:
        return linear
    return replace(
        linear, operand=replace(linear.operand, following=Following(after.operand, gated, num_bytes, BEFORE))
    )
