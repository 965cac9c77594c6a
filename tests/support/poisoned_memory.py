"""Fills the shared memory of a GPU, which a kernel finds as the last one left it, with one value."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from overlap_spec_kernels.launch import GluonKernel

if TYPE_CHECKING:
    from triton.experimental.gluon import language as gl

NANS = {"of 8 bits": 0x7F7F7F7F, "of all bits": -1}  # the second of float16 and bfloat16 too
WORDS = (32768, 16384, 8192)  # 224 KB of the 227 KB that a program of a Hopper may have, so that each has its own


def poison_shared_memory(value: int) -> None:
    """Fill all but 4 KB of each multiprocessor's. Sync: never."""
    programs = 2 * torch.cuda.get_device_properties("cuda").multi_processor_count
    seen = torch.empty(programs, dtype=torch.int32, device="cuda")
    poison_kernel[(programs,)](seen, value, A=WORDS[0], B=WORDS[1], C=WORDS[2], num_warps=32)


@GluonKernel.with_options(do_not_specialize=("value",))
def poison_kernel(
    seen_ptr: gl.tensor, value: int, A: gl.constexpr, B: gl.constexpr, C: gl.constexpr
) -> None:  # fmt: skip
    """What is stored is read again, so that the compiler must store it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [32], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a = gl.allocate_shared_memory(gl.int32, [A], flat)
    b = gl.allocate_shared_memory(gl.int32, [B], flat)
    c = gl.allocate_shared_memory(gl.int32, [C], flat)
    a.store(gl.zeros([A], gl.int32, layout) + value)
    b.store(gl.zeros([B], gl.int32, layout) + value)
    c.store(gl.zeros([C], gl.int32, layout) + value)
    lowest = gl.minimum(gl.min(a.load(layout), 0), gl.minimum(gl.min(b.load(layout), 0), gl.min(c.load(layout), 0)))
    gl.store(seen_ptr + gl.program_id(0), lowest)
