"""Argument checks and kernel launches, shared by all ops.

Triton is imported at the first launch, not when a module of kernels is imported: without Triton, the package must
still import and serve on a CPU.
"""

import contextlib
import functools
import importlib.metadata
import inspect
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Self

import torch
from torch import Tensor

Function = Callable[..., Any]

_ONLY_COMPILES: ContextVar[bool] = ContextVar("only_compiles", default=False)
_MAKES: ContextVar[bool] = ContextVar("makes", default=True)


class _Launches:
    """Launches of one compiled function.

    At each launch Triton looks its kernel up by types, constants and options written out as text, and prepares for
    profilers. Captures make tens of thousands of launches, so kernels are kept here by what Triton's binder tells.
    """

    def __init__(self, function: Any) -> None:
        from triton import knobs
        from triton.runtime import driver

        self._function, self._driver, self._knobs = function, driver, knobs.runtime
        self._caches = getattr(function, "device_caches", None)  # the interpreter has none
        self._loaded: dict[Any, tuple[Any, ...]] = {}  # what runs a kernel, and its arguments after the stream

    def launch(self, grid: tuple[int, ...], cluster: int, *arguments: Any, **options: Any) -> Any:
        """Launch on the current stream of the current device. Sync: never, but for the first of its kind.

        `cluster`: see `TritonKernel.in_clusters`; launches that are watched have none.
        """
        if self._caches is None or self._is_watched():
            return self._function[grid](*arguments, **options)
        driver = self._driver.active
        device = driver.get_current_device()
        bound, types, rest = self._caches[device][-1](*arguments, **options)
        key = (device, cluster, *types, *rest.items())
        loaded = self._loaded.get(key)
        if loaded is None:
            kernel = self._function.warmup(*arguments, grid=grid, **options)
            if kernel is None:  # a hook of Triton's has it compiled elsewhere
                return None
            num_warps, num_ctas, *others = kernel.packed_metadata
            metadata = num_warps, num_ctas * cluster, *others  # by which Triton divides a grid into clusters
            loaded = self._loaded[key] = kernel.run, kernel.function, metadata
        run, function, metadata = loaded
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.get_current_stream(device)
        return run(x // cluster, y, z, stream, function, metadata, None, None, None, *bound.values())

    def _is_watched(self) -> bool:
        """Whether a profiler wants to be told of launches."""
        enter, leave = self._knobs.launch_enter_hook, self._knobs.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class TritonKernel:
    """A Triton function that is compiled at its first launch: `kernel[grid](*arguments)`.

    A module of kernels has the language for type checkers only (`language.py`), and its kernels call each other by
    name. So the compiler gets a copy of the function, whose globals hold `tl` and the compiled kernels that it calls.
    """

    def __init__(self, function: Function, do_not_specialize: tuple[str, ...] = ()) -> None:
        unknown = set(do_not_specialize) - set(inspect.signature(function).parameters)
        assert not unknown, f"{function.__name__} has no parameters {unknown}"
        self.function = function
        self.do_not_specialize = do_not_specialize

    @classmethod
    def with_options(cls, do_not_specialize: tuple[str, ...]) -> Callable[[Function], Self]:
        """A decorator. The compiler does not specialise the named arguments by their values.

        Arguments that change from step to step would otherwise cost a compilation when one is 1 or a multiple of 16.
        """
        return functools.partial(cls, do_not_specialize=do_not_specialize)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.in_clusters(1, grid)

    def in_clusters(self, size: int, grid: tuple[int, ...]) -> Any:
        """`kernel[grid]`, of whose programs so many begin together, next to each other.

        What a program computes must not depend on it: launches that a profiler watches are ordinary ones.
        """
        if only_compiles():
            return functools.partial(self.compiled.warmup, grid=grid)
        return functools.partial(self._launches.launch, grid, size)

    @functools.cached_property
    def _launches(self) -> _Launches:
        return _Launches(self.compiled)

    @functools.cached_property
    def compiled(self) -> Any:
        """The function as a Triton kernel; it is compiled at the first launch with each set of types and constants."""
        jit, names = self._compiler()
        function = self.function
        scope = {**function.__globals__, **names}
        for name in function.__code__.co_names:
            if isinstance(called := scope.get(name), TritonKernel):
                scope[name] = called.compiled
        copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__)
        copy.__annotations__, copy.__qualname__ = function.__annotations__, function.__qualname__
        return jit(do_not_specialize=list(self.do_not_specialize))(copy)

    def _compiler(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The compiler, and the names of `language.py` that the function uses."""
        import triton
        import triton.language

        return triton.jit, {"tl": triton.language}

    def __call__(self, *arguments: Any) -> Any:
        """Raise: only kernels call a kernel without a grid, and they call the compiled function."""
        raise TypeError(f"{self.function.__name__} runs on a device: launch it as kernel[grid](...)")


class GluonKernel(TritonKernel):
    """A function in Gluon, Triton's lower level, where the program states layouts and copies. CUDA only."""

    def _compiler(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        from triton.experimental import gluon
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia import ampere, hopper
        from triton.language.extra import cuda

        barrier = getattr(language, "barrier", None) or language.thread_barrier  # the name until Triton 3.6
        return gluon.jit, {"gl": language, "ampere": ampere, "hopper": hopper, "cuda": cuda, "barrier": barrier}


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """In this block launches compile their kernels and launch nothing."""
    token = _ONLY_COMPILES.set(True)
    try:
        yield
    finally:
        _ONLY_COMPILES.reset(token)


def only_compiles() -> bool:
    """Whether this is such a block."""
    return _ONLY_COMPILES.get()


class NotMadeError(Exception):
    """What all launches of a kernel share is needed for the first time where nothing lasting may be made."""


@contextlib.contextmanager
def made_before() -> Iterator[None]:
    """In this block what all launches of a kernel share must have been made: NotMadeError.

    For captures: what is made in one has its values after the replays of that graph alone.
    """
    token = _MAKES.set(False)
    try:
        yield
    finally:
        _MAKES.reset(token)


def check_making(name: str) -> None:
    """Raises: NotMadeError where nothing lasting may be made."""
    if not _MAKES.get():
        raise NotMadeError(name)


def shared_zeros(size: int, device: torch.device) -> Tensor:
    """See `shared_words`."""
    return shared_words(size, device, 0)


def shared_words(size: int, device: torch.device, value: int) -> Tensor:
    """Words that all launches of a kernel share, made once, and that have a value between them. Shapes: -> [size] i32.

    Raises: NotMadeError in a capture.
    """
    check_making("counters")
    return torch.full((size,), value, dtype=torch.int32, device=device)


_GLUON_SINCE = (3, 6)  # the first Triton whose Gluon has the names that these kernels use
# With more rows in a step a BLAS multiplies. Its kernels never let the next one begin early, so PDL would only cost.
_FEW_ROWS = 64


def dependent_launch(device: torch.device, num_rows: int = 1) -> dict[str, bool]:
    """Launch options of a kernel that begins while the kernel before it on the stream still runs (Hopper and later).

    Such a kernel takes `PDL: tl.constexpr`. It may at once read memory that no kernel writes (weights). Before any
    other access it must call `tl.extra.cuda.gdc_wait()`, which returns when all kernels before it have ended and their
    writes are visible. Every program must wait: otherwise the next kernel could overtake the previous one.
    With more than 64 rows the launch is an ordinary one.
    """
    enabled = num_rows <= _FEW_ROWS and _can_depend(device)
    return {"PDL": True, "launch_pdl": True} if enabled else {"PDL": False}


def lets_next_begin(device: torch.device) -> bool:
    """Whether an ordinary kernel should let the dependent kernel after it begin at once."""
    return _can_depend(device)


def runs_gluon(device: torch.device) -> bool:
    """Whether kernels in Gluon run on `device`. Gluon's names still change from version to version of Triton."""
    return _can_depend(device) and (device.type == "meta" or _has_gluon())


def runs_warpgroups(device: torch.device) -> bool:
    """Whether kernels in Gluon with products of a warpgroup run: those after Hopper have none, and compiling aborts."""
    return runs_gluon(device) and capability_of(device) in ((9, 0), None)  # None: emulated


@functools.cache
def _has_gluon() -> bool:
    return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2]) >= _GLUON_SINCE


def _can_depend(device: torch.device) -> bool:
    capability = capability_of(device)
    return capability is not None and capability >= (9, 0)


_ASSUMED: ContextVar[tuple[int, int] | None] = ContextVar("assumed", default=None)


@contextlib.contextmanager
def assuming(capability: tuple[int, int] | None) -> Iterator[None]:
    """In this block tensors without values (`meta`) are taken for those of such a GPU; None: for those of a CPU."""
    token = _ASSUMED.set(capability)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a GPU; None for a CPU."""
    return _ASSUMED.get() if device.type == "meta" else _capability_of(device)


@functools.cache
def _capability_of(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def require(holds: bool, argument: str, expected: str) -> None:
    """Raises: ValueError naming the argument."""
    if not holds:
        raise ValueError(f"{argument}: expected {expected}")


def runs_triton(tensor: Tensor) -> bool:
    """Whether an op launches its kernel. Tests' oracles compute in float64, which runs the reference on any device."""
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
