"""Requests whose grammars are compiled before they are queued.

    to come     alice: [a4 a5 a6 ..]  bob: [b9]     clients take turns
    compiling   a3 b8                               the worker has been asked for them
    compiled    a1 a2 b7                            queued, and wait for slots

The worker keeps a matcher for each request that it has been asked for, so no more than `most` requests are compiling or
compiled ahead of their slots: a client's thousands of grammars neither fill memory nor hold up those of others.
"""

from collections import OrderedDict
from collections.abc import Iterator

from overlap_spec.scheduler.requests import Request


class PreparingQueue:
    """Owner of the requests that are not queued yet, and of which grammars the worker has."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._to_come: OrderedDict[str, dict[int, Request]] = OrderedDict()  # by client, the next one first, and by uid
        self._compiling: dict[int, Request] = {}
        self._compiled: set[int] = set()
        self._asked: set[int] = set()  # the worker has their grammars, until it is told to drop them

    def __len__(self) -> int:
        return len(self._compiling) + sum(map(len, self._to_come.values()))

    def __iter__(self) -> Iterator[Request]:
        yield from self._compiling.values()
        for requests in self._to_come.values():
            yield from requests.values()

    def add(self, request: Request) -> None:
        """Hold a new request."""
        self._to_come.setdefault(request.admit.client, {})[request.uid] = request

    def take_next(self) -> list[Request]:
        """Those that the worker is to be asked for now."""
        found: list[Request] = []
        while self._to_come and len(self._compiling) + len(self._compiled) < self._most:
            client, requests = self._to_come.popitem(last=False)
            request = requests.pop(next(iter(requests)))
            if requests:
                self._to_come[client] = requests
            self._compiling[request.uid] = request
            self._asked.add(request.uid)
            found.append(request)
        return found

    def compiled(self, uid: int) -> Request | None:
        """The request, which is queued now; None if it has ended meanwhile."""
        request = self._compiling.pop(uid, None)
        if request is not None:
            self._compiled.add(uid)
        return request

    def started(self, uid: int) -> None:
        """A request has got its slot."""
        self._compiled.discard(uid)

    def remove(self, request: Request) -> bool:
        """Take out a request that ends. Returns False if it has been queued."""
        if self._compiling.pop(request.uid, None) is not None:
            return True
        requests = self._to_come.get(request.admit.client, {})
        if requests.pop(request.uid, None) is None:
            return False
        if not requests:
            del self._to_come[request.admit.client]
        return True

    def gone(self, uid: int) -> bool:
        """Forget a request. Returns whether the worker has its grammar."""
        self._compiled.discard(uid)
        was_asked = uid in self._asked
        self._asked.discard(uid)
        return was_asked
