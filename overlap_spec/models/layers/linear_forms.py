"""The forms of a float32 linear on a CPU, and the conversion of a whole model to one of them.

The fastest form depends on the processor and on torch's BLAS, by factors: one row of SmolLM2's linears on two cores
takes 12 ms packed and 26 ms through `F.linear` on an EPYC, 38 and 20 on a Xeon.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed, normalised
from torch import Tensor

from overlap_spec.models.layers.linear import FEW_ROWS, DenseLinear, PackedLinear, linear_columns, linear_packed
from overlap_spec.models.layers.linear_tree import with_linears

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Form:
    """A memory layout of a weight, and the function that multiplies by it."""

    name: str
    lay_out: Callable[[Tensor], Tensor]  # [O, I] -> opaque, or as it is
    run: Callable[[Tensor, Tensor, Tensor | None], Tensor]  # [T, I], laid out, bias -> [T, O]


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, FEW_ROWS)
    return packed


def _as_it_is(weight: Tensor) -> Tensor:
    return weight


FORMS = {
    form.name: form
    for form in (
        Form("packed", _packed, linear_packed),
        Form("packed, rows padded", _packed, lambda x, weight, bias: linear_packed(x, weight, bias, FEW_ROWS)),
        Form("weight @ x.T", _as_it_is, linear_columns),
        Form("x @ weight.T", _as_it_is, F.linear),
    )
}


@dataclass(frozen=True, slots=True)
class FormedLinear(DenseLinear):
    """A linear in the form that was chosen for it."""

    form: Form

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return self.form.run(normalised(x), self.stored, self.bias)


def laid_out(linear: DenseLinear, form: Form) -> Tensor:
    """The weight in the form's layout; a weight that was packed at load is not packed again."""
    if isinstance(linear, PackedLinear) and form.lay_out is _packed:
        return linear.stored
    return form.lay_out(linear.matrix())


def in_form(node: T, form: Form, head: Form) -> T:
    """The tree with dense linears in `form`, heads (fields of that name) in `head`; a shared one stays shared."""

    def formed(linear: DenseLinear, name: str) -> FormedLinear:
        chosen = head if name == "head" else form
        return FormedLinear(laid_out(linear, chosen), linear.bias, chosen)

    return with_linears(node, formed)
