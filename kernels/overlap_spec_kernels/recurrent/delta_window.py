"""Windows of Gated DeltaNet on Hopper, in CUDA C++ (delta_window.cu): one launch, with the bits of `gated_delta.py`'s.

Its programs have a whole head, so that norm and gate follow at once, and nothing is left to move. What a request had
accepted is computed, and its state written, before the kernels ahead have ended: they only give new rows.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import shared_zeros
from overlap_spec_kernels.nvrtc import CudaCode, CudaKernel, runs_hopper

SOURCE = Path(__file__).parent / "cuda" / "delta_window.cu"
_SIZES = {"K": 4, "DK": 128, "DV": 128, "G": 2}
_STORED = torch.float32, torch.bfloat16
_MOST_ROWS = 32  # of a window, whose output is normalised at the end
_MOST_GROUP = 8  # programs of a cluster
_MOST_REQUESTS = 1024
_THREADS = 256


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
    batch, device, heads = len(given.slots), given.projected.device, sizes["N"]
    out = given.projected.new_empty(len(given.projected), heads * sizes["DV"])
    pointers = (each.data_ptr() for each in (*given, out, _counters(device)))
    work = _Work(*pointers, sizes["DK"] ** -0.5, eps, given.window.shape[1], len(out) // batch)
    names = {"HEADS": heads, "KEY_HEADS": sizes["M"], "STORED": given.memory.element_size(), "APART": int(are_apart)}
    _kernel(tuple(f"{name}={value}" for name, value in names.items()), device).launch(batch * heads, (work,))
    return out


@functools.cache
def _kernel(defines: tuple[str, ...], device: torch.device) -> CudaKernel:
    return CudaKernel(CudaCode(SOURCE, defines), "delta_window", _THREADS, 0)


@functools.cache
def _counters(device: torch.device) -> Tensor:
    """Programs of a request that have read its position; 0 between launches. Shapes: -> [requests] i32."""
    return shared_zeros(_MOST_REQUESTS, device)
