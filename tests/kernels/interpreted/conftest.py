"""Triton's interpreter, with what it makes anew at every operation or call of a device function made once.

It searches `triton.language` for builtin functions, makes a table of NumPy's types, and checks the shape of every
value: two thirds of a run.
"""

import functools
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter

HERE = Path(__file__).parent
Holder = ModuleType | type
Known = tuple[tl.core.tuple, int, str, tl.core.tuple, tl.constexpr]  # shape, size, name; for values: shape, size
search, patch, check_block = interpreter._patch_builtin, interpreter._patch_lang, tl.block_type.__init__
blocks: dict[tuple[object, ...], Known] = {}
NO_SHAPE, ONE = tl.core.tuple([]), tl.constexpr(1)
np_dtype = functools.cache(interpreter._get_np_dtype)
BUILTINS: dict[Holder, list[str]] = {
    holder: [name for name, member in inspect.getmembers(holder) if tl.core.is_builtin(member)]
    for holder in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
}


def patch_builtin(holder: Holder, builder: object, scope: Any) -> None:
    """Make the builtin functions of a module or class the interpreter's."""
    if holder not in BUILTINS:
        search(holder, builder, scope)
        return
    for name in BUILTINS[holder]:
        if tl.core.is_builtin(member := getattr(holder, name)):
            interpreter._patch_attr(holder, name, member, builder, scope)


@functools.cache
def languages_of(function: Any) -> tuple[ModuleType, ...]:
    """What it names `tl`, or `core`."""
    return tuple(value for value in function.__globals__.values() if value is tl or value is tl.core)


def patch_lang(function: Any) -> Any:
    """Patch what the function names `tl`, unless the kernel that calls it has."""
    is_patched = not any(tl.core.is_builtin(language.load) for language in languages_of(function))
    return interpreter._LangPatchScope() if is_patched else patch(function)


def init_block(self: tl.block_type, element_ty: tl.core.dtype, shape: Any) -> None:
    """A type of blocks. Each shape is checked once."""
    sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
    key = (element_ty.name, *sizes)
    if key not in blocks:
        check_block(self, element_ty, shape)
        of_values = tl.core.tuple([tl.constexpr(size) for size in self.shape]), tl.constexpr(self.numel)
        blocks[key] = self.shape, self.numel, self.name, *of_values
    self.element_ty = element_ty
    self.shape, self.numel, self.name, *self.of_values = blocks[key]


def init_value(self: tl.tensor, handle: Any, type: tl.core.dtype) -> None:
    """A value of a type, whose shape it shares."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.of_values if type.is_block() else (NO_SHAPE, ONE)


def np_dtype_of(type_: tl.core.dtype) -> "np.dtype[Any]":
    """NumPy's type of an element."""
    scalar = type_.element_ty if isinstance(type_, tl.block_type) else type_
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else np_dtype(scalar)


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a check without marks the cases 0, 4, 8, .. are quick, and of the others every third is slow, the rest full.

    `items` are those of the whole run.
    """
    for item in items:
        if item.path.parent == HERE:
            if not any(item.get_closest_marker(name) for name in ("slow_but_every", "slow", "full")):
                item.add_marker(pytest.mark.slow_but_every(4))
            if not any(item.get_closest_marker(name) for name in ("full_but_every", "full")):
                item.add_marker(pytest.mark.full_but_every(3))


interpreter._patch_builtin = patch_builtin
interpreter._patch_lang = patch_lang
tl.block_type.__init__ = init_block
tl.tensor.__init__ = init_value
interpreter._get_np_dtype = np_dtype_of
