"""Finds the linears of a whole model and puts others in their place.

**Forms of a float32 linear on a CPU**: the fastest depends on the processor and on torch's BLAS, by factors. One row of
SmolLM2's linears on two cores takes 12 ms packed and 26 ms through `F.linear` on an EPYC, 38 and 20 on a Xeon.

**Linears whose rows have the same bits in any company**, on a GPU, for `--enable-deterministic-inference`: chosen once,
when a model is loaded. What multiplies is chosen by the weight and not by a flag.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed, OrderedQuantizedWeight, OrderedWeight, QuantizedWeight, normalised
from torch import Tensor

from overlap_spec.models.layers.latent import LatentAttention
from overlap_spec.models.layers.linear import (
    FEW_ROWS,
    AnyLinear,
    DenseLinear,
    FusedLinear,
    PackedLinear,
    linear_columns,
    linear_packed,
)
from overlap_spec.models.quantization.linear import QuantizedLinear
from overlap_spec.models.work import address

IN_16_BITS = (torch.bfloat16, torch.float16)

T = TypeVar("T")
K = TypeVar("K")
Change = Callable[[DenseLinear, str], AnyLinear]  # a linear and the name of the field that holds it -> its successor


def linears_of(node: object) -> Iterator[DenseLinear]:
    """Every dense linear below a tree of dataclasses and tuples, in order."""
    if isinstance(node, DenseLinear):
        yield node
    elif isinstance(node, tuple):
        for child in node:
            yield from linears_of(child)
    elif is_dataclass(node):
        for field in fields(node):
            yield from linears_of(getattr(node, field.name))


def with_linears(node: T, change: Change) -> T:
    """The same tree, with `change(linear, name)` for each dense linear; a shared one stays shared."""
    return cast(T, _Changer(change).visit(node, ""))


def with_nodes(node: T, kind: type[K], change: Callable[[K], K]) -> T:
    """The same tree, with `change(part)` for each part of a kind; a shared one stays shared."""
    return cast(T, _NodeChanger(kind, change).visit(node, ""))


class _Changer:
    def __init__(self, change: Change) -> None:
        self._change = change
        self._changed: dict[tuple[tuple[int, int], int], AnyLinear] = {}
        self._kept: list[Tensor] = []  # so that no address is used again

    def visit(self, node: Any, name: str) -> Any:
        if isinstance(node, DenseLinear):
            return self._changed_linear(node, name)
        if isinstance(node, tuple) and type(node) is tuple:
            children = tuple(self.visit(child, name) for child in node)
            return children if any(new is not old for new, old in zip(children, node, strict=True)) else node
        if is_dataclass(node) and not isinstance(node, type):
            return self._rebuilt(node)
        return node

    def _rebuilt(self, node: Any) -> Any:
        old = {field.name: getattr(node, field.name) for field in fields(node) if field.init}
        new = {name: self.visit(value, name) for name, value in old.items()}
        changed = {name: value for name, value in new.items() if value is not old[name]}
        return replace(node, **changed) if changed else node

    def _changed_linear(self, linear: DenseLinear, name: str) -> AnyLinear:
        stored = linear.stored
        key = address(stored), linear.out_features  # the first rows of a linear are at its address
        if key not in self._changed:
            self._kept.append(stored)
            self._changed[key] = self._change(linear, name)
        return self._changed[key]


class _NodeChanger(_Changer):
    def __init__(self, kind: type[Any], change: Callable[[Any], Any]) -> None:
        self._kind, self._change_node = kind, change
        self._done: dict[int, tuple[Any, Any]] = {}  # the old one is kept, so that no id is used again

    def visit(self, node: Any, name: str) -> Any:
        if isinstance(node, self._kind):
            if id(node) not in self._done:
                self._done[id(node)] = node, self._change_node(node)
            return self._done[id(node)][1]
        return node if isinstance(node, DenseLinear) else super().visit(node, name)


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


@dataclass(frozen=True, slots=True)
class OrderedLinear(FusedLinear, DenseLinear):
    """A linear in 16 bits that adds up K in one order, for any number of rows."""

    bias: Tensor | None = None  # [O]

    @property
    def operand(self) -> OrderedWeight:
        return OrderedWeight(self.stored, self.bias)

    @property
    def bias_after(self) -> Tensor | None:
        return None

    def rows(self, ids: Tensor | slice) -> AnyLinear:
        return OrderedLinear(self.stored[ids], None if self.bias is None else self.bias[ids])


def in_one_order(node: T) -> T:
    """A model, all of whose linears in 16, 8 and 4 bits are ordered ones, and products of heads of latent attention.

    Only weights in fragment order are copied.
    """

    def of_few_bits(linear: QuantizedLinear) -> QuantizedLinear:
        weight = linear.operand
        if not isinstance(weight, QuantizedWeight) or weight.device.type == "meta":
            return linear
        return replace(linear, operand=OrderedQuantizedWeight.of(weight))

    def ordered(linear: DenseLinear, name: str) -> AnyLinear:
        return OrderedLinear(linear.stored, linear.bias) if linear.compute_dtype in IN_16_BITS else linear

    def of_latents(attention: LatentAttention) -> LatentAttention:
        return attention.ordered() if attention.value.dtype in IN_16_BITS else attention

    with_all = with_nodes(with_linears(node, ordered), QuantizedLinear, of_few_bits)
    return with_nodes(with_all, LatentAttention, of_latents)
