"""What the port answers from the first moment to the last: 503 until the engine is warm, then the app."""

from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.config import EngineConfig
from overlap_spec.config.resolve import settled_flags
from overlap_spec.engine import Engine
from overlap_spec.server.engine_client import ServerInfo
from overlap_spec.server.problems import Problem
from overlap_spec.version import __version__


class Front:
    """An ASGI app around another one that does not exist yet."""

    def __init__(self) -> None:
        self.app: ASGIApp = _starting

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    await Problem(503, "the engine is starting", code="not_ready").response()(scope, receive, send)


def server_info(config: EngineConfig, engine: Engine) -> ServerInfo:
    """What the endpoints say of this run."""
    settings = engine.settings
    model = settings.model
    return ServerInfo(
        model_name=model.name,
        model_path=config.model_path,
        tokenizer_path=model.files.tokenizer_dir,
        max_model_len=model.max_len,
        max_running_requests=settings.scheduler.max_running_requests,
        version=__version__,
        architectures=tuple(model.files.config.get("architectures", ())),
        model_type=str(model.files.config.get("model_type", "")),
        skip_tokenizer_init=settings.skip_tokenizer_init,
        api_key=settings.server.api_key,
        settings=settled_flags(config, settings) | _verification(engine),
        facts=dict(engine.facts),
    )


def _verification(engine: Engine) -> dict[str, str]:
    """How guesses are judged, as the worker says: a method of one's own may have a way of its own."""
    worker = engine.facts.get("worker", {})
    return {"verification": str(worker["verification"])} if worker.get("verification", "none") != "none" else {}
