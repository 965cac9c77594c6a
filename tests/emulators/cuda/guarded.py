"""Tensors after whose end no memory is: a kernel that reads or writes beyond it fails."""

from __future__ import annotations

import ctypes
import mmap
import weakref

import torch
from torch import Tensor

_ALIGNMENT = 16  # of a tensor's beginning, which the copy engine needs


def guarded(tensor: Tensor) -> Tensor:
    """A copy whose last byte (or 15 bytes less, so that its beginning is aligned) is the last of its memory page."""
    size = -(-max(tensor.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _protect(start + pages, mmap.PAGESIZE, False)
    buffer = (ctypes.c_char * size).from_address(start + pages - size)
    copy = torch.frombuffer(buffer, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape)
    weakref.finalize(buffer, _release, memory, start + pages)
    return copy.copy_(tensor)


def _release(memory: mmap.mmap, guard: int) -> None:
    _protect(guard, mmap.PAGESIZE, True)  # the memory is freed by its owner, which may fill it first
    del memory


def _protect(address: int, size: int, accessible: bool) -> None:
    flags = mmap.PROT_READ | mmap.PROT_WRITE if accessible else 0
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), flags):
        raise OSError(ctypes.get_errno(), "mprotect")
