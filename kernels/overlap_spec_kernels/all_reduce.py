"""Sums and gathers over the GPUs of one host, by plain loads and stores to each other's memory.

Every rank has a buffer that all ranks can address: flags, then two places for operands.

    | flags, i64 [PROGRAMS, ranks] | operand of even epochs | operand of odd epochs |

    one-shot    write own operand - signal - wait for all - read all operands, add in the order of the ranks
    with a norm the same, whose sums are added to the residual on its way into a norm (`norm/normed.py`)
    two-shot    the same of the own part of the elements alone, written back in place - signal - wait - read all parts

Program p of a launch works on the same elements on every rank, so it waits for program p of the others, and for no
other program. A launch is an epoch, which each rank counts on its device: a captured graph can be replayed. Flags only
grow: 2 epoch once the operand is there, 2 epoch + 1 once the part is.

A place is written again two epochs later. By then every rank has signalled the epoch between, so its launch before that
one has ended: no rank reads the place. That holds if the launches of a rank follow each other on one stream, and none
touches memory before the one before it has ended: a dependent launch waits for that first. What comes behind it may
begin at once, and ask for weights while this one waits for the other ranks.

A wait has no limit. A rank that is stopped may go on, with the right result; whether it is dead is the supervisor's to
judge, which ends all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require
from overlap_spec_kernels.norm.normed import Norm, Normed

PROGRAMS = 64  # of a launch, at most: all of them run at once on any GPU
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 16  # bytes of a vector access
_FLAG = 8  # bytes
_BLOCK = 2048  # elements that a program handles at once
_WARPS = 8
_ADD_BLOCK = 1024  # the same where the sums are added to a residual: few rows have few programs
_ADD_WARPS = 4


@dataclass(frozen=True, slots=True)
class PeerBuffers:
    """The buffers of all ranks, as one rank addresses them. Flags and epochs begin as zeros, on all ranks."""

    rank: int
    addresses: Tensor  # [ranks] i64: where each rank's buffer begins
    epochs: Tensor  # [PROGRAMS] i64: launches until now; all are equal between launches
    capacity: int  # bytes of an operand, at most

    @property
    def ranks(self) -> int:
        return self.addresses.shape[0]

    @staticmethod
    def num_bytes(ranks: int, capacity: int) -> int:
        """Of one rank's buffer. `capacity`: a multiple of 16 bytes."""
        require(capacity > 0 and capacity % ALIGNMENT == 0, "capacity", f"a positive multiple of {ALIGNMENT} bytes")
        return PROGRAMS * ranks * _FLAG + 2 * capacity


def one_shot_all_reduce(part: Tensor, peers: PeerBuffers) -> Tensor:
    """The sum of all ranks' parts: every rank reads all of them. For few bytes.

    Sums are float32, in the order of the ranks, rounded once: the same bits on every rank.
    All ranks launch the same operations in the same order. Sync: never.
    Shapes: [..] -> [..], contiguous, a float of 16 or 32 bits. Raises: ValueError naming the argument.
    """
    _check(part, peers)
    out = torch.empty_like(part)
    if part.numel():
        options = _constants(peers) | dependent_launch(part.device, part.shape[0])
        _one_shot_kernel[_grid(part.numel())](part, out, *_of(peers), part.numel(), **options)
    return out


def two_shot_all_reduce(part: Tensor, peers: PeerBuffers) -> Tensor:
    """The same bits as `one_shot_all_reduce`: each rank adds up its part of the elements, then all gather the sums.

    Less is read where there are more than two ranks, after one more wait.
    """
    _check(part, peers)
    out = torch.empty_like(part)
    if part.numel():
        size = two_shot_part(part.numel(), peers.ranks)
        _two_shot_kernel[_grid(size)](part, out, *_of(peers), part.numel(), size, **_constants(peers))
    return out


def one_shot_all_reduce_add(part: Tensor, residual: Tensor, norm: Norm, peers: PeerBuffers) -> Normed:
    """The residual and the sum of all ranks' parts, on their way into a norm: one launch. For few bytes.

    Sums are float32, in the order of the ranks, the residual last. All ranks launch the same operations in the same
    order. Sync: never. Shapes: part, residual [T, H], a float of 16 or 32 bits. Raises: ValueError naming the argument.
    """
    _check(part, peers)
    require(part.dim() == 2 and residual.shape == part.shape, "residual", "[T, H], as the part")
    require(residual.stride(1) == 1 and residual.dtype == part.dtype, "residual", "contiguous rows in the part's dtype")
    num_rows, size = part.shape
    require(norm.weight.shape == (size,) and norm.weight.is_contiguous(), "norm", "[H], contiguous")
    out, weighted = torch.empty_like(part), torch.empty_like(part)
    parts = ceil_div(size, _ADD_BLOCK)
    squares = torch.empty((parts, num_rows), dtype=torch.float32, device=part.device)
    options = _constants(peers) | {"BLOCK": _ADD_BLOCK, "num_warps": _ADD_WARPS}
    if num_rows:
        _one_shot_add_kernel[(min(num_rows * parts, PROGRAMS),)](
            part, residual, norm.weight, out, weighted, squares, *_of(peers), residual.stride(0), num_rows, size, parts,
            **options, **dependent_launch(part.device, num_rows),
        )  # fmt: skip
    return Normed(out, weighted, squares, norm.eps)


def one_shot_all_gather(part: Tensor, peers: PeerBuffers) -> Tensor:
    """All ranks' columns side by side, in the order of the ranks. Shapes: [T, N] -> [T, ranks N]; else as the sums."""
    require(part.dim() == 2, "part", "[T, N]")
    _check(part, peers)
    rows, columns = part.shape
    out = torch.empty((rows, peers.ranks * columns), dtype=part.dtype, device=part.device)
    if part.numel():
        options = _constants(peers) | dependent_launch(part.device, rows)
        _gather_kernel[_grid(part.numel())](part, out, *_of(peers), part.numel(), columns, **options)
    return out


def all_reduce_reference(parts: Sequence[Tensor]) -> Tensor:
    """What every rank gets. `parts`: of all ranks, in their order."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def all_reduce_add_reference(parts: Sequence[Tensor], residual: Tensor, norm: Norm) -> Normed:
    """What every rank gets; one sum of squares a row."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    values = (total + residual.float()).to(residual.dtype)
    weighted = (values.float() * norm.weight.float()).to(residual.dtype)
    return Normed(values, weighted, values.float().square().sum(1)[None], norm.eps)


def all_gather_reference(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts), dim=-1)


def two_shot_part(count: int, ranks: int) -> int:
    """Elements that one rank adds up, so many that the next rank's begin at a vector. The last part may be shorter."""
    return ceil_div(ceil_div(count, ranks), ALIGNMENT) * ALIGNMENT


def _check(part: Tensor, peers: PeerBuffers) -> None:
    require(part.dtype in DTYPES and part.is_contiguous(), "part", "contiguous, a float of 16 or 32 bits")
    require(part.nbytes <= peers.capacity, "part", f"at most {peers.capacity} bytes")


def _grid(count: int) -> tuple[int]:
    return (min(ceil_div(count, _BLOCK), PROGRAMS),)


def _of(peers: PeerBuffers) -> tuple[Tensor, Tensor, int, int]:
    return peers.addresses, peers.epochs, peers.capacity, peers.rank


def _constants(peers: PeerBuffers) -> dict[str, int]:
    return {"RANKS": peers.ranks, "PROGRAMS": PROGRAMS, "BLOCK": _BLOCK, "num_warps": _WARPS}


@TritonKernel
def _operand(
    addresses_ptr: tl.tensor,
    of_rank: int,
    epoch: tl.tensor,
    capacity: int,
    dtype: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> tl.tensor:
    """Where a rank's operand of this epoch begins."""
    address = tl.load(addresses_ptr + of_rank) + PROGRAMS * RANKS * 8 + (epoch % 2) * capacity
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@TritonKernel
def _signal_and_wait(addresses_ptr: tl.tensor, value: tl.tensor, rank: int, RANKS: tl.constexpr) -> None:
    """Tell the same program of all ranks that what this one wrote can be read, and wait until all have told so.

    The barriers put the accesses of all threads before the signal, and after the wait.
    """
    tl.debug_barrier()
    row = tl.program_id(0) * RANKS
    for peer in tl.static_range(RANKS):
        theirs = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(theirs + row + rank, value, sem="release", scope="sys")
    own = tl.load(addresses_ptr + rank).to(tl.pointer_type(tl.int64))
    for peer in tl.static_range(RANKS):
        seen = tl.atomic_add(own + row + peer, 0, sem="acquire", scope="sys")
        while seen < value:
            seen = tl.atomic_add(own + row + peer, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@TritonKernel
def _hand_in(
    part_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    epoch: tl.tensor,
    capacity: int,
    rank: int,
    count: int,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write this program's elements of the own operand, and wait until the same program of all ranks has."""
    mine = _operand(addresses_ptr, rank, epoch, capacity, part_ptr.dtype.element_ty, RANKS, PROGRAMS)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        tl.store(mine + place, tl.load(part_ptr + place, mask=place < count), mask=place < count)
    _signal_and_wait(addresses_ptr, 2 * epoch, rank, RANKS)


@TritonKernel
def _count_epoch(epochs_ptr: tl.tensor, epoch: tl.tensor, PROGRAMS: tl.constexpr) -> None:
    """Advance all counters, also those of programs that this launch does not have: each by one program.

    A program reads the counter of its own number, which no other one writes.
    """
    number = tl.arange(0, PROGRAMS)
    tl.store(epochs_ptr + number, epoch + tl.zeros_like(number), mask=number % tl.num_programs(0) == tl.program_id(0))


@TritonKernel.with_options(do_not_specialize=("rank",))
def _one_shot_kernel(
    part_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    capacity: int,
    rank: int,
    count: int,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    wait_for_inputs(PDL)
    epoch = tl.load(epochs_ptr + tl.program_id(0)) + 1
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    _hand_in(part_ptr, addresses_ptr, epoch, capacity, rank, count, RANKS, PROGRAMS, BLOCK)
    for start in range(first, count, step):
        place = start + tl.arange(0, BLOCK)
        total = _sum_of_ranks(addresses_ptr, epoch, capacity, place, place < count, dtype, RANKS, PROGRAMS)
        tl.store(out_ptr + place, total.to(dtype), mask=place < count)
    _count_epoch(epochs_ptr, epoch, PROGRAMS)


@TritonKernel.with_options(do_not_specialize=("rank", "num_rows", "parts"))
def _one_shot_add_kernel(
    part_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    out_ptr: tl.tensor,
    weighted_ptr: tl.tensor,
    squares_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    capacity: int,
    rank: int,
    residual_stride: int,
    num_rows: int,
    size: int,
    parts: int,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A tile is a part of a row. `parts`: tiles of a row."""
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    wait_for_inputs(PDL)
    epoch = tl.load(epochs_ptr + tl.program_id(0)) + 1
    mine = _operand(addresses_ptr, rank, epoch, capacity, dtype, RANKS, PROGRAMS)
    for tile in range(tl.program_id(0), num_rows * parts, tl.num_programs(0)):
        row, column = tile // parts, tile % parts * BLOCK + tl.arange(0, BLOCK)
        place = row * size + column
        tl.store(mine + place, tl.load(part_ptr + place, mask=column < size), mask=column < size)
    _signal_and_wait(addresses_ptr, 2 * epoch, rank, RANKS)
    for tile in range(tl.program_id(0), num_rows * parts, tl.num_programs(0)):
        row, column = tile // parts, tile % parts * BLOCK + tl.arange(0, BLOCK)
        place, inside = row * size + column, column < size
        added = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
        total = _sum_of_ranks(addresses_ptr, epoch, capacity, place, inside, dtype, RANKS, PROGRAMS)
        rounded = (total + added).to(dtype)
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        tl.store(out_ptr + place, rounded, mask=inside)
        tl.store(weighted_ptr + place, (wide * norm).to(dtype), mask=inside)
        tl.store(squares_ptr + tile % parts * num_rows + row, tl.sum(wide * wide, axis=0))
    _count_epoch(epochs_ptr, epoch, PROGRAMS)


@TritonKernel
def _sum_of_ranks(
    addresses_ptr: tl.tensor,
    epoch: tl.tensor,
    capacity: int,
    place: tl.tensor,
    inside: tl.tensor,
    dtype: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> tl.tensor:
    """In float32, from rank 0 on."""
    theirs = _operand(addresses_ptr, 0, epoch, capacity, dtype, RANKS, PROGRAMS)
    total = tl.load(theirs + place, mask=inside, cache_modifier=".cg").to(tl.float32)
    for peer in tl.static_range(1, RANKS):
        theirs = _operand(addresses_ptr, peer, epoch, capacity, dtype, RANKS, PROGRAMS)
        total += tl.load(theirs + place, mask=inside, cache_modifier=".cg").to(tl.float32)
    return total


@TritonKernel.with_options(do_not_specialize=("rank",))
def _two_shot_kernel(
    part_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    capacity: int,
    rank: int,
    count: int,
    size: int,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """`size`: elements of a rank's part."""
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    epoch = tl.load(epochs_ptr + tl.program_id(0)) + 1
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    mine = _operand(addresses_ptr, rank, epoch, capacity, dtype, RANKS, PROGRAMS)
    for start in range(first, size, step):
        within = start + tl.arange(0, BLOCK)
        for peer in tl.static_range(RANKS):
            place = peer * size + within
            inside = (within < size) & (place < count)
            tl.store(mine + place, tl.load(part_ptr + place, mask=inside), mask=inside)
    _signal_and_wait(addresses_ptr, 2 * epoch, rank, RANKS)
    for start in range(first, size, step):
        within = start + tl.arange(0, BLOCK)
        place = rank * size + within
        inside = (within < size) & (place < count)
        total = _sum_of_ranks(addresses_ptr, epoch, capacity, place, inside, dtype, RANKS, PROGRAMS)
        tl.store(mine + place, total.to(dtype), mask=inside)  # of these elements, which this rank alone reads
    _signal_and_wait(addresses_ptr, 2 * epoch + 1, rank, RANKS)
    for start in range(first, size, step):
        within = start + tl.arange(0, BLOCK)
        for peer in tl.static_range(RANKS):
            place = peer * size + within
            inside = (within < size) & (place < count)
            theirs = _operand(addresses_ptr, peer, epoch, capacity, dtype, RANKS, PROGRAMS)
            tl.store(out_ptr + place, tl.load(theirs + place, mask=inside, cache_modifier=".cg"), mask=inside)
    _count_epoch(epochs_ptr, epoch, PROGRAMS)


@TritonKernel.with_options(do_not_specialize=("rank",))
def _gather_kernel(
    part_ptr: tl.tensor,
    out_ptr: tl.tensor,
    addresses_ptr: tl.tensor,
    epochs_ptr: tl.tensor,
    capacity: int,
    rank: int,
    count: int,
    columns: int,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    dtype: tl.constexpr = part_ptr.dtype.element_ty
    wait_for_inputs(PDL)
    epoch = tl.load(epochs_ptr + tl.program_id(0)) + 1
    first, step = tl.program_id(0) * BLOCK, tl.num_programs(0) * BLOCK
    _hand_in(part_ptr, addresses_ptr, epoch, capacity, rank, count, RANKS, PROGRAMS, BLOCK)
    for start in range(first, count, step):
        place = start + tl.arange(0, BLOCK)
        row, column = place // columns, place % columns
        for peer in tl.static_range(RANKS):
            theirs = _operand(addresses_ptr, peer, epoch, capacity, dtype, RANKS, PROGRAMS)
            found = tl.load(theirs + place, mask=place < count, cache_modifier=".cg")
            tl.store(out_ptr + (row * RANKS + peer) * columns + column, found, mask=place < count)
    _count_epoch(epochs_ptr, epoch, PROGRAMS)
