"""The waiting queue, the running batch and the requests that are leaving, with the slots.

Requests that run are ordered by age: by when they started first. A preempted one keeps its age, and comes back before
the others that wait (`waiting.py`). A slot and its pages are free only when their request is done *and* in no step in
flight:

    waiting --start--> running --leave--> leaving --(last step settles)--> gone, or waiting if preempted

A request with a grammar is queued when the worker has compiled it; until then it is `preparing` (`preparing.py`).
"""

from bisect import insort

from overlap_spec.scheduler.audits import Audits
from overlap_spec.scheduler.prefix_cache import Match
from overlap_spec.scheduler.preparing import PreparingQueue
from overlap_spec.scheduler.queue_order import QueueOrder
from overlap_spec.scheduler.request_pages import RequestPages
from overlap_spec.scheduler.requests import Request
from overlap_spec.scheduler.waiting import AGE, WaitingQueue

MOST_PREPARED = 64  # grammars that are compiled ahead of their requests' slots, or one for each slot if that is more


class RequestQueues:
    """Owner of the requests' states and of the slots."""

    def __init__(self, memory: RequestPages, num_slots: int, audits: Audits, order: QueueOrder) -> None:
        self.memory = memory
        self.audits = audits
        self.open: dict[int, Request] = {}  # by uid: everything that has not finished
        self.preparing = PreparingQueue(max(MOST_PREPARED, num_slots))
        self._started: list[int] = []  # uids of requests that have got a slot
        self._ended: list[int] = []  # uids of requests with a grammar that are gone
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

    def prepare(self, request: Request) -> None:
        """Hold a new request until its grammar is compiled."""
        self.open[request.uid] = request
        self.preparing.add(request)

    def enqueue(self, request: Request) -> None:
        """Put a new request at the end of its client's queue."""
        self.open[request.uid] = request
        self.waiting.append(request)

    def start(self, request: Request, match: Match) -> Request:
        """Give a waiting request a slot and pages."""
        self.waiting.start(request)
        self.preparing.started(request.uid)
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
            if not self.preparing.remove(request):
                self.waiting.remove(request)
            self._gone(request)

    def take_ended(self) -> list[int]:
        """Requests with a grammar that are gone since the last call; the worker is to be told."""
        ended, self._ended = self._ended, []
        return ended + self.audits.take_ended()

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
            self._gone(request)

    def _gone(self, request: Request) -> None:
        if self.preparing.gone(request.uid):
            self._ended.append(request.uid)
