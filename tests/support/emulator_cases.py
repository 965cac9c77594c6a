"""The small kernels of emulator_cases.cu, which test the emulator of CUDA C++."""

from __future__ import annotations

import ctypes
from pathlib import Path

CASES = Path(__file__).parents[1] / "kernels" / "emulator_cases.cu"


class Work(ctypes.Structure):
    """`Work` of emulator_cases.cu."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("w", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int),
        ("fault", ctypes.c_int),
    )
