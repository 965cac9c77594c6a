"""The Starlette app: routes, authentication and error shapes together."""

from collections import ChainMap

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from overlap_spec.entrypoints.http.access_log import ID_HEADER, AccessLog
from overlap_spec.entrypoints.http.apis import ApiParts, absent_routes, attached
from overlap_spec.entrypoints.http.auth import Auth
from overlap_spec.entrypoints.http.engine_client import EngineClient, HealthOf, ServerInfo, Watch
from overlap_spec.entrypoints.http.errors import HANDLERS
from overlap_spec.entrypoints.http.http_server import body_bounds
from overlap_spec.entrypoints.http.info import InfoEndpoints
from overlap_spec.entrypoints.http.large_bodies import LargeBodies
from overlap_spec.entrypoints.http.openapi import ENDPOINTS, OpenApi
from overlap_spec.entrypoints.http.probes import Health, Operations
from overlap_spec.entrypoints.http.request_runner import Runner
from overlap_spec.entrypoints.http.request_spans import NO_SPANS, NoteCall, RequestSpans
from overlap_spec.entrypoints.http.tokens import Tokens
from overlap_spec.entrypoints.openai.chat import ChatCompletions
from overlap_spec.entrypoints.openai.chat_runs import ChatRunner
from overlap_spec.entrypoints.openai.completions import Completions
from overlap_spec.metrics.prometheus import Served, ServerMetrics


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
    open_paths = {path for api in apis for path in api.open_paths}
    auth = Middleware(Auth, keys=info.keys, health=health, hosts=info.hosts, open_paths=open_paths)
    log = Middleware(AccessLog, answers=metrics.answers)
    traced = [] if spans is NO_SPANS else [Middleware(NoteCall)]
    middleware = [log, *traced, *_cors(info), auth, *body_bounds(info.http)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.state.large_bodies = LargeBodies()
    app.router.redirect_slashes = False  # `/metrics/` is a 404: a redirect would hide a misspelt path
    return app


def _served(info: ServerInfo) -> Served:
    return Served(info.model_name, info.method, info.version, info.max_running_requests, info.max_queued_requests)


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
