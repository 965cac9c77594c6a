"""One log line for each answer, with an error's reason (a stream's too, whose status is 200), and an id for both logs.

    INFO 10.0.0.7 "POST /v1/chat/completions" 400 2 ms id=4f1c..: temperature must be a finite number >= 0, got -1.0

What a reason quotes of a request is left out: only the client reads it. A client that sends `x-request-id` finds it in
the answer and in the line; else the server makes one up.
"""

import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.metrics.prometheus import Answers
from overlap_spec.runtime.log_limits import Allowance, without_quotes

ID_HEADER = "x-request-id"
SOUND_ID = re.compile(r"[!-~]{1,256}")  # visible ASCII: nothing that could break a line or a header
# Asked for every few seconds: only their errors are logged.
QUIET = frozenset({"/health", "/ping", "/metrics", "/ui/live", "/ui/timeline"})
MOST_REASON = 300  # characters

log = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware around everything else. Errors and other answers have an allowance each; `answers` has all."""

    def __init__(self, app: ASGIApp, answers: Answers) -> None:
        self._app = app
        self._answers = answers
        self._errors = Allowance()
        self._others = Allowance()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 0
        asked = Headers(scope=scope).get(ID_HEADER, "")
        request_id = asked if SOUND_ID.fullmatch(asked) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (ID_HEADER.encode(), request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._write(scope, status, time.perf_counter() - begun, request_id)

    def _write(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        is_error = status >= 400 or status == 0
        if scope["path"] not in QUIET:
            self._answers.add(status)
        if not log.isEnabledFor(logging.INFO) or (scope["path"] in QUIET and not is_error):
            return
        withheld = (self._errors if is_error else self._others).take()
        if withheld is None:
            return
        host = (scope.get("client") or ("-",))[0]
        line = f'{host} "{scope["method"]} {quote(scope["path"])}" {status or "no answer"} {seconds * 1e3:.0f} ms'
        reason = " ".join(without_quotes(str(scope.get("state", {}).get("reason", ""))).split())[:MOST_REASON]
        more = f" ({withheld} lines withheld before this one)" if withheld else ""
        log.info("%s id=%s%s%s", line, request_id, f": {reason}" if reason else "", more)


def note_reason(scope: Scope, reason: str) -> None:
    """Keep the reason of an error for the line of its answer."""
    scope.setdefault("state", {})["reason"] = reason
