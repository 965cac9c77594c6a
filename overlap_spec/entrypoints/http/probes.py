"""Health, metrics and aborts: the endpoints for operators and load balancers."""

import asyncio
import contextlib
import uuid

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec.config import OPERATOR
from overlap_spec.entrypoints.http.auth import SHALLOW, check_admin, identity_of
from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.entrypoints.http.engine_client import EngineClient, HealthOf, ServerInfo
from overlap_spec.entrypoints.http.errors import RETRY_AFTER_S, Problem
from overlap_spec.entrypoints.http.info import audit_report, newest_stats
from overlap_spec.entrypoints.http.request_body import convert, read_body
from overlap_spec.entrypoints.http.request_runner import EngineRequest, Group, Runner
from overlap_spec.entrypoints.http.streams import unless_gone
from overlap_spec.entrypoints.openai.prompts import read_ids
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import EngineHealth, EngineState, SamplingParams
from overlap_spec.metrics.prometheus import CONTENT_TYPE, ServerMetrics

PROBE_S = 20.0


class Health:
    """Is the engine alive, and does it generate?"""

    def __init__(self, runner: Runner, info: ServerInfo, health: HealthOf) -> None:
        self._runner = runner
        self._info = info
        self._health = health

    def routes(self) -> list[Route]:
        return [
            Route(SHALLOW[0], self.shallow),
            Route(SHALLOW[1], self.shallow, methods=["GET", "POST"]),
            Route("/health_generate", self.deep),
        ]

    async def shallow(self, request: Request) -> Response:
        """The engine's state: 200 if it is ready, else 503. It asks no process, so a busy engine is healthy."""
        return health_response(self._health())

    async def deep(self, request: Request) -> Response:
        """Generate one token."""
        name = f"health-{uuid.uuid4().hex}"
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0)
        probe = EngineRequest(name, read_ids([0], "input_ids", self._info), sampling, {})
        try:
            async with asyncio.timeout(PROBE_S):
                await unless_gone(request.receive, self._runner.collect(Group(name, [probe])))
        except TimeoutError:
            return self._ill(f"no token within {PROBE_S:.0f} s")
        except OverlapSpecError as error:
            return self._ill(str(error))
        return Response()

    def _ill(self, reason: str) -> Response:
        """No token came, whatever the processes say of themselves."""
        health = self._health()
        state = EngineState.UNRESPONSIVE if health.is_well else health.state
        return health_response(replace(health, state=state, reason=health.reason or reason))


def health_response(health: EngineHealth) -> Response:
    """200 with the state, or 503 with the state, the actor that is to blame, and since when."""
    retry = {} if health.is_well else {"retry-after": str(RETRY_AFTER_S)}
    ages = {actor: round(seconds, 3) for actor, seconds in health.last_sign_s.items()}
    health = replace(health, since_s=round(health.since_s, 3), last_sign_s=ages)
    return Response(msgspec.json.encode(health), 200 if health.is_well else 503, retry, "application/json")


class Operations:
    """Metrics and aborts."""

    def __init__(
        self, client: EngineClient, runner: Runner, metrics: ServerMetrics, info: ServerInfo, health: HealthOf
    ) -> None:
        self._client = client
        self._health = health
        self._runner = runner
        self._metrics = metrics
        self._info = info

    def routes(self) -> list[Route]:
        return [Route("/metrics", self.metrics), Route("/abort_request", self.abort, methods=["POST"])]

    async def metrics(self, request: Request) -> Response:
        """All counters, in Prometheus' text format; those of an engine that does not answer as they were."""
        with contextlib.suppress(Problem, OverlapSpecError):
            audit = await audit_report(self._client)
            self._metrics.update(await newest_stats(self._client), audit.figures)
        for_operator = identity_of(request).key == OPERATOR
        return Response(self._metrics.render(self._health(), for_operator), headers={"content-type": CONTENT_TYPE})

    async def abort(self, request: Request) -> Response:
        """End one request, or all. An unknown id is fine: it may just have finished.

        A key ends its own requests. With the operator's key all are ended; where there is one, `abort_all` needs it.
        """
        body = await read_body(request, self._info.max_body_bytes, _read_abort)
        if body.abort_all:
            check_admin(request)
            await self._runner.abort_all(identity_of(request).owns)
        elif body.rid:
            await self._runner.abort(body.rid, identity_of(request).owns)
        else:
            raise Problem(400, "give the rid of a request, or abort_all", "rid", "missing_required_parameter")
        return Response()


def _read_abort(fields: Json) -> "AbortRequest":
    return convert(fields, AbortRequest)


class AbortRequest(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`."""

    rid: str = ""
    abort_all: bool = False
