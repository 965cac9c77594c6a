"""The engine in this process: the scheduler's loop and the worker's executor, without sockets and other processes.

It answers prompts by plain decoding. Then it reads answered prompts again, as prompts, and their hidden states go to
the ring: the answers themselves were decoded in another order, and are read several times.
"""

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from msgspec.structs import replace as replaced

from overlap_spec.config import Settings
from overlap_spec.errors import ConfigError
from overlap_spec.messages import (
    Abort,
    AbortReason,
    Admit,
    Refused,
    SamplingParams,
    StepPlan,
    ToFrontend,
    TokenDeltas,
    ToWorker,
)
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.scheduler.build import build_scheduler
from overlap_spec.scheduler.loop import Links
from overlap_spec.train_draft.ring import NOWHERE, FeatureRing
from overlap_spec.worker.build import build_executor, load_models, prepare_place
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.startup.geometry import Geometry, settle_geometry
from overlap_spec.worker.startup.step_times import ChunkSize
from overlap_spec.worker.startup.warmup import (
    FEW_TOKENS,
    capture_graphs,
    cuda_prompt_lengths,
    precompile,
    run_uncaptured,
    warm_up,
)
from overlap_spec.worker.step import StepHandle
from overlap_spec.worker.worker_actor import worker_ready

Tokens = Sequence[int]
Say = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Asked:
    """A prompt, and how it is answered."""

    prompt: Tokens
    sampling: SamplingParams


class _Kept:
    """An outlet that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: ToWorker | ToFrontend) -> None:
        self.messages.append(message)

    def close(self) -> None:
        """Nothing is open."""

    def taken(self) -> list[Any]:
        """What has come since the last call."""
        messages, self.messages = self.messages, []
        return messages


class _NoInbox:
    """The scheduler is handed its messages."""

    def drain(self) -> list[Any]:
        return []

    async def recv(self) -> Any:
        raise AssertionError("this scheduler's loop does not run by itself")

    def close(self) -> None:
        """Nothing is open."""


class LocalEngine:
    """Target, worker and scheduler. `target` is loaded; `max_len`: of a request, its answer included."""

    def __init__(
        self, settings: Settings, ring_for: Callable[[LoadedTarget], FeatureRing], say: Say = lambda *_: None
    ) -> None:
        """Load, warm up, capture. Raises: ConfigError, CheckpointError."""
        place = prepare_place(settings)
        models = load_models(settings, place, lambda done, total: say("loading weights", done, total))
        self.target = models.target
        self.ring = ring_for(models.target)
        models = replace(models, proposer=self.ring)
        geometry = settle_geometry(settings, models, place)
        self.max_len = geometry.max_len
        self._executor = build_executor(models, geometry, place, attention=settings.attention)
        say("warming up", 0, 0)
        _prepare(settings, self._executor, geometry)
        self._captured = self._executor.runner
        self._plans, self._replies = _Kept(), _Kept()
        self._scheduler = build_scheduler(
            worker_ready(geometry, models, self._executor, ChunkSize(geometry.max_chunk, 0)),
            settings.scheduler,
            replaced(settings.cache, prefix_cache=False),
            Links(_NoInbox(), self._plans, self._replies),
        )
        self._most_open = 2 * geometry.num_slots
        self._flight: deque[StepHandle] = deque()
        self._num_asked = 0

    def close(self) -> None:
        """Nothing is asked any more."""
        self._executor.close()

    def answers(
        self, asked: Iterable[Asked], stop_ids: tuple[int, ...], until: float = math.inf
    ) -> Iterator[tuple[int, list[int]]]:
        """Each answer with its place in `asked`, as they end; of a request that is refused, an empty one.

        `until` [s, time.monotonic()]: then those that are open end where they are, and no other begins.
        """
        first, waiting, answers = self._num_asked, iter(asked), dict[int, list[int]]()
        self._executor.use(self._captured)
        while True:
            if time.monotonic() > until:
                waiting = iter(())
                self._scheduler.take([Abort(uid, AbortReason.SHUTDOWN) for uid in answers])
            for each in islice(waiting, self._most_open - len(answers)):
                answers[self._num_asked] = []
                self._scheduler.take([self._admit(self._num_asked, each.prompt, each.sampling, stop_ids)])
                self._num_asked += 1
            if not answers:
                break
            for uid in self._turn(answers, {}):
                yield uid - first, answers.pop(uid)
        self._settle()

    def states(self, samples: Sequence[Tokens], begin: int, length: int) -> None:
        """Write the hidden states of samples into the ring: sample b's begin at row `begin + b * length`.

        Step by step: what is captured for windows of one leaves the proposer out.
        """
        self._executor.use(self._executor.eager)
        first, once = self._num_asked, SamplingParams(max_new_tokens=1, temperature=0.0, seed=0, ignore_eos=True)
        self._num_asked += len(samples)
        bases = {first + place: begin + place * length for place in range(len(samples))}
        answers: dict[int, list[int]] = {uid: [] for uid in bases}
        self._scheduler.take([self._admit(uid, samples[uid - first], once, ()) for uid in bases])
        while answers:
            for uid in self._turn(answers, bases):
                del answers[uid]
        self._settle()

    def _admit(self, uid: int, prompt: Tokens, sampling: SamplingParams, stop_ids: tuple[int, ...]) -> Admit:
        return Admit(uid, array("i", prompt).tobytes(), sampling, stop_ids, time.monotonic())

    def _turn(self, answers: Mapping[int, list[int]], bases: Mapping[int, int]) -> list[int]:
        """Launch what is planned, settle the oldest step, and add what it gave. Returns the requests that ended."""
        self._scheduler.plan_ahead()
        self._launch(bases)
        if self._flight:
            self._scheduler.take([self._flight.popleft().wait()])
            self._launch(bases)
        self._scheduler.send_replies()
        ended: list[int] = []
        for message in self._replies.taken():
            if isinstance(message, Refused):
                answers[message.uid].clear()
                ended.append(message.uid)
            elif isinstance(message, TokenDeltas):
                for uid, tokens, finish in zip(message.uids, message.tokens, message.finishes, strict=True):
                    answers[uid].extend(tokens)
                    if finish is not None:
                        ended.append(uid)
        return ended

    def _launch(self, bases: Mapping[int, int]) -> None:
        for plan in self._plans.taken():
            assert isinstance(plan, StepPlan), "a scheduler without features sends plans alone"
            self.ring.place({slot: bases.get(reset.uid, NOWHERE) for slot, reset in plan.resets.items()})
            self._executor.launch(plan, self._flight.append)

    def _settle(self) -> None:
        """Let the steps end that are in flight; nothing waits."""
        while self._flight:
            self._scheduler.settle(self._flight.popleft().wait())
        self._replies.taken()


def _prepare(settings: Settings, executor: Executor, geometry: Geometry) -> None:
    sizes = settings.graph_batch_sizes
    if settings.model.device == "cpu":
        warm_up(executor, geometry, (), FEW_TOKENS)
        return
    precompile(settings, executor, geometry)
    warm_up(executor, geometry, cuda_prompt_lengths(geometry), decodes=not sizes)
    capture_graphs(executor, geometry, sizes)
    if sizes:
        run_uncaptured(executor, geometry)
    torch.cuda.synchronize()


def refuse_ranks(ranks: int) -> None:
    """Raises: ConfigError."""
    if ranks > 1:
        raise ConfigError("tp_size", f"train-draft runs on one device, got {ranks}; use 1")
