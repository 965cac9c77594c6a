"""The worker's loop: launch what has come, send what is done, and look again.

A launch may have to wait for the host's work of a feature (`executor.py`); the loop goes on meanwhile, and steps behind
it keep their order.

One thread does it all, and talks to the scheduler's sockets itself. A step's result passes no other thread on its way
out, nor does the plan that answers it on its way in: waking a thread takes longer than a decode step of a small model
may wait. Results leave in the order of their plans.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, assert_never

from overlap_spec.messages import (
    Extension,
    FlushCache,
    LivenessProbe,
    Shutdown,
    StepPlan,
    ToScheduler,
    ToWorker,
    with_own_lists,
)
from overlap_spec.runtime.step_link import SpinPolicy
from overlap_spec.runtime.tracing import NO_TRACE, Recorder
from overlap_spec.runtime.transport import Outlet
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.step import Launch, StepHandle

GLANCE_S = 0.0002  # between looks at steps in flight, where polling is not allowed


class PlanInbox(Protocol):
    """What the worker reads, without an event loop."""

    def poll(self) -> list[ToWorker]:
        """What has arrived; never waits."""

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there may be something to read."""


class Worker:
    """Launches and publishes, in turns."""

    def __init__(
        self,
        executor: Executor,
        inbox: PlanInbox,
        scheduler: Outlet[ToScheduler],
        spin: SpinPolicy,
        trace: Recorder = NO_TRACE,
    ) -> None:
        """`trace`: takes what features record of steps."""
        self._executor = executor
        self._inbox = inbox
        self._scheduler = scheduler
        self._spin = spin
        self._trace = trace
        self.report_alive: Callable[[float], None] = lambda step_s: None  # an actor replaces it
        self._arrived: deque[tuple[StepPlan | FlushCache, float]] = deque()  # and not begun; with the time
        self._launching: Launch | None = None
        self._launched: deque[StepHandle] = deque()  # and not published

    def run(self) -> None:
        """Serve until Shutdown; blocks the thread. Raises: what a step raised. Steps in flight are abandoned."""
        for serves in self._executor.hooks.serves:
            serves(self._trace)
        while True:
            messages = self._inbox.poll()
            received, num_probes = time.monotonic(), 0
            for message in messages:
                match message:
                    case StepPlan():
                        self._arrived.append((with_own_lists(message), received))
                    case FlushCache():
                        self._arrived.append((message, received))
                    case Extension():
                        self._executor.hooks.take(message)
                    case LivenessProbe():
                        num_probes += 1
                        for watched in self._executor.hooks.watched:
                            watched(message.watch_s)
                        self.report_alive(self._oldest_step_s(received))
                    case Shutdown():
                        return
                    case _:
                        assert_never(message)
            launched = self._launch()
            if self._publish() or len(messages) > num_probes or launched:
                self._spin.renew()
            elif not self._spin.lasts:
                self._inbox.wait(GLANCE_S if self._is_busy() else None)

    def _launch(self) -> bool:
        """Enqueue what has arrived, up to a launch that waits. Returns whether any was enqueued."""
        any_launched = False
        while self._launching is not None or self._arrived:
            if self._launching is None:
                self._publish()  # the plan that answers a result may have a long way
                self._begin(*self._arrived.popleft())
                if self._launching is None:
                    continue
            if not self._launching.advance():
                break
            for launched in self._executor.hooks.launched:
                for handle in self._launching.handles:
                    launched(handle)
            self._launching, any_launched = None, True
        return any_launched

    def _begin(self, message: StepPlan | FlushCache, received: float) -> None:
        if isinstance(message, FlushCache):
            self._executor.decode_step.forget()
        else:
            self._launching = self._executor.start(message, self._on_published, received)

    def _on_published(self, handle: StepHandle) -> None:
        """Its copy out has begun; on a CPU it is done, and leaves before the draft works."""
        self._launched.append(handle)
        self._publish()

    def _publish(self) -> bool:
        """Send the results that are on the host, oldest first. Returns whether there were any."""
        num_waiting = len(self._launched)
        self._send_replies()
        while self._launched and self._launched[0].ready():
            self._scheduler.send(self._launched.popleft().wait())
        return len(self._launched) < num_waiting

    def _send_replies(self) -> None:
        """Send what features have to tell; before the result of a step in which they found it."""
        for replies in self._executor.hooks.replies:
            for reply in replies():
                self._scheduler.send(reply)

    def _oldest_step_s(self, now: float) -> float:
        """Seconds since the plan of the oldest step came that is not done; 0 without one."""
        if self._launched:
            return now - self._launched[0].host.received
        if self._launching is not None:
            return now - self._launching.handle.host.received
        return now - self._arrived[0][1] if self._arrived else 0.0

    def _is_busy(self) -> bool:
        """Whether there is something to look at that wakes no reader of messages."""
        is_busy = self._executor.hooks.is_busy
        return bool(self._launched or self._launching or any([look() for look in is_busy]))
