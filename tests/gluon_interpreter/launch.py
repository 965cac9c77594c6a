"""Launches of Gluon kernels that are interpreted, by ops that take a CPU for a Hopper GPU."""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gluon_interpreter.language import names
from gluon_interpreter.machine import Program, Tiles
from gluon_interpreter.tensors import Pointer, Tensor
from overlap_spec_kernels._launch import GluonKernel, TritonKernel
from triton import language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction


def _module(name: str) -> ModuleType:
    """Of the kernels' package, whose attributes of the same names are the ops."""
    return importlib.import_module(f"overlap_spec_kernels.{name}")


_OPS = tuple(_module(name) for name in ("decode_attention", "tree_attention", "fused_linear"))
_LINEARS = tuple(_module(name) for name in ("_streamed_linear", "_warpgroup_linear"))
_ATTENTIONS = tuple(_module(name) for name in ("_decode_attention_gluon", "_tree_attention_gluon"))
_ARGMAX = _module("linear_argmax")  # its second kernel is Triton's, and needs no more than Gluon's names
_WITH_KERNELS = (*_OPS, *_LINEARS, *_ATTENTIONS, _ARGMAX)


class Launch(NamedTuple):
    """What one launch was given."""

    kernel: str
    grid: tuple[int, ...]
    constants: dict[str, Any]


class Hopper:
    """A GPU whose kernels run here and now."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.launches: list[Launch] = []
        self.read_before_wait = frozenset({"weight_ptr", "w_tiles"})  # what no kernel writes

    @property
    def kernels(self) -> list[str]:
        """What was launched, in order."""
        return [launch.kernel for launch in self.launches]

    def run(self, function: Callable[..., None], grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Every program, in an order of chance, as on a GPU."""
        is_dependent = named.pop("launch_pdl", False)
        parameters = inspect.signature(function).parameters
        given = {name: value for name, value in named.items() if name in parameters}
        assert set(named) - set(given) <= {"num_warps", "num_stages", "maxnreg"}
        bound = inspect.signature(function).bind(*arguments, **given).arguments
        constants = {name: value for name, value in bound.items() if is_constant(parameters[name])}
        self.launches.append(Launch(function.__name__, grid, constants))
        passed = {name: value if name in constants else argument(name, value) for name, value in bound.items()}
        whole = (*grid, 1, 1)[:3]
        places = list(itertools.product(*(range(count) for count in whole)))
        random.Random(0).shuffle(places)
        for place in places:
            program = Program(place, whole, is_dependent, self.read_before_wait)
            with self.patch.context() as patch, np.errstate(all="ignore"):
                for module in _WITH_KERNELS:
                    for name, value in names(program).items():
                        patch.setattr(module, name, value, raising=False)
                function(**passed)
            program.require_end()


class Interpreted:
    """In place of a kernel: other kernels call it, ops launch it as `kernel[grid](..)`."""

    def __init__(self, gpu: Hopper, function: Callable[..., Any]) -> None:
        self.gpu, self.function = gpu, function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.gpu.run, self.function, grid)


def is_constant(parameter: inspect.Parameter) -> bool:
    """Whether the compiler knows its value."""
    return str(parameter.annotation).endswith(".constexpr")


def argument(name: str, value: Any) -> Any:
    """As a kernel gets it."""
    if isinstance(value, torch.Tensor):
        return Pointer.to_tensor(name, value)
    if isinstance(value, TensorDescriptor):
        return Tiles(name, value)
    if isinstance(value, float):
        return Tensor(value, tl.float32)
    return Tensor(value, tl.int32 if -(2**31) <= value < 2**31 else tl.int64)


def kernel_function(value: Any, compiled: type) -> Callable[..., Any] | None:
    """The Python function of a kernel, compiled to that type or not yet; None for anything else."""
    plain = GluonKernel if compiled is GluonJITFunction else TritonKernel
    if isinstance(value, plain):
        return value._function
    return value.fn if isinstance(value, compiled) else None


def hopper(patch: pytest.MonkeyPatch, num_multiprocessors: int) -> Hopper:
    """Until the patch is undone, ops take tensors on the CPU for tensors on such a GPU."""
    gpu = Hopper(patch)
    for module in _WITH_KERNELS:
        for name, value in list(vars(module).items()):
            if function := kernel_function(value, JITFunction if module is _ARGMAX else GluonJITFunction):
                patch.setattr(module, name, Interpreted(gpu, function))
    for module in _OPS:
        patch.setattr(module, "runs_triton", lambda tensor: tensor.dtype != torch.float64)
    for module in _LINEARS:
        patch.setattr(module, "num_multiprocessors", lambda device: num_multiprocessors)
    patch.setattr(_module("_launch"), "_can_depend", lambda device: True)
    return gpu
