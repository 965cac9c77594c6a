"""The Gluon interpreter notices what a GPU would do wrong: missing waits and fences, refills that come too early."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Gluon is part of Triton, whose wheels are for Linux: pip install triton")
from emulators.gluon.language import Language, ampere, hopper
from emulators.gluon.program import NeverEnds, Program, Shared, Tiles, Unordered
from emulators.gluon.tensors import Pointer, Tensor
from triton import language as tl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SIZE = 64


@pytest.fixture
def program() -> Program:
    return Program()


@pytest.fixture
def matrix() -> torch.Tensor:
    return torch.randn(SIZE, SIZE).bfloat16()


def addresses(matrix: torch.Tensor) -> Pointer:
    return Pointer.to_tensor("x_ptr", matrix) + Tensor(np.arange(matrix.numel()).reshape(matrix.shape), tl.int32)


def holds(actual: Shared | Tensor, expected: torch.Tensor) -> bool:
    return bool(np.array_equal(actual.data, expected.float().numpy()))


def is_nan(actual: Shared | Tensor) -> bool:
    return bool(np.isnan(actual.data).all())


def filled(program: Program, matrix: torch.Tensor) -> Shared:
    """Shared memory that a wgmma may read."""
    shared = program.allocate(tl.bfloat16, [SIZE, SIZE], Tensor(matrix.float().numpy(), tl.bfloat16))
    hopper(program).fence_async_shared()
    return shared


def test_a_copy_arrives_at_the_wait_for_its_group(program: Program, matrix: torch.Tensor) -> None:
    copies, ring = ampere(program).async_copy, program.allocate(tl.bfloat16, [2, SIZE, SIZE], None)
    for stage in range(2):
        copies.async_copy_global_to_shared(ring.index(stage), addresses(matrix))
        copies.commit_group()
    assert is_nan(ring)
    copies.wait_group(1)
    assert holds(ring.index(0), matrix) and is_nan(ring.index(1))
    copies.async_copy_global_to_shared(ring.index(0), addresses(matrix))  # a refill, not committed
    copies.wait_group(0)
    assert is_nan(ring.index(0)) and holds(ring.index(1), matrix)


def test_a_masked_copy_brings_zeros(program: Program, matrix: torch.Tensor) -> None:
    copies, shared = ampere(program).async_copy, program.allocate(tl.bfloat16, [SIZE, SIZE], None)
    live = torch.arange(SIZE)[:, None] < 5
    copies.async_copy_global_to_shared(shared, addresses(matrix), mask=Tensor(live.numpy(), tl.int1))
    copies.commit_group()
    copies.wait_group(0)
    assert holds(shared, matrix * live)


def test_a_product_is_there_after_the_wait(program: Program, matrix: torch.Tensor) -> None:
    gluon, left, right = hopper(program), filled(program, matrix), filled(program, matrix)
    acc = gluon.warpgroup_mma(left, right, Language.zeros([SIZE, SIZE], tl.float32), is_async=True)
    acc = gluon.warpgroup_mma(left, right, acc, is_async=True)
    assert is_nan(acc)
    assert is_nan(gluon.warpgroup_mma_wait(num_outstanding=1, deps=[acc]))
    acc = gluon.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    torch.testing.assert_close(torch.from_numpy(acc.data), 2 * matrix.float() @ matrix.float(), rtol=1e-4, atol=1e-4)


def test_an_operand_that_changes_during_a_product_makes_nan(program: Program, matrix: torch.Tensor) -> None:
    gluon, left, right = hopper(program), filled(program, matrix), filled(program, matrix)
    acc = gluon.warpgroup_mma(left, right, Language.zeros([SIZE, SIZE], tl.float32), is_async=True)
    right.fill(2 * right.data)
    assert is_nan(gluon.warpgroup_mma_wait(num_outstanding=0, deps=[acc]))


def test_a_product_of_rows_that_threads_wrote_needs_a_fence(program: Program, matrix: torch.Tensor) -> None:
    left = program.allocate(tl.bfloat16, [SIZE, SIZE], Tensor(matrix.float().numpy(), tl.bfloat16))
    with pytest.raises(Unordered, match="fence"):
        hopper(program).warpgroup_mma(left, left, Language.zeros([SIZE, SIZE], tl.float32))


def tiles_and_barrier(program: Program, matrix: torch.Tensor) -> tuple[Tiles, Shared]:
    descriptor = TensorDescriptor.from_tensor(matrix, [SIZE, SIZE], NVMMASharedLayout(128, 16, 2))
    bar = program.allocate(tl.int64, [1, 1], None).index(0)
    hopper(program).mbarrier.init(bar, count=1)
    return Tiles("w_tiles", descriptor), bar


def test_a_tile_arrives_at_the_wait_for_its_barrier(program: Program, matrix: torch.Tensor) -> None:
    """Beyond the edges of the matrix there are zeros. A wait for the phase before this one does not wait."""
    gluon, shared = hopper(program), program.allocate(tl.bfloat16, [SIZE, SIZE], None)
    tiles, bar = tiles_and_barrier(program, matrix)
    gluon.fence_async_shared()
    shared.fill(np.zeros((SIZE, SIZE)))
    gluon.mbarrier.expect(bar, tiles.block_type.nbytes)
    gluon.tma.async_copy_global_to_shared(tiles, [60, 0], bar, shared)
    gluon.mbarrier.wait(bar, 1)
    assert is_nan(shared)
    gluon.mbarrier.wait(bar, 0)
    assert holds(shared, torch.cat((matrix[60:], torch.zeros(60, SIZE))))


@pytest.mark.parametrize("announced", [None, 1, 2 * SIZE * SIZE - 1])
def test_a_barrier_needs_its_arrival_and_as_many_bytes_as_announced(
    program: Program, matrix: torch.Tensor, announced: int | None
) -> None:
    gluon, shared = hopper(program), program.allocate(tl.bfloat16, [SIZE, SIZE], None)
    tiles, bar = tiles_and_barrier(program, matrix)
    gluon.fence_async_shared()
    if announced:
        gluon.mbarrier.expect(bar, announced)
    else:
        with pytest.raises(NeverEnds):
            gluon.mbarrier.wait(bar, 0)
    gluon.tma.async_copy_global_to_shared(tiles, [0, 0], bar, shared)
    with pytest.raises(NeverEnds):
        gluon.mbarrier.wait(bar, 0)
    with pytest.raises(NeverEnds):
        program.require_end()


def test_a_barrier_needs_a_fence_after_its_init(program: Program, matrix: torch.Tensor) -> None:
    _, bar = tiles_and_barrier(program, matrix)
    with pytest.raises(Unordered, match="fence"):
        hopper(program).mbarrier.expect(bar, 1)


def test_a_dependent_launch_waits_for_the_kernel_before(matrix: torch.Tensor) -> None:
    program = Program(is_dependent=True, read_before_wait=frozenset({"weight_ptr"}))
    gl, x, weight = Language(program), addresses(matrix), Pointer.to_tensor("weight_ptr", matrix)
    gl.load(weight)
    for early in (lambda: gl.load(x), lambda: gl.store(weight, 0), program.require_end):
        with pytest.raises(Unordered, match="gdc_wait"):
            early()
    gl.extra.cuda.gdc_wait()
    gl.load(x)
    gl.store(weight, 0)
    program.require_end()


@pytest.mark.parametrize("place", [-1, SIZE * SIZE])
def test_an_address_out_of_bounds_is_an_error_unless_masked(program: Program, matrix: torch.Tensor, place: int) -> None:
    gl, pointer = Language(program), Pointer.to_tensor("x_ptr", matrix) + place
    assert gl.load(pointer, mask=False, other=3.0).data == 3
    assert is_nan(gl.load(pointer, mask=False))
    with pytest.raises(IndexError, match="x_ptr"):
        gl.load(pointer)
    with pytest.raises(IndexError, match="x_ptr"):
        gl.store(pointer, 0)


def test_arithmetic_is_tritons() -> None:
    """Integer division truncates, unsigned wins over signed, 16-bit floats are rounded."""
    seven, two = Tensor(-7, tl.int32), Tensor(2, tl.int32)
    assert (seven // two).data == -3 and (seven % two).data == -1
    largest = seven.to(tl.int64).to(tl.uint64, bitcast=True)
    assert (largest + seven.to(tl.int64)).dtype == (seven.to(tl.int64) + largest).dtype == tl.uint64
    assert (largest + two).dtype == tl.uint64 and (largest >> 63).data == 1
    with pytest.raises(AssertionError, match="shift"):
        largest << 64
    assert (Tensor(1.0, tl.bfloat16) + 2**-9).data == 1 and (Tensor(1.0, tl.float32) + 2**-9).data > 1
    assert (two * 1.5).dtype == tl.float32 and (two < seven).dtype == tl.int1
