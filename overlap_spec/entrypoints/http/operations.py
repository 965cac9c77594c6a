"""The endpoints for operators and load balancers: health, metrics and aborts; models, settings and measured figures,
and the flush of the prefix cache.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec.config import OPERATOR
from overlap_spec.entrypoints.http.auth import SHALLOW, check_admin, check_change, identity_of
from overlap_spec.entrypoints.http.body_fields import Json, Neutral, refuse_unsupported
from overlap_spec.entrypoints.http.engine_client import EngineClient, HealthOf, ServerInfo
from overlap_spec.entrypoints.http.errors import RETRY_AFTER_S, Problem
from overlap_spec.entrypoints.http.request_body import convert, read_body
from overlap_spec.entrypoints.http.request_runner import EngineRequest, Group, Runner
from overlap_spec.entrypoints.http.streams import unless_gone
from overlap_spec.entrypoints.openai.prompts import read_ids
from overlap_spec.entrypoints.openai.requests import check_model
from overlap_spec.errors import OverlapSpecError, RequestError
from overlap_spec.messages import AuditReport, EngineHealth, EngineState, SamplingParams, Stats, shown
from overlap_spec.metrics.prometheus import CONTENT_TYPE, ServerMetrics

T = TypeVar("T")

PROBE_S = 20.0
FLUSH = ("/flush_cache", "/reset_prefix_cache")  # SGLang's name and vLLM's; SGLang's clients may GET it
STATS_S = 5.0
FLUSH_POLL_S = 0.02  # between attempts to empty the cache
MOST_FLUSH_S = 600.0
LAST_INTERVAL = ("step_time", "step_efficiency", "gpu_gap", "host_time", "host_time_hidden")  # of Stats; seconds, 0..1
# Fields of SGLang's /update_weights_from_disk that ask for something else; unknown ones are refused, too.
OF_UPDATES: dict[str, Neutral] = {
    **{name: (False,) for name in ("abort_all_requests", "is_async", "keep_pause", "recapture_cuda_graph")},
    **{name: (False,) for name in ("flush_cache", "torch_empty_cache")},
    "weight_version": (),
    "token_step": (0,),
}
SECRETS = frozenset({"api_key", "admin_api_key"})


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


class UpdateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of `/update_weights_from_disk`, as SGLang names its fields."""

    model_path: Annotated[str, msgspec.Meta(min_length=1)]
    load_format: Literal["auto", "safetensors", "pt"] = "auto"


def _read_update(fields: Json) -> UpdateRequest:
    refuse_unsupported(fields, OF_UPDATES)
    return convert({name: value for name, value in fields.items() if name not in OF_UPDATES}, UpdateRequest)


async def newest_stats(client: EngineClient) -> Stats:
    """Ask the engine for its figures. Raises: Problem 503 if it does not answer."""
    return await _in_time(client.stats())


async def audit_report(client: EngineClient) -> AuditReport:
    """Ask the engine what its audit has found. Raises: Problem 503 if it does not answer."""
    return await _in_time(client.audit())


async def _in_time(reply: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(STATS_S):
            return await reply
    except TimeoutError:
        raise Problem(503, f"the engine has not answered for {STATS_S:.0f} s", code="timeout") from None


def as_json(value: Any, status: int = 200) -> Response:
    """An answer with `value` as its body."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class InfoEndpoints:
    """Models and settings, which do not change, and what the engine has measured so far."""

    def __init__(self, client: EngineClient, info: ServerInfo) -> None:
        self._client = client
        self._info = info
        self._created = int(time.time())
        self._since = Stats()  # the newest when the cache was last flushed

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model_id:path}", self.model),
            Route("/version", self.version),
            *(Route(path, self.model_info) for path in ("/model_info", "/get_model_info")),
            *(Route(path, self.server_info) for path in ("/server_info", "/get_server_info")),
            Route("/audit", self.audit),
            *(Route(path, self.flush_cache, methods=["GET", "POST"]) for path in FLUSH),
            Route("/update_weights_from_disk", self.update_draft, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        """List the one model under each of its names."""
        names = (self._info.model_name, *self._info.aliases)
        return as_json({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """The model's card, or 404."""
        name = request.path_params["model_id"]
        check_model(name, self._info)
        return as_json(self._card(name if name in self._info.aliases else self._info.model_name))

    async def version(self, request: Request) -> Response:
        """This program's version."""
        return as_json({"version": self._info.version})

    async def model_info(self, request: Request) -> Response:
        """What SGLang's benchmark reads to find the tokenizer."""
        info = self._info
        return as_json(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.tokenizer_path or info.model_path,
                "is_generation": True,
                "preferred_sampling_params": info.sampling_defaults.changes() or None,
                "weight_version": "default",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": info.model_type,
                "architectures": info.architectures,
            }
        )

    async def server_info(self, request: Request) -> Response:
        """Settings and facts, flat, and under `internal_states` what benchmarks read after a run."""
        info, stats = self._info, await newest_stats(self._client)
        shown = {
            **_without_secrets({**info.settings, **info.facts()}),
            "model_path": info.model_path,
            "tokenizer_path": info.tokenizer_path or info.model_path,
            "served_model_name": info.model_name,
            "max_total_num_tokens": stats.max_total_tokens,
            "max_model_len": info.max_model_len,
        }
        return as_json({**shown, "internal_states": [{**shown, **self._state(stats)}], "version": info.version})

    async def audit(self, request: Request) -> Response:
        """What the live audit has found: figures, and the newest tokens that plain decoding does not draw.

        It names requests of all clients, so it needs the operator's key, where there is one.
        """
        check_admin(request)
        return as_json((await audit_report(self._client)).as_json())

    async def flush_cache(self, request: Request) -> Response:
        """Empty the prefix cache; 400 if something still runs after `timeout` seconds, of the query (default: 0).

        It needs the operator's key, where there is one. GET needs a key.
        """
        check_change(request)
        timeout_s = _timeout(request.query_params.get("timeout", "0"))
        deadline = time.monotonic() + timeout_s
        while not await self._client.flush_cache():
            if time.monotonic() >= deadline:
                text = f"the cache is in use: requests are running or queued, {timeout_s:g} s after this was asked"
                raise Problem(400, text, code="busy")
            await asyncio.sleep(FLUSH_POLL_S)
        self._since = await newest_stats(self._client)
        return Response("Cache flushed.\n", media_type="text/plain")

    async def update_draft(self, request: Request) -> Response:
        """Write the weights of a head on the server's disk over the draft's, between two steps.

        It needs the operator's key, and a server that has one. What does not fit is refused by name, with status 400.
        """
        check_admin(request)
        if self._info.keys.admin is None:
            text = "a path on the server's disk is read for its operator alone: start with --admin-api-key"
            raise Problem(403, text, code="no_admin_key")
        body = await read_body(request, self._info.max_body_bytes, _read_update)
        try:
            await self._client.update_draft(body.model_path, body.load_format)
        except RequestError as error:
            return as_json({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = f"The draft has the weights of {body.model_path} now."
        return as_json({"success": True, "message": message, "num_paused_requests": 0})

    def _state(self, stats: Stats) -> Json:
        state: Json = {
            "last_gen_throughput": stats.gen_throughput,
            "memory_usage": {"token_capacity": stats.max_total_tokens},
            **{name: getattr(stats, name) for name in LAST_INTERVAL},
            "effective_max_running_requests_per_dp": self._info.max_running_requests,
        }
        if stats.draft_classes:
            state["draft"] = msgspec.to_builtins(stats.draft_classes)
        if stats.draft_updates_total:
            state["draft_updates"] = stats.draft_updates_total
        if stats.adapt is not None:
            state["adapt"] = msgspec.to_builtins(stats.adapt)
        steps = stats.verify_steps_total - self._since.verify_steps_total
        if steps > 0:
            committed = stats.committed_tokens_total - self._since.committed_tokens_total
            state["avg_spec_accept_length"] = committed / steps
        return state

    def _card(self, name: str) -> Json:
        info = self._info
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "overlap-spec",
            "root": info.model_path,
            "parent": None,
            "max_model_len": info.max_model_len,
        }


def _timeout(text: str) -> float:
    """Raises: Problem for what is no number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_FLUSH_S:
        text = f"timeout must be seconds from 0 to {MOST_FLUSH_S:.0f}, got {shown(text)}"
        raise Problem(400, text, "timeout", "invalid_value")
    return seconds


def _without_secrets(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_secrets(each) for name, each in value.items() if name not in SECRETS}
