"""The waiting queue, the running batch and the requests that are leaving, with the slots.

Requests that run are ordered by age: by when they started first. A preempted one keeps its age, and comes back before
the others that wait. A slot and its pages are free only when their request is done *and* in no step in
flight:

    waiting --start--> running --leave--> leaving --(last step settles)--> gone, or waiting if preempted

A new request that a feature holds is queued when it is let go of (`hooks.py`).

**The waiting queue**: clients take turns, and within a client `--schedule-policy` chooses.

    returned   [r3 r7]                      preempted requests, oldest first: they have had their turn, and go first
    turns      alice: [a4 a5 a6 ..]         the client whose turn it is; when one of its requests starts, it goes last
               bob:   [b9]

A new client has its turn after one request of each client that waits already, however many requests those have. Whose
turn it is keeps it until its request fits, so a large request waits for no smaller one that came later.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from operator import attrgetter
from typing import Protocol

from overlap_spec.scheduler.hooks import Hooks
from overlap_spec.scheduler.prefix_cache import Match
from overlap_spec.scheduler.request_pages import RequestPages
from overlap_spec.scheduler.requests import Request

MOST_PASSED = 16  # requests that may go before the oldest one
MOST_MATCHED = 32  # requests that are looked up in the prefix cache: the oldest


class QueueOrder(Protocol):
    """Chooses from the waiting requests of one client."""

    def next(self, waiting: deque[Request]) -> Request:
        """The one whose turn it is. `waiting`: oldest first, and not empty."""


class FirstCome:
    """The oldest."""

    def __init__(self, memory: RequestPages) -> None: ...

    def next(self, waiting: deque[Request]) -> Request:
        return waiting[0]


class LongestPrefix:
    """The one with the longest cached prefix, but the oldest after it has been passed `MOST_PASSED` times."""

    def __init__(self, memory: RequestPages) -> None:
        self._memory = memory

    def next(self, waiting: deque[Request]) -> Request:
        oldest = waiting[0]
        if len(waiting) == 1 or oldest.passed >= MOST_PASSED:
            return oldest
        return max(islice(waiting, MOST_MATCHED), key=lambda request: len(self._memory.match(request).pages))


QUEUE_ORDERS: dict[str, Callable[[RequestPages], QueueOrder]] = {"fcfs": FirstCome, "lpm": LongestPrefix}


AGE = attrgetter("order")


class WaitingQueue:
    """Every request that waits for a slot. `order` chooses within a client."""

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self.returned: list[Request] = []
        self.turns: OrderedDict[str, deque[Request]] = OrderedDict()
        self._num_new = 0

    def __len__(self) -> int:
        return self._num_new + len(self.returned)

    def __iter__(self) -> Iterator[Request]:
        """The returned ones, then client by client."""
        yield from self.returned
        for requests in self.turns.values():
            yield from requests

    def append(self, request: Request) -> None:
        """Add a new request, the last of its client."""
        requests = self.turns.get(request.admit.client)
        if requests is None:
            requests = self.turns[request.admit.client] = deque()
        requests.append(request)
        self._num_new += 1

    def put_back(self, request: Request) -> None:
        """Add a preempted request."""
        insort(self.returned, request, key=AGE)

    def next(self) -> Request:
        """The one whose turn it is. The queue must not be empty."""
        if self.returned:
            return self.returned[0]
        return self.order.next(next(iter(self.turns.values())))

    def start(self, request: Request) -> None:
        """Take out a request that has got its slot; it was that client's turn."""
        client = request.admit.client
        if not request.order:
            oldest = self.turns[client][0]
            if request is not oldest:
                oldest.passed += 1
            self.turns.move_to_end(client)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take out a request; a client's turn remains where it is."""
        if request.order:
            self.returned.remove(request)
            return
        client = request.admit.client
        requests = self.turns[client]
        requests.remove(request)
        self._num_new -= 1
        if not requests:
            del self.turns[client]


class RequestQueues:
    """Owner of the requests' states and of the slots."""

    def __init__(self, memory: RequestPages, num_slots: int, order: QueueOrder, hooks: Hooks) -> None:
        self.memory = memory
        self._hooks = hooks
        self.open: dict[int, Request] = {}  # by uid: everything that has not finished
        self.held: dict[int, Request] = {}  # by uid: those that hooks hold
        self._started: list[int] = []  # uids of requests that have got a slot
        self.waiting = WaitingQueue(order)
        self.running: list[Request] = []  # oldest first
        self.unfinished: list[Request] = []  # of the running ones, those whose prompts are; oldest first
        self.leaving: list[Request] = []  # still in flight; nothing more is planned
        self.most_growth = 0  # tokens that the running ones could add at most when they got their slots
        self.num_limited = 0  # of the running ones, those that limit their speculation
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self._num_started = 0

    @property
    def idle(self) -> bool:
        """True if no request waits, runs or leaves. (One that leaves has a step in flight.)"""
        return not (self.waiting or self.running or self.leaving)

    @property
    def only_leaving(self) -> bool:
        """True if no request waits or runs, nor will one that leaves come back."""
        return not (self.waiting or self.running or self.victims_leaving)

    @property
    def victims_leaving(self) -> bool:
        """True while a preempted request has not come back to the queue."""
        return any(request.finish is None for request in self.leaving)

    def hold(self, request: Request) -> None:
        """Keep a new request that hooks hold."""
        self.open[request.uid] = self.held[request.uid] = request

    def release(self, request: Request) -> None:
        self.enqueue(self.held.pop(request.uid))

    def enqueue(self, request: Request) -> None:
        """Put a new request at the end of its client's queue."""
        self.open[request.uid] = request
        self.waiting.append(request)

    def start(self, request: Request, match: Match) -> Request:
        """Give a waiting request a slot and pages."""
        self.waiting.start(request)
        for started in self._hooks.started:
            started(request)
        if not request.order:
            self._num_started += 1
            request.order = self._num_started
        request.own_tokens()
        self.memory.place(request, match)
        request.slot = self.free_slots.pop()
        request.running = True
        self.num_limited += request.is_limited
        self.most_growth += request.committed_limit - request.target
        self._started.append(request.uid)
        insort(self.running, request, key=AGE)
        insort(self.unfinished, request, key=AGE)
        return request

    def leave(self, request: Request) -> None:
        """Plan nothing more for a running request; it is gone as soon as no step in flight involves it."""
        request.running = False
        self.num_limited -= request.is_limited
        self.most_growth -= request.committed_limit - request.target
        self.running.remove(request)
        if request.planned_len < request.target:
            self.unfinished.remove(request)
        self.leaving.append(request)
        self.step_settled(request)

    def close(self, request: Request) -> None:
        """End a request whose `finish` is set, wherever it is."""
        del self.open[request.uid]
        if request.running:
            self.leave(request)
        elif request.slot < 0:
            if self.held.pop(request.uid, None) is None:
                self.waiting.remove(request)
            self._hooks.close(request)

    def take_started(self) -> list[int]:
        """Requests that have got a slot since the last call."""
        if not self._started:
            return self._started
        started, self._started = self._started, []
        return started

    def step_settled(self, request: Request) -> None:
        """Free the slot and pages of a leaving request if that was its last step in flight."""
        if request.in_flight:
            return
        self.leaving.remove(request)
        self.free_slots.append(request.slot)
        self.memory.release(request)
        if request.finish is None:
            self.waiting.put_back(request)
        else:
            self._hooks.close(request)
