"""One round of a soak: a service under load, faults in turn, then the books.

start -> warm up -> load and faults, memory sampled -> the load ends -> everything back? -> answers alone
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from overlap_spec import Client
from support.command_line import Service
from support.leftovers import as_before, drained, held_by
from support.soak.clients import ANSWERED, REFUSED, Clients, Outcome, Tally
from support.soak.faults import A_LONG_RUN, ANOTHER_STEP, FAULTS, HARSH, NO_TROUBLE, Fault, Scene
from support.soak.measure import Memory, growing
from support.soak.requests import CONTEXT, Manner, alone, request

USERS = 32  # requests that are open at once
WARM_S = 3.0  # of load and every fault's start, before descriptors and threads are counted
HARSH_SHARE = 0.35  # of the time, at its end: then processes die, so memory is measured before
SAMPLE_S = 0.25
REFUSED_S = 0.1  # that a user waits then
ALONE = 60  # answers that are compared with solo runs, at most
ONE_IN = 5  # answers that may be compared
POOL = ("--max-total-tokens", "960", "--max-running-requests", "16")  # 60 pages: requests are preempted
METHODS = {
    "chain": ("EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    "tree": ("EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "2"),
    "NGRAM": ("NGRAM",),
}


def flags_of(model: Path, name: str, depth: int) -> tuple[str, ...]:
    """Of a service that has little room."""
    return (
        *("--model", str(model), "--dtype", "float64", "--context-length", str(CONTEXT), *POOL),
        *(*method_flags(model, name), "--log-level", "error", "--audit-rate", "0.02"),
        *("--max-recoveries", "1000", "--watchdog-timeout", "4"),
        *("--logit-processor", "support.soak.spoiler:processor"),
        *(("--disable-overlap-schedule",) if depth == 1 else ()),
    )


def method_flags(model: Path, name: str) -> tuple[str, ...]:
    """Of one of `METHODS`. Of EAGLE-3 the head lies in the model's `head/`."""
    algorithm, *numbers = METHODS[name]
    draft = ("--speculative-draft-model", str(model / "head")) if algorithm == "EAGLE3" else ()
    if numbers:
        numbers += ["--speculative-num-draft-tokens", "4" if name == "chain" else "6"]
    return ("--speculative-algorithm", algorithm, *draft, *numbers)


class Round:
    """One service, and what happens to it."""

    def __init__(self, service: Service, seed: int, seconds: float) -> None:
        self._service = service
        self._seed = seed
        self._seconds = seconds
        self._numbers = itertools.count()
        self._memory = Memory(service)
        self._tally = Tally()
        self._current: Fault | None = None
        self._happened: Counter[str] = Counter()
        self._kept: list[Outcome] = []
        self._survived: set[int] = set()  # requests that were open when a process died
        self._open: dict[int, set[str]] = {}  # request -> kinds of trouble that faults during its life excuse
        self._ends_at = 0.0

    async def run(self) -> dict[str, Any]:
        """Everything. Raises: AssertionError with what went wrong."""
        async with Client(self._service.endpoint) as zmq_client:
            clients = Clients(self._service.url, zmq_client)
            try:
                return await self._run(clients, zmq_client)
            finally:
                await clients.http.aclose()

    async def _run(self, clients: Clients, zmq_client: Client) -> dict[str, Any]:
        random = Random(self._seed)
        scene = Scene(self._service, clients.http, random)
        await self._load(clients, WARM_S, self._every_fault(scene))
        assert await asyncio.to_thread(drained, self._service) == ""
        before = held_by(self._service)
        self._happened.clear()
        scene.num_sent = 0
        begun = time.monotonic()
        await self._load(clients, (1 - HARSH_SHARE) * self._seconds, self._faults_in_turn(scene, FAULTS), sampled=True)
        stats = (
            await zmq_client.stats()
        )  # of the load; counters go on, but for the last second of a scheduler that dies
        await self._load(clients, HARSH_SHARE * self._seconds, self._faults_in_turn(scene, HARSH))
        spent = time.monotonic() - begun
        self._check_outcomes()
        assert (left := await asyncio.to_thread(drained, self._service)) == "", left
        await clients.http.aclose()
        assert (more := await asyncio.to_thread(as_before, self._service, before)) == "", more
        rows = self._memory.report()
        assert not growing(rows), rows
        compared = await self._compare_alone(zmq_client)
        self._check_log()
        return {
            "requests": sum(self._tally.counts.values()) + scene.num_sent,
            "seconds": round(spent, 1),
            "outcomes": dict(sorted(self._tally.counts.items())),
            "excused": dict(self._tally.num_excused),
            "by_path": dict(sorted(self._tally.by_path.items())),
            "faults": dict(sorted(self._happened.items())),
            "recoveries": scene.num_recoveries,
            "preempted": stats.preempted_total,
            "accept_length": round(stats.committed_tokens_total / stats.verify_steps_total, 2),
            "memory": rows,
            "equal_to_solo_runs": compared,
        }

    async def _load(self, clients: Clients, seconds: float, faults: Any, sampled: bool = False) -> None:
        """Users send requests for so many seconds; then the open ones end."""
        self._ends_at = time.monotonic() + seconds
        fault_task = asyncio.create_task(faults)
        watching = asyncio.create_task(self._watch()) if sampled else None
        await asyncio.gather(*(self._user(clients) for _ in range(USERS)))
        await fault_task
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _user(self, clients: Clients) -> None:
        while time.monotonic() < self._ends_at:
            asked = request(self._seed, next(self._numbers))
            excused = self._open[asked.number] = set(self._current.excused if self._current else NO_TROUBLE)
            outcome = await clients.send(asked)
            del self._open[asked.number]
            self._tally.add(outcome, frozenset(excused))
            if outcome.kind == ANSWERED and asked.manner is Manner.READ:
                self._keep(outcome)
            if outcome.kind == REFUSED:
                await asyncio.sleep(REFUSED_S)

    def _keep(self, outcome: Outcome) -> None:
        number = outcome.asked.number
        if outcome.tokens and (number in self._survived or number % ONE_IN == 0):
            self._kept.append(outcome)

    async def _watch(self) -> None:
        while True:
            self._memory.sample(sum(self._tally.counts.values()))
            await asyncio.sleep(SAMPLE_S)

    async def _every_fault(self, scene: Scene) -> None:
        for fault in FAULTS:
            await self._happen(fault, scene)

    async def _faults_in_turn(self, scene: Scene, faults: Sequence[Fault]) -> None:
        """In another order each time, with a pause before each."""
        while time.monotonic() < self._ends_at:
            for fault in scene.random.sample(faults, len(faults)):
                await asyncio.sleep(scene.random.uniform(0.3, 1.0))  # requests are open by then
                if time.monotonic() < self._ends_at:
                    await self._happen(fault, scene)

    async def _happen(self, fault: Fault, scene: Scene) -> None:
        if fault in HARSH:
            self._survived |= set(self._open)
        self._current = fault
        for excused in self._open.values():
            excused |= fault.excused
        async with fault.happen(scene):
            pass
        self._current = None
        self._happened[fault.name] += 1
        if fault in HARSH:  # a request that is open at two deaths is held to be their cause
            await self._all_ended(set(self._open))

    async def _all_ended(self, numbers: set[int]) -> None:
        while not numbers.isdisjoint(self._open):
            await asyncio.sleep(0.1)

    def _check_outcomes(self) -> None:
        trouble = self._tally.trouble
        assert not trouble, (len(trouble), [(each.kind, each.why[:300], each.asked) for each in trouble[:5]])

    def _check_log(self) -> None:
        """No traceback but those that say what is wrong with a step's result."""
        log, spoilt = self._service.log(), self._happened[A_LONG_RUN] + self._happened[ANOTHER_STEP]
        assert log.count("Traceback") <= spoilt, log[-4000:]

    async def _compare_alone(self, zmq_client: Client) -> dict[str, int]:
        """The kept requests once more, each alone, without speculation: the same tokens."""
        survivors = [each for each in self._kept if each.asked.number in self._survived][:ALONE]
        others = [each for each in self._kept if each.asked.number not in self._survived]
        chosen = survivors + others[:: max(1, len(others) // ALONE)][:ALONE]
        clients = Clients(self._service.url, zmq_client)
        for outcome in chosen:
            again = await clients.send(alone(outcome.asked))
            assert again.tokens == outcome.tokens, (outcome.asked, outcome.tokens, again)
        await clients.http.aclose()
        assert chosen, "nothing was compared"
        return {"requests": len(chosen), "open_when_a_process_died": len(survivors)}
