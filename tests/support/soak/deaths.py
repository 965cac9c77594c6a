"""A server whose processes are killed and stopped under load, beside a plain one that is left alone.

Every answer is compared with the plain server's to the same request. One that differs is a near-tie, and listed, if
plain decoding gives both of them in batches of several sizes. Signals come to worker, scheduler and frontend in
turn, or to the ranks of the worker, each with requests open; the next one comes when those have ended, because a
request that is open at two deaths is held to be their cause. Memory is sampled between them, when all processes are
there.
"""

import asyncio
import itertools
import os
import signal
import subprocess
import time
from collections import Counter
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

from overlap_spec import Client
from overlap_spec.config import cache_directory
from overlap_spec.config.ranks import worker_roles
from support.command_line import Service
from support.leftovers import drained, held_by
from support.soak.faults import ALONE, PAIR, RECOVERED_S
from support.soak.measure import Sample, growing, row_of
from support.soak.run import METHODS, method_flags
from support.soak.seeded import Asked, EndedEarly, Sender, alike, asked, for_plain
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import tiny_eagle3, tiny_target, write_checkpoint
from support.tiny.tokenizer import write_tokenizer

CONTEXT = 512
ROUND_S, RANKS_ROUND_S = 300.0, 70.0  # of one method, its start included; the second of several ranks
LEAST_S = 10.0  # of load
USERS = 16  # requests that are open at once
ROLES = "worker", "scheduler", "frontend"
# Of the server that is disturbed; the pool is so small that requests are preempted.
FRAIL = (
    *("--max-total-tokens", "1600", "--max-running-requests", "12"),
    *("--max-recoveries", "10000", "--watchdog-timeout", "6"),
)
PAUSE_S = (0.5, 2.0)  # between a recovery, with its requests' ends, and the next signal
TOGETHER = 1, 2, 3, 5, 8, 16  # equal requests of a plain server at once
# Requests of which no more than one may be a near-tie: a GPU's kernels have more orders of sums by number of rows.
TIES_EVERY = {"cpu": 4000, "cuda": 400}
USED_MEMORY = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")


def death_run(
    directory: Path, device: str, seed: int, seconds: float, alone: bool = False, ranks: int = 1
) -> dict[str, Any]:
    """Rounds with one method each, beside one plain server. Raises: AssertionError as `Deaths.run`.

    `seconds`: after the plain server's start. `alone`: no other process uses the GPU, so its memory is sampled.
    `ranks`: of the server that is disturbed; of several, these get the signals, and rounds are shorter.
    """
    roles, round_s = (ROLES, ROUND_S) if ranks == 1 else (worker_roles(ranks), RANKS_ROUND_S)
    model, rounds = write_models(directory / "model"), max(1, round(seconds / round_s))
    cache = cache_directory()  # kernels that are compiled already
    fixed = (
        *("--model", str(model), "--device", device, "--dtype", "float32", "--trust-request-chat-template"),
        *("--reasoning-parser", "qwen3", "--tool-call-parser", "pythonic", "--log-level", "error"),
    )
    plain_flags = "--max-total-tokens", "20000", "--speculative-algorithm", "NONE"
    rows = []
    (directory / "plain").mkdir()
    with Service(directory / "plain", *fixed, *plain_flags, OVERLAP_SPEC_CACHE=cache) as plain:
        ends_at = time.monotonic() + seconds
        for number in range(rounds):
            method = sorted(METHODS)[(seed + number) % len(METHODS)]
            own = directory / str(number)
            own.mkdir()
            flags = *fixed, *FRAIL, "--tp-size", str(ranks), *method_flags(model, method)
            with Service(own, *flags, OVERLAP_SPEC_CACHE=cache) as disturbed:
                left = (ends_at - time.monotonic()) / (rounds - number)
                watches_gpu, ties_every = alone and device == "cuda", TIES_EVERY[device]
                run = Deaths(disturbed, plain, roles, seed + number, max(left, LEAST_S), watches_gpu, ties_every)
                rows.append({"method": method, **asyncio.run(run.run())})
    return {"device": device, "dtype": "float32", "ranks": ranks, **totals(rows), "rounds": rows}


def write_models(directory: Path, family: str = "llama") -> Path:
    """A target with a tokenizer, and its EAGLE-3 head in `head/`."""
    target = tiny_target(seed=1, max_position_embeddings=CONTEXT, **TINY_FAMILIES[family])
    directory.mkdir()
    write_checkpoint(directory, target)
    write_tokenizer(directory, minds_special=True)
    write_checkpoint(directory / "head", tiny_eagle3(seed=2, target=target))
    return directory


async def is_near_tie(plain: Sender, request: Asked, found: Any) -> bool:
    """Whether plain decoding gives this answer, too, in a batch of another size: float32 rounds otherwise there."""
    for together in TOGETHER:
        answers = await asyncio.gather(*(plain.answer(for_plain(request)) for _ in range(together)))
        if any(alike(found, answer) for answer in answers):
            return True
    return False


def totals(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Over rounds."""
    names = "requests", "differ", "near_ties", "ended_early", "streams", "open_when_a_process_died"
    signals = sum((Counter(row["signals"]) for row in rows), Counter[str]())
    return {name: sum(row[name] for row in rows) for name in names} | {"signals": dict(sorted(signals.items()))}


class Deaths:
    """One round."""

    def __init__(
        self,
        disturbed: Service,
        plain: Service,
        roles: tuple[str, ...],
        seed: int,
        seconds: float,
        watches_gpu: bool,
        ties_every: int,
    ) -> None:
        self._disturbed = disturbed
        self._plain = plain
        self._roles = roles
        self._seed = seed
        self._seconds = seconds
        self._watches_gpu = watches_gpu
        self._ties_every = ties_every
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._survived: set[int] = set()
        self._answered: Counter[str] = Counter()  # by path
        self._streams = 0
        self._differ: list[tuple[Asked, Any, Any]] = []
        self._near_ties: list[int] = []  # numbers of requests
        self._early: list[tuple[Asked, str]] = []
        self._signals: Counter[str] = Counter()
        self._samples: dict[str, list[Sample]] = {}
        self._ends_at = 0.0

    async def run(self) -> dict[str, Any]:
        """The figures. Raises: AssertionError with what differs, ended early, or grows."""
        async with Client(self._disturbed.endpoint) as ours, Client(self._plain.endpoint) as theirs:
            senders = Sender(self._disturbed.url, ours), Sender(self._plain.url, theirs)
            try:
                begun, self._ends_at = time.monotonic(), time.monotonic() + self._seconds
                await asyncio.gather(self._deaths(senders[0]), *(self._user(*senders) for _ in range(USERS)))
                spent = time.monotonic() - begun
                assert (left := await asyncio.to_thread(drained, self._disturbed)) == "", left
            finally:
                for sender in senders:
                    await sender.http.aclose()
        memory = [row_of(role, samples) for role, samples in sorted(self._samples.items()) if len(samples) > 2]
        self._check(memory)
        return {
            "requests": sum(self._answered.values()) + len(self._early),
            "differ": len(self._differ),
            "near_ties": len(self._near_ties),
            "ended_early": len(self._early),
            "by_path": dict(sorted(self._answered.items())),
            "streams": self._streams,
            "open_when_a_process_died": len(self._survived),
            "signals": dict(sorted(self._signals.items())),
            "memory": memory,
            "seconds": round(spent, 1),
        }

    def _check(self, memory: list[dict[str, Any]]) -> None:
        assert not self._early, (len(self._early), self._early[:5])
        assert not self._differ, (len(self._differ), self._differ[:3])
        assert len(self._near_ties) <= 1 + sum(self._answered.values()) // self._ties_every, self._near_ties
        assert self._survived and self._signals, "no request was open at a death"
        assert not growing(memory), memory

    async def _user(self, ours: Sender, theirs: Sender) -> None:
        while time.monotonic() < self._ends_at:
            request = asked(self._seed, next(self._numbers))
            self._open.add(request.number)
            try:
                found = await ours.answer(request)
            except EndedEarly as error:
                self._early.append((request, str(error)))
                continue
            finally:
                self._open.discard(request.number)
            self._answered[request.path] += 1
            self._streams += "stream" in request.body
            if alike(found, wanted := await theirs.answer(for_plain(request))):
                continue
            if await is_near_tie(theirs, request, found):
                self._near_ties.append(request.number)
            else:
                self._differ.append((request, found, wanted))

    async def _deaths(self, ours: Sender) -> None:
        random = Random(self._seed)
        while time.monotonic() < self._ends_at:
            kills, stops = (random.sample(self._roles, len(self._roles)) for _ in range(2))
            for number, role in [*product([signal.SIGKILL], kills), *product([signal.SIGSTOP], stops)]:
                await asyncio.sleep(random.uniform(*PAUSE_S))
                if time.monotonic() >= self._ends_at:
                    return
                self._sample()
                await self._death(ours, role, number)

    async def _death(self, ours: Sender, role: str, number: signal.Signals) -> None:
        before, at_risk = self._disturbed.actors(), set(self._open)
        os.kill(before[role], number)
        self._signals[f"{role} {number.name}"] += 1
        self._survived |= at_risk
        changed = ALONE if role in ALONE else (*PAIR, role)
        async with asyncio.timeout(RECOVERED_S):
            while not await self._is_back(ours, before, changed):
                await asyncio.sleep(0.1)
        at_risk = set(self._open)  # those that came meanwhile had waited, and may have begun before the end
        async with asyncio.timeout(RECOVERED_S):
            while not at_risk.isdisjoint(self._open):
                await asyncio.sleep(0.05)

    async def _is_back(self, ours: Sender, before: dict[str, int], roles: tuple[str, ...]) -> bool:
        now = self._disturbed.actors()
        if any(now.get(role, before[role]) == before[role] for role in roles):
            return False
        return (await ours.http.get("/health")).status_code == 200

    def _sample(self) -> None:
        count = sum(self._answered.values())
        for role, held in held_by(self._disturbed).items():
            self._samples.setdefault(role, []).append(Sample(count, held.rss))
        if self._watches_gpu:
            self._samples.setdefault("GPU", []).append(Sample(count, used_bytes()))


def used_bytes() -> int:
    """Of the first GPU that servers see, by whatever process."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = subprocess.run((*USED_MEMORY, f"--id={first}"), capture_output=True, text=True, timeout=30, check=True)
    return int(done.stdout.split()[0]) << 20
