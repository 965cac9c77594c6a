"""Ends requests whose time is up: whole ones, and those whose first token has not come.

A request's own limits and the server's flags count from its arrival; the tighter of each goes. A request without limits
has no timer.
"""

import asyncio
from collections.abc import Callable

from overlap_spec.errors import RequestTimeout
from overlap_spec.frontend.open_requests import OpenRequest
from overlap_spec.messages import Terms

Expired = Callable[[OpenRequest, RequestTimeout], None]
WHOLE, FIRST = "timeout", "first_token_timeout"  # fields of a request
FLAGS = {WHOLE: "--request-timeout", FIRST: "--first-token-timeout"}


class Deadlines:
    """The timers of open requests. `expired` is called in the event loop, at most once for each."""

    def __init__(self, flags: Terms, expired: Expired) -> None:
        self._flags = flags
        self._expired = expired
        self._timers: dict[int, dict[str, asyncio.TimerHandle]] = {}  # by uid

    def opened(self, request: OpenRequest, terms: Terms) -> None:
        """Start the timers of a request."""
        pairs = {
            WHOLE: (terms.timeout_s, self._flags.timeout_s),
            FIRST: (terms.first_token_timeout_s, self._flags.first_token_timeout_s),
        }
        for field, (own, flag) in pairs.items():
            given = [(seconds, name) for seconds, name in ((own, field), (flag, FLAGS[field])) if seconds is not None]
            if given and not (field is FIRST and terms.has_begun):
                seconds, name = min(given)
                timer = asyncio.get_running_loop().call_later(
                    max(0.0, seconds - terms.age_s), self._end, request, field, f"{name} is {seconds:g} s"
                )
                self._timers.setdefault(request.uid, {})[field] = timer

    def began(self, request: OpenRequest) -> None:
        """The first token has come."""
        timers = self._timers.get(request.uid)
        if timers is not None and FIRST in timers:
            timers.pop(FIRST).cancel()

    def closed(self, request: OpenRequest) -> None:
        """Nothing more is due. A second call does nothing."""
        for timer in self._timers.pop(request.uid, {}).values():
            timer.cancel()

    def _end(self, request: OpenRequest, field: str, limit: str) -> None:
        missing = "its end" if field is WHOLE else "its first token"
        self._expired(request, RequestTimeout(field, f"the request was ended before {missing}: {limit}"))
