"""The small kernels of cases.cu, which test the emulator of CUDA C++."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from overlap_spec_kernels.attention.paged_chunks import products_header
from torch import Tensor

CASES = Path(__file__).with_name("cases.cu")
HEADERS = {"attention_products.h": products_header(128, torch.bfloat16)}


class Work(ctypes.Structure):
    """`Work` of cases.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("fault", ctypes.c_int),
    )


class AcrossRows:
    """Operands of `products_across_rows`."""

    box = (2, 2, 8, 64)

    def __init__(self) -> None:
        self.x = torch.randint(-8, 9, (64, 32)).to(torch.bfloat16)
        self.w = torch.randint(-8, 9, (4, 8, 2, 128)).to(torch.bfloat16)

    @staticmethod
    def in_boxes(w: Tensor) -> Tensor:
        """Shapes: [4, 8, 2, 128] -> [eights, columns in 64s, 8, 64]."""
        return w.view(4, 8, 4, 64).transpose(1, 2)

    @property
    def expected(self) -> Tensor:
        y = self.w[[2, 3, 0, 1], :, 1].reshape(32, 128)
        return self.x.float() @ y.float()
