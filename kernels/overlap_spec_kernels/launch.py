"""What every op needs to check its arguments and to start its kernel.

Triton is imported when a kernel is first launched, not when its module is: the package must import, and serve
on a CPU, where Triton is not installed.
"""

import functools
import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class TritonKernel:
    """A Triton function that its module compiles at the first launch: `kernel[grid](*arguments)`.

    That launch puts what `triton.jit` makes of every such function of the module in its place, so that kernels
    can call each other, and binds `tl`, which the module itself imports for type checkers only.
    An argument named in `FREE` is any integer to the compiler: one that changes from step to step must not cost
    a compilation when it happens to be 1 or a multiple of 16.
    """

    FREE = ("num_splits", "num_rows", "num_squares", "batch_stride", "program_step", "row_step")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.compile_module()
        return self._function.__globals__[self._function.__name__][grid]

    def compile_module(self) -> None:
        """Put compiled functions in place of this module's, and of what it imports from others."""
        jit, names = self._compiler()
        scope = self._function.__globals__
        scope.update(names)
        for name, value in list(scope.items()):
            if isinstance(value, TritonKernel):
                if value._function.__globals__ is not scope:
                    value.compile_module()
                    scope[name] = value._function.__globals__[name]
                else:
                    scope[name] = jit(do_not_specialize=value.free_arguments())(value._function)

    def _compiler(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """What compiles the module's functions, and what they call by a name that the module lacks."""
        import triton
        import triton.language

        return triton.jit, {"tl": triton.language}

    def free_arguments(self) -> list[str]:
        """Those of `FREE` that this function has."""
        return [name for name in inspect.signature(self._function).parameters if name in self.FREE]

    def __call__(self, *arguments: Any) -> Any:
        """Only other kernels call it, and they see the compiled function."""
        raise TypeError(f"{self._function.__name__} runs on a device: launch it as kernel[grid](...)")


class GluonKernel(TritonKernel):
    """A function in Gluon, Triton's lower level, where layouts and copies are the program's own. For CUDA alone."""

    def _compiler(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import ampere, hopper
        from triton.language.extra import cuda

        barrier = getattr(language, "barrier", None) or language.thread_barrier  # its name until Triton 3.6
        return gluon.jit, {"gl": language, "ampere": ampere, "hopper": hopper, "cuda": cuda, "barrier": barrier}


_GLUON_SINCE = (3, 6)  # of Triton, as the kernels here use it
_FEW_ROWS = 64  # of a step: with more, maps are a BLAS's, which lets nobody begin early, and dependence only costs


def dependent_launch(device: torch.device, num_rows: int = 1) -> dict[str, bool]:
    """Launch options of a kernel that begins while the kernel before it on the stream still runs (Hopper and later).

    Such a kernel takes `PDL: tl.constexpr`. It may read what no kernel writes (weights) at once; before anything else
    it must `tl.extra.cuda.gdc_wait()`, which returns when all kernels before it have ended and their writes are
    visible. Every program of it must wait, or the kernel after it could overtake the kernel before it.
    With more than 64 rows it is an ordinary launch.
    """
    enabled = num_rows <= _FEW_ROWS and _can_depend(device)
    return {"PDL": True, "launch_pdl": True} if enabled else {"PDL": False}


def lets_next_begin(device: torch.device) -> bool:
    """Whether a kernel that is not itself dependent should say at once that a dependent one after it may begin."""
    return _can_depend(device)


def runs_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run there: it is young, and its names have moved from version to version."""
    return _can_depend(device) and _has_gluon()


@functools.cache
def _has_gluon() -> bool:
    return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2]) >= _GLUON_SINCE


@functools.cache
def _can_depend(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def require(holds: bool, argument: str, expected: str) -> None:
    """Raises: ValueError naming the argument."""
    if not holds:
        raise ValueError(f"{argument}: expected {expected}")


def runs_triton(tensor: Tensor) -> bool:
    """float64 is the oracle's type: it runs the twin on every device."""
    return tensor.is_cuda and tensor.dtype != torch.float64


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def warps_for(block: int) -> int:
    """One warp for each 512 elements that a program handles at once, 1 to 16."""
    return min(max(next_power_of_2(block // 512), 1), 16)
