"""Tiny targets whose linears are integers with scales, as a .gguf file on a CPU is served."""

import fcntl
import functools
from pathlib import Path
from typing import TypeVar

import gguf
import pytest
import torch
from gguf.quants import quantize
from overlap_spec_kernels import GroupedKernel, NoLibraryError, compiled_cpu

from overlap_spec.config import cache_directory
from overlap_spec.models.layers.linear import AnyLinear, DenseLinear
from overlap_spec.models.layers.linear_forms import with_linears
from overlap_spec.models.loading.gguf_source import FORMATS
from overlap_spec.models.quantization.grouped import Groups, grouped_linear

T = TypeVar("T")
GROUPED = "llama in few bits"  # a family of `tiny_loaded`, in float32
LAYERS, HEAD = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0


@functools.cache
def grouped_kernel() -> GroupedKernel:
    """The kernel, compiled once on a machine, by one process of a run; a test is skipped where it cannot be."""
    cache = Path(cache_directory()) / "kernels"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return GroupedKernel(cache)
        except NoLibraryError as error:
            pytest.skip(str(error))


@functools.cache
def grouped_kernel_of_avx2() -> GroupedKernel:
    """The kernel for processors that multiply floats alone, which this one may be too.

    What it computes is written out as vectors: the compiler's own improvements are left out, 9 of its 14 seconds.
    """
    if "avx2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("the kernel for AVX2 cannot run on this processor, which has none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_cpu, "_flags_of_processor", lambda: ("-march=x86-64-v3", "-O1"))
        return grouped_kernel.__wrapped__()


def groups_of(matrix: torch.Tensor, kind: gguf.GGMLQuantizationType) -> Groups:
    """A matrix as gguf quantises it."""
    data = torch.from_numpy(quantize(matrix.float().numpy(), kind))
    return FORMATS[kind].groups(data.flatten(), len(matrix))


def with_grouped_linears(target: T) -> T:
    """4 bits with offsets, as most of the default model; 8 bits in the head."""

    def grouped(linear: DenseLinear, name: str) -> AnyLinear:
        groups = groups_of(linear.matrix(), HEAD if name == "head" else LAYERS)
        return grouped_linear([groups], linear.bias, grouped_kernel())

    return with_linears(target, grouped)
