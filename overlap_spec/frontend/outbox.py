"""The link to the scheduler, which sends what belongs together at once.

Requests that come together are computed together, if the scheduler hears of all before it plans a step of the first.
Where the first of them are enough for a step that keeps the device busy, they go ahead:

    tokenizer   [ 8 ][ 24 ..          ]
    scheduler        [ 8 ]             [ 24 ]
    device                [ step of 8 ........ ][ step of 24 .....................
"""

import time
from collections.abc import Callable

from overlap_spec.messages import TOKEN_BYTES, Admit, ToScheduler
from overlap_spec.runtime.transport import BatchOutlet

MOST_S = 0.005  # for which the first message is held, about as long as a step of the others would take
LEAST_LEFT = 2  # times the prompts that go ahead: what follows them is at least so large, or one step takes less time


class Outbox:
    """Sends messages in order, at once or, between `hold` and `release`, together."""

    def __init__(self, outlet: BatchOutlet[ToScheduler], clock: Callable[[], float] = time.monotonic) -> None:
        self._outlet = outlet
        self._clock = clock
        self._held: list[ToScheduler] = []
        self._until: float | None = None  # while messages are held
        self._more_bytes = 0  # that follow
        self._enough = 0  # bytes of prompts with which those that are held go ahead; 0: they do not
        self._prompts = 0  # bytes of those that are held

    def send(self, message: ToScheduler) -> None:
        """Send a message, or hold it."""
        if self._until is None:
            self._outlet.send(message)
            return
        self._held.append(message)
        if self._enough and isinstance(message, Admit):
            self._prompts += len(message.prompt)
            if self._prompts >= self._enough and self._more_bytes >= LEAST_LEFT * self._prompts:
                self._enough = 0
                self._send_held()

    def renew(self, outlet: BatchOutlet[ToScheduler]) -> None:
        """Send over another link from now on. What is held was for the reader of the old one."""
        self._outlet = outlet
        self._held.clear()

    def hold(self, more_bytes: int = 0) -> None:
        """Hold messages from now on. The next `hold` or `release` after MOST_S sends them.

        `more_bytes`: how much of what came with the next one follows it.
        """
        self._more_bytes = more_bytes
        if self._until is not None and self._clock() >= self._until:
            self._send_held()
            self._until = None
        if self._until is None:
            self._until = self._clock() + MOST_S

    def send_first(self, num_tokens: int) -> None:
        """Until the next `release`, send prompts that are held once they have so many tokens; 0: do not."""
        self._enough, self._prompts = num_tokens * TOKEN_BYTES, 0

    def release(self) -> None:
        """Send what is held."""
        self._until, self._enough = None, 0
        self._send_held()

    def _send_held(self) -> None:
        if self._held:
            self._outlet.send_all(self._held)
            self._held.clear()
