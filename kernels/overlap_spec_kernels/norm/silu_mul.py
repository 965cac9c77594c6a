"""The gate of a SwiGLU feed-forward layer, and functions of an element whose bits nothing beside it changes.

On a CPU, torch's own silu, sigmoid, softplus and gelu round the elements that fill no vector in another way than the
others; its exp, log1p and tanh do not.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
    warps_for,
)

_MAX_BLOCK = 1024  # elements per program; small enough that few rows still fill a GPU


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv:2002.05202), gate in the first half of each row.

    Shapes: [T, 2I] -> [T, I]. Raises: ValueError naming the argument. Sync: never.
    """
    require(gate_up.dim() == 2 and gate_up.stride(1) == 1, "gate_up", "[T, 2I] with a contiguous last dimension")
    require(gate_up.shape[1] % 2 == 0, "gate_up", "an even number of columns")
    return _silu_mul_triton(gate_up) if runs_triton(gate_up) else silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def silu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x * sigmoid(alpha x), with the same bits whatever is beside an element."""
    if x.is_cuda or x.element_size() == 2:
        return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)
    return x / (1 + torch.exp(-alpha * x))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), with the same bits in any company."""
    return x.sigmoid() if x.is_cuda or x.element_size() == 2 else 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), and x above 20 as torch has it, with the same bits in any company."""
    return F.softplus(x) if x.is_cuda or x.element_size() == 2 else torch.where(x > 20, x, torch.exp(x).log1p())


def mul_by_share(values: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Rows times the sigmoid of a number that another row of each gives: `values * sigmoid(x @ weight.T)`.

    On a GPU in float32, rounded once. Shapes: values [T, I], x [T, H], weight [1, H] -> [T, I]. Raises: ValueError
    naming the argument. Sync: never.
    """
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, H] with a contiguous last dimension")
    require(values.shape[:1] == x.shape[:1] and values.stride(1) == 1, "values", "[T, I], contiguous last dimension")
    require(weight.shape == (1, x.shape[1]) and weight.is_contiguous(), "weight", "[1, H], contiguous")
    require(values.dtype == x.dtype == weight.dtype, "values", "the dtype of x and weight")
    return (_mul_by_share_triton if runs_triton(x) else mul_by_share_reference)(values, x, weight)


def mul_by_share_reference(values: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return values * sigmoid(F.linear(x, weight))


def _mul_by_share_triton(values: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    out, (num_rows, size) = values.new_empty(values.shape), values.shape
    block, inner = next_power_of_2(size), next_power_of_2(x.shape[1])
    _mul_by_share_kernel[(num_rows,)](
        values, x, weight, out, values.stride(0), x.stride(0), size, x.shape[1], BLOCK=block, INNER=inner,
        num_warps=warps_for(max(block, inner)), **dependent_launch(x.device, num_rows),
    )  # fmt: skip
    return out


def mul_by_gates(values: Tensor, gates: Tensor) -> Tensor:
    """Columns times the sigmoids of their gates, of which each may have several neighbours; on a GPU rounded once.

    Shapes: values [T, I], gates [T, n], n of I -> [T, I]. Raises: ValueError naming the argument. Sync: never.
    """
    require(values.dim() == 2 and values.is_contiguous(), "values", "[T, I], contiguous")
    fits = gates.shape[:1] == values.shape[:1] and values.shape[1] % gates.shape[1] == 0 and gates.stride(1) == 1
    require(fits and gates.dtype == values.dtype, "gates", "[T, n], n of I, contiguous columns, the dtype of values")
    return (_mul_by_gates_triton if runs_triton(values) else mul_by_gates_reference)(values, gates)


def mul_by_gates_reference(values: Tensor, gates: Tensor) -> Tensor:
    return (values.view(*gates.shape, -1) * sigmoid(gates)[..., None]).flatten(1)


def _mul_by_gates_triton(values: Tensor, gates: Tensor) -> Tensor:
    out, (num_rows, size) = torch.empty_like(values), values.shape
    block = min(next_power_of_2(size), _MAX_BLOCK)
    _mul_by_gates_kernel[(num_rows, ceil_div(size, block))](
        values, gates, out, gates.stride(0), size, size // gates.shape[1], BLOCK=block,
        **dependent_launch(values.device, num_rows),
    )  # fmt: skip
    return out


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU in its tanh form (Hendrycks and Gimpel 2016, arXiv:1606.08415), with the same bits in any company."""
    if x.is_cuda or x.element_size() == 2:
        return F.gelu(x, approximate="tanh")
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu_tanh(gate) * up, gate in the first half of each row; on a GPU rounded once.

    Shapes: [T, 2I] -> [T, I]. Raises: ValueError naming the argument. Sync: never.
    """
    require(gate_up.dim() == 2 and gate_up.stride(1) == 1, "gate_up", "[T, 2I] with a contiguous last dimension")
    require(gate_up.shape[1] % 2 == 0, "gate_up", "an even number of columns")
    return _silu_mul_triton(gate_up, gelu=True) if runs_triton(gate_up) else gelu_mul_reference(gate_up)


def gelu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate) * up


def _silu_mul_triton(gate_up: Tensor, gelu: bool = False) -> Tensor:
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(next_power_of_2(size), _MAX_BLOCK)
    _silu_mul_kernel[(num_rows, ceil_div(size, block))](gate_up, out, gate_up.stride(0), size, GELU=gelu, BLOCK=block)
    return out


@TritonKernel
def _silu_mul_kernel(
    gate_up_ptr: tl.tensor, out_ptr: tl.tensor, stride: int, size: int, GELU: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and block of columns. GELU in its tanh form is x sigmoid(2 y), where it has tanh(y)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(gate_up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + column, mask=inside, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out_ptr + row * size + column, gate / (1.0 + tl.exp(-inner)) * up, mask=inside)


@TritonKernel
def _mul_by_share_kernel(
    values_ptr: tl.tensor, x_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, stride: int, x_stride: int,
    size: int, inner: int, BLOCK: tl.constexpr, INNER: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    column, place = tl.arange(0, BLOCK), tl.arange(0, INNER)
    weight = tl.load(weight_ptr + place, mask=place < inner, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row * x_stride + place, mask=place < inner, other=0.0).to(tl.float32)
    values = tl.load(values_ptr + row * stride + column, mask=column < size, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-tl.sum(x * weight, 0)))
    tl.store(out_ptr + row * size + column, values * share, mask=column < size)


@TritonKernel
def _mul_by_gates_kernel(
    values_ptr: tl.tensor, gates_ptr: tl.tensor, out_ptr: tl.tensor, stride: int, size: int, share: int,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and block of columns. `share`: columns of a gate."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_inputs(PDL)
    values = tl.load(values_ptr + row * size + column, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gates_ptr + row * stride + column // share, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column, values / (1.0 + tl.exp(-gates)), mask=inside)
