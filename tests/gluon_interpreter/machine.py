"""What one program of a Gluon kernel has besides its tensors: shared memory, and work that goes on while it runs.

Work is done as late as the program allows, and what it touches is no number until then:

    cp.async, TMA   the destination holds NaN from the request on; the values arrive at the wait for them
    wgmma           the result holds NaN until the wait; an operand that changed before then makes NaN
    mbarrier        a wait that no request can end raises `NeverEnds`, as does one that a wrong number of bytes would end
    fences          copies by threads, and barriers, must be fenced before the copy engine or a wgmma meets them
    PDL             before `gdc_wait`, only what `read_before_wait` names may be read, and nothing written

So a wait that is missing, or one block too early, shows in the result. Not modelled: layouts and swizzles, the warps
of a program and what passes between them, the size of shared memory and when its parts serve twice, other programs
at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from gluon_interpreter.tensors import Array, Number, Pointer, Tensor, array_type, poison


class NeverEnds(Exception):
    """A GPU would wait for ever, or read memory that a copy is still writing."""


class Unordered(Exception):
    """A fence, or the wait for the kernel before, is missing."""


class Shared:
    """A part of shared memory, which holds no number at first."""

    def __init__(self, data: Array, dtype: Any) -> None:
        self.data, self.dtype = data, dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def address(self) -> int:
        return int(self.data.__array_interface__["data"][0])

    def index(self, place: Tensor | int) -> Shared:
        place = int(place)
        assert 0 <= place < len(self.data), "a stage that the ring does not have"
        return Shared(self.data[place], self.dtype)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.transpose(order), self.dtype)

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.data.copy(), self.dtype, layout)

    def fill(self, values: Array) -> None:
        self.data[...] = values


class Tiles:
    """What the copy engine knows of a matrix: tiles of it, with zeros beyond its edges."""

    def __init__(self, name: str, descriptor: Any) -> None:
        self.pointer = Pointer.to_tensor(name, descriptor.base)
        self.size, self.strides, self.block = descriptor.shape, descriptor.strides, descriptor.block_shape
        self.layout, self.dtype = descriptor.layout, self.pointer.element

    @property
    def block_type(self) -> Any:
        return SimpleNamespace(nbytes=math.prod(self.block) * self.dtype.primitive_bitwidth // 8)

    def read(self, begin: Sequence[Tensor | int]) -> Array:
        axes = [int(first) + np.arange(count) for first, count in zip(begin, self.block, strict=True)]
        row, column = axes[0][:, None], axes[1][None, :]
        inside = (row >= 0) & (row < self.size[0]) & (column >= 0) & (column < self.size[1])
        offset = Tensor(row * self.strides[0] + column * self.strides[1], self.pointer.offset.dtype)
        return self.pointer.moved(offset).read(Tensor(inside, array_mask()), 0)


def array_mask() -> Any:
    """The dtype of a mask."""
    from triton import language as tl

    return tl.int1


@dataclass
class Barrier:
    """An mbarrier. The phase ends when all have arrived, and all bytes that they announced."""

    count: int
    phase: int = 0
    missing: int = 0  # arrivals
    num_bytes: int = 0
    copies: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # bytes, and what brings them

    def wait(self, parity: int) -> None:
        """Return at once if the phase of that parity is the one before."""
        if self.phase % 2 != parity:
            return
        arrived = sum(num_bytes for num_bytes, _ in self.copies)
        if self.missing or arrived != self.num_bytes:
            raise NeverEnds(f"a wait for {self.missing} arrivals, {arrived} of {self.num_bytes} bytes")
        for _, copy in self.copies:
            copy()
        self.copies.clear()
        self.phase, self.missing, self.num_bytes = self.phase + 1, self.count, 0


class Program:
    """One program's place in the grid and the work that it has begun."""

    def __init__(
        self, place: tuple[int, ...], grid: tuple[int, ...], is_dependent: bool, read_before_wait: frozenset[str]
    ) -> None:
        self.place, self.grid = place, grid
        self.waits = is_dependent  # for the kernel before
        self.read_before_wait = read_before_wait
        self.copies: list[Callable[[], None]] = []  # not committed yet
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[Callable[[], None]] = []
        self.barriers: dict[int, Barrier] = {}
        self.unfenced: set[int] = set()  # addresses

    def allocate(self, dtype: Any, shape: Sequence[int], value: Tensor | None) -> Shared:
        shared = Shared(np.full(shape, poison(dtype), array_type(dtype)), dtype)
        if value is not None:
            shared.fill(value.data)
            self.unfenced.add(shared.address)
        return shared

    def read(self, pointer: Pointer, mask: Tensor | bool | None, other: Number | None) -> Array:
        self.require_order(pointer, self.read_before_wait)
        return pointer.read(mask, other)

    def write(self, pointer: Pointer, value: Tensor, mask: Tensor | bool | None) -> None:
        self.require_order(pointer, frozenset())
        pointer.write(value, mask)

    def require_order(self, pointer: Pointer, settled: frozenset[str]) -> None:
        if self.waits and pointer.name not in settled:
            raise Unordered(f"{pointer.name} before the wait for the kernel before")

    def copy_by_threads(self, shared: Shared, pointer: Pointer, mask: Tensor | None) -> None:
        self.require_order(pointer, self.read_before_wait)
        pointer.places(mask)
        shared.fill(np.asarray(np.nan))

        def arrive() -> None:
            shared.fill(pointer.read(mask, 0))
            self.unfenced.add(shared.address)

        self.copies.append(arrive)

    def commit_group(self) -> None:
        self.groups.append(self.copies)
        self.copies = []

    def wait_group(self, num_outstanding: int) -> None:
        while len(self.groups) > num_outstanding:
            for copy in self.groups.pop(0):
                copy()

    def barrier_at(self, shared: Shared) -> Barrier:
        if shared.address in self.unfenced:
            raise Unordered("a barrier is used before the fence that shows it")
        return self.barriers[shared.address]

    def copy_tile(self, tiles: Tiles, begin: Sequence[Tensor | int], bar: Shared, shared: Shared) -> None:
        self.require_order(tiles.pointer, self.read_before_wait)
        begin = [int(first) for first in begin]
        assert shared.shape == list(tiles.block), "a tile of another shape"
        shared.fill(np.asarray(np.nan))
        self.barrier_at(bar).copies.append((tiles.block_type.nbytes, lambda: shared.fill(tiles.read(begin))))

    def multiply(self, left: Tensor | Shared, right: Shared, acc: Tensor, use_acc: bool, is_async: bool) -> Tensor:
        """A wgmma, whose operands are read from now on until the wait for it."""
        for operand in (left, right):
            if isinstance(operand, Shared) and operand.address in self.unfenced:
                raise Unordered("a wgmma reads what threads have copied, without a fence between")
        assert left.dtype == right.dtype and left.dtype.primitive_bitwidth == 16
        first = left.data.copy(), right.data.copy()
        result = Tensor(np.full(acc.shape, np.nan, np.float32), acc.dtype, acc.layout)

        def end() -> None:
            product = unchanged(first[0], left.data) @ unchanged(first[1], right.data)
            result.data[...] = product + acc.data if use_acc else product

        self.products.append(end)
        if not is_async:
            self.wait_products(0)
        return result

    def wait_products(self, num_outstanding: int) -> None:
        while len(self.products) > num_outstanding:
            self.products.pop(0)()

    def require_end(self) -> None:
        """Raises: Unordered, NeverEnds."""
        if self.waits:
            raise Unordered("a program ends without waiting for the kernel before")
        if self.products or any(barrier.copies for barrier in self.barriers.values()):
            raise NeverEnds("a program ends while copies or products go on")


def unchanged(before: Array, after: Array) -> Array:
    """Values that are the same in both, NaN elsewhere."""
    return np.where(before == after, after, np.nan).astype(np.float32)
