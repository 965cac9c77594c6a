"""Whose requests a draft may learn from: those of keys that are marked, unless a request declines.

Where clients are not kept apart, the operator's flag is the consent of all. What has no mark is not learnt from: a
request without a key, or with the operator's, too.
"""

from collections.abc import Collection

from msgspec.structs import replace

from overlap_spec.frontend.hooks import Parts, RequestHook
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.messages import Admit


def attach(parts: Parts) -> RequestHook | None:
    """Where the draft learns."""
    adapt = parts.settings.adapt
    return ConsentHook(adapt.names) if adapt.share else None


class ConsentHook(RequestHook):
    """`names`: of the keys that are marked; None: clients are not kept apart."""

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = None if names is None else frozenset(names)

    def admission(self, request: OpenRequest, admit: Admit) -> Admit:
        """Mark what may be learnt from."""
        terms = request.terms
        is_willing = terms.adapt and (self._names is None or terms.key in self._names)
        return replace(admit, is_learnt=True) if is_willing else admit
