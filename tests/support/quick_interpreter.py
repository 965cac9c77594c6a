"""Triton's interpreter, with short ways for what it makes anew at every operation, call or value.

Results are the interpreter's own, to the bit, and so are its errors: whatever has no short way takes the long one. It
searches `triton.language` for builtin functions, makes a table of NumPy's types, checks the shape of every value, finds
the common type and shape of operands that have one, and adds integers a second time in 64 bits for an assertion that
only `debug` makes. Four fifths of a run were these. Operators between numbers of one type are NumPy's own, which
broadcasts as Triton does.
"""

import functools
import inspect
from collections.abc import Callable
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
convert, new, load_by_rules = TritonSemantic.cast, object.__new__, TritonSemantic._load_legacy
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
NUMPY = {id(kind): np.dtype(name) for kind, name in ((tl.int32, "i4"), (tl.int64, "i8"), (tl.float32, "f4"))}
BITS = {*INTEGERS, id(tl.int1)}
# Operator of values: NumPy's, the types that it may have, whether its result is one of truths
OPERATORS = {
    **dict.fromkeys(("__add__", "__radd__"), (np.add, set(NUMPY), False)),
    **dict.fromkeys(("__sub__", "__rsub__"), (np.subtract, set(NUMPY), False)),
    **dict.fromkeys(("__mul__", "__rmul__"), (np.multiply, set(NUMPY), False)),
    "__and__": (np.bitwise_and, BITS, False),
    "__or__": (np.bitwise_or, BITS, False),
    "__lt__": (np.less, set(NUMPY), True),
    "__le__": (np.less_equal, set(NUMPY), True),
    "__gt__": (np.greater, set(NUMPY), True),
    "__ge__": (np.greater_equal, set(NUMPY), True),
    "__eq__": (np.equal, set(NUMPY), True),
    "__ne__": (np.not_equal, set(NUMPY), True),
}
AXES = ((slice(None), None), (None, slice(None)))
HOLD_NOTHING = {tl.tensor, int, bool, float, str, type(None), tl.dtype, tl.block_type, tl.pointer_type}


def patch_builtin(holder: Holder, builder: object, scope: Any) -> None:
    """Make the builtin functions of a module or class the interpreter's."""
    if holder not in BUILTINS:
        search(holder, builder, scope)
        return
    for name in BUILTINS[holder]:
        if tl.core.is_builtin(member := getattr(holder, name)):
            is_short = holder is tl.tensor and not options().sanitize_overflow
            if is_short and name in OPERATORS:
                short = short_operator(member, name)
            else:
                short = with_axes(member) if is_short and name == "__getitem__" else interpreted(member)
            scope.set_attr(holder, name, short)


@functools.cache
def interpreted(member: Any) -> Any:
    """A builtin function as the interpreter calls it."""

    function = getattr(member, "__wrapped__", member)  # by what asks for `_semantic`

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    return call


def options() -> Any:
    """Of the interpreter."""
    return interpreter.interpreter_builder.options


@functools.cache
def short_operator(member: Any, name: str) -> Callable[[tl.tensor, Any], tl.tensor]:
    """The operator of a value and another one of its type, or a number; of pointers and offsets. Else the long way."""
    long, (operation, elements, compares) = interpreted(member), OPERATORS[name]
    is_reversed, moves = name in ("__radd__", "__rsub__", "__rmul__"), name == "__add__"

    def operator(self: tl.tensor, other: Any) -> tl.tensor:
        element, mine, type_, of_value = self.dtype, self.handle, self.type, type(other) is tl.tensor
        if type(other) is tl.constexpr:
            other = other.value
        if id(element) in elements:
            if of_value:
                if other.type is not type_:
                    type_ = joint(type_, other.type) if other.dtype is element else None
            elif not holds(element, other) or mine.data.dtype is not NUMPY[id(element)]:
                type_ = None
            if type_ is not None:
                if not is_reversed:
                    data, of = operation(mine.data, other.handle.data if of_value else other), mine.dtype
                elif of_value:
                    data, of = operation(other.handle.data, mine.data), other.handle.dtype
                else:
                    data, of = operation(other, mine.data), element
                of = of.scalar
                if data.itemsize <= SIZES.get(id(of), 0):
                    return value_of(data, of, type_.with_element_ty(tl.int1) if compares else type_)
        elif moves and of_value and type(element) is tl.pointer_type and id(other.dtype) in INTEGERS:
            size, type_ = max(1, mine.get_element_ty().primitive_bitwidth // 8), moved(type_, other.type)
            if type_ is not None:
                return value_of(mine.data + size * other.handle.data.astype(np.uint64), mine.dtype, type_)
        return long(self, other)

    return operator


@functools.cache
def with_axes(member: Any) -> Callable[[tl.tensor, Any], tl.tensor]:
    """A block of two axes, one of which has one element: `x[:, None]`, `x[None, :]`. Other indices: the long way."""
    long = interpreted(member)

    def indexed(self: tl.tensor, index: Any) -> tl.tensor:
        is_row = self.type.__class__ is tl.block_type and len(self.type.sizes) == 1
        if not is_row or type(index) is not tuple or index not in AXES:
            return long(self, index)
        data = self.handle.data[index]
        return value_of(data, self.handle.dtype.scalar, of_shape(self.type.element_ty, data.shape))

    return indexed


def load(self: Any, pointers: Any, mask: Any, other: Any, boundary: Any, padding: Any, *hints: Any) -> tl.tensor:
    """Of a block of pointers with a mask as large, and a value of their type where it is false."""
    type_ = pointers.type
    if type_.__class__ is tl.block_type and not padding and not boundary and mask is not None:
        element = type_.element_ty.element_ty
        is_plain = element is not tl.int1 and mask.type.__class__ is tl.block_type and mask.type.sizes == type_.sizes
        if is_plain and (other is None or other.dtype is element):
            data, of = pointers.handle.data, np_dtype(element)
            rest = np.zeros_like(data, dtype=of) if other is None else np.empty(data.shape, of)
            if other is not None:
                rest[...] = other.handle.data
            loaded = interpreter._interpreter.load(data, mask.handle.data, rest, of)
            return value_of(loaded, element, block_of(element, type_.sizes))
    return load_by_rules(self, pointers, mask, other, boundary, padding, *hints)


def value_of(data: "np.ndarray[Any, Any]", of: tl.core.dtype, type_: Any) -> tl.tensor:
    """A value of a type whose numbers have the size of theirs. `of`: the type of its handle."""
    handle, value = new(interpreter.TensorHandle), new(tl.tensor)
    handle.data, handle.dtype, handle.attr = data, of, {}
    value.handle, value.type = handle, type_
    if type_.__class__ is tl.block_type:
        value.dtype, (value.shape, value.numel) = type_.element_ty, type_.of_values
    else:
        value.dtype, value.shape, value.numel = type_.scalar, NO_SHAPE, ONE
    return value


def joint(one: Any, other: Any) -> Any:
    """The type of both, of one element type, in one shape. None: it has a long way."""
    if one is other:
        return one
    if one.__class__ is not tl.block_type or other.__class__ is not tl.block_type:
        if one.scalar is tl.int1:  # alone it may be held as an integer
            return None
        return one if one.__class__ is tl.block_type else other
    shape = common_shape(one.sizes, other.sizes)
    return None if shape is None else block_of(one.scalar, shape)


def moved(pointer: Any, offset: Any) -> Any:
    """The type of a pointer, or of a block of them, and offsets."""
    if offset.__class__ is not tl.block_type:
        return pointer
    shape, element = offset.sizes, pointer.scalar
    if pointer.__class__ is tl.block_type:
        if pointer.sizes == shape:
            return pointer
        shape = common_shape(pointer.sizes, shape)
    if shape is None:
        return None
    return of_shape(element, shape)


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


def of_shape(element: Any, shape: tuple[int, ...]) -> tl.block_type:
    """There is one type of blocks of each shape of a pointer, too."""
    if type(element) is tl.core.dtype:
        return block_of(element, shape)
    known = vars(element).setdefault("blocks", {})
    if shape not in known:
        known[shape] = tl.block_type(element, list(shape))
    return known[shape]


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
    return value_of(data, handle.dtype.scalar, block_of(value.dtype, shape))


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
    return value_of(data, like.dtype, like.type)


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
    TritonSemantic._load_legacy = load
    if not options().debug:  # else the sums in 64 bits are compared
        interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
