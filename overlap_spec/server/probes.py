"""Health, metrics and aborts: the endpoints for operators and load balancers."""

import asyncio
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import SamplingParams
from overlap_spec.metrics.prometheus import CONTENT_TYPE, ServerMetrics
from overlap_spec.server.bodies import convert, read_json
from overlap_spec.server.engine_client import EngineClient, EngineHealth, ServerInfo
from overlap_spec.server.info import audit_report, newest_stats
from overlap_spec.server.problems import RETRY_AFTER_S, Problem
from overlap_spec.server.prompts import read_ids
from overlap_spec.server.running import EngineRequest, Group, Runner
from overlap_spec.server.streams import unless_gone

PROBE_S = 20.0


class Health:
    """Is the engine alive, and does it generate?"""

    def __init__(self, runner: Runner, info: ServerInfo, health: EngineHealth) -> None:
        self._runner = runner
        self._info = info
        self._health = health

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [
            Route("/health", self.shallow),
            Route("/ping", self.shallow, methods=["GET", "POST"]),  # SageMaker's name for it
            Route("/health_generate", self.deep),
        ]

    async def shallow(self, request: Request) -> Response:
        """200 without a body, or 503 with the reason. It sends the engine no message, so a busy engine is healthy."""
        ok, reason = self._health()
        return Response() if ok else _unhealthy(reason)

    async def deep(self, request: Request) -> Response:
        """Generate one token."""
        name = f"health-{uuid.uuid4().hex}"
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        probe = EngineRequest(name, read_ids([0], "input_ids", self._info), sampling, {})
        try:
            async with asyncio.timeout(PROBE_S):
                await unless_gone(request.receive, self._runner.collect(Group(name, [probe])))
        except TimeoutError:
            return _unhealthy(f"no token within {PROBE_S:.0f} s")
        except OverlapSpecError as error:
            return _unhealthy(str(error))
        return Response()


class Operations:
    """Metrics and aborts."""

    def __init__(self, client: EngineClient, runner: Runner, metrics: ServerMetrics, info: ServerInfo) -> None:
        self._client = client
        self._runner = runner
        self._metrics = metrics
        self._info = info

    def routes(self) -> list[Route]:
        """The endpoints."""
        return [Route("/metrics", self.metrics), Route("/abort_request", self.abort, methods=["POST"])]

    async def metrics(self, request: Request) -> Response:
        """All counters, in Prometheus' text format."""
        audit = await audit_report(self._client)
        text = self._metrics.render(await newest_stats(self._client), audit.figures)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def abort(self, request: Request) -> Response:
        """End one request, or all. An unknown id is fine: it may just have finished."""
        body = convert(await read_json(request, self._info.max_body_bytes), AbortRequest)
        if body.abort_all:
            await self._runner.abort_all()
        elif body.rid:
            await self._runner.abort(body.rid)
        else:
            raise Problem(400, "give the rid of a request, or abort_all", "rid", "missing_required_parameter")
        return Response()


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False


def _unhealthy(reason: str) -> Response:
    return PlainTextResponse(reason or "not ready", 503, {"retry-after": str(RETRY_AFTER_S)})
