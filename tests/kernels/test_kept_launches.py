"""Kernels that were launched before are launched again without Triton's own lookup, and by its rules."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from overlap_spec_kernels.launch import TritonKernel
from overlap_spec_kernels.norm.rms_norm import _rms_norm_kernel

triton = pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton")


class NoDevice:
    """A GPU that is not there, whose current stream is 7."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> Any:
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


class Compiled:
    """Stands for a compiled kernel, and notes its launches."""

    def __init__(self) -> None:
        self.function, self.packed_metadata = object(), (1, 1, 0)
        self.launches: list[tuple[Any, ...]] = []

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        self.launches.append(arguments)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Compiled]]:
    """The kernels that are compiled, in order."""
    made: list[Compiled] = []

    def compile_nothing(function: Any, key: Any, signature: Any, device: int, *_: object) -> Compiled:
        made.append(Compiled())
        function.device_caches[device][0][key] = made[-1]
        return made[-1]

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", compile_nothing)
    triton.runtime.driver.set_active(NoDevice())
    yield made
    triton.runtime.driver._active = None


@pytest.fixture
def kernel() -> TritonKernel:
    return TritonKernel(_rms_norm_kernel.function)


def launch(kernel: TritonKernel, size: int = 64, rows: int = 2, **options: Any) -> None:
    tensor = torch.ones(rows, size)
    kernel[rows,](tensor, tensor[0], tensor, size, size, 1e-5, BLOCK=64, PDL=False, **{"num_warps": 1, **options})


def test_a_kernel_is_looked_up_once(
    kernel: TritonKernel, compiled: list[Compiled], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up: list[int] = []
    run = triton.runtime.jit.JITFunction.run
    monkeypatch.setattr(
        triton.runtime.jit.JITFunction, "run", lambda *args, **kwargs: looked_up.append(1) or run(*args, **kwargs)
    )
    for rows in (2, 3, 4):
        launch(kernel, rows=rows)
    assert len(looked_up) == len(compiled) == 1
    launches = compiled[0].launches
    assert [(found[:3], found[3]) for found in launches] == [((2, 1, 1), 7), ((3, 1, 1), 7), ((4, 1, 1), 7)]
    with told_of_launches():
        launch(kernel)
    by_triton = launches.pop()
    for found in launches:
        assert found[4:6] == by_triton[4:6] == (compiled[0].function, compiled[0].packed_metadata)
        assert found[6:9] == (None, None, None) and found[12:] == by_triton[12:], "all arguments but tensors"
        assert len(found) == len(by_triton)


def test_programs_of_clusters(kernel: TritonKernel, compiled: list[Compiled]) -> None:
    """Triton's launcher multiplies a grid by the programs of a cluster. A kernel is compiled without them."""
    tensor = torch.ones(6, 64)
    for size in (1, 2, 2):
        launched = kernel.in_clusters(size, (6,))
        launched(tensor, tensor[0], tensor, 64, 64, 1e-5, BLOCK=64, PDL=False, num_warps=1)
    found = [(launch[:3], launch[5]) for made in compiled for launch in made.launches]
    assert found == [((6, 1, 1), (1, 1, 0)), ((3, 1, 1), (1, 2, 0)), ((3, 1, 1), (1, 2, 0))]


def test_other_types_constants_and_options_have_other_kernels(kernel: TritonKernel, compiled: list[Compiled]) -> None:
    for _ in range(2):
        launch(kernel)
        launch(kernel, size=63)  # not a multiple of 16
        launch(kernel, num_warps=2)
        tensor = torch.ones(2, 64, dtype=torch.float16)
        kernel[2,](tensor, tensor[0], tensor, 64, 64, 1e-5, BLOCK=64, PDL=False, num_warps=1)
        kernel[2,](tensor, tensor[0], tensor, 64, 64, 1e-5, BLOCK=128, PDL=False, num_warps=1)
    assert [len(each.launches) for each in compiled] == [2] * 5


@contextmanager
def told_of_launches() -> Iterator[Any]:
    """Triton's hook, for which it launches kernels itself."""
    told = SimpleNamespace(calls=[print])
    hook = triton.knobs.runtime.launch_enter_hook
    triton.knobs.runtime.launch_enter_hook = told
    try:
        yield told
    finally:
        triton.knobs.runtime.launch_enter_hook = hook


def test_a_profiler_is_told_of_every_launch(kernel: TritonKernel, compiled: list[Compiled]) -> None:
    launch(kernel)
    with told_of_launches() as told:
        launch(kernel)
    assert compiled[0].launches[1][7] is told
