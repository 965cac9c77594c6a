"""The scheduler in simulated time: the real one, and a device that does nothing but take time.

The device runs plans in order. A step's tokens leave before its draft works, and the seconds that a result states are
accounted as the worker accounts them (`worker/step.py`). Requests come when they are said to, and what counts is when
their tokens leave.
"""

import bisect
import heapq
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from overlap_spec.config import CacheSettings, SchedulerSettings
from overlap_spec.messages import (
    Admit,
    Phase,
    PrefillCosts,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenDeltas,
    TwoPartSizes,
    WorkerReady,
)
from overlap_spec.scheduler.build import build_scheduler
from overlap_spec.scheduler.loop import Links
from overlap_spec.speculative.rows import LONG_CHUNK
from overlap_spec.worker.step import captured_rows
from support.plans import parts_of
from support.scheduler_features import with_features

LINK_S = 0.0001  # from a result to the plan that answers it
DECODE_LAUNCH_S = 0.0005  # of the host
DRAFT_SHARE = {Phase.DECODE: 0.12, Phase.PREFILL: 0.03}  # of a step: what follows its tokens
JUDGE_S, DRAFTS_S = 0.0005, 0.0012  # of steps of windows and prompts, after their layers
JUDGE_LAUNCH_S = 0.005  # of the host: all but the layers is launched operation by operation
ACCEPTED = 0.69  # of guesses, each after the one before: 2.5 tokens a step with three of them


CAPTURED = captured_rows(8192, 1400)  # of an 8B model
ROWS_S = {0: 0.0052, 128: 0.0061, 256: 0.0075, 512: 0.0120, 1024: 0.0225, 4096: 0.0895}  # products of so many rows
TOKEN_S = (ROWS_S[4096] - ROWS_S[1024]) / 3072


@dataclass(frozen=True)
class DeviceCosts:
    """Seconds of steps. An 8B model with EAGLE-3 chains of three guesses on one H200, as far as it was measured.

    Products of rows take what they took there alone, times `slower`: the clock is lower in traffic. `captured`: rows
    that steps are padded to; larger ones are launched operation by operation, which takes the host `launch_s`.
    `two_parts`: what steps of windows and prompts are padded to; None: they are launched operation by operation.
    """

    slower: float = 1.08
    pair_s: float = 0.85e-9
    long_pair_s: float = 0.85e-9  # of chunks of 1,536 rows or more
    decode_s: float = 0.00452
    request_s: float = 0.00004
    key_s: float = 20e-9
    captured: tuple[int, ...] = CAPTURED
    two_parts: TwoPartSizes | None = None
    launch_s: float = 0.016
    two_parts_launch_s: float = 0.028

    def told(self, error: float = 1.0) -> PrefillCosts:
        """What the worker would measure. `error`: what it took for a second."""
        token_s, pair_s, long_pair_s = (
            error * self.slower * seconds for seconds in (TOKEN_S, self.pair_s, self.long_pair_s)
        )
        return PrefillCosts(0.0, token_s, pair_s, self.captured, LONG_CHUNK, long_pair_s)

    def rows(self, num_rows: int) -> float:
        """Products of so many rows, between those that were measured."""
        known = list(ROWS_S)
        at = min(max(bisect.bisect_left(known, num_rows), 1), len(known) - 1)
        low, high = known[at - 1], known[at]
        share = (num_rows - low) / (high - low)
        return self.slower * (ROWS_S[low] + share * (ROWS_S[high] - ROWS_S[low]))

    def attention(self, plan: StepPlan) -> float:
        """That of its chunks."""
        seconds = 0.0
        for work in plan.chunks:
            num_tokens = len(work.tokens) // 4
            pair_s = self.long_pair_s if num_tokens >= LONG_CHUNK else self.pair_s
            seconds += self.slower * num_tokens * pair_s * (work.start + num_tokens / 2)
        return seconds

    def prefill(self, plan: StepPlan) -> tuple[float, float]:
        """A step of chunks: of the device, and of the host."""
        num_rows = rows_of(plan)
        padded = next((size for size in self.captured if size >= num_rows), 0)
        return self.attention(plan) + self.rows(padded or num_rows), 0.0005 if padded else self.launch_s

    def decode(self, batch_size: int, num_keys: int) -> float:
        """A step of windows of four."""
        return self.decode_s + self.request_s * batch_size + self.key_s * num_keys

    def both(self, plan: StepPlan, num_keys: int) -> tuple[float, float]:
        """The layers of windows and prompts: weights are read once, and windows are rows like those of chunks."""
        beside, num_rows = len(plan.slots) * plan.width, rows_of(plan)
        launch_s = self.two_parts_launch_s
        if self.two_parts is not None:
            launch_s, index = JUDGE_LAUNCH_S, self.two_parts.batch_for(len(plan.slots), plan.width)
            assert index is not None and len(plan.chunks) <= self.two_parts.chunks, (
                "the scheduler knows what is captured"
            )
            beside = self.two_parts.batches[index] * plan.width
            num_rows = next(size for size in self.two_parts.rows[index] if size >= num_rows)
        return self.attention(plan) + self.rows(beside + num_rows) + self.key_s * num_keys, launch_s


def rows_of(plan: StepPlan) -> int:
    """Prompt tokens of a step."""
    return sum(len(chunk.tokens) // 4 for chunk in plan.chunks)


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

    drafts_s = DRAFTS_S  # of a step of windows and prompts

    def __init__(
        self, ready: WorkerReady, settings: SchedulerSettings, costs: DeviceCosts, noise: float = 0.02
    ) -> None:
        self.now = 0.0
        self.streams: dict[int, Stream] = {}
        self.plans: list[tuple[float, StepPlan]] = []  # with the time at which it begins
        self._rng = random.Random(0)
        self._costs, self._noise = costs, noise
        self._worker, self._frontend = Outlet(), Outlet()
        cache = CacheSettings(ready.page_size, None, 0.9, True)
        links = Links(NoInbox(), self._worker, self._frontend)
        self.scheduler = with_features(build_scheduler(ready, settings, cache, links, clock=lambda: self.now))
        self._lengths: dict[int, int] = {}  # by slot
        self._decided = self._end = 0.0  # of the last step
        self._launched = 0.0  # when the host was through with the last step
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
        launched = max(self._launched, self.now + LINK_S)
        begin = max(self._end, launched)
        noise = self._rng.lognormvariate(0, self._noise)
        self.plans.append((begin, plan))
        parts = plan.parts()
        if len(parts) > 1:
            seconds, launch_s = self._costs.both(plan, self._num_keys(parts[0]))
            self._launched = launched + launch_s
            layers_end = max(begin + seconds * noise, self._launched)
            self._run(parts[0], begin, layers_end, layers_end, is_last=False)
            judged = layers_end + JUDGE_S
            self._run(parts[1], layers_end, judged, judged + self.drafts_s)
            return
        seconds, launch_s = self._seconds(plan)
        self._launched = launched + launch_s
        end = max(begin + seconds * noise, self._launched)
        self._run(plan, begin, end - seconds * DRAFT_SHARE[plan.phase], end)

    def _run(self, plan: StepPlan, begin: float, decided: float, end: float, is_last: bool = True) -> None:
        """A plan of one part."""
        gpu_time = decided - begin + self._end - self._decided  # with the draft of the step before
        gap = begin - self._end
        result = StepResult(plan.step_id, self._tokens(plan), [], gpu_time, gap, is_last=is_last)
        self._push(decided, self._judged(plan, result))
        self._decided, self._end = decided, end

    def _judged(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result with what it tells of guesses."""
        return replace(result, num_proposed=[3] * len(result.tokens))

    def _seconds(self, plan: StepPlan) -> tuple[float, float]:
        """Of a plan of one part: of the device, and of the host."""
        if plan.phase is Phase.PREFILL:
            return self._costs.prefill(plan)
        return self._costs.decode(len(parts_of(plan)), self._num_keys(plan)), DECODE_LAUNCH_S

    def _num_keys(self, plan: StepPlan) -> int:
        return sum(self._lengths[work.slot] for work in parts_of(plan))

    def _tokens(self, plan: StepPlan) -> list[list[int]]:
        runs = []
        for work in parts_of(plan):
            run = 1
            if plan.phase is Phase.PREFILL:
                self._lengths[work.slot] = work.start + len(work.tokens) // 4
                run = int(work.next_token < 0)
            else:
                while run < plan.width and self._rng.random() < ACCEPTED:
                    run += 1
            self._lengths[work.slot] += run
            runs.append([5] * run)
        return runs

    def _receive(self) -> None:
        while self._frontend.sent:
            message = self._frontend.sent.popleft()
            if isinstance(message, TokenDeltas):
                for uid, tokens in zip(message.uids, message.tokens, strict=True):
                    if tokens:
                        self.streams[uid].times.append(self.now)
                        self.streams[uid].num_tokens += len(tokens)
