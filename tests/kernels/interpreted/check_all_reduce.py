"""Sums and gathers over ranks under the interpreter, to the bit: in one process, and in several that really wait.

The interpreter cuts float32 off where a GPU rounds it to bfloat16, so there the references do so too.
"""

import multiprocessing
import time
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from overlap_spec_kernels.all_reduce import (
    PROGRAMS,
    PeerBuffers,
    all_gather_reference,
    all_reduce_add_reference,
    all_reduce_reference as rounded_sum,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_add,
    two_shot_all_reduce,
    two_shot_part,
)
from overlap_spec_kernels.norm.normed import Norm, Normed
from support.peer_buffers import UNCAPPED, buffers_of, flags_of, parts_of, peers_of
from torch import Tensor

Result = TypeVar("Result")
Operation = Callable[[Tensor, PeerBuffers], Tensor]
SUMS: list[Operation] = [one_shot_all_reduce, two_shot_all_reduce]
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 64), (3, 1000), (2, 4099)]
CAPACITY = 1 << 16
SMALL, LARGE = (1, 5000), (4, 4000)  # of three and of eight programs
LIMIT_S = 40.0


def all_reduce_reference(parts: list[Tensor]) -> Tensor:
    if parts[0].dtype != torch.bfloat16:
        return rounded_sum(parts)
    total = rounded_sum([part.float() for part in parts])
    return (total.view(torch.int32) & -(1 << 16)).view(torch.float32).bfloat16()


def of_preset_flags(operation: Callable[[Tensor, PeerBuffers], Result], parts: list[Tensor]) -> list[Result]:
    """What each rank gets. Ranks run one after another: flags are set, so none waits, and each is run again once all
    operands are there.
    """
    ranks = len(parts)
    buffers = buffers_of(ranks, CAPACITY)
    for buffer in buffers:
        flags_of(buffer, ranks).fill_(UNCAPPED)
    peers = [peers_of(rank, buffers, CAPACITY) for rank in range(ranks)]
    for _ in range(2):  # the first puts the operands there
        for each in peers:
            each.epochs.zero_()
        results = []
        for each, part in zip(peers, parts, strict=True):
            for buffer in buffers:
                flags_of(buffer, ranks).fill_(UNCAPPED)
            results.append(operation(part, each))
    return results


@pytest.mark.slow_but_every(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks, shape", [(2, SHAPES[0]), (4, SHAPES[1])])
def test_one_shot_adds_in_the_order_of_the_ranks(ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = parts_of(ranks, shape, dtype)
    expected = all_reduce_reference(parts)
    if ranks > 2:
        turned = all_reduce_reference(parts[::-1])
        assert not torch.equal(expected, turned), "the parts have the same sum in both orders: the test cannot fail"
    for found in of_preset_flags(one_shot_all_reduce, parts):
        assert torch.equal(found, expected)


def residual_and_norm(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Norm]:
    """Every second row of a larger tensor, and a norm."""
    generator = torch.Generator().manual_seed(7)
    wide = torch.randn((shape[0], 2 * shape[1]), generator=generator).to(dtype)
    return wide[:, : shape[1]], Norm(torch.randn(shape[1], generator=generator).to(dtype), 1e-5)


def is_as(found: Normed, expected: Normed) -> bool:
    """To the bit, but for sums of squares, of which there are several a row."""
    assert found.squares is not None and expected.squares is not None
    close = torch.allclose(found.squares.sum(0), expected.squares.sum(0), rtol=1e-5)
    return close and torch.equal(found.values, expected.values) and torch.equal(found.weighted, expected.weighted)


@pytest.mark.slow_but_every(1)
@pytest.mark.parametrize("ranks, shape, dtype", [(2, (1, 64), torch.float16), (4, (3, 2500), torch.float32)])
def test_sums_are_added_to_a_residual_on_its_way_into_a_norm(
    ranks: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts, (residual, norm) = parts_of(ranks, shape, dtype), residual_and_norm(shape, dtype)
    expected = all_reduce_add_reference(parts, residual, norm)
    for found in of_preset_flags(lambda part, peers: one_shot_all_reduce_add(part, residual, norm, peers), parts):
        assert found.squares is not None and len(found.squares) == -(-shape[1] // 1024) and found.eps == norm.eps
        assert is_as(found, expected)


def test_a_gather_is_in_the_order_of_the_ranks() -> None:
    parts = parts_of(4, SHAPES[2], torch.bfloat16)
    for found in of_preset_flags(one_shot_all_gather, parts):
        assert torch.equal(found, all_gather_reference(parts))


def test_a_launch_counts_for_all_programs_and_tells_all_ranks() -> None:
    buffers = buffers_of(2, CAPACITY)
    flags_of(buffers[1], 2).fill_(UNCAPPED)
    peers = peers_of(1, buffers, CAPACITY)
    for epoch, shape in enumerate((SMALL, LARGE, SMALL), start=1):
        flags_of(buffers[1], 2).fill_(UNCAPPED)
        one_shot_all_reduce(torch.ones(shape), peers)
        assert peers.epochs.tolist() == [epoch] * PROGRAMS
        assert flags_of(buffers[0], 2)[0].tolist() == [0, 2 * epoch]


def test_places_take_turns() -> None:
    """What the others may still read of an epoch is not written in the next one."""
    buffers = buffers_of(2, CAPACITY)
    peers = peers_of(0, buffers, CAPACITY)
    for value in (1.0, 2.0, 3.0):
        flags_of(buffers[0], 2).fill_(UNCAPPED)
        one_shot_all_reduce(torch.full((8,), value), peers)
    even, odd = buffers[0][-2 * CAPACITY :].view(torch.float32).chunk(2)
    assert even[:8].tolist() == [2.0] * 8 and odd[:8].tolist() == [3.0] * 8


def run_rank(rank: int, ranks: int, buffers: list[Tensor], dtype: torch.dtype, found: Tensor) -> None:
    """All operations in turns, of many sizes, now and then late. `found`: which launches gave the reference's bits."""
    peers = peers_of(rank, buffers, CAPACITY)
    for number in range(found.shape[1]):
        shape = ((1, 64), SMALL, (2, 2100), (7, 13), LARGE)[number % 5]
        parts = parts_of(ranks, shape, dtype, seed=number)
        if number % 4 == rank % 4:
            time.sleep(0.02)
        if dtype == torch.float32 and number % 4 == 3:
            residual, norm = residual_and_norm(shape, dtype)
            added = one_shot_all_reduce_add(parts[rank], residual, norm, peers)
            found[rank, number] = is_as(added, all_reduce_add_reference(parts, residual, norm))
            continue
        if number % 3 == 2:
            result, expected = one_shot_all_gather(parts[rank], peers), all_gather_reference(parts)
        else:
            result, expected = SUMS[number % 3](parts[rank], peers), all_reduce_reference(parts)
        found[rank, number] = torch.equal(result, expected)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("ranks, dtype", [(4, torch.float32), (2, torch.bfloat16), (2, torch.float16)])
def test_processes_wait_for_each_other(ranks: int, dtype: torch.dtype) -> None:
    """The flags alone put them in step: their operands, their sums and their epochs."""
    launches = 8
    buffers = buffers_of(ranks, CAPACITY, shared=True)
    found = torch.zeros(ranks, launches, dtype=torch.bool).share_memory_()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=run_rank, args=(rank, ranks, buffers, dtype, found), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    hung = [process for process in processes if process.is_alive()]
    for process in hung:
        process.kill()
    assert not hung, "a rank waits for ever"
    assert found.all(), found


def test_parts_of_two_shots_begin_at_vectors() -> None:
    assert [two_shot_part(count, 4) for count in (1, 64, 65, 1000)] == [16, 16, 32, 256]


def test_wrong_arguments_are_named() -> None:
    peers = peers_of(0, buffers_of(2, 16), 16)
    with pytest.raises(ValueError, match="part: expected at most 16 bytes"):
        one_shot_all_reduce(torch.ones(5), peers)
    with pytest.raises(ValueError, match="part: expected contiguous, a float of 16 or 32 bits"):
        two_shot_all_reduce(torch.ones(4, dtype=torch.float64), peers)
    norm = Norm(torch.ones(2), 1e-5)
    with pytest.raises(ValueError, match="residual: expected \\[T, H\\], as the part"):
        one_shot_all_reduce_add(torch.ones(1, 2), torch.ones(2, 2), norm, peers)
    with pytest.raises(ValueError, match="norm: expected \\[H\\], contiguous"):
        one_shot_all_reduce_add(torch.ones(2, 1), torch.ones(2, 1), norm, peers)
    with pytest.raises(ValueError, match="part: expected .T, N."):
        one_shot_all_gather(torch.ones(4), peers)
    with pytest.raises(ValueError, match="capacity"):
        PeerBuffers.num_bytes(2, 24)
