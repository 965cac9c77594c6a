"""Whose requests a draft may learn from: those of keys that are marked, unless a request declines.

Where clients are not kept apart and none is marked, the operator's flag is the consent of all. Else what has no mark is
not learnt from: a request without a key, or with the operator's, too. The operator can have another head written over
the one that serves.
"""

from collections.abc import Collection

from msgspec.structs import replace

from overlap_spec.client.link import ClientLink
from overlap_spec.features.adapt_draft import HeadLoaded, LoadHead
from overlap_spec.frontend.hooks import Parts, RequestHook
from overlap_spec.frontend.lifecycle import Outbox
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.frontend.request_checks import RequestChecks
from overlap_spec.messages import Admit, DraftUpdated, ErrorCode, Message, Recover, Rejected, ToFrontend, UpdateDraft


def attach(parts: Parts) -> RequestHook | None:
    """Where the draft learns, or can be updated."""
    adapt = parts.settings.adapt
    consent = ConsentHook(adapt.names) if adapt.share else None
    return UpdateHook(parts.checks, parts.scheduler, parts.clients, consent) if adapt.updates else consent


class ConsentHook(RequestHook):
    """`names`: of the keys that are marked; None: none is, and clients are not kept apart."""

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = None if names is None else frozenset(names)

    def admission(self, request: OpenRequest, admit: Admit) -> Admit:
        """Mark what may be learnt from."""
        terms = request.terms
        is_willing = terms.adapt and (self._names is None or terms.key in self._names)
        return replace(admit, is_learnt=True) if is_willing else admit


class UpdateHook(RequestHook):
    """Asks for heads from disk, and tells clients what came of it. `consent`: None where the draft does not learn."""

    def __init__(
        self, checks: RequestChecks, scheduler: Outbox, clients: ClientLink, consent: ConsentHook | None = None
    ) -> None:
        self._checks, self._scheduler, self._clients, self._consent = checks, scheduler, clients, consent
        self._asked: dict[int, tuple[int, str]] = {}  # client and request id, by number
        self._number = 0

    def admission(self, request: OpenRequest, admit: Admit) -> Admit:
        return admit if self._consent is None else self._consent.admission(request, admit)

    def query(self, client: int, message: Message) -> bool:
        """Answered later. Raises: RequestError without the operator's key."""
        if not isinstance(message, UpdateDraft):
            return False
        self._checks.check_admin(message.key)
        self._number += 1
        self._asked[self._number] = client, message.request_id
        self._scheduler.send(LoadHead(self._number, message.path, message.load_format))
        return True

    def message(self, message: ToFrontend) -> bool:
        if not isinstance(message, HeadLoaded):
            return False
        if (asked := self._asked.pop(message.number, None)) is not None:
            self._tell(*asked, message.error)
        return True

    def recovered(self, message: Recover) -> None:
        """The worker that was asked is gone."""
        for asked in self._asked.values():
            self._tell(*asked, "the engine was started again before the head was read: ask once more")
        self._asked.clear()

    def _tell(self, client: int, request_id: str, error: str) -> None:
        failed = Rejected(request_id, ErrorCode.BAD_REQUEST, error)
        self._clients.send(client, failed if error else DraftUpdated(request_id))
