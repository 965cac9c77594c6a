"""The worker's loop: launch what has come, send what is done, and look again.

One thread does it all, and talks to the scheduler's sockets itself. A step's result passes no other thread on its way
out, nor does the plan that answers it on its way in: waking a thread takes longer than a decode step of a small model
may wait. Results leave in the order of their plans.
"""

import time
from collections import deque
from typing import Protocol, assert_never

from overlap_spec.ipc.step_link import SpinPolicy
from overlap_spec.ipc.transport import Outlet
from overlap_spec.messages import FlushCache, Shutdown, StepPlan, ToScheduler, ToWorker
from overlap_spec.worker.executor import Executor
from overlap_spec.worker.handle import StepHandle
from overlap_spec.worker.step_trace import NO_TRACER, StepTracer

GLANCE_S = 0.0002  # between looks at steps in flight, where polling is not allowed


class PlanInbox(Protocol):
    """What the worker reads, without an event loop."""

    def poll(self) -> list[ToWorker]:
        """What has arrived; never waits."""
        ...

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until there may be something to read."""
        ...


class Worker:
    """Launches and publishes, in turns."""

    def __init__(
        self,
        executor: Executor,
        inbox: PlanInbox,
        scheduler: Outlet[ToScheduler],
        spin: SpinPolicy,
        tracer: StepTracer = NO_TRACER,
    ) -> None:
        self._executor = executor
        self._inbox = inbox
        self._scheduler = scheduler
        self._spin = spin
        self._tracer = tracer
        self._launched: deque[StepHandle] = deque()  # and not published

    def run(self) -> None:
        """Serve until Shutdown; blocks the thread. Raises: what a step raised. Steps in flight are abandoned."""
        while True:
            messages = self._inbox.poll()
            received = time.monotonic()
            for message in messages:
                match message:
                    case StepPlan():
                        handle = self._executor.launch(message, self._on_published, received)
                        self._tracer.launched(handle)
                    case FlushCache():
                        self._executor.forget()
                    case Shutdown():
                        return
                    case _:
                        assert_never(message)
            if self._publish() or messages:
                self._spin.renew()
            elif not self._spin.lasts:
                self._inbox.wait(GLANCE_S if self._launched else None)

    def _on_published(self, handle: StepHandle) -> None:
        """Its copy out has begun; on a CPU it is done, and leaves before the draft works."""
        self._launched.append(handle)
        self._publish()

    def _publish(self) -> bool:
        """Send the results that are on the host, oldest first. Returns whether there were any."""
        num_waiting = len(self._launched)
        while self._launched and self._launched[0].ready():
            self._scheduler.send(self._launched.popleft().wait())
        return len(self._launched) < num_waiting
