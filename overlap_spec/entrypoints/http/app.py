"""The Starlette app: routes, gate and error shapes together."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from overlap_spec.entrypoints.anthropic.endpoints import Messages
from overlap_spec.entrypoints.http.access_log import ID_HEADER, AccessLog
from overlap_spec.entrypoints.http.auth import Gate
from overlap_spec.entrypoints.http.engine_client import EngineClient, HealthOf, ServerInfo, Watch
from overlap_spec.entrypoints.http.errors import HANDLERS
from overlap_spec.entrypoints.http.info import InfoEndpoints
from overlap_spec.entrypoints.http.openapi import OpenApi
from overlap_spec.entrypoints.http.probes import Health, Operations
from overlap_spec.entrypoints.http.request_runner import Runner
from overlap_spec.entrypoints.http.request_spans import NO_SPANS, NoteCall, RequestSpans
from overlap_spec.entrypoints.http.tokens import Tokens
from overlap_spec.entrypoints.native.generate import NativeGenerate
from overlap_spec.entrypoints.openai.chat import ChatCompletions
from overlap_spec.entrypoints.openai.chat_runs import ChatRunner
from overlap_spec.entrypoints.openai.completions import Completions
from overlap_spec.entrypoints.protection.body_limits import BodyBounds
from overlap_spec.entrypoints.protection.large_bodies import LargeBodies
from overlap_spec.entrypoints.responses.endpoint import Responses
from overlap_spec.entrypoints.ui.live import Live
from overlap_spec.entrypoints.ui.page import UiPage
from overlap_spec.metrics.prometheus import Served, ServerMetrics


def create_app(
    client: EngineClient, info: ServerInfo, health: HealthOf, watch: Watch = list, spans: RequestSpans = NO_SPANS
) -> Starlette:
    """Build the app. While `health` takes no request, answers are 503, except those of `gate.SHOWING`."""
    metrics = ServerMetrics(_served(info))
    runner = Runner(client, metrics, spans, info.max_model_len)
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
    if info.ui:
        routes += [*Live(client, metrics, info, health, watch).routes(), *UiPage().routes()]
    routes += OpenApi(routes, info).routes()
    gate = Middleware(Gate, keys=info.keys, health=health, hosts=info.hosts)
    log = Middleware(AccessLog, answers=metrics.answers)
    traced = [] if spans is NO_SPANS else [Middleware(NoteCall)]
    middleware = [log, *traced, *_cors(info), gate, Middleware(BodyBounds, limits=info.http)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)
    app.state.large_bodies = LargeBodies()
    app.router.redirect_slashes = False  # `/metrics/` is a 404: a redirect would hide a misspelt path
    return app


def _served(info: ServerInfo) -> Served:
    return Served(info.model_name, info.method, info.version, info.max_running_requests, info.max_queued_requests)


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
