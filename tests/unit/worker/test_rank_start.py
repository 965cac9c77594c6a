"""How the ranks of a worker start: sizes that fit all, GPUs that are alike, and one rank that measures for all."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from support.fake_settings import fake_settings
from support.ring import RingConfig, tiny_loaded

from overlap_spec import features
from overlap_spec.errors import ConfigError, RankLost
from overlap_spec.messages import FlushCache, LivenessProbe, StepPlan, ToWorker, TwoPartSizes
from overlap_spec.runtime.actor import ActorContext
from overlap_spec.runtime.run_directory import Endpoints
from overlap_spec.runtime.step_link import SpinPolicy, StepInbox, StepOutlet
from overlap_spec.runtime.transport import ZmqInbox
from overlap_spec.worker.build import build_executor
from overlap_spec.worker.ranks import (
    ALONE,
    Agreement,
    Gpu,
    Waits,
    WatchedCommunicator,
    follow,
    leading,
    reducing_on_gpus,
    refuse_other_gpus,
    refuse_without_port,
    taking_part,
)
from overlap_spec.worker.startup.geometry import agreed_geometry
from overlap_spec.worker.startup.step_times import measure_chunk, measure_steps
from overlap_spec.worker.worker_actor import bound_inbox

CONFIG = RingConfig("EAGLE3", num_steps=3, topk=1, num_slots=4, num_pages=101, widths_seed=1)
CPU = torch.device("cpu")
GPU = Gpu("H100", (9, 0), 80 << 30)


def test_sizes_are_those_that_every_rank_has_room_for(tmp_path: Path) -> None:
    own = replace(CONFIG.geometry(), num_pages=101, most_deferred=40, batch_rows=7)
    two_parts = TwoPartSizes(2, 3, (1, 2), ((16,), (16,)))
    found = [own, replace(own, num_pages=90, most_deferred=64, batch_rows=9, two_parts=two_parts)]

    def work(rank: int) -> Any:
        return agreed_geometry(found[rank], Agreement(rank, 2, tmp_path / "ranks"))

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(work, range(2), timeout=20)
    assert first == second == replace(own, num_pages=90, most_deferred=40)
    assert agreed_geometry(own, ALONE) == own


def test_gpus_that_are_not_alike_are_refused_by_their_rank() -> None:
    refuse_other_gpus([GPU, GPU])
    with pytest.raises(ConfigError, match="--tp-size: rank 2 has an L4, rank 0 an H100"):
        refuse_other_gpus([GPU, GPU, Gpu("L4", (8, 9), 24 << 30)])


def test_a_socket_that_is_taken_is_named_with_its_rank(tmp_path: Path) -> None:
    context = ActorContext("worker-1", fake_settings(), tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
        taken.bind(str(context.endpoints.steps("worker-1")))
        with pytest.raises(ConfigError, match="--tp-size: rank 1 cannot bind its socket .*worker-1.steps: .*in use"):
            bound_inbox(context)
    context.close()


def test_a_place_of_its_zeromq_socket_that_is_taken_is_named_with_its_rank(tmp_path: Path) -> None:
    """By what ZeroMQ does not remove: a directory."""
    context = ActorContext("worker-1", fake_settings(), tmp_path)
    (tmp_path / "worker-1.sock" / "own").mkdir(parents=True)
    with pytest.raises(ConfigError, match="--tp-size: rank 1 cannot bind its socket of ZeroMQ: .*in use"):
        bound_inbox(context)
    context.close()


def test_a_rank_without_a_port_is_named_before_it_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an address that this machine has not, as the kernel finds no port of it either."""
    refuse_without_port(1)
    monkeypatch.setattr("overlap_spec.worker.ranks.LOOPBACK", "192.0.2.1")
    monkeypatch.setattr("overlap_spec.worker.ranks.reducing_on_cpus", lambda *_: contextlib.nullcontext())  # no wait
    context = ActorContext("worker-1", msgspec.structs.replace(fake_settings(), ranks=2), tmp_path)
    with (
        pytest.raises(ConfigError, match="--tp-size: rank 1 has no TCP port of 192.0.2.1 to listen on: "),
        taking_part(context),
    ):
        raise AssertionError("it goes on to other ranks, and to weights")
    context.close()


def test_a_rank_that_sees_no_memory_of_another_is_named() -> None:
    with pytest.raises(ConfigError, match="--tp-size: the GPU of rank 1 sees no memory of rank 0, 3"):
        refuse_other_gpus([GPU, Gpu("H100", (9, 0), 80 << 30, (0, 3))])


@contextlib.contextmanager
def plans_of_rank_1(tmp_path: Path) -> Iterator[tuple[StepInbox[Any], Any]]:
    """What rank 1 reads, and the part of an actor's context that rank 0 leads by."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    endpoints, union = Endpoints(tmp_path), features.link(ToWorker)
    others: ZmqInbox[Any] = ZmqInbox(context, endpoints.inbox("worker-1"), union)
    inbox: StepInbox[Any] = StepInbox(others, endpoints.steps("worker-1"), union, SpinPolicy(0.0), LivenessProbe)
    leader = SimpleNamespace(
        settings=SimpleNamespace(ranks=2), step_outlet=lambda role: StepOutlet[Any](endpoints.steps(role))
    )
    yield inbox, leader
    inbox.close()
    others.close()
    context.term()


def test_whatever_rank_0_launches_to_measure_is_launched_by_the_others(tmp_path: Path) -> None:
    """How many steps that are depends on a clock."""
    models, geometry = tiny_loaded(1, 3), CONFIG.geometry()
    ranks = [build_executor(models, geometry, CPU) for _ in range(2)]
    launched: list[list[StepPlan]] = [[], []]
    for executor, plans in zip(ranks, launched, strict=True):
        start = executor.start
        executor.start = lambda plan, *more, start=start, plans=plans: plans.append(plan) or start(plan, *more)
    with plans_of_rank_1(tmp_path) as (inbox, context):
        following = threading.Thread(target=follow, args=(ranks[1], inbox), daemon=True)
        following.start()
        with leading(ranks[0], context):
            measure_chunk(ranks[0], geometry)
            measure_steps(ranks[0], geometry, ())
        following.join(20)
        assert not following.is_alive(), "it is told that measuring is over"
        ranks[0].launch(launched[0][-1])
    assert len(launched[1]) > 10 and launched[1] == launched[0][:-1]


def test_what_measuring_raises_ends_it_for_the_others(tmp_path: Path) -> None:
    executor = build_executor(tiny_loaded(1, 3), CONFIG.geometry(), CPU)
    with plans_of_rank_1(tmp_path) as (inbox, context):
        with pytest.raises(ZeroDivisionError), leading(executor, context):
            raise ZeroDivisionError
        inbox.wait(5)
        assert [type(message) for message in inbox.poll()] == [FlushCache]


class Reductions:
    """A communicator that looks, while it is waited in, at what is known of the wait."""

    rank, ranks = 1, 2

    def __init__(self, waits: Waits) -> None:
        self.waits = waits
        self.known: list[bool] = []

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        self.known.append(self.waits.seconds > 0)
        return 2 * part

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        self.known.append(self.waits.seconds > 0)
        raise RuntimeError("Connection closed by peer")


def test_a_wait_in_a_reduction_is_known_and_a_lost_rank_has_a_name() -> None:
    waits = Waits()
    inner = Reductions(waits)
    watched = WatchedCommunicator(waits, inner)
    assert (watched.rank, watched.ranks) == (1, 2)
    assert watched.all_reduce(torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(RankLost, match="gone, or cannot be reached: Connection closed by peer"):
        watched.all_gather(torch.ones(2, 1))
    assert inner.known == [True, True] and waits.seconds == 0.0


class Connected:
    """In place of GPUs that reduce."""

    def __init__(self, rank: int, ranks: int, store_path: Path) -> None:
        self.rank, self.ranks = rank, ranks
        self.closed = False

    def close(self) -> None:
        self.closed = True


def test_gpus_are_compared_before_they_connect_and_left_without_an_error_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank may be gone after one, and NCCL would wait for it."""
    found = [Gpu("H100", (9, 0), 80 << 30), Gpu("H100", (9, 0), 80 << 30)]
    monkeypatch.setattr("overlap_spec.worker.ranks.gpu_of", lambda rank, ranks: found[rank])
    monkeypatch.setattr("overlap_spec.worker.ranks.SymmetricCommunicator", Connected)

    def work(rank: int, fails: bool, start: str) -> bool:
        agreement = Agreement(rank, 2, tmp_path / start)
        with (
            contextlib.suppress(ZeroDivisionError),
            reducing_on_gpus(agreement, tmp_path / "store", Waits()) as communicator,
        ):
            assert (communicator.rank, communicator.ranks) == (rank, 2)
            if fails:
                raise ZeroDivisionError
        return communicator.closed

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(work, (0, 1), (False, True), ("first", "first"), timeout=20)) == [True, False]
        found[1] = Gpu("L4", (8, 9), 24 << 30)
        with pytest.raises(ConfigError, match="--tp-size: rank 1 has an L4"):
            list(threads.map(work, (0, 1), (False, False), ("second", "second"), timeout=20))
