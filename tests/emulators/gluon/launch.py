"""Launches of interpreted Gluon kernels, and ops that take the CPU for a Hopper GPU.

The dispatch, tilings, grids and arguments are those of the ops. Programs run one after another in a shuffled order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from overlap_spec_kernels.launch import GluonKernel, TritonKernel
from triton import language as tl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from emulators.gluon.language import names
from emulators.gluon.program import Program, Tiles
from emulators.gluon.tensors import Pointer, Tensor

_WARPS = 4  # where a launch does not say
# Of a launch; all else is an argument of the kernel.
_OPTIONS = {"num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion"}


def _module(name: str) -> ModuleType:
    """A module of the kernels."""
    return importlib.import_module(f"overlap_spec_kernels.{name}")


_OPS = tuple(
    _module(name)
    for name in (
        *("attention.decode_attention", "attention.tree_attention"),
        *("linear.whole_rows_linear", "linear.ordered"),
    )
)
_LINEARS = tuple(
    _module(f"linear.{name}") for name in ("streamed_linear", "warpgroup_linear", "quantized_stream", "quantized_tiles")
)
_ATTENTIONS = tuple(
    _module(f"attention.{name}")
    for name in ("_decode_attention_gluon", "_decode_attention_8bit", "_tree_attention_gluon")
)
_EXPERTS = _module("experts.sum_of_experts")
# Kernels of these are Triton's, too, but use only functions that Gluon has.
_BOTH = tuple(
    _module(name)
    for name in (
        *("linear.linear_argmax", "attention.large_heads"),
        *("recurrent.gated_delta", "recurrent.replay", "recurrent.row"),
    )
)
_WITH_KERNELS = (*_OPS, *_LINEARS, *_ATTENTIONS, _EXPERTS, *_BOTH)
_BEGIN = _module("language")  # has how every Triton kernel begins


class Launch(NamedTuple):
    """One launch of a kernel."""

    kernel: str
    grid: tuple[int, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


class Hopper:
    """A GPU that runs a kernel when it is launched, and records the launch."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.read_before_wait = frozenset(
            {"weight_ptr", "w_tiles", "scales_ptr", "zeros_ptr"}
        )  # arguments that no kernel writes

    @property
    def kernels(self) -> list[str]:
        """Names of the kernels launched so far."""
        return [launch.kernel for launch in self.launches]

    def run(self, function: Callable[..., None], grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
        """Run every program of the grid."""
        options = {name: named.pop(name) for name in _OPTIONS & set(named)}
        is_dependent = options.get("launch_pdl", False)
        signature = inspect.signature(function)
        bound = signature.bind(*arguments, **named).arguments
        constants = {name: value for name, value in bound.items() if is_constant(signature.parameters[name])}
        assert constants.get("PDL", False) == is_dependent
        self.launches.append(Launch(function.__name__, grid, constants, options))
        passed = {name: value if name in constants else argument(name, value) for name, value in bound.items()}
        grid = (*grid, 1, 1)[:3]
        places = list(itertools.product(*(range(count) for count in grid)))
        random.Random(0).shuffle(places)
        for place in places:
            program = Program(place, grid, options.get("num_warps", _WARPS), is_dependent, self.read_before_wait)
            with replaced_names(program), np.errstate(all="ignore"):
                function(**passed)
            program.require_end()


class Interpreted:
    """Takes the place of a kernel. Another kernel calls it; an op launches it as `kernel[grid](..)`."""

    def __init__(self, gpu: Hopper, function: Callable[..., Any]) -> None:
        self.gpu, self.function = gpu, function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self.gpu.run, self.function, grid)

    def in_clusters(self, size: int, grid: tuple[int, ...]) -> Callable[..., None]:
        return self[grid]


@contextlib.contextmanager
def replaced_names(program: Program) -> Iterator[None]:
    """Let the kernels use the modules of this program."""
    with pytest.MonkeyPatch.context() as patch:
        for module, (name, value) in itertools.product((*_WITH_KERNELS, _BEGIN), names(program).items()):
            patch.setattr(module, name, value, raising=False)
        yield


def is_constant(parameter: inspect.Parameter) -> bool:
    """Whether the kernel takes it as a constexpr."""
    return str(parameter.annotation).endswith(".constexpr")


def argument(name: str, value: Any) -> Any:
    """A launch's argument as the kernel sees it."""
    if isinstance(value, torch.Tensor):
        return Pointer.to_tensor(name, value)
    if isinstance(value, TensorDescriptor):
        return Tiles(name, value)
    if isinstance(value, float):
        return Tensor(value, tl.float32)
    if value is None:
        return None
    return Tensor(value, tl.int32 if -(2**31) <= value < 2**31 else tl.int64)


def hopper_gpu(patch: pytest.MonkeyPatch, num_multiprocessors: int) -> Hopper:
    """Make the ops take the CPU for such a GPU, until `patch` is undone. float64 stays with the references."""
    gpu = Hopper()
    for module in (*_WITH_KERNELS, _BEGIN):
        kind = TritonKernel if module in (*_BOTH, _BEGIN) else GluonKernel
        for name, value in list(vars(module).items()):
            if isinstance(value, kind):
                patch.setattr(module, name, Interpreted(gpu, value.function))
    for module in _OPS:
        patch.setattr(module, "runs_triton", lambda tensor: tensor.dtype != torch.float64)
    for module in _LINEARS:
        patch.setattr(module, "num_multiprocessors", lambda device: num_multiprocessors)
    patch.setattr(_module("launch"), "_can_depend", lambda device: True)
    return gpu
