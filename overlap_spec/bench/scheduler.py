"""Measures the scheduler's CPU time per step: to settle a result, plan the next step and encode both messages.

A fake worker answers at once, outside of the measured time. Requests that finish are replaced, so the mean includes
admission, prefill plans and the prefix cache.
"""

import random
import time
from array import array
from collections import deque
from typing import Any

import msgspec

from overlap_spec import features
from overlap_spec.config import EngineConfig, Machine, ModelFiles, Settings
from overlap_spec.config.resolve import resolve
from overlap_spec.messages import (
    Admit,
    Phase,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenDeltas,
    ToScheduler,
    WorkerReady,
)
from overlap_spec.scheduler.build import attach_features, build_scheduler
from overlap_spec.scheduler.loop import Links, Scheduler

WIDTH = 4
PROMPT_TOKENS = 128
NEW_TOKENS = 512


class EncodingOutlet:
    """An outlet that encodes messages as a socket's does, and keeps them for the fake peer."""

    def __init__(self) -> None:
        self.sent: deque[Any] = deque()
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: Any) -> None:
        self._encoder.encode(message)
        self.sent.append(message)

    def close(self) -> None:
        self.sent.clear()


class NoInbox:
    """An inbox that is never read: the measured loop passes messages directly."""

    def drain(self) -> list[ToScheduler]:
        return []

    async def recv(self) -> ToScheduler:
        raise EOFError

    def close(self) -> None: ...


def _settings(batch: int) -> Settings:
    """An engine's, with requests for so many slots."""
    config = EngineConfig(page_size=16, max_running_requests=batch)
    files = ModelFiles(
        weights="", config={}, tokenizer_dir=None, eos_token_ids=(), context_length=4096, vocab_size=32_000
    )
    return resolve(config, files, Machine(num_cores=1, has_cuda=False))[0]


class Load:
    """Keeps `batch` requests running, and acts as the worker."""

    def __init__(self, batch: int) -> None:
        self._rng = random.Random(0)
        self._num_admitted = 0
        self.batch = batch
        self.worker, self.frontend = EncodingOutlet(), EncodingOutlet()
        pages = batch * (PROMPT_TOKENS + NEW_TOKENS) // 16 * 2
        ready = WorkerReady(batch, pages, 16, 4096, WIDTH, 2, 1, 32_000, 8192)
        settings = _settings(batch)
        links = Links(NoInbox(), self.worker, self.frontend)
        self.scheduler: Scheduler = build_scheduler(ready, settings.scheduler, settings.cache, links)
        attach_features(self.scheduler, settings)

    def admit(self) -> Admit:
        self._num_admitted += 1
        prompt = array("i", (self._rng.randrange(32_000) for _ in range(PROMPT_TOKENS)))
        # Requests end at different steps, as in a service that has run for a while.
        sampling = SamplingParams(max_new_tokens=self._rng.randint(NEW_TOKENS // 2, NEW_TOKENS), seed=0)
        return Admit(self._num_admitted, prompt.tobytes(), sampling, (2,), 0.0)

    def payloads(self) -> list[bytes]:
        """The next messages to the scheduler: a result, and a new request for each finished one."""
        arrivals = [msgspec.msgpack.encode(self.admit()) for _ in range(self._num_finished())]
        return ([self._answer()] if self.worker.sent else []) + arrivals

    def _answer(self) -> bytes:
        plan = self.worker.sent.popleft()
        assert isinstance(plan, StepPlan)
        if plan.phase is Phase.DECODE:
            tokens = [[5] * self._rng.randint(1, WIDTH) for _ in plan.slots]
        else:
            tokens = [[5] if chunk.next_token < 0 else [] for chunk in plan.chunks]
        return msgspec.msgpack.encode(StepResult(plan.step_id, tokens, [WIDTH - 1] * len(tokens), 0.0))

    def _num_finished(self) -> int:
        """Requests that finished since the last call."""
        said = [self.frontend.sent.popleft() for _ in range(len(self.frontend.sent))]
        return sum(f is not None for m in said if isinstance(m, TokenDeltas) for f in m.finishes)


def measure_scheduler(batch: int = 64, steps: int = 2000) -> dict[str, float | int]:
    """Mean, median and 99th percentile of the scheduler's CPU time per step, in milliseconds."""
    load = Load(batch)
    decoder: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(features.link(ToScheduler))
    arrivals = [msgspec.msgpack.encode(load.admit()) for _ in range(batch)]
    _turn(load.scheduler, decoder, arrivals)
    times: list[float] = []
    for _ in range(steps):
        times.append(_turn(load.scheduler, decoder, load.payloads()) * 1e3)
    times.sort()
    return {
        "batch": batch,
        "steps": steps,
        "mean_ms": sum(times) / steps,
        "median_ms": times[steps // 2],
        "p99_ms": times[steps * 99 // 100],
        "verify_steps_per_step": load.scheduler.planner.counters.verify_steps / steps,
    }


def _turn(scheduler: Scheduler, decoder: "msgspec.msgpack.Decoder[ToScheduler]", payloads: list[bytes]) -> float:
    """One turn of the loop. Returns its CPU time in seconds."""
    started = time.thread_time()
    for payload in payloads:
        scheduler.dispatch(decoder.decode(payload))
    scheduler.plan_ahead()
    scheduler.send_replies()
    return time.thread_time() - started
