"""Rows that take long to make, in turns: other requests' rows never wait for them.

    what      runs of requests whose text takes long to search for stops; rows of features, and what comes after them
    a turn    rows of all other requests, then these for `TURN_S`; what is left waits for the next turn
    order     owners one after the other, and the requests of each; what a request has gained stays in order

A request's runs that wait are joined, so a search that is slower than the engine holds no more than the answer.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from overlap_spec.frontend.steps import Gains, Run
from overlap_spec.messages import TextDeltas

TURN_S = 0.005  # of this thread's CPU time
SLICE = 2  # tokens of a request between two looks at the clock


@dataclass(frozen=True)
class LateRow:
    """A row of a feature, which adds no tokens and is made when it has its turn."""

    uid: int
    make: Callable[[], TextDeltas]


Waiting = Gains | LateRow  # of one request


class RowTurns:
    """What waits for its turn, by owner and request."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[int, deque[Waiting]]] = OrderedDict()  # the next ones first
        self._until: float | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def has(self, owner: str, uid: int) -> bool:
        """Whether something of a request waits, so that what it gains next must wait, too."""
        return uid in self._waiting.get(owner, ())

    def put(self, owner: str, uid: int, gained: Waiting) -> None:
        """Add what a request alone has gained."""
        waiting = self._waiting.setdefault(owner, OrderedDict()).setdefault(uid, deque())
        last = waiting[-1] if waiting else None
        if isinstance(last, Gains) and isinstance(gained, Gains) and last.is_plain and gained.is_plain:
            last.join(gained)
        else:
            waiting.append(gained)

    def begin_turn(self) -> None:
        """The next `turn` has its full time."""
        self._until = None

    def turn(self) -> Iterator[Waiting]:
        """What is made in this turn, at least one row of it: of a feature, or a request's next tokens."""
        if self._waiting and self._until is None:
            self._until = time.thread_time() + TURN_S
            yield self._next()
        while self._waiting and self._until is not None and time.thread_time() < self._until:
            yield self._next()

    def clear(self) -> None:
        """Forget all of it."""
        self._waiting.clear()

    def _next(self) -> Waiting:
        owner, requests = self._waiting.popitem(last=False)
        uid, waiting = requests.popitem(last=False)
        gained = waiting.popleft()
        if isinstance(gained, Gains) and gained.is_plain and _is_long(gained.runs[uid]):
            waiting.appendleft(gained)
            gained = gained.cut(SLICE)
        if waiting:
            requests[uid] = waiting
        if requests:
            self._waiting[owner] = requests
        return gained


def _is_long(run: Run) -> bool:
    return len(run.tokens) > SLICE and len(run.parts) > 1
