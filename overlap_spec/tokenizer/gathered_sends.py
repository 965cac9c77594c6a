"""The link to the scheduler, which sends what belongs together at once.

Requests that come together are computed together, if the scheduler hears of all before it plans a step of the first.
"""

import time
from collections.abc import Callable

from overlap_spec.ipc.transport import BatchOutlet
from overlap_spec.messages import ToScheduler

MOST_S = 0.005  # for which the first message is held, about as long as a step of the others would take


class GatheredSends:
    """Sends messages in order, at once or, between `hold` and `release`, together."""

    def __init__(self, outlet: BatchOutlet[ToScheduler], clock: Callable[[], float] = time.monotonic) -> None:
        self._outlet = outlet
        self._clock = clock
        self._held: list[ToScheduler] = []
        self._until: float | None = None  # while messages are held

    def send(self, message: ToScheduler) -> None:
        """Send a message, or hold it."""
        if self._until is None:
            self._outlet.send(message)
        else:
            self._held.append(message)

    def renew(self, outlet: BatchOutlet[ToScheduler]) -> None:
        """Send over another link from now on. What is held was for the reader of the old one."""
        self._outlet = outlet
        self._held.clear()

    def hold(self) -> None:
        """Hold messages from now on. The next `hold` or `release` after MOST_S sends them."""
        if self._until is not None and self._clock() >= self._until:
            self.release()
        if self._until is None:
            self._until = self._clock() + MOST_S

    def release(self) -> None:
        """Send what is held."""
        self._until = None
        if self._held:
            self._outlet.send_all(self._held)
            self._held.clear()
