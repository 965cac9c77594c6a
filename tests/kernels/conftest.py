"""Inputs of every test of this folder, and of `interpreted/`, are drawn from the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from emulators.cuda import CudaEmulator
    from emulators.gluon.launch import Hopper


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Hopper:
    """A Hopper GPU of 4 multiprocessors, whose Gluon kernels run on the CPU."""
    pytest.importorskip("triton", reason="Gluon is part of Triton, whose wheels are for Linux: pip install triton")
    from emulators.gluon.launch import hopper_gpu

    return hopper_gpu(monkeypatch, num_multiprocessors=4)


@pytest.fixture
def nvrtc() -> None:
    """The compiler of CUDA C++ for a real GPU."""
    reason = (
        "needs NVRTC and its bindings, 100 MB that come with PyTorch for CUDA and not for a CPU: where the kernel can "
        "run, this runs by itself; elsewhere, pip install cuda-bindings nvidia-cuda-nvrtc"
    )
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason=reason)
    try:
        bindings.nvrtcVersion()
    except RuntimeError:  # bindings without a library
        pytest.skip(reason)


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels compiled for the emulator are kept: between runs too, where pytest keeps its own folders."""
    base = tmp_path_factory.getbasetemp()
    kept = next((folder for folder in base.parents if folder.name.startswith("pytest-of-")), base)
    return kept / "cuda-emulator"


@pytest.fixture
def cuda_emulator(compiled_kernels: Path) -> CudaEmulator:
    """Runs kernels in CUDA C++ on the CPU."""
    from emulators.cuda import CudaEmulator
    from emulators.cuda.build import compiler

    if compiler() is None:
        pytest.skip("the emulator of CUDA C++ needs a C++ compiler: install g++")
    return CudaEmulator(compiled_kernels)
