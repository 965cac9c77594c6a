"""Triton's interpreter, with what it looks up anew at every call of a device function looked up once.

It searches `triton.language` for builtin functions, and makes a table of NumPy's types: more than half of a run.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

Holder = ModuleType | type
search = interpreter._patch_builtin
np_dtype = functools.cache(interpreter._get_np_dtype)
BUILTINS: dict[Holder, list[str]] = {
    holder: [name for name, member in inspect.getmembers(holder) if tl.core.is_builtin(member)]
    for holder in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
}


def patch_builtin(holder: Holder, builder: object, scope: Any) -> None:
    """Make the builtin functions of a module or class the interpreter's, unless they are."""
    if holder not in BUILTINS:
        search(holder, builder, scope)
        return
    if not tl.core.is_builtin(getattr(holder, BUILTINS[holder][0])):
        return  # in a device function, whose kernel has done it
    for name in BUILTINS[holder]:
        if tl.core.is_builtin(member := getattr(holder, name)):
            interpreter._patch_attr(holder, name, member, builder, scope)


def np_dtype_of(type_: tl.core.dtype) -> "np.dtype[Any]":
    """NumPy's type of an element."""
    scalar = type_.element_ty if isinstance(type_, tl.block_type) else type_
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else np_dtype(scalar)


interpreter._patch_builtin = patch_builtin
interpreter._get_np_dtype = np_dtype_of
