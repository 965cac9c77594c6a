"""The Starlette app: routes, authentication and error shapes together.

An API attaches to it by `attach(parts) -> Api` in its package.
"""

from collections import ChainMap
from collections.abc import Mapping
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec import entrypoints
from overlap_spec.entrypoints.http.access_log import ID_HEADER, AccessLog
from overlap_spec.entrypoints.http.auth import Auth
from overlap_spec.entrypoints.http.engine_client import EngineClient, HealthOf, ServerInfo, Watch
from overlap_spec.entrypoints.http.errors import HANDLERS, Problem
from overlap_spec.entrypoints.http.http_server import body_bounds
from overlap_spec.entrypoints.http.openapi import ENDPOINTS, OPEN_PATHS, Endpoint, OpenApi
from overlap_spec.entrypoints.http.operations import Health, InfoEndpoints, Operations
from overlap_spec.entrypoints.http.request_body import LargeBodies
from overlap_spec.entrypoints.http.request_runner import Runner
from overlap_spec.entrypoints.http.request_spans import NO_SPANS, NoteCall, RequestSpans
from overlap_spec.entrypoints.http.tokens import Tokens
from overlap_spec.entrypoints.openai.chat import ChatCompletions, ChatRunner
from overlap_spec.entrypoints.openai.completions import Completions
from overlap_spec.metrics.prometheus import Served, ServerMetrics

ANY_METHOD = ["GET", "POST"]


class ApiParts(NamedTuple):
    """What an API may use of the server."""

    client: EngineClient
    info: ServerInfo
    health: HealthOf
    watch: Watch
    metrics: ServerMetrics
    runner: Runner
    chats: ChatRunner


class Api(NamedTuple):
    """What an API adds. `endpoints`: by path, for the description; `open_paths`: need no API key."""

    routes: list[Route]
    endpoints: Mapping[str, Endpoint]
    open_paths: frozenset[str] = frozenset()


class Absent:
    """Endpoint of an API that is not there: it names it."""

    def __init__(self, name: str, path: str) -> None:
        self._problem = f"{path} {entrypoints.refusal(name)}"

    async def refuse(self, request: Request) -> Response:
        """Raises: Problem."""
        raise Problem(404, self._problem, code="not_found")


def attached(parts: ApiParts) -> list[Api]:
    """The APIs that are there, in the table's order."""
    modules = [entrypoints.find(name) for name in entrypoints.PATHS]
    return [module.attach(parts) for module in modules if module is not None]


def absent_routes() -> list[Route]:
    """Routes to what is not there. A page that may be switched off is simply not found."""
    return [
        Route(path, Absent(name, path).refuse, methods=ANY_METHOD)
        for name in entrypoints.absent()
        for path in entrypoints.PATHS.get(name, ())
    ]


def create_app(
    client: EngineClient, info: ServerInfo, health: HealthOf, watch: Watch = list, spans: RequestSpans = NO_SPANS
) -> Starlette:
    """Build the app. While `health` takes no request, answers are 503, except those of `auth.SHOWING`."""
    metrics = ServerMetrics(_served(info))
    runner = Runner(client, metrics, spans, info.max_model_len)
    chats = ChatRunner(runner, info)
    routes = [
        Route("/v1/chat/completions", ChatCompletions(chats, info).post, methods=["POST"]),
        Route("/v1/completions", Completions(runner, info).post, methods=["POST"]),
        *Health(runner, info, health).routes(),
        *InfoEndpoints(client, info).routes(),
        *Tokens(client, info).routes(),
        *Operations(client, runner, metrics, info, health).routes(),
    ]
    apis = attached(ApiParts(client, info, health, watch, metrics, runner, chats))
    routes += [route for api in apis for route in api.routes]
    endpoints = dict(ChainMap(ENDPOINTS, *(dict(api.endpoints) for api in apis)))
    routes += [*OpenApi(routes, endpoints, info).routes(), *absent_routes()]
    open_paths = OPEN_PATHS.union(*(api.open_paths for api in apis))
    auth = Middleware(Auth, keys=info.keys, health=health, hosts=info.hosts, open_paths=open_paths)
    log = Middleware(AccessLog, answers=metrics.answers)
    traced = [] if spans is NO_SPANS else [Middleware(NoteCall)]
    middleware = [log, *traced, *_cors(info), auth, *body_bounds(info.http)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.state.large_bodies = LargeBodies()
    app.router.redirect_slashes = False  # `/metrics/` is a 404: a redirect would hide a misspelt path
    return app


def _served(info: ServerInfo) -> Served:
    limits = info.max_running_requests, info.max_queued_requests
    return Served(info.model_name, info.method, info.version, *limits, info.ranks)


def _cors(info: ServerInfo) -> list[Middleware]:
    """What lets web pages of other origins call, before `Auth`: browsers ask for permission without a key."""
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
