"""Errors as HTTP shows them: a status and `{"error": {message, type, param, code}}`, or the same in an event stream.

Paths below `/v1/messages` have Anthropic's shape, `{"type": "error", "error": {type, message}}`.
The engine's errors are mapped in one place, `as_problem`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.entrypoints.http.access_log import note_reason
from overlap_spec.errors import ActorDied, Overloaded, RequestAborted, RequestError, RequestFailed, RequestTimeout

RETRY_AFTER_S = 1
LATE, LATE_FIRST_TOKEN = "request_timeout", "first_token_timeout"  # codes
CLIENT_GONE = 499  # no client reads it; logs of other servers show this status
CONTEXT_WORDS = "maximum context length"
CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
ANTHROPIC = "/v1/messages"
ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}


class ClientGone(Exception):
    """The HTTP client has closed its connection."""


class Problem(Exception):
    """A request ends with this status. `param` is the request's field that is to blame."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self, path: str = "") -> bytes:
        """The JSON body, in the shape of the path's API."""
        if path.startswith(ANTHROPIC):
            return msgspec.json.encode(self.anthropic())
        error = {"message": str(self), "type": self._type(), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def anthropic(self) -> dict[str, Any]:
        """The error in Anthropic's shape, which is also that of an event. Its message begins with the field."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def response(self, path: str = "", headers: Mapping[str, str] | None = None) -> Response:
        """The whole answer to a request of this path.

        A 503 has a Retry-After header, a 408 ends its connection. After a whole request's time, SDKs are told
        not to ask for it again.
        """
        extra = {"retry-after": str(RETRY_AFTER_S)} if self.status == 503 or self.code == LATE_FIRST_TOKEN else {}
        if self.status == 408:
            extra["connection"] = "close"
        if self.code == LATE:
            extra["x-should-retry"] = "false"
        return Response(self.body(path), self.status, {**extra, **(headers or {})}, "application/json")

    def _type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 503:
            return "service_unavailable"
        if self.status == 504:
            return "timeout_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


def as_problem(error: Exception) -> Problem:
    """Map an error of the engine. An unexpected one is a 500 without details."""
    match error:
        case Problem():
            return error
        case RequestError():
            code = "context_length_exceeded" if CONTEXT_WORDS in str(error) else "invalid_value"
            return Problem(400, str(error), error.field or None, code)
        case Overloaded():
            return Problem(503, str(error), code="overloaded")
        case RequestTimeout():
            return Problem(504, str(error), error.field, LATE if error.field == "timeout" else LATE_FIRST_TOKEN)
        case RequestFailed():
            return Problem(500, str(error), code=error.code)
        case ActorDied():
            return Problem(500, f"the engine has failed: {error}", code="engine_failed")
        case RequestAborted():
            return Problem(503, f"the request was aborted: {error}", code="aborted")
        case _:
            return Problem(500, "internal server error", code="internal_error")


async def on_error(request: Request, error: Exception) -> Response:
    """Answer with an error that was raised on purpose, or for a bug, which the HTTP server then logs."""
    problem = as_problem(error)
    note_reason(request.scope, str(problem))
    return problem.response(request.url.path)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown route, wrong method: Starlette's own errors, in our shape."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    note_reason(request.scope, str(error.detail))
    problem = Problem(error.status_code, text, code=CODES.get(error.status_code))
    return problem.response(request.url.path, error.headers)


async def on_client_gone(request: Request, error: Exception) -> Response:
    """The client is gone: answer with a status for the log."""
    note_reason(request.scope, "the client has closed its connection")
    return Response(status_code=CLIENT_GONE)


HANDLERS: dict[Any, Any] = {
    Problem: on_error,
    RequestError: on_error,
    Overloaded: on_error,
    RequestTimeout: on_error,
    RequestAborted: on_error,
    RequestFailed: on_error,
    ActorDied: on_error,
    HTTPException: on_http_error,
    ClientGone: on_client_gone,
    Exception: on_error,
}
