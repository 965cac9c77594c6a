"""The Starlette app: routes, gate and error shapes together."""

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from overlap_spec.metrics.prometheus import ServerMetrics
from overlap_spec.server.chat import ChatCompletions
from overlap_spec.server.completions import Completions
from overlap_spec.server.engine_client import EngineClient, EngineHealth, ServerInfo
from overlap_spec.server.facts import Facts
from overlap_spec.server.gate import Gate
from overlap_spec.server.native import NativeGenerate
from overlap_spec.server.probes import Health, Operations
from overlap_spec.server.problems import HANDLERS
from overlap_spec.server.running import Runner
from overlap_spec.server.tokens import Tokens


def create_app(client: EngineClient, info: ServerInfo, health: EngineHealth) -> Starlette:
    """Build the app. `health` is asked before a request: while it says no, the answer is 503, but for metrics."""
    metrics = ServerMetrics()
    runner = Runner(client, metrics)
    routes = [
        Route("/v1/chat/completions", ChatCompletions(runner, info).post, methods=["POST"]),
        Route("/v1/completions", Completions(runner, info).post, methods=["POST"]),
        Route("/generate", NativeGenerate(runner, info).post, methods=["POST"]),
        *Health(runner, info, health).routes(),
        *Facts(client, info).routes(),
        *Tokens(client, info).routes(),
        *Operations(client, runner, metrics, info).routes(),
    ]
    gate = Middleware(Gate, api_key=info.api_key, health=health)
    app = Starlette(routes=routes, middleware=[gate], exception_handlers=HANDLERS)
    app.router.redirect_slashes = False  # `/metrics/` is a 404: a redirect would hide a misspelt path
    return app
