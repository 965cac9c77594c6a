"""When a request that is traced passes from one phase to the next. Other requests are not followed."""

import time

from overlap_spec.frontend.hooks import Parts, RequestHook
from overlap_spec.frontend.open_requests import Follower, Gains, OpenRequest, Run
from overlap_spec.frontend.output import Piece
from overlap_spec.messages import Admit, Phases, TextDeltas


def attach(parts: Parts) -> RequestHook:
    """Any request may be traced."""
    return TracingHook()


class TracingHook(RequestHook):
    """Follows the requests whose terms ask for it."""

    terms = ("is_traced",)

    def admitted(self, request: OpenRequest, admit: Admit) -> Follower:
        """Its prompt is encoded; from now on it waits for a slot."""
        return PhaseClock(request.request_id, admit.arrived_at)


class PhaseClock(Follower):
    """Times of one request, on the clock that all processes of a machine share. `received`: when it came."""

    def __init__(self, request_id: str, received: float) -> None:
        self._request_id = request_id
        self._received = received
        self._admitted = time.monotonic()
        self._started = self._first_token = self._last_token = 0.0
        self._detokenize_s = 0.0

    def started(self) -> None:
        """It has a slot. Once: a recovery starts it again."""
        self._started = self._started or time.monotonic()

    def arrived(self) -> None:
        """A run of tokens is to become text."""
        self._last_token = time.monotonic()
        self._first_token = self._first_token or self._last_token

    def gained(self, gains: Gains, run: Run, piece: Piece, reply: TextDeltas) -> None:
        """It has become text. With the last run, the reply gets all times."""
        now = time.monotonic()
        self._detokenize_s += now - self._last_token
        if piece.finish is not None:
            times = self._received, self._admitted, self._started, self._first_token, self._last_token, now
            reply.phases[self._request_id] = Phases(*times, self._detokenize_s)
