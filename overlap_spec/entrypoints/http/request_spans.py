"""Spans of requests, for a collector of traces: what `Runner` tells one, and who its parent is. No package is needed.

`overlap_spec.entrypoints.otlp` makes and sends them. Without `--otlp-traces-endpoint` there are none: `NO_SPANS` takes
every call and keeps nothing.
"""

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec import entrypoints
from overlap_spec.config.settings import OtlpTarget
from overlap_spec.entrypoints.http.engine_client import DeltaLike
from overlap_spec.errors import ConfigError
from overlap_spec.messages import SamplingParams

PARENT_HEADERS = ("traceparent", "tracestate")  # W3C Trace Context
SPANS_S = 1.0  # at the end of a server, for spans that wait to be sent


class RequestSpan(Protocol):
    """The span of one request at the engine, as long as its block lasts. An error that leaves the block is its end."""

    @property
    def is_recorded(self) -> bool:
        """Whether the engine is to report the request's phases."""

    def add(self, delta: DeltaLike) -> None:
        """Note what a step has added."""

    def aborted(self, reason: str) -> None:
        """Note that the request was ended before its end."""


class RequestSpans(Protocol):
    """Makes spans."""

    def request(self, request_id: str, sampling: SamplingParams) -> AbstractContextManager[RequestSpan]:
        """One of them; the HTTP request that is answered is its parent's carrier."""

    def close(self, timeout_s: float) -> None:
        """Send what is left, for so long at most."""


class NoSpan:
    """Takes every call."""

    is_recorded = False

    def add(self, delta: DeltaLike) -> None:
        pass

    def aborted(self, reason: str) -> None:
        pass


class NoSpans:
    """Makes none."""

    _none: AbstractContextManager[RequestSpan] = nullcontext(NoSpan())

    def request(self, request_id: str, sampling: SamplingParams) -> AbstractContextManager[RequestSpan]:
        return self._none

    def close(self, timeout_s: float) -> None:
        pass


NO_SPANS = NoSpans()


class Call:
    """The HTTP request that is being answered: its path, and its headers of traces."""

    def __init__(self, path: str = "", carrier: dict[str, str] | None = None) -> None:
        self.path = path
        self.carrier = carrier or {}


NO_CALL = Call()
current_call: ContextVar[Call] = ContextVar("current_call", default=NO_CALL)


class NoteCall:
    """ASGI middleware, where there are spans: tasks that answer a request know its path and its parent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            carrier = {name: headers[name] for name in PARENT_HEADERS if name in headers}
            current_call.set(Call(scope["path"], carrier))
        await self._app(scope, receive, send)


def open_spans(target: OtlpTarget | None, model: str) -> RequestSpans:
    """What sends spans of a model's requests to the collector; NO_SPANS without one.

    Raises: ConfigError if what sends them is not there, or the extra `otlp` is not installed.
    """
    if target is None:
        return NO_SPANS
    try:
        otlp = entrypoints.find("otlp")
    except ImportError as error:
        wanted = f"needs the extra otlp ({error}): pip install 'overlap-spec[otlp]'"
        raise ConfigError("otlp_traces_endpoint", wanted) from None
    if otlp is None:
        raise ConfigError("otlp_traces_endpoint", entrypoints.refusal("otlp"))
    spans: RequestSpans = otlp.open_spans(target, model)
    return spans
