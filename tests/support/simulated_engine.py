"""The scheduler in simulated time: the real one, and a device that does nothing but take time.

The device runs plans in order. A step's tokens leave before its draft works, and the seconds that a result states are
accounted as the worker accounts them (`worker/handle.py`). Requests come when they are said to, and what counts is when
their tokens leave.
"""

import heapq
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from overlap_spec.config import CacheSettings, SchedulerSettings
from overlap_spec.messages import Admit, Phase, SamplingParams, StepPlan, StepResult, TokenDeltas, WorkerReady
from overlap_spec.scheduler.build import build_scheduler
from overlap_spec.scheduler.loop import Links

LINK_S = 0.0001  # from a result to the plan that answers it
DRAFT_SHARE = {Phase.DECODE: 0.12, Phase.PREFILL: 0.03}  # of a step: what follows its tokens
JUDGE_S, DRAFTS_S = 0.0004, 0.0007  # of joined steps, after their layers
ACCEPTED = 0.69  # of guesses, each after the one before: 2.5 tokens a step with three of them


@dataclass(frozen=True)
class DeviceCosts:
    """Seconds of steps. An 8B model with EAGLE-3 chains of three guesses on one H200, as far as it was measured."""

    step_s: float = 0.0
    token_s: float = 22.5e-6
    pair_s: float = 1.76e-9
    decode_s: float = 0.00452
    request_s: float = 0.00004
    key_s: float = 20e-9

    def prefill(self, plan: StepPlan) -> float:
        """A step of chunks."""
        seconds = self.step_s
        for work in plan.work:
            num_tokens = len(work.prompt_chunk) // 4
            seconds += num_tokens * (self.token_s + self.pair_s * (work.start + num_tokens / 2))
        return seconds

    def decode(self, batch_size: int, num_keys: int) -> float:
        """A step of windows of four."""
        return self.decode_s + self.request_s * batch_size + self.key_s * num_keys

    def joined(self, decode: StepPlan, prefill: StepPlan, num_keys: int) -> float:
        """The layers of both: the weights are read once, and windows are rows like those of chunks."""
        rows = len(decode.work) * decode.width
        return self.prefill(prefill) + rows * self.token_s + self.key_s * num_keys


class Outlet:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: deque[Any] = deque()

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def close(self) -> None: ...


class NoInbox:
    """Never read: messages are passed directly."""

    def drain(self) -> list[Any]:
        return []

    async def recv(self) -> Any:
        raise EOFError

    def close(self) -> None: ...


@dataclass
class Stream:
    """When a request came, and when its tokens left."""

    arrived: float
    times: list[float] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def first_token_s(self) -> float:
        return self.times[0] - self.arrived

    @property
    def longest_gap_s(self) -> float:
        return max((after - before for before, after in pairwise(self.times)), default=0.0)

    @property
    def per_token_s(self) -> float:
        return (self.times[-1] - self.times[0]) / max(self.num_tokens - 1, 1)


class SimulatedEngine:
    """`costs`: the device's. `noise`: of their logarithm, step by step."""

    def __init__(
        self, ready: WorkerReady, settings: SchedulerSettings, costs: DeviceCosts, noise: float = 0.02
    ) -> None:
        self.now = 0.0
        self.streams: dict[int, Stream] = {}
        self.plans: list[tuple[float, StepPlan]] = []  # with the time at which it begins
        self._rng = random.Random(0)
        self._costs, self._noise = costs, noise
        self._worker, self._tokenizer = Outlet(), Outlet()
        cache = CacheSettings(ready.page_size, None, 0.9, True)
        links = Links(NoInbox(), self._worker, self._tokenizer)
        self.scheduler = build_scheduler(ready, settings, cache, links, clock=lambda: self.now)
        self._lengths: dict[int, int] = {}  # by slot
        self._beside: StepPlan | None = None  # a joined plan, whose other half is to come
        self._decided = self._end = 0.0  # of the last step
        self._events: list[tuple[float, int, Admit | StepResult]] = []
        self._num_events = 0

    def ask(self, at: float, uid: int, num_tokens: int, max_new: int) -> None:
        """A request of a random prompt."""
        prompt = array("i", self._rng.randbytes(4 * num_tokens))
        sampling = SamplingParams(max_new_tokens=max_new, seed=0)
        self._push(at, Admit(uid, prompt.tobytes(), sampling, (), at))

    def run(self, until: Callable[[], bool] = lambda: False) -> dict[int, Stream]:
        """Let time pass until then, or until all have ended."""
        while self._events and not until():
            self.now, _, message = heapq.heappop(self._events)
            if isinstance(message, Admit):
                self.streams[message.uid] = Stream(self.now)
            self.scheduler.take([message])
            self.scheduler.plan_ahead()
            self.scheduler.send_replies()
            self._receive()
            while self._worker.sent:
                self._start(self._worker.sent.popleft())
        return self.streams

    def _push(self, at: float, message: Admit | StepResult) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (at, self._num_events, message))

    def _start(self, plan: StepPlan) -> None:
        if plan.joined:
            self._beside = plan
            return
        begin = max(self._end, self.now + LINK_S)
        noise = self._rng.lognormvariate(0, self._noise)
        if self._beside is not None:
            decode, self._beside = self._beside, None
            layers_end = begin + self._costs.joined(decode, plan, self._num_keys(decode)) * noise
            self._run(decode, begin, layers_end, layers_end)
            self._run(plan, layers_end, layers_end + JUDGE_S, layers_end + JUDGE_S + DRAFTS_S)
            return
        seconds = self._seconds(plan) * noise
        self._run(plan, begin, begin + seconds * (1 - DRAFT_SHARE[plan.phase]), begin + seconds)

    def _run(self, plan: StepPlan, begin: float, decided: float, end: float) -> None:
        gpu_time = decided - begin + self._end - self._decided  # with the draft of the step before
        self.plans.append((begin, plan))
        tokens = self._tokens(plan)
        self._push(decided, StepResult(plan.step_id, tokens, [3] * len(tokens), gpu_time, begin - self._end))
        self._decided, self._end = decided, end

    def _seconds(self, plan: StepPlan) -> float:
        if plan.phase is Phase.PREFILL:
            return self._costs.prefill(plan)
        return self._costs.decode(len(plan.work), self._num_keys(plan))

    def _num_keys(self, plan: StepPlan) -> int:
        return sum(self._lengths[work.slot] for work in plan.work)

    def _tokens(self, plan: StepPlan) -> list[list[int]]:
        runs = []
        for work in plan.work:
            run = 1
            if plan.phase is Phase.PREFILL:
                self._lengths[work.slot] = work.start + len(work.prompt_chunk) // 4
                run = int(work.next_token < 0)
            else:
                while run < plan.width and self._rng.random() < ACCEPTED:
                    run += 1
            self._lengths[work.slot] += run
            runs.append([5] * run)
        return runs

    def _receive(self) -> None:
        while self._tokenizer.sent:
            message = self._tokenizer.sent.popleft()
            if isinstance(message, TokenDeltas):
                for uid, tokens in zip(message.uids, message.tokens, strict=True):
                    if tokens:
                        self.streams[uid].times.append(self.now)
                        self.streams[uid].num_tokens += len(tokens)
