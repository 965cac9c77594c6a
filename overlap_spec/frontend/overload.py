"""Keeps one client, or too many, from taking the place of the others: bytes, turns, places and time.

    ByteBudget    bytes that wait somewhere, of each owner and in all
    FairQueue     frames that clients have sent and the service has not read yet, served in turn
    QueueBound    requests that wait (`--max-queued-requests`)
    Backlog       frames that a client has not read yet, and how many bytes of them belong to each request
    Deadlines     requests whose time is up: whole ones, and those whose first token has not come

Turns, with up to TURN frames of what a client has sent together in each:

    a:  [1 2 3 ..]  [4]          one turn of a
    b:  [1]                      then b, then a again
    c:  [1 2]  held              its first frame is looked at before it is read, and others do not wait for that
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from overlap_spec.errors import RequestTimeout
from overlap_spec.frontend.client_messages import Payload
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.frontend.request_checks import Refusal
from overlap_spec.messages import ErrorCode, Terms


class Backlog:
    """A frame's bytes are shared evenly by the requests that it tells about."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._frames: deque[tuple[bytes, Sequence[str]]] = deque()
        self._by_request: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._frames)

    @property
    def first(self) -> bytes:
        """The frame that is to be sent next."""
        return self._frames[0][0]

    def add(self, frame: bytes, request_ids: Sequence[str]) -> None:
        self._frames.append((frame, request_ids))
        self._count(frame, request_ids, 1)

    def pop(self) -> int:
        """Forget the first frame, which was sent. Returns its bytes."""
        frame, request_ids = self._frames.popleft()
        self._count(frame, request_ids, -1)
        return len(frame)

    def clear(self) -> None:
        """Forget everything."""
        self.num_bytes = 0
        self._frames.clear()
        self._by_request.clear()

    def of(self, request_id: str) -> int:
        return self._by_request[request_id]

    def largest(self, request_ids: Sequence[str]) -> str:
        """Which of these requests has the most bytes."""
        return max(request_ids, key=self.of)

    def _count(self, frame: bytes, request_ids: Sequence[str], sign: int) -> None:
        self.num_bytes += sign * len(frame)
        share = sign * (len(frame) // max(1, len(request_ids)))
        for request_id in request_ids:
            self._by_request[request_id] += share
            if not self._by_request[request_id]:
                del self._by_request[request_id]


K = TypeVar("K", bound=Hashable)
Frames = deque[tuple[Payload, int, int]]  # with the bytes that follow, and those that are charged
Expired = Callable[[OpenRequest, RequestTimeout], None]

TURN = 32  # frames that were sent together and are read together; more of them are read in several turns
WHOLE, FIRST = "timeout", "first_token_timeout"  # fields of a request
FLAGS = {WHOLE: "--request-timeout", FIRST: "--first-token-timeout"}


class ByteBudget(Generic[K]):
    """Bytes in use by owner. What `take` was granted, `give` returns; an owner without bytes is forgotten."""

    def __init__(self, per_owner: int, in_all: int) -> None:
        self.per_owner = per_owner
        self.in_all = in_all
        self.total = 0
        self._used: dict[K, int] = {}

    def of(self, owner: K) -> int:
        return self._used.get(owner, 0)

    def take(self, owner: K, num_bytes: int) -> bool:
        """Use more bytes. Returns False, and uses none, if that were too many."""
        if self.of(owner) + num_bytes > self.per_owner or self.total + num_bytes > self.in_all:
            return False
        self._used[owner] = self.of(owner) + num_bytes
        self.total += num_bytes
        return True

    def give(self, owner: K, num_bytes: int) -> None:
        left = self._used.pop(owner, 0) - num_bytes
        assert left >= 0, f"{owner}: {-left} bytes more were returned than taken"
        self.total -= num_bytes
        if left:
            self._used[owner] = left


class FairQueue:
    """Frames by client number. `budget` and `most_frames` bound what a client has waiting."""

    def __init__(self, budget: ByteBudget[int], most_frames: int) -> None:
        self.budget = budget
        self.most_frames = most_frames
        self._queues: dict[int, Frames] = {}  # the first one's turn it is
        self._held: dict[int, Frames] = {}
        self._taken = 0  # in this turn
        self.more_bytes = 0  # of what was sent together with the last frame that was taken

    def __bool__(self) -> bool:
        """Whether there is a frame to be taken: of a client that is not held."""
        return bool(self._queues)

    def of(self, client: int) -> int:
        """Frames that wait from this client."""
        return len(self._queues.get(client, ())) + len(self._held.get(client, ()))

    @property
    def turn_is_over(self) -> bool:
        """Whether the next frame begins a turn."""
        return not (self.more_bytes and 0 < self._taken < TURN)

    def put(self, client: int, frame: Payload, more: int) -> bool:
        """Add a frame; `more`: bytes of the same sending that follow. Returns False if the client has too many."""
        if self.of(client) >= self.most_frames or not self.budget.take(client, len(frame)):
            return False
        self._queue(client).append((frame, more, len(frame)))
        return True

    def put_together(self, client: int, frames: Sequence[Payload]) -> bool:
        """Add the frames of one sending. Returns False, and adds none, if they are too many."""
        if not frames:
            return True
        sizes = list(map(len, frames))
        more = sum(sizes)
        if self.of(client) + len(frames) > self.most_frames or not self.budget.take(client, more):
            return False
        queue = self._queue(client)
        for frame, size in zip(frames, sizes, strict=True):
            more -= size
            queue.append((frame, more, size))
        return True

    def put_anyway(self, client: int, frame: Payload, more: int) -> None:
        """Add a small frame that no bound may keep out."""
        self._queue(client).append((frame, more, 0))

    @property
    def first(self) -> tuple[int, Payload]:
        """The client and frame that `take` returns next; there must be one."""
        if self.turn_is_over:
            self._begin_turn()
        client, queue = next(iter(self._queues.items()))
        return client, queue[0][0]

    def take(self) -> tuple[int, Payload]:
        """The next frame and its client; there must be one."""
        client, _ = self.first
        queue = self._queues[client]
        frame, more, charged = queue.popleft()
        self.budget.give(client, charged)
        self._taken += 1
        self.more_bytes = more if queue else 0
        if not queue:
            del self._queues[client]
            self._taken = 0
        return client, frame

    def hold(self, client: int) -> None:
        """Take nothing from a client that has frames waiting until `release`; others have their turns."""
        self._end_turn_of(client)
        self._held[client] = self._queues.pop(client)

    def release(self, client: int) -> None:
        """Its next turn comes after those of all others. Nothing happens if it was dropped."""
        if client in self._held:
            self._queues[client] = self._held.pop(client)

    def drop(self, client: int) -> list[Payload]:
        """Forget a client. Returns what it had waiting."""
        self._end_turn_of(client)
        dropped = [*self._queues.pop(client, ()), *self._held.pop(client, ())]
        self.budget.give(client, sum(charged for _, _, charged in dropped))
        return [frame for frame, _, _ in dropped]

    def _queue(self, client: int) -> Frames:
        return self._held[client] if client in self._held else self._queues.setdefault(client, deque())

    def _end_turn_of(self, client: int) -> None:
        """If it is that client's."""
        if client == next(iter(self._queues), None):
            self._taken = self.more_bytes = 0

    def _begin_turn(self) -> None:
        """The client that was served last goes to the end."""
        if self._taken:
            client = next(iter(self._queues))
            self._queues[client] = self._queues.pop(client)
        self._taken = 0


class QueueBound:
    """The requests that have no token yet, by owner, oldest first.

    At most so many requests are open as can run, and `max_queued` more. If all of these are taken, a request of a
    client with fewer waiting ones than another takes the place of the other's newest; any other new request is refused.
    So a flood fills the places that no other client needs.
    """

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


class Deadlines:
    """The timers of open requests. `expired` is called in the event loop, at most once for each.

    A request's own limits and the server's flags count from its arrival; the tighter of each goes. A request without
    limits has no timer.
    """

    def __init__(self, flags: Terms, expired: Expired) -> None:
        self._flags = flags
        self._expired = expired
        self._timers: dict[int, dict[str, asyncio.TimerHandle]] = {}  # by uid

    def opened(self, request: OpenRequest, terms: Terms) -> None:
        """Start the timers of a request."""
        pairs = {
            WHOLE: (terms.timeout_s, self._flags.timeout_s),
            FIRST: (terms.first_token_timeout_s, self._flags.first_token_timeout_s),
        }
        for field, (own, flag) in pairs.items():
            given = [(seconds, name) for seconds, name in ((own, field), (flag, FLAGS[field])) if seconds is not None]
            if given and not (field is FIRST and terms.has_begun):
                seconds, name = min(given)
                timer = asyncio.get_running_loop().call_later(
                    max(0.0, seconds - terms.age_s), self._end, request, field, f"{name} is {seconds:g} s"
                )
                self._timers.setdefault(request.uid, {})[field] = timer

    def began(self, request: OpenRequest) -> None:
        """The first token has come."""
        timers = self._timers.get(request.uid)
        if timers is not None and FIRST in timers:
            timers.pop(FIRST).cancel()

    def closed(self, request: OpenRequest) -> None:
        """Nothing more is due. A second call does nothing."""
        for timer in self._timers.pop(request.uid, {}).values():
            timer.cancel()

    def _end(self, request: OpenRequest, field: str, limit: str) -> None:
        missing = "its end" if field is WHOLE else "its first token"
        self._expired(request, RequestTimeout(field, f"the request was ended before {missing}: {limit}"))
