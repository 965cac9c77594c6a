"""Decoder layers whose linears behind attention are one kernel, for up to 128 rows of quantised weights on Hopper.

    x, qkv --> attention --> [ output, +, norm, gate and up, down, +, norm, the next layer's qkv ]

A kernel that computes one linear leaves the memory idle while it begins and ends, so the linears between two attentions
run in one (`linear_run`). With more rows, each linear is a kernel of its own, as in any other layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from overlap_spec_kernels import Normed, QuantizedRun, QuantizedWeight, linear_run, run_counter
from torch import Tensor

from overlap_spec.models.layers.decoder import (
    Attend,
    Attention,
    DecoderLayer,
    PreNormLayer,
    Projection,
    SelfAttention,
)
from overlap_spec.models.layers.head_norm import HeadNormLinear
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import Norm, RMSNorm
from overlap_spec.models.quantization.linear import QuantizedLinear
from overlap_spec.models.work import ForwardWork

RUNS = True  # whether linears run together at all
RUNS_REACH_QKV = True  # of the next layer
RUNS_LOOK_AHEAD = True  # and bring the output weight of the next layer into the L2 cache


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A `PreNormLayer`, computed otherwise."""

    layer: PreNormLayer
    run: QuantizedRun

    @property
    def input_norm(self) -> Norm:
        return self.layer.input_norm

    @property
    def attention(self) -> Attention:
        return self.layer.attention

    @property
    def work(self) -> ForwardWork:
        return self.layer.work

    def __call__(self, x: Normed, next_norm: Norm, attend: Attend) -> Normed:
        projection = self._projection
        qkv = projection(x) if x.projected is None else _finished(projection, x.projected)
        return linear_run(attend(qkv), attend.kept(x.values), self.run)

    @property
    def _projection(self) -> Projection:
        assert isinstance(self.layer.attention, SelfAttention)
        return self.layer.attention.qkv


class _Linears(NamedTuple):
    """Those of a layer behind its attention, as a run begins with them."""

    output: QuantizedWeight
    norm: RMSNorm
    gate_up: QuantizedWeight
    down: QuantizedWeight


def in_runs(layers: Sequence[DecoderLayer], final_norm: Norm) -> list[DecoderLayer]:
    """The same layers, with a `QuantizedLayer` in place of each whose linears can run together."""
    first = next(filter(None, map(_behind_attention, layers)), None)
    if first is None or not RUNS:
        return list(layers)
    counter = run_counter(first.output.data.device)
    next_norms = [*(layer.input_norm for layer in layers[1:]), final_norm]
    return [_in_run(layers, index, next_norm, counter) for index, next_norm in enumerate(next_norms)]


def _in_run(layers: Sequence[DecoderLayer], index: int, next_norm: Norm, counter: Tensor) -> DecoderLayer:
    layer, linears = layers[index], _behind_attention(layers[index])
    if linears is None or not isinstance(layer, PreNormLayer) or not isinstance(next_norm, RMSNorm):
        return layer
    after = _behind_attention(layers[index + 1]) if RUNS_LOOK_AHEAD and index + 1 < len(layers) else None
    qkv = _next_qkv(layers, index) if RUNS_REACH_QKV else None
    ahead = None if after is None else after.output
    return QuantizedLayer(layer, QuantizedRun(*linears, next_norm, qkv, counter, ahead))


def _behind_attention(layer: DecoderLayer) -> _Linears | None:
    """None if they are something else, as in derived classes."""
    if type(layer) is not PreNormLayer or type(layer.mlp) is not GatedMLP or type(layer.attention) is not SelfAttention:
        return None
    linears = (layer.attention.output, layer.mlp.gate_up, layer.mlp.down)
    operands = [operand for operand in map(_operand, linears) if operand is not None]
    if len(operands) < len(linears) or not isinstance(layer.mlp_norm, RMSNorm):
        return None
    output, gate_up, down = operands
    return _Linears(output, layer.mlp_norm, gate_up, down)


def _next_qkv(layers: Sequence[DecoderLayer], index: int) -> QuantizedWeight | None:
    """That of the next layer, or no rows of the own one where that is not possible: all layers have the same kernel.

    None where there is no such kernel: in a single layer, or with another projection.
    """
    after = _qkv(layers[index + 1]) if index + 1 < len(layers) else None
    own = _qkv(layers[index]) if len(layers) > 1 else None
    return after if after is not None or own is None else replace(own, data=own.data[:0])


def _qkv(layer: DecoderLayer) -> QuantizedWeight | None:
    """Of a layer that takes what a run has computed."""
    if _behind_attention(layer) is None or not isinstance(layer.attention, SelfAttention):
        return None
    projection = layer.attention.qkv
    linear = projection.qkv if isinstance(projection, HeadNormLinear) else projection
    return linear.operand if isinstance(linear, QuantizedLinear) else None


def _finished(projection: object, product: Tensor) -> Tensor:
    """What the projection gives, from the product with its weight. Shapes: [T, (n + 2 nkv) d]."""
    if isinstance(projection, HeadNormLinear):
        return projection.normed(_finished(projection.qkv, product))
    assert isinstance(projection, QuantizedLinear)
    return projection.biased(product)


def _operand(linear: AnyLinear) -> QuantizedWeight | None:
    """Of a linear with others before or after it in a run: a bias would come between them."""
    return linear.operand if isinstance(linear, QuantizedLinear) and linear.bias is None else None
