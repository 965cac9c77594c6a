"""The state of one interpreted program: shared memory, and asynchronous work that has not ended yet.

Asynchronous work is done as late as the program allows. Until then its result is NaN, so a missing or early wait
changes what the kernel computes:

    cp.async, TMA   the destination holds NaN from the request until the wait; integers, what two 8-bit NaNs are
    wgmma           the result holds NaN until the wait; an operand that changes before the wait becomes NaN
    mbarrier        a wait raises `NeverEnds` if arrivals are missing, or bytes arrive that were not announced
    fences          a wgmma of rows that threads copied, and a barrier that was just initialised, need a fence first
    PDL             before `gdc_wait`, a program reads only `read_before_wait` and writes nothing

Not modelled: layouts and swizzles, exchange between the warps of a program, the size of shared memory and the reuse of
its parts, programs that run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language as tl

from emulators.gluon.tensors import Array, Number, Pointer, Tensor, array_type, poison


class NeverEnds(Exception):
    """A GPU would wait for ever, or the program ends while work goes on."""


class Unordered(Exception):
    """A fence is missing, or `gdc_wait`."""


class Shared:
    """A part of shared memory. It holds NaN until something is written."""

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

    def slice(self, begin: int, count: int) -> Shared:
        assert begin >= 0 and begin + count <= len(self.data), "places that the part does not have"
        return Shared(self.data[begin : begin + count], self.dtype)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.transpose(order), self.dtype)

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.data.copy(), self.dtype, layout)

    def fill(self, values: Array) -> None:
        self.data[...] = values


class Tiles:
    """A TMA descriptor. Tiles have zeros beyond the edges of the matrix."""

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
        return self.pointer.moved(offset).read(Tensor(inside, tl.int1), 0)


@dataclass
class Barrier:
    """An mbarrier. A phase ends when all arrivals and all announced bytes are there."""

    count: int
    phase: int = 0
    missing: int = 0  # arrivals
    num_bytes: int = 0
    copies: list[tuple[int, Callable[[], None]]] = field(default_factory=list)  # bytes of each, and the copy itself

    def wait(self, parity: int) -> None:
        """Return at once if the current phase has the other parity: then the phase of this one has ended."""
        if self.phase % 2 != parity:
            return
        arrived = sum(num_bytes for num_bytes, _ in self.copies)
        if self.missing or arrived != self.num_bytes:
            raise NeverEnds(f"{self.missing} arrivals are missing, {arrived} of {self.num_bytes} bytes arrive")
        for _, copy in self.copies:
            copy()
        self.copies.clear()
        self.phase, self.missing, self.num_bytes = self.phase + 1, self.count, 0


class Program:
    """A program's place in the grid, and the work that it has begun."""

    def __init__(
        self,
        place: tuple[int, ...] = (0, 0, 0),
        grid: tuple[int, ...] = (1, 1, 1),
        num_warps: int = 4,
        is_dependent: bool = False,
        read_before_wait: frozenset[str] = frozenset(),
    ) -> None:
        self.place, self.grid, self.num_warps = place, grid, num_warps
        self.must_wait = is_dependent  # a dependent launch (PDL), before its `gdc_wait`
        self.read_before_wait = read_before_wait
        self.copies: list[Callable[[], None]] = []  # cp.async not committed yet
        self.groups: list[list[Callable[[], None]]] = []
        self.products: list[Callable[[], None]] = []
        self.barriers: dict[int, Barrier] = {}
        self.unfenced: set[int] = set()  # addresses that only a fence shows to wgmma and TMA
        self.shared: list[Shared] = []  # all of it, so that no address serves twice

    def allocate(self, dtype: Any, shape: Sequence[int], value: Tensor | None) -> Shared:
        shared = Shared(np.full(shape, poison(dtype), array_type(dtype)), dtype)
        self.shared.append(shared)
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

    def require_order(self, pointer: Pointer, allowed: frozenset[str]) -> None:
        if self.must_wait and pointer.name not in allowed:
            raise Unordered(f"{pointer.name} is used before gdc_wait")

    def copy_by_threads(self, shared: Shared, pointer: Pointer, mask: Tensor | None) -> None:
        self.require_order(pointer, self.read_before_wait)
        assert list(pointer.places(mask)[0].shape) == shared.shape, "a copy of another shape"
        shared.fill(np.asarray(poison(shared.dtype)))

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
            raise Unordered("a barrier is used before the fence after its init")
        return self.barriers[shared.address]

    def copy_tile(self, tiles: Tiles, begin: Sequence[Tensor | int], bar: Shared, shared: Shared) -> None:
        self.require_order(tiles.pointer, self.read_before_wait)
        begin = [int(first) for first in begin]
        assert shared.shape == list(tiles.block), "a tile of another shape"
        shared.fill(np.asarray(np.nan))
        self.barrier_at(bar).copies.append((tiles.block_type.nbytes, lambda: shared.fill(tiles.read(begin))))

    def multiply(self, left: Tensor | Shared, right: Shared, acc: Tensor, use_acc: bool, is_async: bool) -> Tensor:
        """A wgmma. It may read its operands at any time until the wait."""
        for operand in (left, right):
            if isinstance(operand, Shared) and operand.address in self.unfenced:
                raise Unordered("a wgmma reads what threads have written, without a fence between")
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
        if self.must_wait:
            raise Unordered("a dependent launch ends without gdc_wait")
        if self.products or any(barrier.copies for barrier in self.barriers.values()):
            raise NeverEnds("a program ends while copies or products are in flight")


def unchanged(before: Array, after: Array) -> Array:
    """Values that are the same in both, NaN elsewhere."""
    return np.where(before == after, after, np.nan).astype(np.float32)
