"""The languages that kernels are written in, for type checkers, how a kernel begins, and what all of them need.

Kernels get the compiler's languages when they are compiled: without Triton, their modules must import (`launch.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlap_spec_kernels.launch import TritonKernel

if TYPE_CHECKING:
    from triton import language as tl
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import ampere, hopper
    from triton.language.extra import cuda

    barrier = gl.thread_barrier

if not TYPE_CHECKING:
    tl = gl = ampere = hopper = cuda = barrier = None

__all__ = [
    "ampere", "barrier", "cuda", "gl", "halves_added", "hopper", "let_next_begin", "of_16_bits", "tl", "wait",
    "wait_for_inputs",
]  # fmt: skip


@TritonKernel
def wait_for_inputs(PDL: tl.constexpr) -> None:
    """The next kernel may start now; this one waits for the results of the kernels before it."""
    let_next_begin(PDL)
    wait(PDL)


@TritonKernel
def let_next_begin(PDL: tl.constexpr) -> None:
    """The next kernel may start now.

    If a kernel calls this after its own wait, those after it may at once read what was written before it.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@TritonKernel
def wait(PDL: tl.constexpr) -> None:
    """Wait for the results of the kernels before this one."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@TritonKernel
def of_16_bits(values: tl.tensor, dtype: tl.constexpr, COMPILED: tl.constexpr) -> tl.tensor:
    """Values that were loaded in fewer bits, as a right operand that is multiplied like one that was loaded in 16.

    Otherwise a thread holds four neighbouring columns of K instead of two, so that an instruction of `mma.sync` adds up
    another 16 columns than one of `wgmma` does: sums have other bits. The compiler follows values through elementwise
    operations only, and not through assembly that might do more. COMPILED: not interpreted, where nothing is done.
    """
    values = values.to(dtype)
    if COMPILED:
        values = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [values], dtype=values.dtype, is_pure=False, pack=2
        )
    return values


@TritonKernel
def halves_added(x: tl.tensor, LENGTH: tl.constexpr) -> tl.tensor:
    """The second half of each run of values is added to its first, as lanes of a warp do. Shapes: [N] -> [N / 2]."""
    RUNS: tl.constexpr = x.shape[0] // LENGTH
    first, second = tl.split(tl.permute(tl.reshape(x, (RUNS, 2, LENGTH // 2)), (0, 2, 1)))
    return tl.reshape(first + second, (RUNS * LENGTH // 2,))
