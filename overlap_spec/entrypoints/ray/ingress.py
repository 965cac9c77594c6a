"""The HTTP side of the application: gives each request to a replica and passes on what the replica's app sends.

no byte of the answer was sent, the replica dies  ──► another replica runs the request
the answer has begun                              ──► an error event ends the stream, as where an engine fails
the client leaves                                 ──► the call is cancelled, and its requests are aborted
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.config import HttpLimits
from overlap_spec.entrypoints.http.engine_client import MAX_BODY_BYTES
from overlap_spec.entrypoints.http.errors import ANTHROPIC, HANDLERS, ClientGone, Problem
from overlap_spec.entrypoints.http.http_server import body_bounds
from overlap_spec.entrypoints.http.request_body import read_bytes
from overlap_spec.entrypoints.http.streams import failed, named_event, unless_gone
from overlap_spec.entrypoints.ray.calls import EVERYWHERE, Call, answer_everywhere, call_of, header_of, prompt_of

MOST_TRIES = 3
RESPONSES = "/v1/responses"


class Ingress:
    """The deployment behind Ray's HTTP proxies. `engines`: Serve's handle of the replicas.

    `by_prefix`: its router compares prompts. A handle keeps the router that it began with: another value restarts this.
    """

    def __init__(self, engines: Any, limits: HttpLimits, by_prefix: bool) -> None:
        self._engines = engines
        self._limits = limits
        self._by_prefix = by_prefix

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The app that Serve runs: every path goes to the replicas."""
        route = Route("/{path:path}", Forward(self._engines, self._by_prefix))
        return Starlette(routes=[route], middleware=body_bounds(self._limits), exception_handlers=HANDLERS)


class Forward:
    """ASGI app: one request, one replica."""

    def __init__(self, engines: Any, by_prefix: bool) -> None:
        self._engines = engines
        self._by_prefix = by_prefix
        self._answer = engines.options(method_name="answer", stream=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_bytes(Request(scope, receive), MAX_BODY_BYTES)
        call = call_of(scope, body, prompt_of(body) if self._by_prefix else "")
        if call.scope["path"] in EVERYWHERE:
            await (await answer_everywhere(self._engines, call))(scope, receive, send)
            return
        answer = Answer(call, send)
        try:
            await unless_gone(receive, self._run(call, answer))
        except ClientGone:
            return
        except BackPressureError:
            raise Problem(503, "every engine has as many requests as may wait", code="overloaded") from None

    async def _run(self, call: Call, answer: "Answer") -> None:
        for _ in range(MOST_TRIES):
            if await self._try(call, answer):
                return
        raise Problem(503, "the engines that ran the request have died", code="replica_died")

    async def _try(self, call: Call, answer: "Answer") -> bool:
        """Let a replica answer. Returns False if it has died, and the request is as good as new."""
        messages = self._answer.remote(call)
        try:
            async for some in messages:
                await answer.pass_on(some)
            return True
        except RayActorError:
            return await answer.end()
        except asyncio.CancelledError:
            messages.cancel()
            raise


class Answer:
    """What of an answer the client has been sent."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call = call
        self._send = send
        self._begun: Sequence[Message] = ()

    async def pass_on(self, messages: Sequence[Message]) -> None:
        """Send what a replica's app has sent."""
        self._begun = self._begun or messages
        for message in messages:
            await self._send(message)

    async def end(self) -> bool:
        """The replica has died. Returns False if nothing was sent; a stream ends with an error event.

        Raises: RuntimeError to cut the connection under an answer that is no stream.
        """
        if not self._begun:
            return False
        if "event-stream" not in header_of(self._begun, "content-type"):
            raise RuntimeError("the replica has died in the midst of an answer")
        await self._send({"type": "http.response.body", "body": self._last_event(), "more_body": False})
        return True

    def _last_event(self) -> bytes:
        problem = Problem(500, "the replica that ran the request has died", code="replica_died")
        path = self._call.scope["path"]
        if path.startswith(ANTHROPIC):
            return named_event("error", problem.anthropic())
        if path.startswith(RESPONSES):
            return named_event("error", {"type": "error", "code": problem.code, "message": str(problem), "param": None})
        return failed(problem)
