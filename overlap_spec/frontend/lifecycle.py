"""A request's life at the frontend: it is opened, has its first token, and is closed.

It may be closed by its last token, its client, a time limit, a full queue, or an error. Each time its timers, its place
in the queue and the scheduler's work for it end too, so this is done here alone.

**The outbox**, the link to the scheduler, sends what belongs together at once. Requests that come together are
computed together, if the scheduler hears of all before it plans a step of the first. Where the first of them are enough
for a step that keeps the device busy, they go ahead:

    frontend    [ 8 ][ 24 ..          ]
    scheduler        [ 8 ]             [ 24 ]
    device                [ step of 8 ........ ][ step of 24 .....................
"""

import logging
import time
from collections.abc import Callable

from overlap_spec.client.link import ClientLink
from overlap_spec.errors import Overloaded, RequestError, RequestTimeout
from overlap_spec.frontend.open_requests import OpenRequest, OpenRequests
from overlap_spec.frontend.overload import Deadlines, QueueBound
from overlap_spec.frontend.request_checks import Refusal, RequestChecks
from overlap_spec.messages import (
    TOKEN_BYTES,
    Abort,
    AbortReason,
    Admit,
    ErrorCode,
    Finish,
    FinishKind,
    Generate,
    Rejected,
    TextDeltas,
    ToScheduler,
)
from overlap_spec.runtime.transport import BatchOutlet

MOST_S = 0.005  # for which the first message is held, about as long as a step of the others would take
LEAST_LEFT = 2  # times the prompts that go ahead: what follows them is at least so large, or one step takes less time


class Outbox:
    """Sends messages in order, at once or, between `hold` and `release`, together."""

    def __init__(self, outlet: BatchOutlet[ToScheduler], clock: Callable[[], float] = time.monotonic) -> None:
        self._outlet = outlet
        self._clock = clock
        self._held: list[ToScheduler] = []
        self._until: float | None = None  # while messages are held
        self._more_bytes = 0  # that follow
        self._enough = 0  # bytes of prompts with which those that are held go ahead; 0: they do not
        self._prompts = 0  # bytes of those that are held

    def send(self, message: ToScheduler) -> None:
        """Send a message, or hold it."""
        if self._until is None:
            self._outlet.send(message)
            return
        self._held.append(message)
        if self._enough and isinstance(message, Admit):
            self._prompts += len(message.prompt)
            if self._prompts >= self._enough and self._more_bytes >= LEAST_LEFT * self._prompts:
                self._enough = 0
                self._send_held()

    def renew(self, outlet: BatchOutlet[ToScheduler]) -> None:
        """Send over another link from now on. What is held was for the reader of the old one."""
        self._outlet = outlet
        self._held.clear()

    def hold(self, more_bytes: int = 0) -> None:
        """Hold messages from now on. The next `hold` or `release` after MOST_S sends them.

        `more_bytes`: how much of what came with the next one follows it.
        """
        self._more_bytes = more_bytes
        if self._until is not None and self._clock() >= self._until:
            self._send_held()
            self._until = None
        if self._until is None:
            self._until = self._clock() + MOST_S

    def send_first(self, num_tokens: int) -> None:
        """Until the next `release`, send prompts that are held once they have so many tokens; 0: do not."""
        self._enough, self._prompts = num_tokens * TOKEN_BYTES, 0

    def release(self) -> None:
        """Send what is held."""
        self._until, self._enough = None, 0
        self._send_held()

    def _send_held(self) -> None:
        if self._held:
            self._outlet.send_all(self._held)
            self._held.clear()


log = logging.getLogger(__name__)


class Lifecycle:
    """Opens and closes requests. `closed` is called after a request has been closed."""

    def __init__(
        self,
        checks: RequestChecks,
        scheduler: Outbox,
        clients: ClientLink,
        closed: Callable[[OpenRequest], None],
    ) -> None:
        self.requests = OpenRequests()
        self._scheduler = scheduler
        self._clients = clients
        self._closed = closed
        self._deadlines = Deadlines(checks.flags, self._time_is_up)
        self._bound = QueueBound(checks.max_queued_requests)

    # --- open ---

    def make_room(self, owner: str, num_slots: int) -> OpenRequest | None:
        """The waiting request whose place a new one of `owner` takes; None if there is room. Raises: Refusal."""
        return self._bound.make_room(owner, len(self.requests), num_slots)

    def open(self, client: int, message: Generate, owner: str) -> OpenRequest:
        """A request that waits. Raises: RequestError if the client has an open request of that id."""
        request = self.requests.open(client, message.request_id, owner, message.terms)
        request.asked = message.sampling
        self._bound.add(request)
        self._deadlines.opened(request, message.terms)
        return request

    def began(self, request: OpenRequest) -> None:
        """Its first token has come."""
        request.is_waiting = False
        self._bound.discard(request)
        self._deadlines.began(request)

    # --- ended ---

    def close(self, request: OpenRequest, finish: Finish | None = None) -> None:
        """Forget a request, whose client has heard of its end or is told next. A second call does nothing.

        `finish`: of its last row, if it has come to its end.
        """
        self.requests.close(request)
        self._bound.discard(request)
        self._deadlines.closed(request)
        request.ended(finish)
        self._closed(request)

    def abort(self, request: OpenRequest, reason: AbortReason) -> None:
        """Close a request that the scheduler may be running."""
        if request.output is not None:
            self._scheduler.send(Abort(request.uid, reason))
        self.close(request)

    def cancel(self, request: OpenRequest, why: str) -> None:
        """Abort a request. Its client gets the text so far and the reason."""
        self.abort(request, AbortReason.REQUESTED)
        text = request.output.end() if request.output is not None else ""
        reply = TextDeltas([], [], [], [], [])
        request.add_row(reply, text, [], Finish(FinishKind.ABORT, message=why))
        self._clients.send(request.client, reply)

    def give_place(self, request: OpenRequest, num_slots: int) -> None:
        """End a request that waits, for one of a client that has fewer."""
        full = self._bound.full(len(self.requests) - 1, num_slots)
        self.fail(request, AbortReason.OVERLOADED, full)

    def fail(self, request: OpenRequest, reason: AbortReason, error: Exception) -> None:
        """Abort a request. Its client gets the error."""
        self.abort(request, reason)
        self.refuse(request.client, request.request_id, error)

    def reject(self, request: OpenRequest, code: ErrorCode, text: str, field: str = "") -> None:
        """Close a request that no scheduler runs any more. Its client gets the reason."""
        self.close(request)
        self._clients.send(request.client, Rejected(request.request_id, code, text, field))

    def refuse(self, client: int, request_id: str, error: Exception) -> None:
        """Answer with an error, whether the request has been opened or not."""
        match error:
            case RequestError():
                reply = Rejected(request_id, ErrorCode.BAD_REQUEST, str(error), error.field)
            case Refusal():
                reply = Rejected(request_id, error.code, str(error))
            case RequestTimeout():
                reply = Rejected(request_id, ErrorCode.TIMEOUT, str(error), error.field)
            case Overloaded():
                reply = Rejected(request_id, ErrorCode.OVERLOADED, str(error))
            case _:
                log.error("request %r of client %d failed", request_id, client, exc_info=error)
                reply = Rejected(request_id, ErrorCode.FAILED, f"the frontend failed: {type(error).__name__}")
        self._clients.send(client, reply)

    def _time_is_up(self, request: OpenRequest, error: RequestTimeout) -> None:
        self.fail(request, AbortReason.TIMEOUT, error)
