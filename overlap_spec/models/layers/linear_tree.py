"""The linears of a whole model: finding them, and putting others in their place."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear, DenseLinear
from overlap_spec.models.work import address

T = TypeVar("T")
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
