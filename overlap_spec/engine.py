"""The engine as a handle in this process: `async with Engine(EngineConfig(...)) as engine`.

Engine owns the run directory, the supervisor and one client, and frees each exactly once: on stop, on a failed start
and when an actor dies.
"""

import asyncio
import concurrent.futures
import contextlib
import math
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import Self, TypeVar

from msgspec.structs import replace

from overlap_spec.client import AnyPrompt, Client
from overlap_spec.client.answers import Delta
from overlap_spec.config import EngineConfig, Settings
from overlap_spec.config.fields import check_config
from overlap_spec.config.keys import read_keys
from overlap_spec.config.ranks import with_ranks
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ActorDied, Overloaded
from overlap_spec.features import without_absent
from overlap_spec.messages import (
    ANY_TERMS,
    ActorFacts,
    EngineFacts,
    EngineHealth,
    EngineState,
    FrontendFacts,
    Record,
    SamplingParams,
    SchedulerFacts,
    Terms,
    WorkerFacts,
)
from overlap_spec.runtime.actor import ROLES
from overlap_spec.runtime.run_directory import RunDirectory
from overlap_spec.runtime.supervisor import Progress, Supervisor
from overlap_spec.runtime.tracing import CLIENT, NO_TRACE, Recorder, recorder
from overlap_spec.runtime.watchdog import WATCH_S

T = TypeVar("T")


def no_progress(what: str, done: int, total: int) -> None:
    """Show nothing."""


class Engine:
    """The actors' processes, one more for each further rank, and a client connected to them.

    `progress(what, done, total)` reports what is fetched and loaded; it may be called from another thread.
    `trace_dir`: every process writes its trace there (`tracing.py`) when the engine stops. `watched`: `watch` may be
    called.
    Raises: ConfigError before anything is read, CheckpointError or ActorDied if it cannot start.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        progress: Progress = no_progress,
        roles: Mapping[str, str] = ROLES,
        trace_dir: Path | None = None,
        watched: bool = False,
    ) -> None:
        self.config = check_config(config or EngineConfig())
        self.keys = read_keys(self.config)
        self.notes: list[str] = []  # what `resolve` has adjusted, for the log
        self.progress = progress
        self._roles = roles
        self._trace_dir = None if trace_dir is None else str(trace_dir)
        self._watched = watched
        self._trace: Recorder = NO_TRACE
        self._settings: Settings | None = None
        self._run_dir: RunDirectory | None = None
        self._supervisor: Supervisor | None = None
        self._client: Client | None = None
        self._runs = False
        self._resources = contextlib.AsyncExitStack()  # freed last in, first out, even if one raises

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.stop()

    @property
    def settings(self) -> Settings:
        """The settings that are run. Raises: Overloaded before the start."""
        return _started(self._settings)

    @property
    def client(self) -> Client:
        """The client of this engine. Raises: Overloaded before the start."""
        return _started(self._client)

    @property
    def facts(self) -> EngineFacts:
        """What each actor reported when it was ready, the last time. Raises: Overloaded before the start."""
        return _started(_engine_facts(self._supervisor.facts if self._supervisor is not None else {}))

    @property
    def failure(self) -> ActorDied | None:
        """Why the engine is dead; None while it lives."""
        failed = self._supervisor.failed if self._supervisor is not None else None
        return failed.result() if failed is not None and failed.done() else None

    @property
    def health(self) -> EngineHealth:
        """What the engine is doing, by the heartbeats of its processes."""
        watchdog = self._supervisor.watchdog if self._supervisor is not None else None
        if self.failure is not None:
            return EngineHealth(EngineState.FAILED, f"the engine has failed: {self.failure}", self.failure.actor)
        if watchdog is None or self._supervisor is None:
            return EngineHealth(EngineState.STARTING, "the engine is starting: the model is looked for")
        ages = watchdog.ages()
        if self._client is None and (starting := watchdog.starting()) is not None:
            reason = f"the engine is starting: {starting.doing}"
            return EngineHealth(EngineState.STARTING, reason, starting.actor, starting.seconds, ages)
        if self._client is None:
            return EngineHealth(EngineState.STARTING, "the engine is starting", last_sign_s=ages)
        if (cause := self._supervisor.recovering) is not None:
            reason = f"the engine is recovering: {cause}"
            return EngineHealth(EngineState.RECOVERING, reason, cause.actor, self._supervisor.recovering_s, ages)
        if (late := watchdog.unresponsive()) is not None:
            return EngineHealth(EngineState.UNRESPONSIVE, f"{late.actor}: {late}", late.actor, late.seconds, ages)
        return EngineHealth(EngineState.READY, last_sign_s=ages, draft=self._supervisor.draft)

    @property
    def killed(self) -> frozenset[str]:
        """Processes that hung, or did not leave when they were told to."""
        return frozenset(self._supervisor.killed if self._supervisor is not None else ())

    @property
    def pids(self) -> dict[str, int]:
        """Process number of each actor."""
        return _started(self._supervisor).pids

    @property
    def endpoint(self) -> str:
        """Where a `Client` of another process connects."""
        return self.facts.frontend.client_endpoint

    def generate(
        self,
        prompt: AnyPrompt,
        sampling: SamplingParams | None = None,
        request_id: str | None = None,
        terms: Terms = ANY_TERMS,
    ) -> AsyncGenerator[Delta, None]:
        """Stream one request; leaving the loop cancels it. See `Client.generate`."""
        return self.client.generate(prompt, sampling, request_id, terms)

    def watch(self) -> list[Record]:
        """What the engine's processes and its client did in the last seconds, since `watch` is called every second."""
        supervisor = _started(self._supervisor)
        self._trace.watch(WATCH_S)
        supervisor.records.add(CLIENT, self._trace.take())
        return supervisor.watch()

    async def start(self) -> None:
        """Resolve the model, start the actors, return when they are warm. Cancellation: leaves nothing behind."""
        if self._runs:
            raise RuntimeError("the engine has been started: stop it first")
        self._runs = True
        self._resources.callback(setattr, self, "_runs", False)  # after all others are freed
        try:
            settings, self.notes = await in_daemon_thread(self._resolve)
            self._settings = settings
            await self._start_actors(settings)
        except BaseException:
            await self.stop()
            raise

    async def _start_actors(self, settings: Settings) -> None:
        run_dir = self._run_dir = RunDirectory()
        self._resources.callback(self._remove_files, run_dir)
        roles = with_ranks(self._roles, settings.ranks)
        supervisor = self._supervisor = Supervisor(run_dir, roles, self.progress)
        self._resources.push_async_callback(supervisor.stop)
        await supervisor.start(settings)
        self._trace = recorder(CLIENT, self._trace_dir, self._watched)
        self._resources.callback(self._trace.write)
        address, key = run_dir.endpoints.client(), settings.link.api_key
        connection = Client(address, key, lost_s=math.inf, trace=self._trace)
        client = await self._resources.enter_async_context(connection)
        self._client = client
        supervisor.failed.add_done_callback(lambda failed: client.fail(failed.result()))
        supervisor.frontend_died = client.frontend_died
        await supervisor.unless_failed(client.wait_ready())

    def announce(self, url: str) -> None:
        """Tell `overlap-spec top` of this user on this machine where the engine is served. Nothing before the start."""
        if self._run_dir is not None:
            self._run_dir.announce(url)

    async def wait_failed(self) -> ActorDied:
        """Wait until an actor dies. Open requests have then been told."""
        return await asyncio.shield(_started(self._supervisor).failed)

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for open ones. Returns False if some are open after `timeout_s`."""
        try:
            return await _started(self._supervisor).drain(timeout_s)
        except ActorDied:
            return False

    async def stop(self, drain_s: float = 0.0) -> None:
        """End every process and remove the run directory; open requests get `drain_s` to finish first.

        A second call does nothing.
        """
        if drain_s > 0:
            await self.drain(drain_s)
        await self._resources.aclose()

    def kill(self, reason: str) -> None:
        """End every process at once: open requests fail with `reason`. `stop` still has to follow."""
        if self._supervisor is not None:
            self._supervisor.fail(ActorDied("engine", f"killed by {reason}"))

    def _resolve(self) -> tuple[Settings, list[str]]:
        # Here, because a hub client is slow to import and no other process needs it.
        from overlap_spec import hub
        from overlap_spec.runtime import machine

        config = without_absent(self.config)
        files = hub.resolve_model(config, self.progress)
        settings, notes = resolve(config, files, machine.inspect(), self.keys)
        settings = replace(settings, trace_dir=self._trace_dir, watched=self._watched)
        spec, said = hub.resolve_drafting(settings.spec, files, config, self.progress)
        return replace(settings, spec=spec), notes + said

    def _remove_files(self, run_dir: RunDirectory) -> None:
        run_dir.remove()
        frontend = _started(self._supervisor).facts.get("frontend")
        if isinstance(frontend, FrontendFacts) and frontend.client_endpoint.startswith("ipc://"):
            Path(frontend.client_endpoint.removeprefix("ipc://")).unlink(missing_ok=True)  # the frontend made it


def _engine_facts(facts: Mapping[str, ActorFacts]) -> EngineFacts | None:
    if not facts.keys() >= set(ROLES):
        return None
    frontend, scheduler, worker = (facts[role] for role in ROLES)
    assert isinstance(frontend, FrontendFacts), frontend
    assert isinstance(scheduler, SchedulerFacts), scheduler
    assert isinstance(worker, WorkerFacts), worker
    return EngineFacts(frontend, scheduler, worker)


def _started(part: T | None) -> T:
    if part is None:
        raise Overloaded("the engine has not been started")
    return part


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread and return its result.

    Cancellation: returns at once and abandons the thread. An executor would be joined at exit, so that
    Ctrl-C during a download waited for the download.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # from here on a cancelled waiter cannot make `set_result` fail

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
