"""How an API attaches to the server: `<name>/api.py` of its folder has `attach(parts) -> Api`."""

from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec import entrypoints
from overlap_spec.entrypoints.http.engine_client import EngineClient, HealthOf, ServerInfo, Watch
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.openapi import Endpoint
from overlap_spec.entrypoints.http.request_runner import Runner
from overlap_spec.entrypoints.openai.chat_runs import ChatRunner
from overlap_spec.metrics.prometheus import ServerMetrics

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
    modules = [entrypoints.find(name, "api") for name in entrypoints.PATHS]
    return [module.attach(parts) for module in modules if module is not None]


def absent_routes() -> list[Route]:
    """Routes to what is not there. A page that may be switched off is simply not found."""
    return [
        Route(path, Absent(name, path).refuse, methods=ANY_METHOD)
        for name in entrypoints.absent()
        for path in entrypoints.PATHS.get(name, ())
    ]
