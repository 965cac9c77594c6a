"""Plays an attack beside a victim, and judges what it has cost.

The machine is as busy during the honest request as during the attack: `spinners` processes (two, as CI has cores) spin
at a nice value of 10, which is also what processes have that the server may kill; on a GPU machine there are none.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.attacks import victim as victim_script
from support.attacks.attacker import Attacker
from support.attacks.case import MIB, Attack, Case
from support.attacks.memory import Peak, memory_of, settle
from support.attacks.servers import AttackedServer
from support.command_line import Service

LATER_S = 0.25  # a victim's wait beyond that beside an honest request
QUIET_LATER_S = 0.02  # beyond --max-gap-ms, on a quiet GPU machine
QUIET_GAP_S = 0.025  # --max-gap-ms of a GPU
BASELINE_S = 1.0
SETTLED_S = 10.0
MOST_GROWN = 100 * MIB
ENDED_S = 180.0  # for an attack to end by itself
FORBIDDEN = re.compile(r"Traceback|\brecover(?:ed|ing|s)?\b|has failed|killed as hung", re.IGNORECASE)


class VictimProcess:
    """The victim (`victim.py`); entering waits for its stream's first tokens."""

    def __init__(self, server: AttackedServer, attacker: Attacker, case: Case) -> None:
        self._asked = {"host": attacker.host, "port": attacker.port, "key": server.key("victim")}
        self._asked |= {"rid": case.victim_rid, "poll": case.poll}

    async def __aenter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(Path(victim_script.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._write(json.dumps(self._asked))
        deadline = time.monotonic() + 30
        while (await self.report())["num_events"] < 3:
            assert time.monotonic() < deadline, "the victim's stream has not begun"
            await asyncio.sleep(0.1)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.communicate)

    async def report(self) -> dict[str, Any]:
        """Since the last one."""
        self._write("")
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(await asyncio.to_thread(self._process.stdout.readline))
        return found

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


NOT_SEEN = {"stream_s": 0.0, "small_s": 0.0, "num_events": 0, "num_small": 0, "errors": {}}


@dataclass
class Played:
    """What a case came to. Seconds; bytes."""

    honest: dict[str, Any] = field(default_factory=lambda: dict(NOT_SEEN))
    attacked: dict[str, Any] = field(default_factory=lambda: dict(NOT_SEEN))
    outcome: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    honest_peak_bytes: int = 0
    grown: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    only_late: bool = True  # what failed is the victim's wait alone, which other programs may have caused

    def figures(self) -> dict[str, Any]:
        """For the summary."""
        return {
            "outcome": self.outcome,
            "seconds": round(self.seconds, 1),
            "honest_gap_ms": round(1e3 * self.honest["stream_s"]),
            "gap_ms": round(1e3 * self.attacked["stream_s"]),
            "honest_small_ms": round(1e3 * self.honest["small_s"]),
            "small_ms": round(1e3 * self.attacked["small_s"]),
            "events": self.attacked["num_events"],
            "peak_mib": round(self.peak_bytes / MIB),
            "honest_peak_mib": round(self.honest_peak_bytes / MIB),
            "grown_mib": {role: round(size / MIB) for role, size in self.grown.items()},
            "failures": self.failures,
        }


def play(case: Case, server: AttackedServer, quiet: bool) -> Played:
    """Play a case against a server that has started. `quiet`: nothing else runs here, and there is a GPU."""
    service = server.ready()
    played = Played()
    pids, logged, before = service.actors(), len(service.log()), memory_of(service.process.pid)
    try:
        asyncio.run(_play(case, server, service, played, before))
    except (AssertionError, OSError, ValueError) as error:
        played.failures.append(f"the victim: {error!r}")
        played.only_late = False
    _judge_gaps(case, played, quiet)
    for failure in _broken(case, service, played, pids, logged):
        played.only_late = False
        played.failures.append(failure)
    return played


async def _play(case: Case, server: AttackedServer, service: Service, played: Played, before: dict[str, int]) -> None:
    main = service.process.pid
    async with Attacker(server, service, case.seconds) as attacker, VictimProcess(server, attacker, case) as victim:
        await victim.report()
        idle = memory_of(main)
        with Peak(main) as peak:
            await _tried("the honest request", case.honest, attacker, BASELINE_S, played)
        played.honest, played.honest_peak_bytes = await victim.report(), peak.num_bytes - sum(idle.values())
        begun = time.monotonic()
        before.update(memory_of(main))
        with Peak(main) as peak:
            played.outcome = await _tried("the attacker", case.attack, attacker, case.seconds, played)
            await asyncio.sleep(0.2)
        played.attacked, played.seconds = await victim.report(), time.monotonic() - begun
        played.peak_bytes = peak.num_bytes - sum(before.values())
        played.grown = await asyncio.to_thread(settle, main, before, MOST_GROWN, SETTLED_S)


async def _tried(who: str, attack: Attack | None, attacker: Attacker, seconds: float, played: Played) -> str:
    """As `_watched`; what the case asserts and does not hold is noted."""
    try:
        async with asyncio.timeout(ENDED_S):
            return await _watched(attack, attacker, seconds)
    except Exception as error:  # an assertion of the case, or what broke it
        played.failures.append(f"{who}: {error!r}"[:1200])
        played.only_late = False
        return ""


async def _watched(attack: Attack | None, attacker: Attacker, seconds: float) -> str:
    """Returns when it has ended, and not before so many seconds."""
    begun = time.monotonic()
    outcome = await attack(attacker) if attack is not None else ""
    await asyncio.sleep(max(0.0, seconds - (time.monotonic() - begun)))
    return outcome


def _judge_gaps(case: Case, played: Played, quiet: bool) -> None:
    """The victim's waits, and whether it had all answers."""
    of_stream, of_small = max(played.honest["stream_s"], case.least_s), max(played.honest["small_s"], case.poll_s)
    allowed = {"stream_s": of_stream + LATER_S, "small_s": of_small + LATER_S}
    if quiet:
        allowed = {"stream_s": QUIET_GAP_S + QUIET_LATER_S, "small_s": max(QUIET_GAP_S, of_small) + QUIET_LATER_S}
    for name, what in (("stream_s", "stream"), ("small_s", "small requests")):
        honest, attacked = played.honest[name], played.attacked[name]
        if attacked > allowed[name]:
            played.failures.append(
                f"the victim's {what} waited {1e3 * attacked:.0f} ms, {1e3 * honest:.0f} beside an honest request"
            )
    if played.attacked["errors"]:
        played.only_late = False
        played.failures.append(f"the victim got {played.attacked['errors']}"[:1200])


def _broken(case: Case, service: Service, played: Played, pids: dict[str, int], logged: int) -> Iterator[str]:
    """What must never be, however long the victim waited."""
    if service.process.poll() is not None:
        yield f"the server has ended with status {service.process.returncode}"
        return
    if service.actors() != pids:
        yield f"processes were started again: {pids}, now {service.actors()}"
    if found := FORBIDDEN.search(log := service.log()[logged:]):
        yield f"the log has: {log[max(0, found.start() - 200) : found.start() + 400]}"
    for role, grown in played.grown.items():
        if grown > MOST_GROWN + case.pool_mib * MIB * (role == "worker"):
            yield f"{role} keeps {grown / MIB:.0f} MiB more than before"
    most = MOST_GROWN + case.answer_mib * MIB
    taken = played.peak_bytes - max(0, played.honest_peak_bytes)
    if case.bounds_peak and taken > most:
        yield f"all processes together took {taken / MIB:.0f} MiB more, at most {most / MIB:.0f} are right"


@contextmanager
def busy_cores(num_spinners: int) -> Iterator[None]:
    """Processes that spin at a nice value of 10."""
    program = f"import os\nos.nice(10)\nwhile os.getppid() == {os.getpid()}: pass"
    spinners = [subprocess.Popen([sys.executable, "-I", "-c", program]) for _ in range(num_spinners)]
    try:
        yield
    finally:
        for each in spinners:
            each.kill()
            each.wait()
