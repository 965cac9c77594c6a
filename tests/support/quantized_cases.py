"""Random weights in 8 and 4 bits, in the layout of the kernels, and their matrices from the definition."""

from typing import NamedTuple

import torch
from overlap_spec_kernels.linear.packing import Packing, packed, part_of, unpacked
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from torch import Tensor


class Case(NamedTuple):
    """Rows of x, a weight [O, I], its bits, the columns that share a scale (0: all), and how scales are stored."""

    rows: int
    size_n: int
    size_k: int
    bits: int
    group: int = 0
    scale_rows: int = 1
    has_zeros: bool = False
    scales: torch.dtype = torch.float32


def weight_of(case: Case, dtype: torch.dtype = torch.bfloat16) -> QuantizedWeight:
    """Random bits, without NaN; scales of different sizes."""
    part = part_of(case.bits, case.group, case.size_k)
    assert part is not None
    num_groups = case.size_k // case.group if case.group else 1
    scales = torch.rand(num_groups, -(-case.size_n // case.scale_rows)) + 0.5
    scales *= case.size_k**-0.5 * (0.01 if case.bits == 8 else 0.2)
    if case.bits == 8:
        data = torch.randint(0, 256, (case.size_n, case.size_k), dtype=torch.uint8)
        data[data & 127 == 127] = 8
    else:
        data = packed(torch.randint(0, 16, (case.size_n, case.size_k), dtype=torch.uint8), part)
    zeros = torch.randint(0, 16, (num_groups, case.size_n)) + 128 if case.has_zeros else None
    scales = scales.to(case.scales if dtype == torch.bfloat16 else dtype)
    zeros = None if zeros is None else zeros.to(torch.bfloat16)
    return QuantizedWeight(data, Packing(scales, zeros, case.bits, part, case.group, case.scale_rows), dtype)


def matrix_of(weight: QuantizedWeight) -> Tensor:
    """Element by element, from the definition."""
    packing, (size_n, size_k) = weight.packing, weight.shape
    if packing.bits == 8:
        values = weight.data.view(torch.float8_e4m3fn).double()
    else:
        values = unpacked(weight.data, packing.part).double()
    rows, columns = torch.meshgrid(torch.arange(size_n), torch.arange(size_k), indexing="ij")
    group = columns // packing.group if packing.group else columns * 0
    if packing.bits == 4:
        values -= 8 if packing.zeros is None else packing.zeros.double()[group, rows] - 128
    return values * packing.scales.double()[group, rows // packing.scale_rows]
