"""A decoder layer's linears after attention in one launch: output, gate and up, down, of quantised weights.

Between two launches no weight is read for as long as an end and a beginning take. Here a program's ring goes on through
all three: while the last parts of a linear are added and written, the next linear's weight is on its way, and only x
waits until all programs have written theirs.

    sum   = residual + x output^T            and sum * norm's weight, sums of squares
    gates = silu(gate) * up                  of the normalised sum
    y     = sum + gates down^T               and y * next norm's weight, sums of squares
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.linear.call import Addition, Call, call_of
from overlap_spec_kernels.linear.fragments import TILE_ROWS
from overlap_spec_kernels.linear.packed_products import (
    Form,
    PackedProducts,
    Step,
    form_of,
    in_parts,
    launch,
    multiprocessors_of,
    padded,
)
from overlap_spec_kernels.linear.packing import Order
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.nvrtc import runs_hopper

_LEAST_ROWS, _MOST_ROWS = 17, 128  # of x; `packed_stream` takes fewer
_GATES = (False, True, False)


class BlockWeights(NamedTuple):
    """Weights of a block."""

    output: QuantizedWeight  # [H, A]
    gate_up: QuantizedWeight  # [2 I, H], gate first
    down: QuantizedWeight  # [H, I]

    @property
    def forms(self) -> tuple[Form, ...] | None:
        """What the kernel is compiled for; None if it does not take them, or not together."""
        forms = [form_of(weight.packing, gated) for weight, gated in zip(self, _GATES, strict=True)]
        known = tuple(form for form in forms if form is not None)
        return known if len(known) == len(_GATES) and len({form._replace(gated=False) for form in known}) == 1 else None

    @property
    def follow(self) -> bool:
        """Whether each takes what the one before it gives, in whole tiles."""
        (hidden, _), (gates, of_gates), (of_down, inner) = (weight.shape for weight in self)
        return (of_gates, gates, of_down) == (hidden, 2 * inner, hidden) and not (hidden | inner) % TILE_ROWS


class PackedBlock(NamedTuple):
    """How each of the linears is divided among programs. They share a ring, so only parts of K differ."""

    cuts: tuple[PackedProducts, ...]

    def run(self, x: Tensor, weights: BlockWeights, residual: Tensor, norm: Norm, next_norm: Norm) -> Normed:
        """Shapes: x [T, A], residual [T, H] -> [T, H]. Sync: never."""
        block_n = self.cuts[0].block_n
        first = call_of(x, weights.output.data, False, Addition(residual, norm), x.dtype, block_n)
        middle = _sum_of(first, norm)
        second = call_of(middle, weights.gate_up.data, True, None, x.dtype, block_n)
        assert second.out is not None
        third = call_of(second.out, weights.down.data, False, Addition(middle.values, next_norm), x.dtype, block_n)
        packings = (weight.packing for weight in weights)
        steps = tuple(map(Step, self.cuts, (first, second, third), packings))
        launch(steps, multiprocessors_of(x.device))
        return _sum_of(third, next_norm)


def packed_block_for(x: Tensor, weights: BlockWeights) -> PackedBlock | None:
    """The division for these tensors; None where the kernel does not apply. Shapes: x [T, A]."""
    num_rows, forms = x.shape[0], weights.forms
    if not _LEAST_ROWS <= num_rows <= _MOST_ROWS or x.dtype != torch.bfloat16 or not runs_hopper(x.device):
        return None
    if forms is None or not weights.follow or any(each.packing.order is not Order.FRAGMENTS for each in weights):
        return None
    if x.stride(0) % 8 or any(each.data_ptr() % 16 for each in (x, *(weight.data for weight in weights))):
        return None
    ring = PackedProducts(padded(num_rows), 1, 0).with_stages(*forms)
    return None if ring is None else _division(ring, weights, multiprocessors_of(x.device))


def _division(ring: PackedProducts, weights: BlockWeights, multiprocessors: int) -> PackedBlock:
    """As many parts of K as run at once. (The kernel of one linear has more stages, and cuts into fewer parts.)"""
    sizes = (weight.shape for weight in weights)
    halves = ((size_n // 2 if gated else size_n, size_k) for (size_n, size_k), gated in zip(sizes, _GATES, strict=True))
    return PackedBlock(tuple(in_parts(ring, *shape, multiprocessors) for shape in halves))


def _sum_of(call: Call, norm: Norm) -> Normed:
    """What a linear with a residual writes."""
    assert call.out is not None and call.weighted is not None
    return Normed(call.out, call.weighted, call.sums, norm.eps)
