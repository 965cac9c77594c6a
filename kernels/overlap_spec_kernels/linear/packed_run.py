"""Linears of a decoder layer that follow one another, in one kernel: from attention to the next layer's qkv.

    attention --> output --> + --> norm --> gate, up --> down --> + --> norm --> qkv of the next layer

Each of them alone reads its weight at nearly the speed of memory, but a kernel of one linear begins slowly: its program
takes a whole multiprocessor, so nothing is asked for until the program before it has left. Here a program stays for
all linears. It asks for tiles of the next linear while it finishes the items of the present one, so memory stays busy
while programs wait for each other (packed_stream.cu).

**Programs of a launch wait for each other, so all must run at once.** There are never more than the device has room
for. They begin when those of the kernel before have left, at the latest, and the kernel after is let in only after all
of ours have begun. So nothing that is launched before or after on the same stream can keep some of them out for ever,
and neither can kernels of other streams that end by themselves. Two such launches at the same time could: each might
hold some multiprocessors and wait for more. The engine launches its forwards on one stream, and graphs that it captures
have no branches. Processes take turns on a GPU, except under MPS, where no linears run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from overlap_spec_kernels.linear import packed_products as products
from overlap_spec_kernels.linear.call import Addition, Call, call_of
from overlap_spec_kernels.linear.fused_linear import fused_linear, linear_add, require_linear
from overlap_spec_kernels.linear.packed_products import PackedProducts, Step
from overlap_spec_kernels.linear.packed_stream import MOST_ROWS, PackedStream, Part, launch, run_division, takes_rows
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.nvrtc import shares_gpu

Cuts = Sequence[PackedStream | PackedProducts]


@dataclass(frozen=True, slots=True)
class QuantizedRun:
    """The linears of a layer behind its attention, and the next layer's first one.

    `next_qkv` has no rows after the last layer, where the same kernel ends with `down`.
    """

    output: QuantizedWeight  # [H, n d]
    norm: Norm  # of the sum with the residual, [H]
    gate_up: QuantizedWeight  # [2I, H], gate first
    down: QuantizedWeight  # [H, I]
    next_norm: Norm
    next_qkv: QuantizedWeight | None
    counter: Tensor  # [1] i32, zero at first: where programs meet. Runs on one stream share one
    ahead: QuantizedWeight | None = None  # what the next run reads first: it is brought into the L2 cache at the end

    @property
    def weights(self) -> tuple[QuantizedWeight, ...]:
        """In the order of the linears."""
        after = () if self.next_qkv is None else (self.next_qkv,)
        return self.output, self.gate_up, self.down, *after

    @property
    def reaches_qkv(self) -> bool:
        """Whether it computes the next layer's first linear."""
        return self.next_qkv is not None and self.next_qkv.shape[0] > 0

    def cuts(self, x: Tensor) -> Cuts | None:
        """How a kernel divides its linears; None where none applies. Shapes: x [T, n d]."""
        if shares_gpu(x.device):
            return None
        linears = [(each.data, gates, each.packing) for each, gates in zip(self.weights, self.gated(), strict=True)]
        return self._stream(x) or products.run_division(x, linears)

    def _stream(self, x: Tensor) -> tuple[PackedStream, ...] | None:
        gated = self.gated()
        if not all(map(partial(_takes, x), self.weights, gated)):
            return None
        sizes = [each.shape[1] for each in self.weights]
        return run_division(len(x), sizes, gated, [each.packing for each in self.weights])

    def gated(self) -> list[bool]:
        """By linear."""
        return [each is self.gate_up for each in self.weights]

    def launch(self, cuts: Cuts, x: Tensor, residual: Tensor) -> Normed:
        """Run the kernel. Shapes: x [T, n d], residual [T, H] -> [T, H], past `next_norm`."""
        calls = self._calls(x, residual, cuts[0].block_n)
        work = [cut.num_programs(call.weight, call.gated) for cut, call in zip(cuts, calls, strict=True)]
        ahead = None if self.ahead is None else self.ahead.data
        given = list(zip(cuts, calls, (each.packing for each in self.weights), strict=True))
        if parts := [Part(cut, call, packing) for cut, call, packing in given if isinstance(cut, PackedStream)]:
            launch(parts, max(work), self.counter, ahead)
        else:
            steps = [Step(cut, call, packing) for cut, call, packing in given if isinstance(cut, PackedProducts)]
            products.launch(steps, max(work), ahead)
        return _normed(calls[2], self.next_norm)._replace(projected=calls[3].out if self.reaches_qkv else None)

    def _calls(self, x: Tensor, residual: Tensor, block_n: int) -> list[Call]:
        """Arguments and results of each linear."""
        first = call_of(x, self.output.data, False, Addition(residual, self.norm), x.dtype, block_n)
        middle = _normed(first, self.norm)
        gates = call_of(middle, self.gate_up.data, True, None, x.dtype, block_n)
        assert gates.out is not None
        add = Addition(middle.values, self.next_norm)
        down = call_of(gates.out, self.down.data, False, add, x.dtype, block_n)
        if self.next_qkv is None:
            return [first, gates, down]
        after = call_of(_normed(down, self.next_norm), self.next_qkv.data, False, None, x.dtype, block_n)
        return [first, gates, down, after]


def linear_run(x: Tensor, residual: Tensor, run: QuantizedRun) -> Normed:
    """All linears of `run`, one after another: in one kernel where that applies, else each in its own.

    Where none applies to more than 16 rows, it leaves out `next_qkv`, whose result would only lie in memory for longer.
    Shapes: x [T, n d], residual [T, H] -> [T, H], past `next_norm`. Raises: ValueError naming the argument.
    Sync: never.
    """
    require_linear(x, run.output)
    if cuts := run.cuts(x):
        return run.launch(cuts, x, residual)
    return linear_run_reference(x, residual, run if len(x) <= MOST_ROWS else replace(run, next_qkv=None))


def linear_run_reference(x: Tensor, residual: Tensor, run: QuantizedRun) -> Normed:
    middle = linear_add(x, run.output, residual, run.norm)
    after = linear_add(fused_linear(middle, run.gate_up, gated=True), run.down, middle.values, run.next_norm)
    if run.next_qkv is None or not run.reaches_qkv:
        return after
    return after._replace(projected=fused_linear(after, run.next_qkv))


def run_counter(device: torch.device) -> Tensor:
    """For all runs of a model, which follow one another on one stream."""
    return torch.zeros(1, dtype=torch.int32, device=device)


def _takes(x: Tensor, weight: QuantizedWeight, gated: bool) -> bool:
    return takes_rows(x, weight.data, gated, weight.packing)


def _normed(call: Call, norm: Norm) -> Normed:
    assert call.out is not None and call.weighted is not None
    return Normed(call.out, call.weighted, call.sums, norm.eps)
