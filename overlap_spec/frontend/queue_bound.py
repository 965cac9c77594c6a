"""Bounds the requests that wait (`--max-queued-requests`), and lets no client fill the queue for the others.

At most so many requests are open as can run, and `max_queued` more. If all of these are taken, a request of a client
with fewer waiting ones than another takes the place of the other's newest; any other new request is refused. So a flood
fills the places that no other client needs.
"""

from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.frontend.request_checks import Refusal
from overlap_spec.messages import ErrorCode


class QueueBound:
    """The requests that have no token yet, by owner, oldest first."""

    def __init__(self, max_queued: int) -> None:
        self._max_queued = max_queued
        self._waiting: dict[str, dict[int, OpenRequest]] = {}  # by owner and uid

    def make_room(self, owner: str, num_open: int, num_slots: int) -> OpenRequest | None:
        """The request whose place a new one of `owner` takes; None if there is room. Raises: Refusal."""
        if num_open < num_slots + self._max_queued:
            return None
        longest = max(self._waiting.values(), key=len, default={})
        if not self._max_queued or len(longest) <= len(self._waiting.get(owner, {})) + 1:
            raise self.full(num_open, num_slots)
        return longest[next(reversed(longest))]

    def full(self, num_open: int, num_slots: int) -> Refusal:
        """What a request without a place is told."""
        queued = max(0, num_open - num_slots)
        text = f"{queued} requests are waiting, and --max-queued-requests is {self._max_queued}: try again later"
        return Refusal(ErrorCode.OVERLOADED, text)

    def add(self, request: OpenRequest) -> None:
        """A request is open, and waits."""
        self._waiting.setdefault(request.owner, {})[request.uid] = request

    def discard(self, request: OpenRequest) -> None:
        """It has its first token, or is gone."""
        mine = self._waiting.get(request.owner)
        if mine is not None and mine.pop(request.uid, None) is not None and not mine:
            del self._waiting[request.owner]
