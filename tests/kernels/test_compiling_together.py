"""Kernels that are compiled together: nothing is launched, torch reads zeros, and at the end all are there."""

from typing import Any

import pytest
import torch
from overlap_spec_kernels.launch import TritonKernel, compiling_together

async_compile = pytest.importorskip("triton.runtime._async_compile")


class Compiled:
    """A kernel that is loaded when `run` is first looked at."""

    def __init__(self, name: str, done: list[str]) -> None:
        self._name, self._done = name, done

    @property
    def run(self) -> None:
        self._done.append(f"load {self._name}")


class FakeCompiler:
    """A compiled function: notes what is asked of it. A compilation is that of the real compiler's queue."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.done.append(f"launch {grid}")

    def warmup(self, *arguments: Any, grid: tuple[int, ...]) -> None:
        def compile() -> Any:
            self.done.append(f"compile {arguments[0]}")
            return Compiled(arguments[0], self.done)

        async_compile.active_mode.get().submit(arguments[0], compile, lambda kernel: None)


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def kernel(compiler: FakeCompiler) -> TritonKernel:
    kernel = TritonKernel(lambda x: None)
    kernel.__dict__["compiled"] = compiler
    return kernel


def test_nothing_is_launched_and_each_kernel_is_compiled_once(kernel: TritonKernel, compiler: FakeCompiler) -> None:
    with compiling_together(2):
        for name in ("a", "b", "a"):
            kernel[2, 3](name)
    assert sorted(compiler.done) == ["compile a", "compile b", "load a", "load b"]
    kernel[2, 3]("a")
    assert compiler.done[-1] == "launch (2, 3)"


def test_outputs_of_kernels_that_are_not_run_are_zeros() -> None:
    like = torch.ones(3, dtype=torch.int64)
    with compiling_together(1):
        made = [torch.empty(5), torch.empty_like(like), like.new_empty(2, 2), torch.empty_strided((2, 3), (3, 1))]
        found = torch.arange(4)[torch.empty(2, dtype=torch.int64)]
    assert not any(tensor.any() for tensor in made)
    assert found.tolist() == [0, 0] and like.all()


def test_launches_follow_a_block_that_failed(kernel: TritonKernel, compiler: FakeCompiler) -> None:
    with pytest.raises(ZeroDivisionError), compiling_together(1):
        raise ZeroDivisionError
    kernel[1,]("a")
    assert compiler.done == ["launch (1,)"]
