"""The application of Ray Serve: two deployments, made of flags.

A replica (`EngineReplica`) is an engine and the server's app, called in the replica's process, not over a socket:

start    the engine, which is warm before Serve sends a request
answer   a call is run through the app; what the app sends is yielded, all that has come at a time
health   the engine's, as `/health` shows it: a replica whose engine has failed is replaced
end      Serve waits for open calls, then the engine stops

The HTTP side (`Ingress`) gives each request to a replica and passes on what the replica's app sends:

no byte of the answer was sent, the replica dies  ──► another replica runs the request
the answer has begun                              ──► an error event ends the stream, as where an engine fails
the client leaves                                 ──► the call is cancelled, and its requests are aborted
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from overlap_spec.config import EngineConfig, HttpLimits
from overlap_spec.config.fields import ConfigField, check_config, config_fields, config_from, flags_from
from overlap_spec.config.resolve import http_limits
from overlap_spec.engine import Engine
from overlap_spec.entrypoints import without_absent
from overlap_spec.entrypoints.http.access_log import ID_HEADER
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.engine_client import MAX_BODY_BYTES, server_info
from overlap_spec.entrypoints.http.errors import ANTHROPIC, HANDLERS, ClientGone, Problem
from overlap_spec.entrypoints.http.http_server import body_bounds, freeze_heap
from overlap_spec.entrypoints.http.request_body import read_bytes
from overlap_spec.entrypoints.http.request_spans import NO_SPANS, SPANS_S, RequestSpans, open_spans
from overlap_spec.entrypoints.http.streams import GOODBYE_S, failed, named_event, unless_gone
from overlap_spec.entrypoints.ray.calls import (
    EVERYWHERE,
    REPLICA_HEADER,
    Call,
    answer_everywhere,
    call_of,
    header_of,
    may_isolate,
    prompt_of,
    sender_of,
)
from overlap_spec.entrypoints.ray.scaling import RUNNING, WAITING, ReplicaFlags
from overlap_spec.errors import ConfigError
from overlap_spec.messages import EngineState
from overlap_spec.runtime.log_limits import limit_lines

OF_PROXY = ID_HEADER.encode()  # Ray's proxy passes the id on to the app, and adds the same header to its answer

log = logging.getLogger(__name__)


class EngineReplica:
    """The deployment. Raises: ConfigError, CheckpointError or ActorDied if the engine cannot start."""

    async def __init__(self, config: EngineConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._id = serve.get_replica_context().replica_id.unique_id
        logging.basicConfig(level=config.log_level.upper(), format=f"%(asctime)s %(levelname)s {self._id}: %(message)s")
        limit_lines()
        self._engine = Engine(config)
        self._watch: asyncio.Task[None] | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._spans: RequestSpans = NO_SPANS
        await self._engine.start()
        for note in self._engine.notes:
            log.info("%s", note)
        info = server_info(config, self._engine.settings, lambda: self._engine.facts)
        self._spans = open_spans(self._engine.settings.server.otlp, info.model_name)
        health, watch = (lambda: self._engine.health), self._engine.watch
        self._app: ASGIApp = create_app(self._engine.client, info, health, watch, self._spans)
        self._watch = asyncio.create_task(self._leave_when_failed())
        freeze_heap()

    async def answer(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """Yield the ASGI messages of the answer. Leaving early is what a client does that closes its connection."""
        exchange = Exchange(call, self._id)
        task = asyncio.create_task(exchange.run(self._app))
        self._open.add(task)
        task.add_done_callback(self._open.discard)
        try:
            while messages := await exchange.take():
                yield messages
        finally:
            exchange.gone.set()

    async def answer_whole(self, call: Call) -> list[Message]:
        """All messages of the answer, for a call that goes to every replica."""
        return [message async for messages in self.answer(call) for message in messages]

    async def check_health(self) -> None:
        """Raises: RuntimeError if the engine has failed. One that recovers is well: its requests wait."""
        health = self._engine.health
        if health.state is EngineState.FAILED:
            raise RuntimeError(health.reason)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scaling.py` reads."""
        stats = await self._engine.client.stats()
        return {WAITING: float(stats.num_queued), RUNNING: float(stats.num_running)}

    async def _leave_when_failed(self) -> None:
        """End the process of an engine that has failed: routers drop a dead replica sooner than an unhealthy one."""
        log.error("%s; this replica ends", await self._engine.wait_failed())
        await asyncio.sleep(GOODBYE_S)
        os._exit(1)

    async def __del__(self) -> None:
        """Called by Serve when no call is open any more."""
        if self._watch is not None:
            self._watch.cancel()
        await self._engine.stop()
        await asyncio.to_thread(self._spans.close, SPANS_S)


class Exchange:
    """One call in the app: what it may receive, and what it has sent."""

    def __init__(self, call: Call, replica_id: str) -> None:
        self.gone = asyncio.Event()
        self._call = call
        self._header = (REPLICA_HEADER.encode(), replica_id.encode())
        self._is_read = False
        self._sent: list[Message] = []
        self._has_sent = asyncio.Event()
        self._is_over = False

    async def run(self, app: ASGIApp) -> None:
        """Run the app to its end; what it raises is in its log and its answer."""
        try:
            await app(dict(self._call.scope), self._receive, self._send)
        except Exception:
            log.exception("a call has failed")
        finally:
            self._is_over = True
            self._has_sent.set()

    async def take(self) -> list[Message]:
        """Wait for messages. Empty: there are no more."""
        await self._has_sent.wait()
        taken, self._sent = self._sent, []
        if not self._is_over:
            self._has_sent.clear()
        return taken

    async def _receive(self) -> Message:
        if not self._is_read:
            self._is_read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [header for header in message.get("headers", ()) if header[0] != OF_PROXY]
            message = {**message, "headers": [*kept, self._header]}
        self._sent.append(message)
        self._has_sent.set()


MOST_TRIES = 3
RESPONSES = "/v1/responses"


class Ingress:
    """The deployment behind Ray's HTTP proxies. `engines`: Serve's handle of the replicas.

    `by_prefix`: its router compares prompts. A handle keeps the router that it began with: another value restarts this.
    `isolates`: it compares those of the same key alone.
    """

    def __init__(self, engines: Any, limits: HttpLimits, by_prefix: bool, isolates: bool) -> None:
        self._engines = engines
        self._limits = limits
        self._by_prefix = by_prefix
        self._isolates = isolates

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The app that Serve runs: every path goes to the replicas."""
        route = Route("/{path:path}", Forward(self._engines, self._by_prefix, self._isolates))
        return Starlette(routes=[route], middleware=body_bounds(self._limits), exception_handlers=HANDLERS)


class Forward:
    """ASGI app: one request, one replica."""

    def __init__(self, engines: Any, by_prefix: bool, isolates: bool) -> None:
        self._engines = engines
        self._by_prefix = by_prefix
        self._isolates = isolates
        self._answer = engines.options(method_name="answer", stream=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_bytes(Request(scope, receive), MAX_BODY_BYTES)
        sender = sender_of(scope) if self._isolates else b""
        call = call_of(scope, body, prompt_of(body, sender) if self._by_prefix else "")
        if call.scope["path"] in EVERYWHERE:
            await (await answer_everywhere(self._engines, call))(scope, receive, send)
            return
        answer = Answer(call, send)
        try:
            await unless_gone(receive, self._run(call, answer))
        except ClientGone:
            return
        except BackPressureError:
            raise Problem(503, "every engine has as many requests as may wait", code="overloaded") from None

    async def _run(self, call: Call, answer: "Answer") -> None:
        for _ in range(MOST_TRIES):
            if await self._try(call, answer):
                return
        raise Problem(503, "the engines that ran the request have died", code="replica_died")

    async def _try(self, call: Call, answer: "Answer") -> bool:
        """Let a replica answer. Returns False if it has died, and the request is as good as new."""
        messages = self._answer.remote(call)
        try:
            async for some in messages:
                await answer.pass_on(some)
            return True
        except RayActorError:
            return await answer.end()
        except asyncio.CancelledError:
            messages.cancel()
            raise


class Answer:
    """What of an answer the client has been sent."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call = call
        self._send = send
        self._begun: Sequence[Message] = ()

    async def pass_on(self, messages: Sequence[Message]) -> None:
        """Send what a replica's app has sent."""
        self._begun = self._begun or messages
        for message in messages:
            await self._send(message)

    async def end(self) -> bool:
        """The replica has died. Returns False if nothing was sent; a stream ends with an error event.

        Raises: RuntimeError to cut the connection under an answer that is no stream.
        """
        if not self._begun:
            return False
        if "event-stream" not in header_of(self._begun, "content-type"):
            raise RuntimeError("the replica has died in the midst of an answer")
        await self._send({"type": "http.response.body", "body": self._last_event(), "more_body": False})
        return True

    def _last_event(self) -> bytes:
        problem = Problem(500, "the replica that ran the request has died", code="replica_died")
        path = self._call.scope["path"]
        if path.startswith(ANTHROPIC):
            return named_event("error", problem.anthropic())
        if path.startswith(RESPONSES):
            return named_event("error", {"type": "error", "code": problem.code, "message": str(problem), "param": None})
        return failed(problem)


SLOTS = 48  # of an engine, unless --max-running-requests is given
INGRESS_REQUESTS = 10_000  # that one ingress has open
STOP_S = 5.0  # for an engine to end after its open requests
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 2.0, 10.0
LOOK_BACK_S = 15.0  # of the figures that autoscaling goes by; replicas report theirs every 10 s
ANY_HOST = ""  # Serve's own options say where its proxies listen
MOST_STARTS = 3  # of a replica whose engine fails to start
TREE_CHARACTERS = 2_000_000  # of prompts, that the router remembers of each replica
BELONG_TO_OUR_SERVER = ("http_header_timeout", "max_connections", "max_connections_per_address")


def build(arguments: Mapping[str, Any]) -> Any:
    """For `serve run overlap_spec.entrypoints.ray:build model_path=.. num_replicas=2` and for Serve's config files.

    Names are the flags' with underscores. Raises: ConfigError.
    """
    values = {name: _value(name, given) for name, given in arguments.items()}
    replicas = {name: value for name, value in values.items() if name in ReplicaFlags.__struct_fields__}
    engine = {name: value for name, value in values.items() if name not in replicas}
    return build_app(config_from({"recover": True, "host": ANY_HOST, **engine}), flags_from(replicas, ReplicaFlags))


def build_app(config: EngineConfig, replicas: ReplicaFlags | None = None) -> Any:
    """The application, for `serve.run`. Raises: ConfigError naming a flag that cannot be honoured here."""
    config, flags = without_absent(config), replicas or ReplicaFlags()
    _check(check_config(config), flags)
    engines = serve.deployment(**_engine_options(config, flags))(EngineReplica)
    ingress = serve.deployment(
        name="Ingress",
        num_replicas=flags.num_ingress_replicas,
        max_ongoing_requests=INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=config.drain_timeout + 2 * STOP_S,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(Ingress))
    return ingress.bind(engines.bind(config), http_limits(config), flags.prefix_routing, may_isolate(config))


def _engine_options(config: EngineConfig, flags: ReplicaFlags) -> dict[str, Any]:
    slots = config.max_running_requests or SLOTS
    options: dict[str, Any] = {
        "name": "Engine",
        "max_ongoing_requests": 2 * slots,  # as many wait in the engine as run: a free slot is filled at once
        "max_queued_requests": config.max_queued_requests,
        "graceful_shutdown_timeout_s": config.drain_timeout + STOP_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": HEALTH_TIMEOUT_S,
        "max_constructor_retry_count": MOST_STARTS,
        "ray_actor_options": {"num_cpus": flags.num_cpus_per_replica, "num_gpus": _num_gpus(config, flags)},
    }
    if flags.prefix_routing:
        options["request_router_config"] = _routing(slots)
    if flags.max_replicas is None:
        return {**options, "num_replicas": flags.num_replicas or 1}
    return {**options, "autoscaling_config": _autoscaling(flags, slots)}


def _routing(slots: int) -> RequestRouterConfig:
    """By prefix, while no replica has a quarter of its slots more to do than another."""
    remembered = {"do_eviction": True, "eviction_threshold_chars": TREE_CHARACTERS}
    return RequestRouterConfig(
        request_router_class="overlap_spec.entrypoints.ray.routing:PrefixRouter",
        request_router_kwargs={
            "imbalanced_threshold": max(1, slots // 4),
            "eviction_target_chars": TREE_CHARACTERS * 9 // 10,
            **remembered,
        },
    )


def _autoscaling(flags: ReplicaFlags, slots: int) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=flags.min_replicas or 1,
        max_replicas=flags.max_replicas,
        target_ongoing_requests=flags.target_ongoing_requests or slots,
        upscale_delay_s=flags.upscale_delay_s,
        downscale_delay_s=flags.downscale_delay_s,
        look_back_period_s=LOOK_BACK_S,
        policy=AutoscalingPolicy(policy_function="overlap_spec.entrypoints.ray.scaling:wanted_replicas"),
    )


def _num_gpus(config: EngineConfig, flags: ReplicaFlags) -> float:
    if flags.num_gpus_per_replica is not None:
        return flags.num_gpus_per_replica
    has_some = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return 1.0 if has_some and config.device != "cpu" else 0.0


def _check(config: EngineConfig, flags: ReplicaFlags) -> None:
    if flags.max_replicas is None:
        given = "min_replicas" if flags.min_replicas else "target_ongoing_requests"
        if flags.min_replicas or flags.target_ongoing_requests:
            raise ConfigError(given, "is of autoscaling: give --max-replicas with it")
    elif flags.num_replicas is not None:
        raise ConfigError("num_replicas", "is a fixed number: leave it out, or --max-replicas")
    elif flags.max_replicas < (flags.min_replicas or 1):
        raise ConfigError("max_replicas", f"must be at least --min-replicas, {flags.min_replicas}")
    if config.zmq_endpoint is not None:
        raise ConfigError("zmq_endpoint", "every replica has an endpoint of its own; use HTTP, or `serve`")
    for field in config_fields():
        if field.name in BELONG_TO_OUR_SERVER and getattr(config, field.name) != field.default:
            raise ConfigError(field.name, "connections are those of Ray's HTTP proxy here; leave it out")


def _value(name: str, given: Any) -> Any:
    """A word of `serve run` as the field's type. Raises: ConfigError for an unknown name."""
    field = _fields().get(name)
    if field is None:
        raise ConfigError(name, "is no flag of the engine or of serve-ray")
    if not isinstance(given, str):
        return given
    if field.kind is bool:
        return {"true": True, "false": False}.get(given.lower(), given)
    return field.parse(given.split(",") if field.many else given)


def _fields() -> dict[str, ConfigField]:
    return {field.name: field for flags in (EngineConfig, ReplicaFlags) for field in config_fields(flags)}
