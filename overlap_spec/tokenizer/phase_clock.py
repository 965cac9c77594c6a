"""When a request that is traced passes from one phase to the next. Other requests have none."""

import time

from overlap_spec.messages import Phases, TextDeltas


class PhaseClock:
    """Times of one request, on the clock that all processes of a machine share."""

    def __init__(self) -> None:
        self._received = time.monotonic()
        self._admitted = self._started = self._first_token = self._last_token = 0.0
        self._detokenize_s = 0.0

    def admitted(self) -> None:
        """Its prompt is encoded; from now on it waits for a slot."""
        self._admitted = time.monotonic()

    def started(self) -> None:
        """It has a slot. Once: a recovery starts it again."""
        self._started = self._started or time.monotonic()

    def tokens_came(self) -> None:
        """A run of tokens is to become text."""
        self._last_token = time.monotonic()
        self._first_token = self._first_token or self._last_token

    def text_is_made(self, reply: TextDeltas, request_id: str, is_last: bool) -> None:
        """It has become text. With the last run, the reply gets all times."""
        now = time.monotonic()
        self._detokenize_s += now - self._last_token
        if is_last:
            times = self._received, self._admitted, self._started, self._first_token, self._last_token, now
            reply.phases[request_id] = Phases(*times, self._detokenize_s)
