"""Triton's interpreter, with short ways for what it makes anew at every operation, call or value.

Results are the interpreter's own, to the bit, and so are its errors: whatever has no short way takes the long one. It
searches `triton.language` for builtin functions, makes a table of NumPy's types, checks the shape of every value, finds
the common type and shape of operands that have one, and adds integers a second time in 64 bits for an assertion that
only `debug` makes. Four fifths of a run were these.
"""

import functools
import inspect
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

Holder = ModuleType | type
Known = tuple[tl.core.tuple, int, str, tl.core.tuple, tl.constexpr]  # shape, size, name; for values: shape, size
search, patch, check_block = interpreter._patch_builtin, interpreter._patch_lang, tl.block_type.__init__
check_operands, broadcast = TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value
convert = TritonSemantic.cast
unwrap = tl.core._unwrap_if_constexpr
blocks: dict[tuple[object, ...], Known] = {}
types_of_elements: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}
NO_SHAPE, ONE = tl.core.tuple([]), tl.constexpr(1)
np_dtype = functools.cache(interpreter._get_np_dtype)
BUILTINS: dict[Holder, list[str]] = {
    holder: [name for name, member in inspect.getmembers(holder) if tl.core.is_builtin(member)]
    for holder in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
}
ELEMENTS = [
    *(tl.int1, tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64),
    *(tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5, tl.float8e4nv),
]
SIZES = {id(element): max(element.primitive_bitwidth // 8, 1) for element in ELEMENTS}  # there is one object of each
INTEGERS = {id(element): range(-(1 << bits - 1), 1 << bits - 1) for element, bits in ((tl.int32, 32), (tl.int64, 64))}
FLOATS = {id(tl.float32), id(tl.float64)}
HOLD_NOTHING = {tl.tensor, int, bool, float, str, type(None), tl.dtype, tl.block_type, tl.pointer_type}


def patch_builtin(holder: Holder, builder: object, scope: Any) -> None:
    """Make the builtin functions of a module or class the interpreter's."""
    if holder not in BUILTINS:
        search(holder, builder, scope)
        return
    for name in BUILTINS[holder]:
        if tl.core.is_builtin(member := getattr(holder, name)):
            scope.set_attr(holder, name, interpreted(member))


@functools.cache
def interpreted(member: Any) -> Any:
    """A builtin function as the interpreter calls it."""

    function = getattr(member, "__wrapped__", member)  # by what asks for `_semantic`

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


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
    self.element_ty, self.sizes = element_ty, key[1:]
    self.shape, self.numel, self.name, *self.of_values = blocks[key]


def with_element_ty(self: tl.block_type, scalar_ty: tl.core.dtype) -> tl.block_type:
    """Blocks of that shape."""
    return block_of(scalar_ty, self.sizes)


def block_of(element: tl.core.dtype, shape: tuple[int, ...]) -> tl.block_type:
    """There is one type of each shape of each kind of number."""
    if type(element) is not tl.core.dtype:  # a pointer
        return tl.block_type(element, list(shape))
    key = (element.name, shape)
    if key not in types_of_elements:
        types_of_elements[key] = tl.block_type(element, list(shape))
    return types_of_elements[key]


def init_value(self: tl.tensor, handle: Any, type: tl.core.dtype) -> None:
    """A value of a type, whose shape it shares."""
    self.handle, self.type = handle, type
    if type.__class__ is tl.block_type:
        self.dtype, (self.shape, self.numel) = type.element_ty, type.of_values
    else:
        self.dtype, self.shape, self.numel = type.scalar, NO_SHAPE, ONE


def init_handle(self: Any, data: "np.ndarray[Any, Any]", dtype: tl.core.dtype, attr: Any = None) -> None:
    """NumPy's numbers of a value. Their size is checked."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if data.itemsize > SIZES.get(id(dtype), 0):
        self.__post_init__()


def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    """Of two handles."""
    output, type_ = op(lhs.data, rhs.data), lhs.dtype.scalar
    if output.itemsize > SIZES.get(id(type_), 0) and not interpreter._validate_np_data_size(output, type_):
        output = output.astype(interpreter._get_np_dtype(type_))
    return interpreter.TensorHandle(output, type_)


def np_dtype_of(type_: tl.core.dtype) -> "np.dtype[Any]":
    """NumPy's type of an element."""
    scalar = type_.element_ty if isinstance(type_, tl.block_type) else type_
    return np.dtype(np.uint64) if isinstance(scalar, tl.pointer_type) else np_dtype(scalar)


def unwrap_if_constexpr(value: Any) -> Any:
    """What a `constexpr` holds; any other value."""
    kind = type(value)
    if kind in HOLD_NOTHING:
        return value
    return value.value if kind is tl.constexpr else unwrap(value)


def cast(self: TritonSemantic, value: tl.tensor, type_: tl.core.dtype, rounding: str | None = None) -> tl.tensor:
    """A value in another type of elements, or in its own."""
    return value if value.dtype is type_.scalar else convert(self, value, type_, rounding)


def spread(value: tl.tensor, shape: tuple[int, ...], is_scalar: bool) -> tl.tensor:
    """A value repeated along the axes of a shape in which it has one element."""
    handle = value.handle
    data = np.empty(shape, interpreter._get_np_dtype(handle.dtype) if is_scalar else handle.data.dtype)
    data[...] = handle.data
    type_ = block_of(value.dtype, shape)
    return tl.tensor(interpreter.TensorHandle(data, handle.dtype.scalar), type_)


@functools.cache
def common_shape(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """Of two blocks of as many axes, which are as long or have one element; else None."""
    if len(left) != len(right) or any(1 != one != other != 1 for one, other in zip(left, right, strict=True)):
        return None
    return tuple(max(sizes) for sizes in zip(left, right, strict=True))


def in_one_shape(self: TritonSemantic, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Both, broadcast if their shapes differ."""
    if lhs.type is rhs.type or lhs.shape is rhs.shape:
        return lhs, rhs
    if not rhs.type.is_block():
        return lhs, spread(rhs, lhs.type.sizes, is_scalar=True)
    if not lhs.type.is_block():
        return spread(lhs, rhs.type.sizes, is_scalar=True), rhs
    if (shape := common_shape(lhs.type.sizes, rhs.type.sizes)) is None:
        return broadcast(self, lhs, rhs)
    return tuple(each if each.type.sizes == shape else spread(each, shape, is_scalar=False) for each in (lhs, rhs))


def filled(like: tl.tensor, number: Any) -> tl.tensor:
    """A number as often as a value has elements, in its type."""
    data = np.empty(like.type.sizes if like.type.is_block() else (1,), interpreter._get_np_dtype(like.dtype))
    data[...] = number
    return tl.tensor(interpreter.TensorHandle(data, like.dtype), like.type)


def holds(element: tl.core.dtype, number: Any) -> bool:
    """Whether a number beside values of that type is one of them."""
    if type(number) is int and (integers := INTEGERS.get(id(element))) is not None:
        return number in integers
    return id(element) in FLOATS and (type(number) is float or type(number) is int and abs(number) < 1 << 31)


def operands(
    self: TritonSemantic, lhs: Any, rhs: Any, lhs_ptr: bool = False, rhs_ptr: bool = False, *rules: bool
) -> tuple[tl.tensor, tl.tensor]:
    """Both in one type and shape. `rules`: `arithmetic_check`, `div_or_mod`."""
    is_left, is_right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
    if rules:
        pass
    elif is_left and is_right:
        alike = lhs.dtype is rhs.dtype and type(lhs.dtype) is tl.core.dtype
        if alike or lhs_ptr and type(lhs.dtype) is tl.pointer_type and id(rhs.dtype) in INTEGERS:
            return self.broadcast_impl_value(lhs, rhs)
    elif is_left and holds(lhs.dtype, rhs):
        return lhs, filled(lhs, rhs)
    elif is_right and holds(rhs.dtype, lhs):
        return filled(rhs, lhs), rhs
    return check_operands(self, lhs, rhs, lhs_ptr, rhs_ptr, *rules)


def install() -> None:
    """In this process, for good."""
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = np_dtype_of
    interpreter.TensorHandle.__init__ = init_handle
    interpreter.InterpreterBuilder.binary_op = binary_op
    tl.block_type.__init__ = init_block
    tl.block_type.with_element_ty = with_element_ty
    tl.tensor.__init__ = init_value
    tl.core._unwrap_if_constexpr = unwrap_if_constexpr
    TritonSemantic.binary_op_type_checking_impl = operands
    TritonSemantic.broadcast_impl_value = in_one_shape
    TritonSemantic.cast = cast
    if not interpreter.interpreter_builder.options.debug:  # else the sums in 64 bits are compared
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
