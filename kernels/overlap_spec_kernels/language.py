"""The languages that kernels are written in, for type checkers, and how a kernel begins.

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

__all__ = ["ampere", "barrier", "cuda", "gl", "hopper", "let_next_begin", "tl", "wait", "wait_for_inputs"]


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
