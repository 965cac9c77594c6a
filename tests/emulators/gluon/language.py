"""The modules that a Gluon kernel uses, `gl`, `ampere`, `hopper` and `cuda`, for one interpreted program.

Layouts and dtypes are Triton's own. A name that is missing here raises AttributeError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton import language as tl
from triton.experimental.gluon import language as layouts
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from emulators.gluon import assembly
from emulators.gluon.program import Barrier, Program, Shared, Tiles
from emulators.gluon.tensors import Array, Number, Pointer, Tensor, apply, common_dtype

Value = Tensor | Number


def _unary(function: Callable[[Array], Array]) -> Callable[[Tensor], Tensor]:
    return lambda x: Tensor(function(x.data), x.dtype, x.layout)


def _reduction(function: Callable[..., Array]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, axis: int) -> Tensor:
        return Tensor(function(x.data, axis=axis), x.dtype, layouts.SliceLayout(axis, x.layout) if x.layout else None)

    return reduce


def _binary(function: Callable[..., Array]) -> Callable[[Value, Value], Tensor]:
    return lambda left, right: apply(function, left, right)


class Language:
    """`gl`, and `tl` for a Triton kernel that uses the same functions."""

    SliceLayout, DotOperandLayout = layouts.SliceLayout, layouts.DotOperandLayout
    SwizzledSharedLayout, NVMMASharedLayout = layouts.SwizzledSharedLayout, layouts.NVMMASharedLayout
    int1, int16, int32, int64, uint64 = tl.int1, tl.int16, tl.int32, tl.int64, tl.uint64
    uint8, float16, bfloat16, float32 = tl.uint8, tl.float16, tl.bfloat16, tl.float32

    static_range = staticmethod(range)
    exp, exp2, log2 = staticmethod(_unary(np.exp)), staticmethod(_unary(np.exp2)), staticmethod(_unary(np.log2))
    rsqrt, sqrt = staticmethod(_unary(lambda x: 1 / np.sqrt(x))), staticmethod(_unary(np.sqrt))
    log, abs = staticmethod(_unary(np.log)), staticmethod(_unary(np.abs))
    sum, max, min = staticmethod(_reduction(np.sum)), staticmethod(_reduction(np.max)), staticmethod(_reduction(np.min))
    maximum, minimum = staticmethod(_binary(np.maximum)), staticmethod(_binary(np.minimum))
    cdiv = staticmethod(_binary(lambda left, right: -(-left // right)))

    def __init__(self, program: Program) -> None:
        self._program = program
        self.extra = SimpleNamespace(cuda=cuda(program))

    def BlockedLayout(self, *arguments: Any) -> Any:
        layout = layouts.BlockedLayout(*arguments)
        assert math.prod(layout.threads_per_warp) == 32
        return self._for_warps(layout)

    def NVMMADistributedLayout(self, *arguments: Any) -> Any:
        return self._for_warps(layouts.NVMMADistributedLayout(*arguments))

    def _for_warps(self, layout: Any) -> Any:
        assert math.prod(layout.warps_per_cta) == self._program.num_warps, "a layout for another number of warps"
        return layout

    def program_id(self, axis: int) -> Tensor:
        return Tensor(self._program.place[axis], tl.int32)

    def num_programs(self, axis: int) -> Tensor:
        return Tensor(self._program.grid[axis], tl.int32)

    def load(
        self, pointer: Pointer, mask: Tensor | bool | None = None, other: Number | None = None, **_hints: Any
    ) -> Tensor:
        return Tensor(self._program.read(pointer, mask, other), pointer.element, pointer.offset.layout)

    def store(self, pointer: Pointer, value: Value, mask: Tensor | bool | None = None) -> None:
        value = value if isinstance(value, Tensor) else Tensor(value, pointer.element)
        self._program.write(pointer, value, mask)

    def atomic_add(self, pointer: Pointer, value: int, sem: str) -> Tensor:
        assert sem == "acq_rel"
        before = self.load(pointer)
        self.store(pointer, before + value)
        return before

    def allocate_shared_memory(
        self, dtype: Any, shape: Sequence[int], _layout: Any, value: Tensor | None = None
    ) -> Shared:
        return self._program.allocate(dtype, shape, value)

    @staticmethod
    def arange(begin: int, end: int, layout: Any = None) -> Tensor:
        return Tensor(np.arange(begin, end), tl.int32, layout)

    @staticmethod
    def full(shape: Sequence[int], value: Number, dtype: Any, layout: Any = None) -> Tensor:
        return Tensor(np.full(shape, value), dtype, layout)

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any, layout: Any = None) -> Tensor:
        return cls.full(shape, 0, dtype, layout)

    @classmethod
    def expand_dims(cls, x: Tensor | Pointer, axis: int) -> Tensor | Pointer:
        if isinstance(x, Pointer):
            offset = cls.expand_dims(x.offset, axis)
            assert isinstance(offset, Tensor)
            return x.moved(offset)
        parent = x.layout.parent if isinstance(x.layout, layouts.SliceLayout) else None
        return Tensor(np.expand_dims(x.data, axis), x.dtype, parent)

    @staticmethod
    def where(condition: Value, yes: Value, no: Value) -> Tensor:
        chosen = condition if isinstance(condition, Tensor) else Tensor(condition, tl.int1)
        sides = [Tensor(side.data if isinstance(side, Tensor) else side, common_dtype(yes, no)) for side in (yes, no)]
        known = [x.layout for x in (chosen, yes, no) if isinstance(x, Tensor) and x.layout is not None]
        return Tensor(np.where(chosen.data, *(side.data for side in sides)), sides[0].dtype, (known or [None])[0])

    @staticmethod
    def debug_barrier() -> None:
        """The program's threads are one."""

    @staticmethod
    def reduce(x: Tensor, axis: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        parts = [Tensor(part, x.dtype) for part in np.moveaxis(x.data, axis, 0)]
        total = parts[0]
        for part in parts[1:]:
            total = combine(total, part)
        return total

    @staticmethod
    def broadcast(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        shape = np.broadcast_shapes(left.data.shape, right.data.shape)
        one, other = (Tensor(np.broadcast_to(x.data, shape).copy(), x.dtype, x.layout) for x in (left, right))
        return one, other

    @staticmethod
    def join(left: Tensor, right: Tensor) -> Tensor:
        return Tensor(np.stack((left.data, right.data), axis=-1), left.dtype)

    @staticmethod
    def split(x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = (Tensor(x.data[..., place], x.dtype) for place in range(2))
        return one, other

    @staticmethod
    def convert_layout(x: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
        return Tensor(x.data, x.dtype, layout)

    @staticmethod
    def inline_asm_elementwise(
        asm: str, constraints: str, args: Sequence[Tensor], dtype: Any, is_pure: bool, pack: int
    ) -> Tensor | tuple[Tensor, ...]:
        assert is_pure
        if assembly.is_of_8_bits(args, dtype):
            return assembly.of_8_bits(asm, args, dtype)
        several = isinstance(dtype, tuple)
        results = assembly.run(asm, constraints, args, dtype if several else (dtype,), pack)
        return tuple(results) if several else results[0]


def mma_v2(left: Tensor, right: Tensor, acc: Tensor) -> Tensor:
    """A product of 16-bit operands, accumulated in float32."""
    assert left.dtype == right.dtype and left.dtype.primitive_bitwidth == 16
    return Tensor(left.data @ right.data + acc.data, acc.dtype, acc.layout)


def ampere(program: Program) -> Any:
    """`gluon.language.nvidia.ampere`."""

    def copy(shared: Shared, pointer: Pointer, mask: Tensor | None = None) -> None:
        program.copy_by_threads(shared, pointer, mask)

    return SimpleNamespace(
        mma_v2=mma_v2,
        async_copy=SimpleNamespace(
            async_copy_global_to_shared=copy, commit_group=program.commit_group, wait_group=program.wait_group
        ),
    )


def hopper(program: Program) -> Any:
    """`gluon.language.nvidia.hopper`."""

    def init(bar: Shared, count: int) -> None:
        program.barriers[bar.address] = Barrier(count, missing=count)
        program.unfenced.add(bar.address)

    def expect(bar: Shared, num_bytes: int, pred: Value = True) -> None:
        if pred:
            barrier = program.barrier_at(bar)
            barrier.missing, barrier.num_bytes = barrier.missing - 1, barrier.num_bytes + num_bytes

    def wait(bar: Shared, phase: Tensor | int) -> None:
        program.barrier_at(bar).wait(int(phase))

    def copy(tiles: Tiles, begin: Sequence[Tensor | int], bar: Shared, shared: Shared, pred: Value = True) -> None:
        if pred:
            program.copy_tile(tiles, begin, bar, shared)

    def multiply(
        left: Tensor | Shared, right: Shared, acc: Tensor, use_acc: bool = True, is_async: bool = False
    ) -> Tensor:
        return program.multiply(left, right, acc, use_acc, is_async)

    def wait_products(num_outstanding: int, deps: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        program.wait_products(num_outstanding)
        return deps[0] if len(deps) == 1 else tuple(deps)

    return SimpleNamespace(
        mbarrier=SimpleNamespace(MBarrierLayout=mbarrier.MBarrierLayout, init=init, expect=expect, wait=wait),
        tma=SimpleNamespace(async_copy_global_to_shared=copy),
        fence_async_shared=program.unfenced.clear,
        warpgroup_mma=multiply,
        warpgroup_mma_wait=wait_products,
    )


def cuda(program: Program) -> Any:
    """`triton.language.extra.cuda`."""

    def wait() -> None:
        program.must_wait = False

    return SimpleNamespace(gdc_launch_dependents=lambda: None, gdc_wait=wait)


def names(program: Program) -> dict[str, Any]:
    """The names to put into a kernel's module while the program runs."""
    language = Language(program)
    return {
        "gl": language,
        "tl": language,
        "cuda": language.extra.cuda,
        "ampere": ampere(program),
        "hopper": hopper(program),
        "barrier": lambda: None,
    }
