"""Linears fused with their neighbours in a decoder layer: the scale of a norm, a gate, or the residual addition.

    fused_linear   y = scale * (x W^T)                 scale from the sums of squares of a `Normed` residual
                   y = silu(gate) * up                 if gated; W holds gate's rows first
    linear_beside  the same, and another linear of the same rows
    linear_logits  the same, in float32
    linear_add     v = residual + x W^T                also writes v times the next norm's weight, and sums of v^2

W is a `LinearOperand`, whose class has the kernels: `DenseWeight` (`dense.py`), `QuantizedWeight` (`quantized.py`).
"""

from torch import Tensor

from overlap_spec_kernels.launch import require
from overlap_spec_kernels.linear.operand import LinearOperand
from overlap_spec_kernels.norm.normed import Norm, Normed, rows_of
from overlap_spec_kernels.norm.rms_norm import OF_NORMS, fits_norm


def fused_linear(x: Tensor | Normed, weight: LinearOperand, gated: bool = False) -> Tensor:
    """`x @ weight.T` of the normalised rows; if gated, then silu(first half) * second half. Sums are float32.

    Shapes: x [T, I], weight [O, I] -> [T, O], or [T, O / 2] if gated. Raises: ValueError naming the argument.
    Sync: never.
    """
    require_linear(rows_of(x), weight)
    if not gated:
        return weight.product(x)
    require(weight.shape[0] % 2 == 0, "weight", "an even number of rows if gated")
    return weight.gated(x)


def linear_beside(x: Tensor | Normed, weight: LinearOperand, other: LinearOperand) -> tuple[Tensor, Tensor]:
    """`fused_linear` of two weights, the second one's result after the first one's.

    Shapes: x [T, I], weight [O, I], other [P, I] -> [T, O], [T, P]. Raises: ValueError naming the argument.
    Sync: never.
    """
    require_linear(rows_of(x), weight)
    require_linear(rows_of(x), other)
    return weight.product_beside(x, other)


def linear_logits(x: Tensor | Normed, weight: LinearOperand) -> Tensor:
    """`x @ weight.T` of the normalised rows in float32: logits rounded to 16 bits would often be equal.

    Shapes: x [T, I], weight [V, I] -> [T, V], float32 or wider. Raises: ValueError naming the argument. Sync: never.
    """
    require_linear(rows_of(x), weight)
    return weight.logits(x)


def linear_add(x: Tensor, weight: LinearOperand, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
    """`residual + x @ weight.T`, prepared for the next norm. Sums are float32.

    `take`: nothing else reads the residual, so the sum may be written over it.
    Shapes: x [T, I], weight [O, I], residual [T, O]. Raises: ValueError naming the argument. Sync: never.
    """
    require_linear(x, weight)
    size_n = weight.shape[0]
    require(residual.shape == (x.shape[0], size_n), "residual", "[T, O]")
    require(residual.stride(1) == 1 and residual.dtype == x.dtype, "residual", "contiguous rows in the dtype of x")
    require(norm.weight.shape == (size_n,) and fits_norm(norm.weight, x.dtype), "norm", f"[O] in {OF_NORMS}")
    require(norm.weight.is_contiguous(), "norm", "contiguous")
    return weight.add(x, residual, norm, take)


def require_linear(x: Tensor, weight: LinearOperand) -> None:
    """Raises: ValueError naming the argument."""
    require(x.dim() == 2 and x.stride(1) == 1, "x", "[T, I] with a contiguous last dimension")
    weight.check(x)
