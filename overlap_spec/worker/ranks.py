"""One rank of a model's worker: its place among the others, what they agree on, and how they measure together.

    start    all: load, settle sizes, warm up, capture: each the same work in the same order
             rank 0: measures; a step that it runs for that is sent to the others first, as a plan is later
    serving  the scheduler sends each plan to all; rank 0 answers

A worker alone is rank 0 of 1, which waits for no other. Whether there are others is asked here, and nowhere else in the
worker.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from overlap_spec_kernels import Norm, Normed
from torch import Tensor

from overlap_spec.config.ranks import rank_of, worker_roles
from overlap_spec.errors import ConfigError, RankLost
from overlap_spec.messages import FlushCache, StepPlan, with_own_lists, with_shared_lists
from overlap_spec.models.layers.parallel import WHOLE, Communicator, GlooCommunicator, Rank, SymmetricCommunicator
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.loop import GLANCE_S, PlanInbox
from overlap_spec.worker.step import StepHandle

T = TypeVar("T")

LOOK_S = 0.002  # between looks for the file of another rank
TOLD_S = 0.5  # between reports of a rank that waits, and after so much time for the first


class Waits:
    """Entered while this rank waits for others; not twice at once.

    It answers no probe then, as its one thread waits. So a thread tells the supervisor since when it does, which must
    not take the rank that waits for the one that hangs (`watchdog.py`).
    """

    def __init__(self) -> None:
        self._since = 0.0

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_error: object) -> None:
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """For how long it has waited; 0: it does not."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    @contextmanager
    def reported(self, connect: Callable[[], AbstractContextManager[Callable[[float], None]]]) -> Iterator[None]:
        """Tell of waits that last, from a thread, until the block ends. `connect`: called in that thread."""
        ended = threading.Event()

        def report() -> None:
            with connect() as tell:
                while not ended.wait(TOLD_S):
                    if (seconds := self.seconds) >= TOLD_S:
                        tell(seconds)

        thread = threading.Thread(target=report, name="waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Agreement:
    """One rank's part of what is decided by a clock or by free memory: once for all, as all must launch the same work.

    Each rank writes a file, and reads those of the others: run directory / ranks / geometry-0, geometry-1, .. All ask
    for the same names in the same order; each name is used once. A rank that is gone writes nothing: the others wait
    until the supervisor, which has noticed, ends them.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        directory: Path | None = None,
        waits: AbstractContextManager[object] | None = None,
    ) -> None:
        """`directory`: of this start, for all ranks; one rank alone needs none. `waits`: entered while it waits."""
        assert directory is not None or ranks == 1
        self.rank = rank
        self.ranks = ranks
        self._directory = directory
        self._waits = waits or nullcontext()
        if directory is not None:
            directory.mkdir(exist_ok=True)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which decides."""
        return self.rank == 0

    def gathered(self, name: str, value: T, kind: type[T]) -> list[T]:
        """Every rank's value, in the order of the ranks. Waits for all."""
        if self._directory is None:
            return [value]
        self._write(self._directory, name, value)
        return [self._read(self._directory, name, rank, kind) for rank in range(self.ranks)]

    def of_first(self, name: str, decide: Callable[[], T], kind: type[T]) -> T:
        """What rank 0 decides. The others wait for it and decide nothing."""
        if self._directory is None:
            return decide()
        if self.is_first:
            self._write(self._directory, name, decide())
        return self._read(self._directory, name, 0, kind)

    def _write(self, directory: Path, name: str, value: object) -> None:
        scratch = directory / f"{name}-{self.rank}.new"
        scratch.write_bytes(msgspec.msgpack.encode(value))
        os.rename(scratch, scratch.with_suffix(""))

    def _read(self, directory: Path, name: str, rank: int, kind: type[T]) -> T:
        path = directory / f"{name}-{rank}"
        with self._waits:
            while not path.exists():
                time.sleep(LOOK_S)
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)


ALONE = Agreement()


LOOPBACK = "127.0.0.1"


class Gpu(msgspec.Struct, frozen=True):
    """The GPU of a rank. `unreachable`: the ranks whose memory it does not see."""

    name: str
    capability: tuple[int, int]
    num_bytes: int
    unreachable: tuple[int, ...] = ()


class WatchedCommunicator:
    """Another communicator, of which is known when this rank waits in it. Raises: RankLost."""

    def __init__(self, waits: Waits, communicator: Communicator) -> None:
        self._waits = waits
        self._inner = communicator

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def ranks(self) -> int:
        return self._inner.ranks

    def all_reduce(self, part: Tensor) -> Tensor:
        with self._waits, losing_ranks():
            return self._inner.all_reduce(part)

    def all_reduce_add(self, part: Tensor, residual: Tensor, norm: Norm) -> Normed:
        with self._waits, losing_ranks():
            return self._inner.all_reduce_add(part, residual, norm)

    def all_gather(self, part: Tensor) -> Tensor:
        with self._waits, losing_ranks():
            return self._inner.all_gather(part)


@contextmanager
def losing_ranks() -> Iterator[None]:
    """What a library raises where another rank is gone, or was never reached, by a name of ours."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank of the model is gone, or cannot be reached: {error}") from error


class Silent:
    """What ranks that do not answer send their results to."""

    def send(self, message: object) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Ranks:
    """This rank, and what it shares with the others."""

    rank: Rank = WHOLE
    agreement: Agreement = ALONE

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which measures and answers."""
        return self.rank.rank == 0


ONE = Ranks()


@contextmanager
def taking_part(context: ActorContext) -> Iterator[Ranks]:
    """This process's rank among those of the engine. Waits of it are told the supervisor until the block ends.

    Raises: ConfigError naming a rank that has no TCP port, or whose GPU is missing, of another kind, or sees no memory
    of the others.
    """
    rank, ranks = rank_of(context.role), context.settings.ranks
    assert rank is not None, f"{context.role} is no worker's role"
    if ranks == 1:
        yield ONE
        return
    refuse_without_port(rank)
    waits = Waits()
    with waits.reported(context.waiting_reports):
        agreement = Agreement(rank, ranks, context.endpoints.agreement(), waits)
        reducing = reducing_on_gpus if context.settings.model.device == "cuda" else reducing_on_cpus
        with reducing(agreement, context.endpoints.reductions(), waits) as communicator:
            yield Ranks(Rank(rank, ranks, communicator), agreement)


@contextmanager
def reducing_on_cpus(agreement: Agreement, store_path: Path, waits: Waits) -> Iterator[Communicator]:
    """Each operation waits for the other ranks."""
    with waits, losing_ranks():
        communicator = GlooCommunicator(agreement.rank, agreement.ranks, store_path)
    yield WatchedCommunicator(waits, communicator)


@contextmanager
def reducing_on_gpus(agreement: Agreement, store_path: Path, waits: Waits) -> Iterator[Communicator]:
    """Operations are launched, and the GPUs wait for each other: a step that is long in flight is noticed as ever.

    After an error nothing is closed, as other ranks may be gone.
    """
    rank, ranks = agreement.rank, agreement.ranks
    refuse_other_gpus(agreement.gathered("gpus", gpu_of(rank, ranks), Gpu))
    with waits, losing_ranks():
        communicator = SymmetricCommunicator(rank, ranks, store_path)
    yield communicator
    communicator.close()


def refuse_without_port(rank: int) -> None:
    """gloo and NCCL listen on a port that the kernel chooses. What they raise where none is free is no lost rank.

    Raises: ConfigError.
    """
    with socket.socket() as listener:
        try:
            listener.bind((LOOPBACK, 0))
        except OSError as error:
            raise ConfigError("tp_size", f"rank {rank} has no TCP port of {LOOPBACK} to listen on: {error}") from None


def gpu_of(rank: int, ranks: int) -> Gpu:
    """What this rank computes on, from now on. Raises: ConfigError if there is no such GPU."""
    count = torch.cuda.device_count()
    if rank >= count:
        raise ConfigError("tp_size", f"rank {rank} has no GPU: torch sees {count}; use {_fitting(count)}")
    torch.cuda.set_device(rank)
    others = [other for other in range(min(ranks, count)) if other != rank]
    unreachable = tuple(other for other in others if not torch.cuda.can_device_access_peer(rank, other))
    found = torch.cuda.get_device_properties(rank)
    return Gpu(found.name, (found.major, found.minor), found.total_memory, unreachable)


def refuse_other_gpus(gpus: list[Gpu]) -> None:
    """Raises: ConfigError naming the first rank whose GPU is not like that of rank 0, or sees no memory of another."""
    first = gpus[0]
    for rank, gpu in enumerate(gpus):
        if (gpu.name, gpu.capability) != (first.name, first.capability):
            raise ConfigError(
                "tp_size", f"rank {rank} has an {gpu.name}, rank 0 an {first.name}: the GPUs of an engine must be alike"
            )
        if gpu.unreachable:
            others = ", ".join(map(str, gpu.unreachable))
            raise ConfigError(
                "tp_size",
                f"the GPU of rank {rank} sees no memory of rank {others}: no reduction runs between them; use 1,"
                " or GPUs that are connected by NVLink or PCIe with peer access",
            )


def _fitting(count: int) -> int:
    """The most ranks that so many GPUs hold."""
    return 1 << (count.bit_length() - 1) if count else 1


@contextmanager
def leading(executor: Executor, context: ActorContext) -> Iterator[None]:
    """Send each step that is launched in this block to the other ranks, and what ends it (`follow`)."""
    others = [context.step_outlet(role) for role in worker_roles(context.settings.ranks)[1:]]

    def announce(plan: StepPlan) -> None:
        shared = with_shared_lists(plan)
        for other in others:
            other.send(shared)

    executor.announce = announce
    try:
        yield
    finally:
        executor.announce = lambda plan: None
        for other in others:
            other.send(FlushCache())
            other.close()


def follow(executor: Executor, inbox: PlanInbox) -> None:
    """Launch what rank 0 launches, until it is through with measuring. It has no use for results."""
    launched: deque[StepHandle] = deque()
    while True:
        for message in inbox.poll():
            if isinstance(message, FlushCache):
                executor.device.finish()
                return
            if isinstance(message, StepPlan):
                launched.append(executor.launch(with_own_lists(message)))
        while launched and launched[0].ready():
            launched.popleft()
        inbox.wait(GLANCE_S if launched else None)
