"""The life of engine and HTTP server, from a bound port to an empty process table.

    bind -> start the engine (503 meanwhile) -> print the table -> serve -> stop
    one signal: new requests 503, open ones finish, status 0       a second: everything ends at once, status 1
    scheduler or worker dies: both are started again (`--recover`), requests wait, /health answers 503 meanwhile
    another actor dies, or too many: open streams get an error event, /health answers 503, status 1
    one had to be killed at the end, because it hung: status 1

The port is bound first, so that a busy one is found before a weight is read.

**Signals** are SIGINT, SIGTERM and SIGHUP. A SIGHUP that is ignored when the program starts (nohup) stays ignored. It
never forces: a terminal that closes may send it twice, itself and by its shell.
"""

import asyncio
import json
import logging
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table
from starlette.types import ASGIApp, Receive, Scope, Send

from overlap_spec.config import (
    DUMMY,
    MIB,
    ApiKeys,
    AttentionSettings,
    EngineConfig,
    SamplingDefaults,
    Settings,
    is_loopback,
)
from overlap_spec.config.resolve import http_limits
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.progress import shown_progress
from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.auth import SHALLOW
from overlap_spec.entrypoints.http.engine_client import HealthOf, server_info
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.http_server import HttpServer, freeze_heap
from overlap_spec.entrypoints.http.operations import health_response
from overlap_spec.entrypoints.http.request_spans import NO_SPANS, SPANS_S, RequestSpans, open_spans
from overlap_spec.entrypoints.http.streams import GOODBYE_S
from overlap_spec.entrypoints.parsers.formats import AUTO, call_format, reasoning_format
from overlap_spec.errors import OverlapSpecError, RequestAborted
from overlap_spec.messages import CudaFacts, EngineFacts, EngineHealth, EngineState, WorkerFacts

HOST = "127.0.0.1"  # of a server for benchmarks
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Handles them inside its block. The first signal sets `asked`; a later one calls `force`."""

    def __init__(self, force: Callable[[], None]) -> None:
        self.asked = asyncio.Event()
        self._force = force
        self._loop = asyncio.get_running_loop()
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._numbers = [number for number in STOPPING if not (ignored and number is signal.SIGHUP)]

    def __enter__(self) -> Self:
        for number in self._numbers:
            self._loop.add_signal_handler(number, self._handle, number)
        return self

    def __exit__(self, *_error: object) -> None:
        for number in self._numbers:
            self._loop.remove_signal_handler(number)

    async def interrupt(self, work: Coroutine[Any, Any, object]) -> bool:
        """Run `work` to its end, or cancel it when a stop is asked for: then True. Raises: what `work` raises."""
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self.asked.wait())
        try:
            await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            return not task.done()
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.wait((task, asked))

    def _handle(self, number: signal.Signals) -> None:
        if self.asked.is_set() and number is not signal.SIGHUP:
            self._force()
        self.asked.set()


ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
QUEUE_ORDER = {"fcfs": "first come, first served", "lpm": "longest cached prefix first"}
PLAIN_WIDTH = 120  # columns where stdout is no terminal


def http_url(host: str, port: int) -> str:
    """The server's address, as seen from this machine."""
    address = ANY_ADDRESS.get(host.strip("[]"), host.strip("[]"))
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def start_table(settings: Settings, facts: EngineFacts, url: str, endpoint: str) -> Table:
    """Model, method, memory and endpoints: the settings, and what the worker has measured."""
    table = Table(show_header=False, title="overlap-spec")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (
        _settled(settings, facts) | _read(settings, facts) | _measured(facts) | _addresses(settings, url, endpoint)
    ).items():
        table.add_row(name, value)
    return table


def _addresses(settings: Settings, url: str, endpoint: str) -> dict[str, str]:
    page = {"in a browser": f"{url}/ui"} if settings.server.ui else {}
    return {"HTTP": url, **page, "ZMQ": endpoint}


def _settled(settings: Settings, facts: EngineFacts) -> dict[str, str]:
    spec, model, scheduler = settings.spec, settings.model, settings.scheduler
    counts = f" ({spec.num_steps}, {spec.topk}, {spec.width}): steps, topk, draft tokens"
    numbers = counts if spec.num_steps else ""
    rows = {"model": model.name + _made_up(model.files.load_format), "method": spec.method + numbers}
    if spec.draft_path is not None:
        rows["draft model"] = spec.draft_path + _made_up(spec.draft_load_format)
    if spec.token_map is not None:
        rows["token map"] = spec.token_map
    if spec.width > 1:
        rows["draft numbers"] = spec.numbers_from
        rows["verification"] = facts.worker.verification
    if attention := _attention(settings.attention):
        rows["attention"] = attention
    return rows | {
        "dtype, device": f"{model.dtype}, {model.device}",
        "steps in flight": f"{scheduler.depth}" + (" (overlapped)" if scheduler.depth > 1 else " (no overlap)"),
        "context": f"{model.max_len} tokens",
        "requests": f"at most {scheduler.max_running_requests} running, {QUEUE_ORDER[scheduler.schedule_policy]}",
        **_gap(scheduler.max_gap_s),
        "sampling defaults": _sampling(settings.server.sampling_defaults),
    }


def _sampling(defaults: SamplingDefaults) -> str:
    """What a request gets that does not say how tokens are drawn."""
    given = ", ".join(f"{name} {value:g}" for name, value in defaults.changes().items())
    return f"{given} (the model's; OpenAI's else)" if given else "OpenAI's"


def _read(settings: Settings, facts: EngineFacts) -> dict[str, str]:
    """What is read out of answers, and whether a flag or the chat template has decided that."""
    server, template = settings.server, facts.frontend.chat_template
    found = {
        "tool calls": (server.tool_call_parser, call_format(server.tool_call_parser, template)),
        "reasoning": (server.reasoning_parser, reasoning_format(server.reasoning_parser, template)),
    }
    by = {AUTO: " (by the chat template)"}
    return {what: (form.name if form else "not read") + by.get(name, "") for what, (name, form) in found.items()}


def _gap(max_gap_s: float | None) -> dict[str, str]:
    return {} if max_gap_s is None else {"chunks beside decoding": f"at most {max_gap_s * 1000:g} ms"}


def _made_up(load_format: str) -> str:
    return ", RANDOM WEIGHTS" if load_format == DUMMY else ""


def _attention(attention: AttentionSettings) -> str:
    """Choices that are not the fastest."""
    said = {
        "torch operations for the target": attention.target_torch,
        "torch operations for the draft": attention.draft_torch,
        "the kernel of prefill for windows": attention.prefill_kernel,
        f"the draft sees {attention.draft_window} keys": attention.draft_window is not None,
    }
    return ", ".join(words for words, holds in said.items() if holds)


def _measured(facts: EngineFacts) -> dict[str, str]:
    worker = facts.worker
    drafting = worker.draft_weight_bytes // MIB  # of NGRAM: its log
    rows = {
        "KV pages": f"{worker.num_pages} of {worker.page_size} tokens ({worker.num_tokens} tokens)",
        "prefix cache": facts.scheduler.prefix_cache,
        "prefill chunk": f"{worker.chunk_tokens} tokens",
        "CUDA graphs": worker.graphs,
        "step widths": " ".join(map(str, worker.step_widths)),
        "start-up": worker.start_up,
        "weights": f"{worker.weight_bytes // MIB} MiB" + (f", {drafting} of them for drafting" if drafting else ""),
        **({"recurrent states": _states(worker)} if worker.state_bytes_per_request else {}),
        **({"ranks": worker.of_ranks} if len(worker.ranks) > 1 else {}),
        **({"weight format": worker.weight_format} if worker.weight_format else {}),
        **({"draft's weight format": worker.draft_weight_format} if worker.draft_weight_format else {}),
    }
    if isinstance(worker.platform, CudaFacts):
        rows |= {name: str(value) for name, value in worker.platform.report().items()}
    return rows


def _states(worker: WorkerFacts) -> str:
    """Of the layers that recur: the dummy slot has one, too."""
    each, count = worker.state_bytes_per_request, worker.num_slots + 1
    snapshots = worker.num_snapshots * worker.snapshot_bytes
    kept = f"; {snapshots / MIB:.1f} MiB for {worker.num_snapshots} snapshots" if snapshots else ""
    return f"{each * count / MIB:.1f} MiB, {each} bytes for each of {count} slots{kept}"


def curl_line(url: str, needs_key: bool, takes_text: bool) -> str:
    """A request to paste into a shell."""
    chat = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}
    of_ids = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 8}}
    path, body = ("/v1/chat/completions", chat) if takes_text else ("/generate", of_ids)
    key = ' -H "Authorization: Bearer $API_KEY"' if needs_key else ""
    return f"curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(json.dumps(body))}"


def print_start(settings: Settings, facts: EngineFacts, url: str, endpoint: str) -> None:
    """Print the table, the curl line (never wrapped) and `ready`."""
    console = Console()
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    console.print(start_table(settings, facts, url, endpoint))
    print(curl_line(url, bool(settings.server.keys.names), not settings.skip_tokenizer_init))
    print("ready", flush=True)


LOOK_S = 1.0
CLOSE_S = 0.7  # for answers that are still being written at the end

log = logging.getLogger(__name__)


async def serve(config: EngineConfig) -> int:
    """Run the service to its end. Returns the exit status.

    Raises: OverlapSpecError if the port is taken or the engine does not start.
    """
    engine = Engine(config, watched=not config.disable_ui)
    service = Service(engine)
    with StopSignals(force=lambda: engine.kill("a second signal")) as signals:
        try:
            await service.bind()
            if await signals.interrupt(service.start()):
                return 0
            if await signals.interrupt(engine.wait_failed()):
                await service.drain()
            status = await service.report_failure()
        finally:
            await service.stop()
    return 1 if engine.killed else status


class Service:
    """One engine behind one port."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._front = Front(self.health)
        self._server = HttpServer(self._front, engine.config.host, engine.config.port, http_limits(engine.config))
        self._spans: RequestSpans = NO_SPANS
        self._draining = False
        self._is_late = False  # the time to drain is over
        self._state, self._state_since = EngineState.STARTING, time.monotonic()
        self._looking: asyncio.Task[None] | None = None

    async def bind(self) -> None:
        """Bind the port. Raises: OverlapSpecError if that fails."""
        config = self._engine.config
        try:
            await self._server.start()
        except OSError as error:
            reason = error.strerror or str(error)
            raise OverlapSpecError(f"cannot listen on {config.host} port {config.port}: {reason}") from None
        if not self._engine.keys.names and not is_loopback(config.host):
            log.warning(
                "--host %s is reachable from other machines, and there is no --api-key: whoever reaches it may use the"
                " engine, abort all requests, empty the cache, and find out by guessing what others have sent",
                config.host,
            )

    async def start(self) -> None:
        """Start the engine and answer requests from then on. Raises: ConfigError, CheckpointError, ActorDied."""
        engine = self._engine
        self._looking = asyncio.create_task(self.note_states())
        with shown_progress(log.info) as engine.progress:
            await engine.start()
        for note in engine.notes:
            log.info("%s", note)
        info = server_info(engine.config, engine.settings, lambda: engine.facts)
        self._spans = open_spans(engine.settings.server.otlp, info.model_name)
        app = self._front.app = create_app(engine.client, info, self.health, engine.watch, self._spans)
        app.state.large_bodies.start()
        freeze_heap()
        url = http_url(engine.config.host, self._server.port)
        engine.announce(url)
        print_start(engine.settings, engine.facts, url, engine.endpoint)

    async def note_states(self) -> None:
        """Look at the state all the time, so that it is seen as it begins, without a question too."""
        while True:
            self.health()
            await asyncio.sleep(LOOK_S)

    def health(self) -> EngineHealth:
        """The state of engine and server. A state that knows no time of its own began when it was first seen."""
        health, now = self._engine.health, time.monotonic()
        if self._draining and health.state is not EngineState.FAILED:
            health = replace(health, state=EngineState.DRAINING, reason="the server is shutting down", since_s=0.0)
        if health.state is not self._state:
            self._state, self._state_since = health.state, now
        return health if health.since_s else replace(health, since_s=now - self._state_since)

    async def drain(self) -> None:
        """Refuse new requests and let open ones finish, within bounds."""
        self._draining = True
        seconds = self._engine.config.drain_timeout
        log.info("stopping: open requests have %.0f s to finish; a second signal ends them now", seconds)
        if await self._engine.drain(seconds) or self._engine.failure is not None:
            return
        self._is_late = True
        log.warning("requests are still open after %.0f s; aborting them", seconds)
        await self._engine.client.cancel("", everyone=True)
        await asyncio.sleep(GOODBYE_S)
        self._engine.client.fail(RequestAborted("the engine is stopping"))  # where it does not answer

    async def report_failure(self) -> int:
        """Log a failure and give its error events time to leave. Returns the exit status."""
        if self._engine.failure is None:
            return 0
        log.error("%s; stopping", self._engine.failure)
        await asyncio.sleep(GOODBYE_S)
        return 1

    async def stop(self) -> None:
        """End connections, processes and files: the last answers first, if there is time for them."""
        if self._looking is not None:
            self._looking.cancel()
        closing = asyncio.create_task(self._server.stop(CLOSE_S))
        try:
            if not self._is_late:
                await asyncio.wait((closing,))
            await self._engine.stop()
        finally:
            await closing
            await asyncio.to_thread(self._spans.close, SPANS_S)


class Front:
    """The ASGI app of the port: 503 until the engine is warm, then the server's app."""

    def __init__(self, health: HealthOf) -> None:
        self.app: ASGIApp = self._starting
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)

    async def _starting(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Problem(503, "the engine is starting", code="not_ready").response()
        if scope["type"] == "http" and scope["path"] in SHALLOW:
            answer = health_response(self._health())
        await answer(scope, receive, send)


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[tuple[str, int]]:
    """A started engine behind an HTTP server of this process, as benchmarks measure it. Yields host and port."""
    info = server_info(engine.config, engine.settings, lambda: engine.facts)
    info = replace(info, keys=ApiKeys())  # its requests carry none
    server = HttpServer(create_app(engine.client, info, lambda: engine.health), HOST, 0)
    await server.start()
    freeze_heap()
    try:
        yield HOST, server.port
    finally:
        await server.stop(1.0)
