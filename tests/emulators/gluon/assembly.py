"""Inline assembly of interpreted kernels: the few PTX instructions that they use, on registers of 32 bits.

Elements are packed into registers in their order along the last dimension, as they lie in a thread's registers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from triton import language as tl

from emulators.gluon.tensors import Array, Tensor, poison


def run(asm: str, constraints: str, args: Sequence[Tensor], dtypes: Sequence[Any], pack: int) -> list[Tensor]:
    """Run it on `pack` elements of each argument at a time."""
    shape = np.broadcast_shapes(*(tensor.data.shape for tensor in args))
    inputs = [register for tensor in args for register in _registers(tensor, shape, pack)]
    num_outputs = constraints.count("=")
    assert len(constraints.split(",")) == num_outputs + len(inputs), "other registers than the constraints name"
    known = {f"${num_outputs + i}": register for i, register in enumerate(inputs)}
    for line in asm.strip().strip("{}").split(";"):
        if line.strip() and not line.strip().startswith(".reg"):
            _execute(line.strip(), known)
    results, first = [], 0
    for dtype in dtypes:
        count = pack * dtype.primitive_bitwidth // 32
        results.append(_elements([known[f"${first + i}"] for i in range(count)], shape, dtype, args[0].layout))
        first += count
    return results


def is_of_8_bits(args: Sequence[Tensor], dtype: Any) -> bool:
    """Whether it makes pairs of 8 bits, in one int16, or float16 of them."""
    return dtype == tl.int16 or args[0].dtype == tl.int16


def of_8_bits(asm: str, args: Sequence[Tensor], dtype: Any) -> Tensor | tuple[Tensor, ...]:
    """What such assembly is for: two floats to one pair, the first in the low bits; or pairs to their two columns.

    Where both pairs of a register are the same conversion, the second becomes NaN, as `torn_conversions` explains.
    """
    narrow = torch.float8_e4m3fn if "e4m3" in asm else torch.float8_e5m2
    if dtype == tl.int16:
        low_high = torch.from_numpy(np.stack([tensor.data for tensor in args], axis=-1))
        bound = torch.finfo(narrow).max
        pairs = low_high.clamp(-bound, bound).to(narrow).view(torch.int16)[..., 0]
        same = (low_high[..., ::2, :] == low_high[..., 1::2, :]).all(-1)
        pairs[..., 1::2].masked_fill_(same, poison(dtype))
        return Tensor(pairs.numpy(), dtype, args[0].layout)
    octets = np.ascontiguousarray(args[0].data).view(np.uint8).reshape(*args[0].shape, 2)
    columns = torch.from_numpy(octets).view(narrow).float().numpy()
    return tuple(Tensor(columns[..., place], dtype[place], args[0].layout) for place in range(2))


def _registers(tensor: Tensor, shape: tuple[int, ...], pack: int) -> list[Array]:
    data = np.broadcast_to(tensor.data, shape)
    if tensor.dtype.is_floating():
        data = torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    data = np.ascontiguousarray(data).reshape(-1, pack)
    missing = -pack * data.itemsize % 4 // data.itemsize
    words = np.pad(data, ((0, 0), (0, missing))).view(np.uint32)
    return [words[:, i].copy() for i in range(words.shape[1])]


def _elements(registers: list[Array], shape: tuple[int, ...], dtype: Any, layout: Any) -> Tensor:
    assert dtype.name == "bf16"
    bits = np.ascontiguousarray(np.stack(registers, axis=1)).view(np.int16)
    return Tensor(torch.from_numpy(bits).view(torch.bfloat16).float().numpy().reshape(shape), dtype, layout)


def _execute(line: str, known: dict[str, Array]) -> None:
    operation, target, *rest = re.split(r"[\s,]+", line)
    values = [known[name] if name in known else np.uint32(int(name, 0)) for name in rest]
    known[target] = np.asarray(INSTRUCTIONS[operation](*values), np.uint32)


def _prmt(low: Array, high: Array, selector: Any) -> Array:
    """Four bytes out of eight; a selector's fourth bit asks for a byte's sign, eight times."""
    both = [(source >> np.uint32(8 * i)) & np.uint32(255) for source in (low, high) for i in range(4)]
    both += [(byte >> np.uint32(7)) * np.uint32(255) for byte in both]
    parts = [both[int(selector) >> 4 * i & 15] << np.uint32(8 * i) for i in range(4)]
    return np.asarray(parts[0] | parts[1] | parts[2] | parts[3])


def _lop3(a: Array, b: Array, c: Array, table: Any) -> Array:
    result = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), np.uint32)
    for index in range(8):
        if int(table) >> index & 1:
            sides = zip((a, b, c), (4, 2, 1), strict=True)
            x, y, z = (side if index & bit else ~side for side, bit in sides)
            result |= x & y & z
    return result


def _in_pairs(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    """An operation on two bfloat16 in each register."""

    def apply(*registers: Array) -> Array:
        sides = np.broadcast_arrays(*registers)
        values = [torch.from_numpy(side.copy().view(np.int16)).view(torch.bfloat16).float() for side in sides]
        return function(*values).bfloat16().view(torch.int16).numpy().view(np.uint32)

    return apply


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.b32": lambda value: value,
    "and.b32": np.bitwise_and,
    "shr.b32": np.right_shift,
    "shr.s32": lambda value, count: (np.asarray(value).view(np.int32) >> np.int32(count)).view(np.uint32),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "fma.rn.bf16x2": _in_pairs(lambda one, other, added: one * other + added),  # float32 holds these products
    "mul.rn.bf16x2": _in_pairs(torch.mul),
    "sub.rn.bf16x2": _in_pairs(torch.sub),
}
