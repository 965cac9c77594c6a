"""Launches of emulated kernels, by themselves or in place of the launches of a kernel's Python module."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from overlap_spec_kernels.nvrtc import CudaCode
from torch import Tensor

from emulators.cuda.build import library

_TENSOR_MAP_MARK = 0x70616D726F736E65


class EmulatorError(RuntimeError):
    """What a kernel did wrong, or where its threads wait for one another."""


class TensorMap(ctypes.Structure):
    """`TensorMap` of cpp/ptx_copies.h, as large as a real one."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("mark", "address", "rows", "columns", "pitch", "box_rows", "box_columns", "item_bytes", "swizzle")
    ) + (("outer", ctypes.c_uint64 * 6), ("rest", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    """`Launch` of cpp/machine.h."""

    _fields_ = (
        ("programs", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("kernel", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("num_before", ctypes.c_uint32),
    )


def tensor_map(matrix: Tensor, rows: int, columns: int, swizzle: int = 128) -> TensorMap:
    """As `nvrtc.tensor_map`. Shapes: matrix [R, C]."""
    return box_map(matrix, (rows, columns), swizzle)


def box_map(tensor: Tensor, box: tuple[int, ...], swizzle: int = 128) -> TensorMap:
    """As `nvrtc.box_map`, of two dimensions or four."""
    item = tensor.element_size()
    (*outer_sizes, rows, columns), (*outer_box, box_rows, box_columns) = tensor.shape, box
    pitches = [stride * item for stride in tensor.stride()]
    assert tensor.stride(-1) == 1
    assert all(pitch % 16 == 0 for pitch in pitches[:-1])
    matrix = tensor.data_ptr(), rows, columns, pitches[-2], box_rows, box_columns, item, swizzle
    outer = [value for dim in reversed(list(zip(outer_sizes, pitches, outer_box, strict=False))) for value in dim]
    return TensorMap(_TENSOR_MAP_MARK, *matrix, (ctypes.c_uint64 * 6)(*(outer or [1, 0, 1] * 2)))


@dataclass(frozen=True)
class Kernel:
    """A kernel that was compiled for the emulator."""

    code: ctypes.CDLL
    name: str

    def launch(
        self,
        programs: int,
        threads: int,
        shared_bytes: int,
        arguments: Sequence[ctypes.Structure],
        *,
        cluster: int | None = None,
        seed: int = 0,
        written_before: Sequence[Tensor] = (),
    ) -> None:
        """Run it to its end.

        `cluster` defaults to the source's `__cluster_dims__`. The order of events follows from `seed`. `written_before`
        are tensors that a kernel before this one writes: until `griddepcontrol.wait` returns, they hold NaN.

        Raises: EmulatorError.
        """
        if cluster is None:
            cluster = getattr(self.code, f"emulated_cluster_{self.name}")()
        final = [tensor.clone(memory_format=torch.preserve_format) for tensor in written_before]
        pointers = (ctypes.c_void_p * max(1, len(arguments)))(*map(ctypes.addressof, arguments))
        copies = [(to.data_ptr(), of.data_ptr(), _bytes(to)) for to, of in zip(written_before, final, strict=True)]
        before = (ctypes.c_uint64 * max(1, 3 * len(copies)))(*(value for copy in copies for value in copy))
        for to, _, size in copies:
            ctypes.memset(to, 0xFF, size)
        kernel = ctypes.cast(getattr(self.code, f"emulated_{self.name}"), ctypes.c_void_p)
        given = programs, cluster, threads, shared_bytes, seed, kernel, ctypes.addressof(pointers)
        run = self.code.emulator_run
        run.restype = ctypes.c_char_p
        error = run(ctypes.byref(_Launch(*given, ctypes.addressof(before), len(copies))))
        for tensor, values in zip(written_before, final, strict=True):  # a launch that failed may not have written them
            tensor.copy_(values)
        if error is not None:
            raise EmulatorError(f"{self.name}, seed {seed}: {error.decode()}")


def _bytes(tensor: Tensor) -> int:
    assert tensor.is_contiguous(), "the kernel before writes whole tensors"
    return tensor.nbytes


@dataclass
class CudaEmulator:
    """Compiles into a cache; stands in for the GPU of a kernel's Python module."""

    cache: Path
    multiprocessors: int = 4
    seed: int = 0  # of launches by a module
    written_before: list[Tensor] = field(default_factory=list)  # of launches by a module

    def code(self, source: Path, defines: tuple[str, ...] = (), headers: dict[str, str] | None = None) -> ctypes.CDLL:
        """Of a source, as `CudaCode` describes it."""
        return library(source, defines, headers or {}, self.cache)

    def kernel(
        self, source: Path, name: str, defines: tuple[str, ...] = (), headers: dict[str, str] | None = None
    ) -> Kernel:
        """A kernel of a source."""
        return Kernel(self.code(source, defines, headers), name)

    def running(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType, *caches: Any) -> Iterator[CudaEmulator]:
        """A fixture: Hopper's kernels of a module run here. `caches`: what it makes once, emptied before and behind."""
        for cache in caches:
            cache.cache_clear()
        self.install(monkeypatch, module)
        monkeypatch.setattr(module, "runs_hopper", lambda device: True)
        yield self
        for cache in caches:
            cache.cache_clear()

    def install(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Let a module that launches through nvrtc.py launch here. Its caller clears caches of kernels."""
        emulator = self

        class CudaKernel:
            """As `nvrtc.CudaKernel`."""

            def __init__(self, code: CudaCode, name: str, threads: int, shared: int) -> None:
                made = emulator.code(code.source, code.defines, dict(code.headers))
                self._kernel, self._threads, self._shared = Kernel(made, name), threads, shared

            def load(self) -> None:
                """It is compiled when it is made."""

            def clusters_at_once(self, size: int) -> int:
                return max(emulator.multiprocessors // size, 1)

            def launch(self, programs: int, arguments: tuple[ctypes.Structure, ...]) -> None:
                self._kernel.launch(
                    programs,
                    self._threads,
                    self._shared,
                    arguments,
                    seed=emulator.seed,
                    written_before=emulator.written_before,
                )

        for name, replacement in (("CudaKernel", CudaKernel), ("tensor_map", tensor_map), ("box_map", box_map)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, replacement)
