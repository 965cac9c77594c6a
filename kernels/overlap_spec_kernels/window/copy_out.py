"""Copies what a step publishes into pinned memory of the host, by a kernel.

Between two kernels of one stream a copy engine would hold up the device for some nine microseconds, most of them to
hand the work over and back. A few hundred bytes that a kernel writes over the bus cost it next to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, require, runs_triton

_INTS_PER_PROGRAM = 512


def copy_out(source: Tensor, out: Tensor) -> None:
    """Copy `source` into `out`, which may lie in pinned memory; an event behind the launch tells when it is there.

    For few integers: the bus is not used as well as by a copy engine. Sync: never.
    Shapes: source any, i64, contiguous; out the same. Raises: ValueError naming the argument.
    """
    require(source.dtype == torch.int64 and source.is_contiguous(), "source", "contiguous int64")
    require(out.dtype == torch.int64 and out.is_contiguous(), "out", "contiguous int64")
    require(out.shape == source.shape, "out", "the shape of source")
    run = _copy_out_triton if runs_triton(source) else copy_out_reference
    run(source, out)


def copy_out_reference(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


def _copy_out_triton(source: Tensor, out: Tensor) -> None:
    count = source.numel()
    _copy_out_kernel[(ceil_div(count, _INTS_PER_PROGRAM),)](source, out, count, BLOCK=_INTS_PER_PROGRAM, num_warps=4)


@TritonKernel.with_options(do_not_specialize=("count",))
def _copy_out_kernel(source_ptr: tl.tensor, out_ptr: tl.tensor, count: int, BLOCK: tl.constexpr) -> None:
    """An ordinary launch: between two graphs nothing begins early."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    tl.store(out_ptr + place, tl.load(source_ptr + place, mask=inside), mask=inside)
