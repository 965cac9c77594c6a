"""Tensors and pointers of an interpreted Gluon kernel, over NumPy arrays and the memory of torch tensors.

A tensor has one of Triton's dtypes, and arithmetic follows Triton: a Python number takes the dtype of the tensor, mixed
integers become unsigned if one of equal width is, integer division truncates. A 16-bit float is held in float32 and
rounded after each operation. Layouts are passed on, because kernels ask for them, and have no other effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton import language as tl

Array = NDArray[Any]
Number = bool | int | float

_TORCH = {
    torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16,
    torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8,
}  # fmt: skip
_ROUNDED = {tl.bfloat16: torch.bfloat16, tl.float16: torch.float16}


def array_type(dtype: Any) -> Any:
    """The NumPy dtype that holds values of a Triton dtype."""
    if dtype.is_floating():
        return np.float32
    return np.bool_ if dtype == tl.int1 else np.dtype(dtype.name)


def rounded(data: Array, dtype: Any) -> Array:
    """Values of a 16-bit float; others as they are."""
    if dtype not in _ROUNDED:
        return data
    return np.asarray(torch.from_numpy(data).to(_ROUNDED[dtype]).float())


def poison(dtype: Any) -> Any:
    """What uninitialised memory holds: NaN, or an index out of all bounds; of 16 bits, two NaNs of 8 bits."""
    return np.nan if dtype.is_floating() else np.iinfo(array_type(dtype)).max


def _quotient(left: Array, right: Array) -> Array:
    return np.where((left < 0) == (right < 0), 1, -1) * (abs(left) // abs(right))


def _remainder(left: Array, right: Array) -> Array:
    return np.asarray(left - right * _quotient(left, right))


def _shift(function: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    def checked(left: Array, right: Array) -> Array:
        assert np.all(right < 8 * left.itemsize), "undefined: a shift by as many bits as the type has"
        return function(left, right)

    return checked


def _operator(function: Callable[..., Any], result: Any = None, swapped: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Tensor, other: Any) -> Any:
        if not isinstance(other, Tensor | bool | int | float):
            return NotImplemented
        return apply(function, other, self, result) if swapped else apply(function, self, other, result)

    return method


class Tensor:
    """A block of values."""

    __hash__ = None  # type: ignore[assignment]  # == compares element by element

    def __init__(self, data: Any, dtype: Any, layout: Any = None) -> None:
        self.dtype = dtype
        self.data: Array = rounded(np.asarray(data, dtype=array_type(dtype)), dtype)
        self.layout = layout

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def type(self) -> Any:
        return SimpleNamespace(layout=self.layout)

    def to(self, dtype: Any, bitcast: bool = False) -> Tensor:
        return Tensor(self.data.view(array_type(dtype)) if bitcast else self.data, dtype, self.layout)

    def reshape(self, shape: Sequence[int]) -> Tensor:
        return Tensor(self.data.reshape(shape), self.dtype)

    def __getitem__(self, place: Any) -> Tensor:
        """Only Triton's own tensors have axes added so: their layouts are the compiler's."""
        return Tensor(self.data[place], self.dtype)

    def __bool__(self) -> bool:
        return bool(self.data)

    def __index__(self) -> int:
        return int(self.data)

    def __neg__(self) -> Tensor:
        return Tensor(-self.data, self.dtype, self.layout)

    __add__, __radd__ = _operator(np.add), _operator(np.add, swapped=True)
    __sub__, __rsub__ = _operator(np.subtract), _operator(np.subtract, swapped=True)
    __mul__, __rmul__ = _operator(np.multiply), _operator(np.multiply, swapped=True)
    __truediv__, __rtruediv__ = _operator(np.divide), _operator(np.divide, swapped=True)
    __floordiv__, __rfloordiv__ = _operator(_quotient), _operator(_quotient, swapped=True)
    __mod__, __rmod__ = _operator(_remainder), _operator(_remainder, swapped=True)
    __lshift__, __rshift__ = _operator(_shift(np.left_shift)), _operator(_shift(np.right_shift))
    __and__, __or__ = _operator(np.bitwise_and), _operator(np.bitwise_or)
    __lt__, __le__ = _operator(np.less, tl.int1), _operator(np.less_equal, tl.int1)
    __gt__, __ge__ = _operator(np.greater, tl.int1), _operator(np.greater_equal, tl.int1)
    __eq__, __ne__ = _operator(np.equal, tl.int1), _operator(np.not_equal, tl.int1)


def common_dtype(left: Tensor | Number, right: Tensor | Number) -> Any:
    """The dtype in which two operands meet."""
    tensors = [side for side in (left, right) if isinstance(side, Tensor)]
    if len(tensors) < 2:
        is_float = isinstance(left, float) or isinstance(right, float)
        alone = tensors[0].dtype if tensors else tl.int32
        return tl.float32 if is_float and not alone.is_floating() else alone
    one, other = (side.dtype for side in tensors)
    if one.is_floating() != other.is_floating():
        return one if one.is_floating() else other
    if one.is_floating():
        return one if one == other else tl.float32
    unsigned = one.is_int_unsigned() >= other.is_int_unsigned()
    wider = one.primitive_bitwidth - other.primitive_bitwidth
    return one if wider > 0 or (wider == 0 and unsigned) else other


def apply(function: Callable[..., Array], left: Any, right: Any, result: Any = None) -> Tensor:
    """Apply a NumPy function in the common dtype. `result` is the dtype of the result if it differs."""
    dtype = common_dtype(left, right)
    layouts = [side.layout for side in (left, right) if isinstance(side, Tensor) and side.layout is not None]
    sides = (Tensor(side.data if isinstance(side, Tensor) else side, dtype).data for side in (left, right))
    return Tensor(function(*sides), result or dtype, layouts[0] if layouts else None)


class Pointer:
    """A block of addresses in the memory of one argument, as offsets in elements."""

    def __init__(self, name: str, memory: torch.Tensor, offset: Tensor) -> None:
        self.name, self.memory, self.offset = name, memory, offset

    @classmethod
    def to_tensor(cls, name: str, tensor: torch.Tensor) -> Pointer:
        """The address of its first element. Only what follows in its storage is in bounds."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        return cls(name, tensor.detach().as_strided((size,), (1,)), Tensor(0, tl.int64))

    @property
    def element(self) -> Any:
        return _TORCH[self.memory.dtype]

    @property
    def dtype(self) -> Any:
        return SimpleNamespace(element_ty=self.element)

    @property
    def type(self) -> Any:
        return self.offset.type

    def moved(self, offset: Tensor) -> Pointer:
        return Pointer(self.name, self.memory, offset)

    def __add__(self, steps: Tensor | int) -> Pointer:
        layout = steps.layout if isinstance(steps, Tensor) else None
        offset = self.offset + steps
        return self.moved(Tensor(offset.data, tl.int64, layout or self.offset.layout))

    def places(self, mask: Tensor | bool | None) -> tuple[Array, Array]:
        """Broadcast the offsets (0 where the mask is not set) and the mask. Raises: IndexError."""
        wanted: Any = True if mask is None else mask.data if isinstance(mask, Tensor) else mask
        offset, wanted = np.broadcast_arrays(self.offset.data, wanted)
        offset = np.where(wanted, offset, 0)
        if np.any(wanted & ((offset < 0) | (offset >= len(self.memory)))):
            raise IndexError(f"{self.name}: an address outside of its memory")
        return offset, wanted

    def read(self, mask: Tensor | bool | None = None, other: Number | None = None) -> Array:
        offset, wanted = self.places(mask)
        values = self.memory[torch.from_numpy(offset)]
        found = (values.float() if values.is_floating_point() else values).numpy()
        return np.where(wanted, found, poison(self.element) if other is None else other)

    def write(self, value: Tensor, mask: Tensor | bool | None = None) -> None:
        offset, wanted = self.places(mask)
        values = torch.from_numpy(np.ascontiguousarray(np.broadcast_to(value.data, offset.shape)[wanted]))
        self.memory[torch.from_numpy(offset[wanted])] = values.to(self.memory.dtype)
