"""The languages that kernels are written in, for type checkers. Kernels get the compiler's when they are compiled.

Without Triton, modules of kernels must still import: see `launch.py`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triton import language as tl
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import ampere, hopper
    from triton.language.extra import cuda

    barrier = gl.thread_barrier

if not TYPE_CHECKING:
    tl = gl = ampere = hopper = cuda = barrier = None

__all__ = ["ampere", "barrier", "cuda", "gl", "hopper", "tl"]
