"""Accept lengths of synthetic acceptance, for benchmarks: looked up by each slot's seed and length, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_SLOTS_PER_PROGRAM = 128


def synthetic_accept(table: Tensor, seeds: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    """Return table[(seeds[slots] + lengths) mod N]; sums wrap around.

    Shapes: table [N] i64, N a power of two, seeds [S] i64 of any stride, slots, lengths [B] i64 -> [B] i64.
    Raises: ValueError naming the argument. Sync: never.
    """
    size = table.shape[0]
    require(table.dim() == 1 and table.dtype == torch.int64 and table.is_contiguous(), "table", "[N] int64")
    require(size > 0 and size & (size - 1) == 0, "table", "a power of two entries")
    require(seeds.dim() == 1 and seeds.dtype == torch.int64, "seeds", "[S] int64")
    require(slots.dim() == 1 and slots.dtype == torch.int64 and slots.is_contiguous(), "slots", "[B] int64")
    require(lengths.shape == slots.shape and lengths.is_contiguous(), "lengths", "[B], contiguous")
    require(lengths.dtype == torch.int64, "lengths", "int64")
    run = _synthetic_accept_triton if runs_triton(table) else synthetic_accept_reference
    return run(table, seeds, slots, lengths)


def synthetic_accept_reference(table: Tensor, seeds: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    return table[(seeds[slots] + lengths) & (table.shape[0] - 1)]


def _synthetic_accept_triton(table: Tensor, seeds: Tensor, slots: Tensor, lengths: Tensor) -> Tensor:
    num_slots = slots.shape[0]
    out = torch.empty_like(lengths)
    block = min(next_power_of_2(num_slots), _SLOTS_PER_PROGRAM)
    _synthetic_accept_kernel[(ceil_div(num_slots, block),)](
        table,
        seeds,
        slots,
        lengths,
        out,
        table.shape[0] - 1,
        seeds.stride(0),
        num_slots,
        BLOCK=block,
        num_warps=1,
        **dependent_launch(table.device),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_slots",))
def _synthetic_accept_kernel(
    table_ptr: tl.tensor, seeds_ptr: tl.tensor, slots_ptr: tl.tensor, lengths_ptr: tl.tensor, out_ptr: tl.tensor,
    last: int, seed_stride: int, num_slots: int, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A program for some slots. `last`: N - 1."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_slots
    wait_for_inputs(PDL)
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    place = tl.load(seeds_ptr + slot * seed_stride, mask=inside, other=0)
    place += tl.load(lengths_ptr + row, mask=inside, other=0)
    found = tl.load(table_ptr + (place & last), mask=inside, other=0)
    tl.store(out_ptr + row, found, mask=inside)
