"""The weight of a linear: a class for each format, with the kernels of that format.

The ops (`fused_linear`, `linear_logits`, `linear_add`, `linear_argmax`) check what all formats have in common and call
the operand. A new format implements `check`, `product` and `logits`. The defaults of `gated`, `add` and `argmax` run a
product and then separate ops; a format overrides them where it has a fused kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from overlap_spec_kernels.logits.columns import largest_columns
from overlap_spec_kernels.norm.add_rms_norm import add_rms_norm
from overlap_spec_kernels.norm.normed import Norm, Normed
from overlap_spec_kernels.norm.silu_mul import silu_mul


class LinearOperand(ABC):
    """A weight W [O, I] in some format."""

    __slots__ = ()

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """O and I."""

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Raises: ValueError naming `weight` if it cannot multiply rows of this type and width. Shapes: x [T, I]."""

    @abstractmethod
    def product(self, x: Tensor | Normed) -> Tensor:
        """`x @ W.T` of the normalised rows, in their type. Shapes: [T, I] -> [T, O]."""

    def product_beside(self, x: Tensor | Normed, other: LinearOperand) -> tuple[Tensor, Tensor]:
        """`product`, and that of another weight, which is launched first: this one comes meanwhile."""
        beside = other.product(x)
        return self.product(x), beside

    @abstractmethod
    def logits(self, x: Tensor | Normed) -> Tensor:
        """`product` without rounding to 16 bits. Shapes: [T, I] -> [T, O], float32 or wider."""

    def gated(self, x: Tensor | Normed) -> Tensor:
        """silu(first half) * second half of the product. Shapes: [T, I] -> [T, O / 2]."""
        return silu_mul(self.product(x))

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        """See `linear_add`. Shapes: x [T, I], residual [T, O]."""
        rows, values = add_rms_norm(self.product(x), residual, norm.weight, norm.eps)
        return Normed(values, rows)

    def argmax(self, x: Tensor | Normed, ids: Tensor | None) -> Tensor:
        """The column of each row's largest logit, the first of equals, mapped through `ids` if given.

        What `largest_columns` gives where that logit is not finite. Shapes: x [T, I], ids [O] i64 -> [T] i64.
        """
        return largest_columns(self.logits(x), ids)
