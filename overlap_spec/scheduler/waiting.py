"""The waiting queue: clients take turns, and within a client `--schedule-policy` chooses.

    returned   [r3 r7]                      preempted requests, oldest first: they have had their turn, and go first
    turns      alice: [a4 a5 a6 ..]         the client whose turn it is; when one of its requests starts, it goes last
               bob:   [b9]

A new client has its turn after one request of each client that waits already, however many requests those have. Whose
turn it is keeps it until its request fits, so a large request waits for no smaller one that came later.
"""

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from operator import attrgetter

from overlap_spec.scheduler.queue_order import QueueOrder
from overlap_spec.scheduler.requests import Request

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
