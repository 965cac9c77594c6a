"""The scheduler's loop: plan ahead, speak, sleep, then settle what has arrived.

Depth is the number of steps in flight: at 2, plan N+1 is sent before result N is dispatched; 1 is the synchronous
engine.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from overlap_spec.config import CacheSettings, SchedulerSettings
from overlap_spec.ipc.transport import Inbox, Outlet
from overlap_spec.messages import (
    Abort,
    Admit,
    ErrorCode,
    FlushCache,
    Flushed,
    Refused,
    Shutdown,
    StepResult,
    ToScheduler,
    ToTokenizer,
    ToWorker,
    WorkerReady,
)
from overlap_spec.runtime.tracing import NO_TRACE, Recorder
from overlap_spec.scheduler.admission import Admission, why_refused
from overlap_spec.scheduler.ledger import Ledger
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.pages import PagePool
from overlap_spec.scheduler.planner import Planner
from overlap_spec.scheduler.prefix_cache import NoPrefixCache, PrefixCache
from overlap_spec.scheduler.queues import RequestQueues
from overlap_spec.scheduler.request_pages import RequestPages
from overlap_spec.scheduler.requests import Request, Step
from overlap_spec.scheduler.stats import Counters, Reporter
from overlap_spec.scheduler.width.lookahead import LookaheadWidth, MatchedWidth
from overlap_spec.scheduler.width.policy import FixedWidth, MeasuredWidth, WidthPolicy
from overlap_spec.scheduler.width.rules import RuledWidth


@dataclass(frozen=True)
class Links:
    """The scheduler's place in the ring."""

    inbox: Inbox[ToScheduler]
    worker: Outlet[ToWorker]
    tokenizer: Outlet[ToTokenizer]
    trace: Recorder = NO_TRACE


class Scheduler:
    """Runs requests on the worker, as many steps ahead as the depth allows."""

    def __init__(
        self, queues: RequestQueues, planner: Planner, ledger: Ledger, reporter: Reporter, links: Links
    ) -> None:
        self.queues = queues
        self.planner = planner
        self.ledger = ledger
        self.reporter = reporter
        self.links = links
        self.limits = planner.limits
        self.inflight: deque[Step] = deque()
        self.outbox: list[ToTokenizer] = []
        self.stopping = False
        self._num_arrived = 0

    async def run(self) -> None:
        """Serve until Shutdown. Cancellation: loses nothing that was received."""
        while not self.stopping:
            self.plan_ahead()
            self.speak()  # deltas leave after the plan has left
            assert self.inflight or self.queues.idle, "asleep with work that nothing will wake"
            self.reporter.asleep()
            message = await self.links.inbox.recv()
            self.reporter.awake()
            self.take([message, *self.links.inbox.drain()])
        self.speak()

    def take(self, messages: list[ToScheduler]) -> None:
        """Apply what has arrived: requests first, then results, and plan after each: two of them may be out at once."""
        for message in sorted(messages, key=lambda message: isinstance(message, StepResult)):
            self.dispatch(message)
            if isinstance(message, StepResult) and not self.stopping:
                self.plan_ahead()

    def plan_ahead(self) -> None:
        """Fill the pipeline: N+1 is queued before N is read."""
        trace = self.links.trace
        begun = trace.now()
        while len(self.inflight) < self.limits.depth and (step := self.planner.next_step()):
            self.links.worker.send(step.plan)
            self.inflight.append(step)
            trace.span("plan", begun, step.plan.step_id, batch=len(step.requests), in_flight=len(self.inflight))
            begun = trace.now()

    def speak(self) -> None:
        """Send what the last events had to say."""
        self._say(self.reporter.poll())
        if self.outbox:
            begun = self.links.trace.now()
            for message in self.outbox:
                self.links.tokenizer.send(message)
            self.outbox.clear()
            self.links.trace.span("send deltas", begun)

    def dispatch(self, message: ToScheduler) -> None:
        """Apply one message."""
        match message:
            case StepResult():
                begun = self.links.trace.now()
                self._say(self.ledger.settle(self.inflight.popleft(), message))
                self.links.trace.span("settle", begun, message.step_id)
            case Admit():
                self._admit(message)
            case Abort():
                self._say(self.ledger.abort(message.uid, message.reason))
            case FlushCache():
                self._flush()
            case Shutdown():
                self.stopping = True
            case WorkerReady():
                raise AssertionError("the worker is ready only once")
            case _:
                assert_never(message)

    def _say(self, message: ToTokenizer | None) -> None:
        if message is not None:
            self.outbox.append(message)

    def _admit(self, admit: Admit) -> None:
        if reason := why_refused(admit, self.limits):
            self._say(Refused(admit.uid, ErrorCode.BAD_REQUEST, reason))
            return
        self._num_arrived += 1
        self.queues.enqueue(Request(admit, self._num_arrived, self.queues.memory.cache.root))
        self.planner.counters.requests += 1

    def _flush(self) -> None:
        """Empty the prefix cache, unless something runs or waits."""
        can = self.queues.idle and not self.inflight
        if can:
            cache = self.queues.memory.cache
            cache.evict(cache.num_evictable)
            if self.limits.is_self_drafting:
                self.links.worker.send(FlushCache())
            self._say(self.reporter.snapshot())  # before the answer: who asks for figures after it sees an empty cache
        self._say(Flushed(can))


def _width_policy(ready: WorkerReady, settings: SchedulerSettings) -> WidthPolicy:
    if settings.width_rules:
        return RuledWidth(settings.width_rules, settings.width_padding)
    if ready.is_self_drafting and settings.keeps_width:
        return MatchedWidth(ready.width)
    if not ready.step_costs.widths:
        return FixedWidth(ready.width)
    if ready.is_self_drafting:
        return LookaheadWidth(ready.step_costs)
    return MeasuredWidth(ready.step_costs)


def build_scheduler(
    ready: WorkerReady,
    settings: SchedulerSettings,
    cache: CacheSettings,
    links: Links,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """Assemble a scheduler for a worker that is ready. Raises: ConfigError if its pool holds no request."""
    limits = Limits(ready, settings)
    pool = PagePool(limits.num_pages)
    kind = PrefixCache if cache.prefix_cache else NoPrefixCache
    memory = RequestPages(pool, kind(pool, limits.page_size, limits.key_lookahead), limits)
    queues = RequestQueues(memory, limits.num_slots)
    counters = Counters(runs=[0] * (limits.width + 1))
    widths = _width_policy(ready, settings)
    planner = Planner(queues, Admission(queues, limits), limits, counters, widths)
    return Scheduler(
        queues, planner, Ledger(queues, limits, counters, widths), Reporter(queues, limits, counters, clock), links
    )
