"""Kernels that are compiled together: nothing is launched, torch reads zeros, and at the end all are in the cache."""

import contextlib
import importlib
import inspect
import os
import pkgutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import overlap_spec_kernels
import pytest
import torch
from overlap_spec_kernels import compile_pool
from overlap_spec_kernels.compile_pool import _NoDevice, begin_compiler as begin, compiling_together, end_with
from overlap_spec_kernels.launch import NotMadeError, TritonKernel, check_making, compiling_only, made_before
from overlap_spec_kernels.linear.packed_products import split_counters
from overlap_spec_kernels.norm.rms_norm import _rms_norm_kernel
from overlap_spec_kernels.nvrtc import _COMPILER, CudaCode, CudaKernel
from support.command_line import is_running, wait_until_gone

triton = pytest.importorskip("triton", reason="Triton's wheels are for Linux: pip install triton")


class NoStream(_NoDevice):
    """A GPU that is not there, as far as launches ask for it."""

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton compiles for one, into an empty cache."""
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton.runtime.driver.set_active(NoStream(GPUTarget("cuda", 90, 32)))
    yield
    triton.runtime.driver._active = None


@pytest.fixture
def kernel() -> TritonKernel:
    """A kernel that was never compiled."""
    return TritonKernel(_rms_norm_kernel.function)


def launch(kernel: TritonKernel, num_warps: int = 1) -> Any:
    rows = torch.ones(2, 64)
    return kernel[2,](rows, rows[0], rows, 64, 64, 1e-5, BLOCK=64, PDL=False, num_warps=num_warps)


def test_a_process_of_the_pool_ends_with_a_parent_that_is_killed() -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        own = os.getpid()
        if os.fork() == 0:
            end_with(own)
            os.write(writer, str(os.getpid()).encode())
        signal.pause()
    child = int(os.read(reader, 16))
    assert is_running(child)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        assert wait_until_gone([child], 5)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


@pytest.mark.slow
@pytest.mark.parametrize("counted", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_kernel_is_compiled_by_another_process_and_found_later(
    counted: bool, kernel: TritonKernel, hopper: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[bool] = []
    processes = 2 if counted else ProcessPoolExecutor(2, get_context("spawn"), begin, (os.getpid(),))
    with compiling_together(processes) as compilations, compilations.finding():
        for _ in range(3):
            launch(kernel)
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **found: compiled.append(found["cache_hit"]))
    with compiling_only():
        launch(kernel)
    assert compiled == [True]
    assert list(tmp_path.rglob("*.cubin"))


class Processes:
    """That compile nothing. Notes what it is asked to do; a job ends when it is waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.jobs: list[Future[None]] = []
        self.ended: list[int] = []  # by number, as they were waited for
        self.left: list[bool] = []  # whether jobs were cancelled when the processes ended
        monkeypatch.setattr(compile_pool, "wait", self.wait)

    def submit(self, *job: Any) -> Future[None]:
        self.asked.append(job)
        self.jobs.append(Future())
        return self.jobs[-1]

    def wait(self, jobs: list[Future[None]]) -> None:
        for job in jobs:
            self.ended.append(self.jobs.index(job))
            job.set_exception(BrokenProcessPool())  # whatever became of it

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        assert not wait and cancel_futures
        self.left.append(not all(job.done() for job in self.jobs))


@pytest.fixture
def processes(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    return Processes(monkeypatch)


def test_each_kernel_is_asked_for_once(kernel: TritonKernel, processes: Any) -> None:
    with compiling_together(processes) as compilations, compilations.finding():
        for _ in range(3):
            launch(kernel)
    assert [job[2:4] for job in processes.asked] == [("overlap_spec_kernels.norm.rms_norm", "_rms_norm_kernel")]
    assert processes.asked[0][1] == triton.runtime.driver.active.get_current_target()
    kernels, *_ = kernel.compiled.device_caches[0]
    assert not kernels and triton.knobs.runtime.jit_cache_hook is None


def test_kernels_in_cuda_are_asked_for_too(processes: Any) -> None:
    """By what they are compiled from; nothing is loaded or launched."""
    code = CudaCode(Path("a.cu"), ("ROWS=8",))
    with compiling_together(processes) as compilations, compilations.finding():
        for each in (code, code, code._replace(defines=("ROWS=16",))):
            kernel = CudaKernel(each, "a", 128, 0)
            assert kernel.clusters_at_once(2) >= 132
            kernel.launch(1, ())
    assert [(job[0], *job[1].defines) for job in processes.asked] == [
        (CudaCode.compiled, "ROWS=8"),
        (CudaCode.compiled, "ROWS=16"),
    ]


def test_a_launch_waits_for_its_own_kernel_and_the_end_for_all(
    kernel: TritonKernel, processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton then compiles it, which finds it in its cache."""
    loaded: list[object] = []
    monkeypatch.setattr(triton.compiler, "compile", lambda *_, **__: loaded.append(list(processes.ended)))
    codes = [CudaCode(Path("a.cu"), (f"ROWS={rows}",)) for rows in (8, 16)]
    monkeypatch.setattr(CudaCode, "compiled", lambda code: code.defines)
    with compiling_together(processes) as compilations:
        with compilations.finding():
            for warps in (1, 2):
                launch(kernel, warps)
            for code in codes:
                CudaKernel(code, "a", 128, 0).launch(1, ())
        assert compilations.waited() == 0.0 and not processes.ended
        with contextlib.suppress(Exception):  # there is no kernel to launch
            launch(kernel, 2)
        assert (loaded, processes.ended) == ([[1]], [1]) and compilations.waited() > 0.0 == compilations.waited()
        assert _COMPILER.get()(codes[1]) == codes[1].defines and processes.ended == [1, 3]
        assert _COMPILER.get()(CudaCode(Path("b.cu"))) == () and processes.ended == [1, 3], "it was not asked for"
        with made_before(), contextlib.suppress(Exception):  # a capture waits as any launch
            launch(kernel, 1)
        assert processes.ended == [1, 3, 0]
    assert processes.ended == [1, 3, 0, 2] and processes.left == [False]
    assert triton.knobs.runtime.jit_cache_hook is None and _COMPILER.get() is not compilations.compiled


def made_once() -> set[Any]:
    """The functions that make a tensor once, for all launches of a kernel."""
    return {
        function.__wrapped__
        for module in pkgutil.walk_packages(overlap_spec_kernels.__path__, "overlap_spec_kernels.")
        for function in vars(importlib.import_module(module.name)).values()
        if hasattr(function, "cache_info") and function.__annotations__["return"] in ("Tensor", torch.Tensor)
    }


def test_what_launches_share_is_not_made_in_a_capture() -> None:
    found = made_once()
    assert len(found) >= 6
    for make in found:
        sizes = [5] * (len(inspect.signature(make).parameters) - 1)
        with made_before(), pytest.raises(NotMadeError, match="counters"):
            make(*sizes, torch.device("cpu"))
        assert len(make(*sizes, torch.device("cpu"))) > 0
    check_making("a")
    assert not split_counters.__wrapped__(torch.device("cpu")).any()


def test_outputs_of_kernels_that_are_not_run_are_zeros(hopper: None) -> None:
    like = torch.ones(3, dtype=torch.int64)
    before = vars(torch)["empty"], "new_empty" in vars(torch.Tensor)
    with compiling_together(1) as compilations, compilations.finding(), torch.inference_mode():
        made = [torch.empty(5), torch.empty_like(like), like.new_empty(2, 2), torch.empty_strided((2, 3), (3, 1))]
        found = torch.arange(4)[torch.empty(2, dtype=torch.int64)]
    assert not any(tensor.any() for tensor in made)
    assert found.tolist() == [0, 0] and like.all()
    assert [(vars(torch)["empty"], "new_empty" in vars(torch.Tensor))] == [before], "as they were"


def test_launches_follow_a_block_that_failed(kernel: TritonKernel, processes: Any) -> None:
    """What it had found is compiled no more."""
    launched: list[object] = []
    with pytest.raises(ZeroDivisionError), compiling_together(processes) as compilations, compilations.finding():
        launch(kernel)
        raise ZeroDivisionError
    assert processes.left == [True] and triton.knobs.runtime.jit_cache_hook is None
    another = TritonKernel(lambda x: None)
    another.__dict__["compiled"] = {(1,): launched.append}
    another[1,]("a")
    assert launched == ["a"]
