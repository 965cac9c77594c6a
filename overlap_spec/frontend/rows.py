"""Rows of messages to clients, made of what steps have added to requests.

    TokenDeltas, as many as have come --> one run of each request --> text --> one message for each client

Rows that take long, and those of features that are made later, have turns behind all others (`row_turns.py`).
"""

from overlap_spec.client.link import ClientLink
from overlap_spec.frontend.lifecycle import Lifecycle
from overlap_spec.frontend.outbox import Outbox
from overlap_spec.frontend.row_turns import LateRow, RowTurns
from overlap_spec.frontend.steps import Gains, joined
from overlap_spec.messages import Abort, AbortReason, TextDeltas, TokenDeltas
from overlap_spec.runtime.tracing import NO_TRACE, Recorder


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
