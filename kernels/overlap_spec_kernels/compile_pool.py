"""Compiles many kernels at once, in processes of their own, where one after another would take most of a minute.

Launches are recorded instead of launched, each kernel is compiled into Triton's cache by one of the processes, and the
first launch after that finds it there: kernels in Triton, in Gluon and in CUDA C++. The processes never touch the
device: Triton compiles for a GPU that it is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from overlap_spec_kernels.launch import compiling_only
from overlap_spec_kernels.nvrtc import CudaCode, compiling_with

PR_SET_PDEATHSIG = 1


def load_compiler() -> None:
    """Import Triton and let it hash its own files, for which its first compilation would wait a second.

    It may run in a thread while other work goes on.
    """
    with contextlib.suppress(ImportError):  # without Triton, or with one that keeps its hash elsewhere
        from triton.runtime.cache import triton_key

        triton_key()


@contextlib.contextmanager
def compiling_together(processes: int | Executor) -> Iterator[None]:
    """In this block launches launch nothing: their kernels are compiled, many at once. At its end all of them are.

    Torch's own operations run, on zeros in place of what the kernels would have written. A kernel that cannot be
    compiled raises at its first launch, as ever. `processes`: how many, or those that have run `begin_compiler`; they
    have ended after the block.
    """
    import triton

    target = triton.runtime.driver.active.get_current_target()
    if isinstance(processes, int):
        spawned = multiprocessing.get_context("spawn")
        processes = ProcessPoolExecutor(processes, spawned, begin_compiler, (os.getpid(),))
    with processes:
        found = _FoundKernels(processes, target)
        triton.knobs.runtime.jit_cache_hook = found.on_compilation
        try:
            with compiling_only(), compiling_with(found.on_launch), _ZeroedOutputs():
                yield
        finally:
            triton.knobs.runtime.jit_cache_hook = None
            found.forget()


class _FoundKernels:
    """Sends every kernel that would be compiled to a process, once."""

    def __init__(self, processes: Executor, target: Any) -> None:
        """`target`: the GPU that is compiled for."""
        self._processes = processes
        self._target = target
        self._held: list[tuple[dict[Any, Any], Any]] = []  # entries of Triton's caches that stand for a kernel
        self._cuda: set[CudaCode] = set()
        self.jobs: list[Future[Any]] = []

    def on_compilation(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """A hook of Triton's. Returns True: it is not to compile."""
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        kernels[key] = self  # so that the next launch does not ask again
        self._held.append((kernels, key))
        how = compile["specialization_data"]
        self.jobs.append(self._processes.submit(_compile, self._target, fn.module, fn.name, how))
        return True

    def on_launch(self, code: CudaCode) -> None:
        """A kernel in CUDA C++ would be launched."""
        if code not in self._cuda:
            self._cuda.add(code)
            self.jobs.append(self._processes.submit(CudaCode.compiled, code))

    def forget(self) -> None:
        """Let Triton look for the kernels again."""
        for kernels, key in self._held:
            del kernels[key]


class _NoDevice:
    """The driver of a process that only compiles. `target`: the GPU that it compiles for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def begin_compiler(parent: int) -> None:
    """Begin a process of the pool: import what every compilation needs, but no kernel."""
    end_with(parent)
    load_compiler()


def end_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux): a process of a pool would wait for work for ever."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _compile(target: Any, module: str, name: str, specialization: str) -> None:
    """Compile a kernel of a module, and what launches it, into Triton's cache."""
    import triton

    triton.runtime.driver.set_active(_NoDevice(target))
    kernel = getattr(importlib.import_module(module), name).compiled.preload(specialization)
    with contextlib.suppress(ImportError, AttributeError):  # another version of Triton may launch without C code
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


class _ZeroedOutputs(TorchFunctionMode):
    """Zeros in new memory: kernels that are not run leave it as it is, and torch reads indices there."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function in _MAKERS else result


_MAKERS = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty, Tensor.new_empty_strided)
