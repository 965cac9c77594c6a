"""Compiles many kernels at once, in processes of their own, where one after another would take most of a minute.

Launches are recorded instead of launched, each kernel is compiled into Triton's cache by one of the processes, and the
first launch after that finds it there: kernels in Triton, in Gluon and in CUDA C++. The processes never touch the
device: Triton compiles for a GPU that it is told. They begin with what was found first, so that launches in the same
order can follow at once: one waits for its own kernel, while those behind it are compiled.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from overlap_spec_kernels.launch import compiling_only
from overlap_spec_kernels.nvrtc import CudaCode, compiling_with

PR_SET_PDEATHSIG = 1
LAST = 10  # niceness of what compiles: the process that launches goes on meanwhile


@contextlib.contextmanager
def compiling_together(processes: int | Executor) -> Iterator[Compilations]:
    """In this block kernels are compiled many at once: those found in a block of `finding`. At its end all are.

    A kernel that cannot be compiled raises at its first launch, as ever. `processes`: how many, or those that have run
    `begin_compiler`; they end with the block.
    """
    import triton

    target = triton.runtime.driver.active.get_current_target()
    if isinstance(processes, int):
        spawned = multiprocessing.get_context("spawn")
        processes = ProcessPoolExecutor(processes, spawned, begin_compiler, (os.getpid(),))
    found = Compilations(processes, target)
    try:
        with _asking(found.before_launch), compiling_with(found.compiled):
            yield found
            found.finish()
    finally:
        processes.shutdown(wait=False, cancel_futures=True)  # some are left of a block that failed


class Compilations:
    """Kernels that processes compile, each once. A launch waits for its own."""

    def __init__(self, processes: Executor, target: Any) -> None:
        """`target`: the GPU that is compiled for."""
        self._waited = 0.0
        self._processes = processes
        self._target = target
        self._jobs: dict[object, Future[Any]] = {}

    @contextlib.contextmanager
    def finding(self) -> Iterator[None]:
        """In this block launches launch nothing: their kernels are compiled.

        Torch's own operations run, on zeros in place of what the kernels would have written.
        """
        held: list[tuple[dict[Any, Any], Any]] = []  # entries of Triton's caches that stand for a kernel

        def ask(*, key: Any, fn: Any, compile: dict[str, Any], **_: object) -> bool:
            """A hook of Triton's. Returns True: it is not to compile."""
            kernels = _kernels_of(fn, compile)
            kernels[key] = self  # so that the next launch does not ask again
            held.append((kernels, key))
            how = compile["specialization_data"]
            self._jobs[id(kernels), key] = self._processes.submit(_compile, self._target, fn.module, fn.name, how)
            return True

        try:
            with _asking(ask), compiling_only(), compiling_with(self._ask_for), _zeroed_outputs():
                yield
        finally:
            for kernels, key in held:  # let Triton look for the kernels again
                del kernels[key]

    def before_launch(self, *, key: Any, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """A hook of Triton's. Returns False: it is to compile the kernel, and finds it in its cache."""
        self._wait((id(_kernels_of(fn, compile)), key))
        return False

    def compiled(self, code: CudaCode) -> bytes:
        """Machine code of a kernel in CUDA C++."""
        self._wait(code)
        return code.compiled()

    def finish(self) -> None:
        """Wait until all are compiled."""
        for kernel in self._jobs:
            self._wait(kernel)

    def waited(self) -> float:
        """Seconds that launches have waited since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _ask_for(self, code: CudaCode) -> None:
        """A kernel in CUDA C++ would be launched."""
        if code not in self._jobs:
            self._jobs[code] = self._processes.submit(CudaCode.compiled, code)

    def _wait(self, kernel: object) -> None:
        job = self._jobs.get(kernel)
        if job is None or job.done():
            return
        begun = time.perf_counter()
        wait([job])
        self._waited += time.perf_counter() - begun


def _kernels_of(function: Any, compilation: dict[str, Any]) -> dict[Any, Any]:
    """Where Triton keeps the kernels of a function that it is about to compile."""
    kernels: dict[Any, Any] = function.jit_function.device_caches[compilation["device"]][0]
    return kernels


@contextlib.contextmanager
def _asking(hook: Callable[..., bool]) -> Iterator[None]:
    """In this block Triton asks before it compiles a kernel."""
    import triton

    before = triton.knobs.runtime.jit_cache_hook
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = before


class _NoDevice:
    """The driver of a process that only compiles. `target`: the GPU that it compiles for."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def begin_compiler(parent: int) -> None:
    """Begin a process of the pool: import Triton, and let it hash its own files, as every compilation needs it.

    Others have cores first.
    """
    end_with(parent)
    os.nice(LAST)
    with contextlib.suppress(ImportError):  # without Triton, or with one that keeps its hash elsewhere
        from triton.runtime.cache import triton_key

        triton_key()


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


@contextlib.contextmanager
def _zeroed_outputs() -> Iterator[None]:
    """Zeros in new memory: kernels that are not run leave it as it is, and torch reads indices there.

    Torch's own way to change calls (`TorchFunctionMode`) takes as long as half of them, whatever they call.
    """
    with contextlib.ExitStack() as undone:
        for owner, name in _MAKERS:
            make, was_own = getattr(owner, name), name in vars(owner)
            undone.callback(setattr, owner, name, make) if was_own else undone.callback(delattr, owner, name)
            setattr(owner, name, _zeroed(make))
        yield


def _zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def zeros(*arguments: Any, **options: Any) -> Tensor:
        return make(*arguments, **options).zero_()

    return zeros


_MAKERS = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided")),
    *((Tensor, name) for name in ("new_empty", "new_empty_strided")),
)
