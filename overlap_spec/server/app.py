"""The Starlette app: routes, gate and error shapes together."""

import hmac

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.messages import READY
from overlap_spec.metrics.prometheus import ServerMetrics
from overlap_spec.server.access_log import ID_HEADER, AccessLog, note_reason
from overlap_spec.server.anthropic.endpoints import Messages
from overlap_spec.server.callers import note_caller
from overlap_spec.server.chat import ChatCompletions
from overlap_spec.server.chat_runs import ChatRunner
from overlap_spec.server.completions import Completions
from overlap_spec.server.engine_client import EngineClient, HealthOf, ServerInfo
from overlap_spec.server.info import InfoEndpoints
from overlap_spec.server.native import NativeGenerate
from overlap_spec.server.openai_responses.endpoint import Responses
from overlap_spec.server.openapi import UNCHECKED, OpenApi
from overlap_spec.server.probes import SHALLOW, Health, Operations
from overlap_spec.server.problems import HANDLERS, Problem
from overlap_spec.server.running import Runner
from overlap_spec.server.tokens import Tokens

SHOWING = ("/metrics", *SHALLOW)  # answered until the end: they give the engine no work


def create_app(client: EngineClient, info: ServerInfo, health: HealthOf) -> Starlette:
    """Build the app. While `health` takes no request, answers are 503, except those of `SHOWING`."""
    metrics = ServerMetrics()
    runner = Runner(client, metrics)
    chats = ChatRunner(runner, info)
    routes = [
        Route("/v1/chat/completions", ChatCompletions(chats, info).post, methods=["POST"]),
        Route("/v1/responses", Responses(chats, info).post, methods=["POST"]),
        *Messages(client, chats, info).routes(),
        Route("/v1/completions", Completions(runner, info).post, methods=["POST"]),
        Route("/generate", NativeGenerate(runner, info).post, methods=["POST"]),
        *Health(runner, info, health).routes(),
        *InfoEndpoints(client, info).routes(),
        *Tokens(client, info).routes(),
        *Operations(client, runner, metrics, info, health).routes(),
    ]
    routes += OpenApi(routes, info).routes()
    gate = Middleware(Gate, api_key=info.api_key, health=health)
    middleware = [Middleware(AccessLog), *_cors(info), gate]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # `/metrics/` is a 404: a redirect would hide a misspelt path
    return app


def _cors(info: ServerInfo) -> list[Middleware]:
    """What lets web pages of other origins call, before the gate: browsers ask for permission without a key."""
    if not info.cors_allow_origins:
        return []
    everything = ["*"]
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=info.cors_allow_origins,
            allow_methods=everything,
            allow_headers=everything,
            expose_headers=[ID_HEADER],
        )
    ]


class Gate:
    """ASGI middleware: checks the API key, then whether the engine takes requests. It ends no admitted request."""

    def __init__(self, app: ASGIApp, api_key: str | None, health: HealthOf) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._check(scope) if scope["type"] == "http" and scope["path"] not in UNCHECKED else None
        if problem is None:
            note_caller(scope, "")
            await self._app(scope, receive, send)
            return
        note_reason(scope, str(problem))
        headers = {"www-authenticate": "Bearer"} if problem.status == 401 else None
        await problem.response(scope["path"], headers)(scope, receive, send)

    def _check(self, scope: Scope) -> Problem | None:
        headers = Headers(scope=scope)
        if not (self._may_enter(headers.get("authorization", "")) or self._is_key(headers.get("x-api-key", ""))):
            text = "missing or wrong API key: send `Authorization: Bearer KEY`, or `x-api-key: KEY`"
            return Problem(401, text, code="invalid_api_key")
        health = READY if scope["path"] in SHOWING else self._health()
        if health.takes_requests:
            return None
        return Problem(503, health.reason or "the engine is not ready", code="not_ready")

    def _may_enter(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        return self._key is None or (self._is_key(key.strip()) and scheme.lower() == "bearer")

    def _is_key(self, key: str) -> bool:
        # Starlette decodes headers as latin-1: encoded the same way, the bytes are those that were sent.
        return self._key is not None and hmac.compare_digest(key.encode("latin-1"), self._key)
