"""Ranks as threads of one process, for tests of layers that are divided among them."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from overlap_spec_kernels import Norm, Normed
from torch import Tensor

from overlap_spec.models.layers.parallel import Rank, reduced_then_added

T = TypeVar("T")
LATE_S = 60.0  # for the others to call the same operation


class ThreadedCommunicator:
    """One of several threads. All hand in their parts, and each adds them up in the order of the ranks.

    Once a thread has failed, `abort` lets no other one wait for it.
    """

    def __init__(self, rank: int, parts: list[Tensor | None], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.ranks = len(parts)
        self._parts = parts
        self._barrier = barrier
        self.abort = barrier.abort

    def all_reduce(self, part: Tensor) -> Tensor:
        first, *others = self._gathered(part)
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_reduce_add(self, part: Tensor, residual: Tensor, norm: Norm) -> Normed:
        return reduced_then_added(self, part, residual, norm)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._gathered(part), dim=-1)

    def _gathered(self, part: Tensor) -> list[Tensor]:
        self._parts[self.rank] = part
        self._barrier.wait(LATE_S)
        found = [each for each in self._parts if each is not None]
        self._barrier.wait(LATE_S)  # all have read before one hands in its next part
        return found


@dataclass(frozen=True)
class SummedBy:
    """One of two ranks, whose sums a function computes."""

    sum: Callable[[Tensor], Tensor]
    rank: int = 0
    ranks: int = 2

    def all_reduce(self, part: Tensor) -> Tensor:
        return self.sum(part)

    def all_reduce_add(self, part: Tensor, residual: Tensor, norm: Norm) -> Normed:
        return reduced_then_added(self, part, residual, norm)

    def all_gather(self, part: Tensor) -> Tensor:
        raise AssertionError("nothing is gathered where a test sums up")


def communicators(ranks: int) -> list[ThreadedCommunicator]:
    """Of so many threads, one for each."""
    parts: list[Tensor | None] = [None] * ranks
    barrier = threading.Barrier(ranks)
    return [ThreadedCommunicator(rank, parts, barrier) for rank in range(ranks)]


def on_ranks(ranks: int, run: Callable[[Rank], T]) -> list[T]:
    """What `run` returns on each rank. Raises: what a rank raises."""

    def of(communicator: ThreadedCommunicator) -> T:
        try:
            return run(Rank(communicator.rank, ranks, communicator))
        except BaseException:
            communicator.abort()
            raise

    with ThreadPoolExecutor(ranks) as threads:
        futures = [threads.submit(of, communicator) for communicator in communicators(ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
