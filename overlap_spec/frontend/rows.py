"""Rows of messages to clients, made of what steps have added to requests.

    TokenDeltas, as many as have come --> one run of each request --> text --> one message for each client

Rows that take long, and those of features that are made later, have turns behind all others, which never wait for them.

    what      runs of requests whose text takes long to search for stops; rows of features, and what comes after them
    a turn    rows of all other requests, then these for `TURN_S`; what is left waits for the next turn
    order     owners one after the other, and the requests of each; what a request has gained stays in order

A request's runs that wait are joined, so a search that is slower than the engine holds no more than the answer.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from overlap_spec.client.link import ClientLink
from overlap_spec.frontend.lifecycle import Lifecycle, Outbox
from overlap_spec.frontend.open_requests import Gains, Run, joined
from overlap_spec.messages import Abort, AbortReason, TextDeltas, TokenDeltas
from overlap_spec.runtime.tracing import NO_TRACE, Recorder

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


class Rows:
    """Makes rows and sends them. A request whose text ends before its tokens do is aborted at the scheduler."""

    def __init__(self, lifecycle: Lifecycle, scheduler: Outbox, clients: ClientLink) -> None:
        self.turns = RowTurns()
        self.trace: Recorder = NO_TRACE  # an actor replaces it
        self._lifecycle = lifecycle
        self._requests = lifecycle.requests
        self._scheduler = scheduler
        self._clients = clients

    def add(self, steps: list[TokenDeltas]) -> None:
        """What has come of steps: one of them, unless this process is behind. Empties the list."""
        if steps:
            for gains in joined(steps):
                self._add_gains(gains)
            steps.clear()

    def _add_gains(self, gains: Gains) -> None:
        """Every request's run becomes a row, every client gets one message. Rows that take long come last."""
        begun = self.trace.now()
        replies: dict[int, TextDeltas] = {}
        self._add_rows(replies, gains)
        self.take_turn(replies)
        self._send(replies)
        self.trace.span("detokenize", begun, gains.step_id, requests=len(gains.runs))

    def take_turn(self, replies: dict[int, TextDeltas]) -> None:
        """Add rows that take long, as many as this turn has time for."""
        if not self.turns:
            return
        answered: set[int] = set()
        for gained in self.turns.turn():
            if isinstance(gained, LateRow):
                self._send(replies)  # they go first
                if (request := self._requests.by_uid(gained.uid)) is not None:
                    self._clients.send(request.client, gained.make())
                answered.clear()
                continue
            if not answered.isdisjoint(gained.runs):  # a message has one row of a request
                self._send(replies)
                answered.clear()
            answered.update(gained.runs)
            try:
                self._add_rows(replies, gained, is_turn=True)
            except Exception as error:  # a pattern is a program: one that fails ends its own request alone
                for request in filter(None, map(self._requests.by_uid, gained.runs)):
                    self._lifecycle.fail(request, AbortReason.REQUESTED, error)
        self._send(replies)

    def _send(self, replies: dict[int, TextDeltas]) -> None:
        """Every client gets its message. Empties them."""
        for client, reply in replies.items():
            self._clients.send(client, reply)
        replies.clear()

    def _add_rows(self, replies: dict[int, TextDeltas], gains: Gains, is_turn: bool = False) -> None:
        """Every request's run becomes a row, unless it takes long, or waits for one that does, and has no turn."""
        find, has_turns, cached, verified = self._requests.by_uid, self.turns.has, gains.cached_tokens, gains.verified
        for uid, run in gains.runs.items():
            request = find(uid)
            if request is None or (output := request.output) is None:
                continue
            if not is_turn and (output.takes_long or has_turns(request.owner, uid)):
                self.turns.put(request.owner, uid, gains.of(uid))
                continue
            if request.arriving:
                for follower in request.arriving:
                    follower.arrived()
            piece = output.push(run.tokens, run.finish)
            if request.is_waiting:
                self._lifecycle.began(request)
            request.count(cached.get(uid), run.verify_steps(len(piece.token_ids)))
            reply = replies.get(request.client)
            if reply is None:
                reply = replies[request.client] = TextDeltas([], [], [], [], [])
            request.add_row(reply, piece.text, piece.token_ids, piece.finish)
            if request.followers:
                for follower in request.followers:
                    follower.gained(gains, run, piece, reply)
            if uid in verified:
                reply.verified[request.request_id] = verified[uid]
            if piece.finish is not None:
                if run.finish is None:
                    self._scheduler.send(Abort(uid, AbortReason.STOP_STRING))
                self._lifecycle.close(request, piece.finish)
