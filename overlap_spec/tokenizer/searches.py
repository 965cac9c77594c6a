"""Runs of requests whose text takes long to search for stops, in turns: other requests' rows never wait for them.

    a turn    rows of all other requests, then searches for `TURN_S`; what is left waits for the next turn
    order     owners one after the other, and the requests of each; a request's runs stay in order

A request's runs that wait are joined, so a search that is slower than the engine holds no more than the answer.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Iterator

from overlap_spec.tokenizer.steps import Gains

TURN_S = 0.005  # of this thread's CPU time
SLICE = 2  # tokens of a request between two looks at the clock


class Searches:
    """What waits to be searched, by owner and request."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, OrderedDict[int, deque[Gains]]] = OrderedDict()  # the next ones first
        self._until: float | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, owner: str, uid: int, gains: Gains) -> None:
        """Add what a request alone has gained."""
        waiting = self._waiting.setdefault(owner, OrderedDict()).setdefault(uid, deque())
        if waiting and waiting[-1].is_plain and gains.is_plain:
            waiting[-1].join(gains)
        else:
            waiting.append(gains)

    def begin_turn(self) -> None:
        """The next `turn` has its full time."""
        self._until = None

    def turn(self) -> Iterator[Gains]:
        """What is searched in this turn, at least one run of it: a request's next tokens."""
        if self._waiting and self._until is None:
            self._until = time.thread_time() + TURN_S
            yield self._next()
        while self._waiting and self._until is not None and time.thread_time() < self._until:
            yield self._next()

    def clear(self) -> None:
        """Forget all of it."""
        self._waiting.clear()

    def _next(self) -> Gains:
        owner, requests = self._waiting.popitem(last=False)
        uid, waiting = requests.popitem(last=False)
        gains = waiting.popleft()
        run = gains.runs[uid]
        if len(run.tokens) > SLICE and len(run.parts) > 1 and gains.is_plain:
            waiting.appendleft(gains)
            gains = gains.cut(SLICE)
        if waiting:
            requests[uid] = waiting
        if requests:
            self._waiting[owner] = requests
        return gains
