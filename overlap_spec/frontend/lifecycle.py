"""A request's life at the tokenizer: it is opened, has its first token, and is closed.

It may be closed by its last token, its client, a time limit, a full queue, or an error. Each time its timers, its place
in the queue and the scheduler's work for it end too, so this is done here alone.
"""

import logging
from collections.abc import Callable

from overlap_spec.client.link import ClientLink
from overlap_spec.errors import Overloaded, RequestError, RequestTimeout
from overlap_spec.frontend.open_requests import OpenRequest, OpenRequests
from overlap_spec.frontend.outbox import Outbox
from overlap_spec.frontend.overload import Deadlines, QueueBound
from overlap_spec.frontend.request_checks import Refusal, RequestChecks
from overlap_spec.messages import (
    Abort,
    AbortReason,
    ErrorCode,
    Finish,
    FinishKind,
    Generate,
    Rejected,
    TextDeltas,
)

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

    def reject(self, request: OpenRequest, code: ErrorCode, text: str) -> None:
        """Close a request that no scheduler runs any more. Its client gets the reason."""
        self.close(request)
        self._clients.send(request.client, Rejected(request.request_id, code, text))

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
                reply = Rejected(request_id, ErrorCode.FAILED, f"the tokenizer failed: {type(error).__name__}")
        self._clients.send(client, reply)

    def _time_is_up(self, request: OpenRequest, error: RequestTimeout) -> None:
        self.fail(request, AbortReason.TIMEOUT, error)
