"""Windows of Gated DeltaNet on Hopper, in CUDA C++ (delta_window.cu): one launch, with the bits of `gated_delta.py`'s.

Its programs have a whole head, so that norm and gate follow at once, and nothing is left to move. What a request had
accepted is computed, and its state written, before the kernels ahead have ended: they only give new rows. Of more
heads than run at once a program has several.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import shared_zeros
from overlap_spec_kernels.linear.call import num_multiprocessors
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "delta_window.cu"
_SIZES = {"K": 4, "DK": 128, "DV": 128, "G": 2}
_STORED = torch.float32, torch.bfloat16
_MOST_ROWS = 32  # of a window, whose output is normalised at the end
_MOST_GROUP = 8  # programs of a cluster
_MOST_REQUESTS = 1024
_THREADS, _PROGRAMS = 256, 2  # of a program; on a multiprocessor


class Windows(NamedTuple):
    """What `gated_delta` is given; `gates` begin with the first row's."""

    projected: Tensor
    gates: Tensor
    slots: Tensor
    positions: Tensor
    memory: Tensor
    inputs: Tensor
    window: Tensor
    position: Tensor
    conv: Tensor
    steepness: Tensor
    offset: Tensor
    norm: Tensor


class _Work(ctypes.Structure):
    """`Work` of delta_window.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*Windows._fields, "out", "counters")),
        *(("scale", ctypes.c_float), ("eps", ctypes.c_float), ("most", ctypes.c_int), ("width", ctypes.c_int)),
        ("heads", ctypes.c_int),
    )


def takes(given: Windows, sizes: dict[str, int]) -> bool:
    """Whether the kernel computes this, without a bias: by shapes and types alone. `sizes`: as in `gated_delta`."""
    fits = _SIZES.items() <= sizes.items() and sizes["N"] % 2 == 0 and sizes["N"] // sizes["M"] <= _MOST_GROUP
    few = 0 < len(given.projected) <= _MOST_ROWS * len(given.slots) and len(given.slots) <= _MOST_REQUESTS
    narrow = {each.dtype for each in (*given[:2], given.inputs, given.window, given.conv)} == {torch.bfloat16}
    exact = {each.dtype for each in given[-3:]} == {torch.float32} and given.memory.dtype in _STORED
    aligned = all(each.data_ptr() % 16 == 0 for each in (given.memory, given.conv, given.norm))
    return fits and few and narrow and exact and aligned and runs_hopper(given.projected.device)


def run(given: Windows, sizes: dict[str, int], eps: float, are_apart: bool) -> Tensor:
    """See `gated_delta`. Shapes: -> [T, n dv]. Sync: never."""
    batch, device, heads, group = len(given.slots), given.projected.device, sizes["N"], sizes["N"] // sizes["M"]
    out = given.projected.new_empty(len(given.projected), heads * sizes["DV"])
    pointers = (each.data_ptr() for each in (*given, out, _counters(device)))
    programs = num_multiprocessors(device) * _PROGRAMS // group * group
    work = _Work(*pointers, sizes["DK"] ** -0.5, eps, given.window.shape[1], len(out) // batch, batch * heads)
    names = {"HEADS": heads, "KEY_HEADS": sizes["M"], "STORED": given.memory.element_size(), "APART": int(are_apart)}
    several = batch * heads > programs
    names["SEVERAL"], ahead = several, sizes["DK"] * sizes["DV"] * given.memory.element_size() if several else 0
    kernel = _kernel(tuple(f"{name}={int(value)}" for name, value in names.items()), ahead, device)
    kernel.launch(min(batch * heads, programs), (work,))
    return out


@functools.cache
def _kernel(defines: tuple[str, ...], ahead: int, device: torch.device) -> CudaKernel:
    return CudaKernel(CudaCode(SOURCE, defines), "delta_window", _THREADS, ahead)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Programs of a request that have read its position; 0 between launches. Shapes: -> [requests] i32."""
    return shared_zeros(_MOST_REQUESTS, device)
