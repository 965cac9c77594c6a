"""The scheduler's loop: plan ahead, send replies, wait, then settle what has arrived.

Depth is the number of steps in flight: at 2, plan N+1 is sent before result N is dispatched; 1 is the synchronous
engine.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import assert_never

from overlap_spec.errors import RequestError
from overlap_spec.messages import (
    Abort,
    Admit,
    ErrorCode,
    Extension,
    FlushCache,
    Flushed,
    LivenessProbe,
    Memo,
    NewFrontend,
    Refused,
    Shutdown,
    Started,
    Stats,
    StepResult,
    ToFrontend,
    ToScheduler,
    ToWorker,
    WorkerReady,
    with_shared_lists,
)
from overlap_spec.runtime.tracing import NO_TRACE, Recorder
from overlap_spec.runtime.transport import Inbox, Outlet
from overlap_spec.scheduler.hooks import Hooks
from overlap_spec.scheduler.ledger import Ledger
from overlap_spec.scheduler.planner import Planner
from overlap_spec.scheduler.queues import Admitted, RequestQueues, why_refused
from overlap_spec.scheduler.requests import Request, Step
from overlap_spec.scheduler.stats import Reporter


def _no_other_frontend(generation: int) -> Outlet[ToFrontend]:
    raise AssertionError("this scheduler's frontend is never another one")


@dataclass(frozen=True)
class Links:
    """The scheduler's links to the worker, the frontend and, by `report_alive`, the supervisor.

    `new_frontend`: opens the one to a frontend of this generation.
    """

    inbox: Inbox[ToScheduler]
    worker: Outlet[ToWorker]
    frontend: Outlet[ToFrontend]
    trace: Recorder = NO_TRACE
    report_alive: Callable[[Stats], None] = lambda report: None
    new_frontend: Callable[[int], Outlet[ToFrontend]] = _no_other_frontend


class Scheduler:
    """Runs requests on the worker, as many steps ahead as the depth allows."""

    def __init__(
        self, queues: RequestQueues, planner: Planner, ledger: Ledger, reporter: Reporter, links: Links, hooks: Hooks
    ) -> None:
        self.hooks = hooks
        self.queues = queues
        self.planner = planner
        self.ledger = ledger
        self.reporter = reporter
        self.links = links
        self.limits = planner.limits
        self.inflight: deque[Step] = deque()
        self.outbox: list[ToFrontend] = []
        self.stopping = False
        self.tells_started = False  # the frontend is to know which requests have a slot
        self._num_flushes = 0  # asked for and not answered
        self._admitted = Admitted()
        self._memos: dict[str, Memo] = {}  # by feature

    async def run(self) -> None:
        """Serve until Shutdown. Cancellation: loses nothing that was received."""
        while not self.stopping:
            self.plan_ahead()
            self.send_replies()  # after the plan has left
            assert self.inflight or self.queues.idle, "work is left, and no message will wake the scheduler"
            self.reporter.pause()
            message = await self.links.inbox.recv()
            self.reporter.resume()
            self.take([message, *self.links.inbox.drain()])
        self.send_replies()

    def take(self, messages: list[ToScheduler]) -> None:
        """Apply what has arrived: requests first, then results, and plan after each: two of them may be out at once."""
        for message in sorted(messages, key=lambda message: isinstance(message, StepResult)):
            self.dispatch(message)
            if isinstance(message, StepResult) and not self.stopping:
                self.plan_ahead()

    def plan_ahead(self) -> None:
        """Fill the pipeline: N+1 is queued before N is read."""
        while len(self.inflight) < self.limits.depth and self.plan_step():
            pass

    def plan_step(self) -> Step | None:
        """Plan one step and send it. Returns None if nothing can run before a result arrives."""
        step = self.planner.next_step()
        if step is not None:
            self.links.worker.send(with_shared_lists(step.plan))
            self.inflight.append(step)
        return step

    def send_replies(self) -> None:
        """Send the frontend what the last events left for it, and then a report if one is due."""
        for replies in self.hooks.replies:
            self.outbox += replies()
        if started := self.queues.take_started():
            self._reply(Started(started) if self.tells_started else None)
        if self.outbox:
            self.empty_outbox()
        if report := self.reporter.poll():
            self.links.frontend.send(report)

    def empty_outbox(self) -> None:
        """Send every reply in the outbox."""
        for message in self.outbox:
            self.links.frontend.send(message)
        self.outbox.clear()

    def dispatch(self, message: ToScheduler) -> None:
        match message:
            case StepResult():
                self.settle(message)
            case Admit():
                self._admit(message)
            case Abort():
                self._reply(self.ledger.abort(message.uid, message.reason))
            case FlushCache():
                self._num_flushes += 1
                self._flush()
            case NewFrontend():
                self._follow(message)
            case Memo():
                self._memos[message.feature] = message
            case LivenessProbe():
                self.links.trace.watch(message.watch_s)
                self.links.report_alive(self.reporter.last)
            case Shutdown():
                self.stopping = True
            case WorkerReady():
                raise AssertionError("the worker is ready only once")
            case Extension():
                taken = any([takes(message) for takes in self.hooks.message])
                assert taken, f"no feature takes {type(message).__name__}"
            case _:
                assert_never(message)

    def settle(self, result: StepResult) -> None:
        """Apply a result of the oldest step in flight, which is over with its last one."""
        step = self.inflight.popleft() if result.is_last else self.inflight[0]
        if step.owner is None:
            self._reply(self.ledger.settle(step, result))
            self.outbox += self.ledger.take_failed()
        for settled in self.hooks.settled:
            settled(step, result)
        if self._num_flushes:
            self._flush()

    def greet(self) -> None:
        """Tell a frontend that is new what it is to remember, and then that it may take requests."""
        self.outbox += [*self._memos.values(), self.limits.engine_limits(), self.reporter.snapshot()]

    def _follow(self, message: NewFrontend) -> None:
        """Drop all that the frontend before has asked for, and what is there to be told to it; greet the new one.

        Steps in flight go on; a slot and its pages are free when its last one has settled.
        """
        self.links.frontend.close()
        self.links = replace(self.links, frontend=self.links.new_frontend(message.generation))
        self.ledger.drop_all()
        for abandoned in self.hooks.abandoned:
            abandoned()
        self.queues.take_started()
        self.outbox.clear()
        self._num_flushes = 0
        self.greet()

    def _reply(self, message: ToFrontend | None) -> None:
        if message is not None:
            self.outbox.append(message)

    def _admit(self, admit: Admit) -> None:
        if reason := why_refused(admit, self.limits, self.hooks.by_name.keys()):
            self._reply(Refused(admit.uid, ErrorCode.BAD_REQUEST, reason))
            return
        self.planner.counters.requests += admit.resumed is None
        request = self._admitted.request(admit, self.queues.memory.cache.root)
        if self.hooks.admit(request, self):
            self.queues.hold(request)
        else:
            self.queues.enqueue(request)

    def released(self, request: Request) -> None:
        self.queues.release(request)

    def failed(self, request: Request, error: RequestError) -> None:
        self._reply(self.ledger.fail(request.uid, error))

    def _flush(self) -> None:
        """Empty the prefix cache, unless something runs or waits. Steps of requests that have finished end first."""
        serving = any(step.holds_cache for step in self.inflight)
        if serving and self.queues.only_leaving:
            return
        can = self.queues.idle and not serving
        if can:
            cache = self.queues.memory.cache
            cache.evict(cache.num_evictable)
            if self.limits.is_self_drafting:
                self.links.worker.send(FlushCache())
            self._reply(self.reporter.snapshot())  # before Flushed: figures asked for after it show an empty cache
        for _ in range(self._num_flushes):
            self._reply(Flushed(can))
        self._num_flushes = 0
