"""Watches the actors of one run: waits until they are ready, notices when one is gone, stops them.

The ring does not work without one of its actors. With `Settings.recovery` scheduler and worker, all of its ranks, are
started again when one of them has died, and the frontend lets its requests go on there:

    died -> both killed -> Recover to the frontend -> both started -> ready
             `-- a death of these counts as another one; at more than `recovery.most`, or without recovery: `fail`

A frontend that has died is started again alone. The new one connects to the scheduler, which drops what the old one
held (`NewFrontend`); clients have kept their requests, and send them again. All three are started again if one of the
pair dies before the frontend is ready, or the frontend while the pair starts. A frontend that is to drain hears of it
again over each new link.

Else, and at `fail`, the first failure is kept, and every other child is killed at once.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar, assert_never

import zmq
from msgspec.structs import replace

from overlap_spec.config import Settings
from overlap_spec.errors import ActorDied
from overlap_spec.messages import (
    ActorFacts,
    ActorFailed,
    ActorProgress,
    ActorReady,
    Alive,
    DraftState,
    Drained,
    FrontendFacts,
    LivenessProbe,
    Record,
    Recover,
    Shutdown,
    ToSupervisor,
)
from overlap_spec.runtime.processes import Children, cpu_seconds, describe_exit, request_dump
from overlap_spec.runtime.run_directory import Endpoints, RunDirectory
from overlap_spec.runtime.transport import ZmqInbox, ZmqOutlet
from overlap_spec.runtime.watchdog import WATCH_S, Late, RecoveryLimit, Watchdog, WatchedRecords

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # what, done, total (0: unknown)

STOP_S = 5.0  # for an actor to leave after Shutdown
LAST_STOP_S = 1.0  # likewise, once the time to drain is over
DUMP_S = 0.5  # for an actor that hangs to write its stack
GONE_S = 10.0  # for killed processes to end before others take their place: a driver frees their memory first
FRONTEND = "frontend"  # it owns the open requests
SCHEDULER = "scheduler"
ALONE = (FRONTEND,)
FAILURE_S = 0.2  # for the ActorFailed of a child that exits by itself, or the cause of one, which may be on the way

log = logging.getLogger(__name__)


class Supervisor:
    """The children of one run and the link from them. `failed` gets the first ActorDied as its result."""

    def __init__(self, run_dir: RunDirectory, roles: Mapping[str, str], progress: Progress) -> None:
        self.failed: asyncio.Future[ActorDied] = asyncio.get_running_loop().create_future()
        self.facts: dict[str, ActorFacts] = {}  # by role, of those that are ready
        self.frontend_died: Callable[[ActorDied], None] = lambda error: None  # called when it is replaced
        self._run_dir = run_dir
        self._roles = roles
        # Scheduler and ranks are restarted together: what one knows of another's state cannot be told to a new one.
        self._together = tuple(role for role in roles if role != FRONTEND)
        self._progress = progress
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._inbox: ZmqInbox[ToSupervisor] = ZmqInbox(
            self._context, run_dir.endpoints.inbox("supervisor"), ToSupervisor
        )
        self._children = Children(roles, self._on_exit)
        self._settings: Settings | None = None
        self._recoveries = RecoveryLimit()
        self._recovery: asyncio.Task[None] | None = None  # under way, or the last one
        self._generations = dict.fromkeys(roles, 0)  # of the process of each role
        self._starting: tuple[str, ...] = ()  # actors that are being started again
        self._links = dict.fromkeys(roles, 0)  # generation of the addresses that each role reads at
        self._ready: set[str] = set()
        self._lasting: dict[str, tuple[int, ZmqOutlet[Any]]] = {}  # by role: generation of the link, and its end here
        self.draft = DraftState.UNKNOWN  # by the scheduler's last judgement
        self.watchdog = Watchdog(0)  # `start` replaces it
        self.records = WatchedRecords()
        self.killed: set[str] = set()  # actors that hung, or did not leave when they were told to
        self._leave_by = 0.0
        self._is_draining = False
        self._all_ready = asyncio.Event()
        self._drained = asyncio.Event()
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pids(self) -> dict[str, int]:
        """Process number by role."""
        return self._children.pids

    @property
    def recovering(self) -> ActorDied | None:
        """Why actors are being started again; None if they are not."""
        return self._recoveries.cause

    @property
    def recovering_s(self) -> float:
        """For how long."""
        return time.monotonic() - self._recoveries.died_at

    async def start(self, settings: Settings) -> None:
        """Start every actor and wait until all are ready. Raises: ActorDied with the child's error."""
        self.watchdog = Watchdog(settings.supervisor.watchdog_timeout_s)
        self._spawn(self._guard(self._listen()))
        self._spawn(self._guard(self._watch()))
        for role in self._roles:
            self.watchdog.started(role)
        await self._children.start(self._run_dir.path, settings, self._roles)
        await self.unless_failed(self._all_ready.wait())
        self._settings = self._with_address(settings)
        self._recoveries.settings = settings.recovery

    def _with_address(self, settings: Settings) -> Settings:
        """Another frontend is to bind the port that clients know, where any free one was asked for."""
        facts = self.facts[FRONTEND]
        if not isinstance(facts, FrontendFacts) or not facts.client_endpoint.startswith("tcp://"):
            return settings
        return replace(settings, link=replace(settings.link, client_endpoint=facts.client_endpoint))

    async def drain(self, timeout_s: float) -> bool:
        """Let open requests finish and take no new one. Returns False if some are open after `timeout_s`."""
        self._leave_by = time.monotonic() + timeout_s + LAST_STOP_S
        self._is_draining = True
        self._lasting_outlet(FRONTEND).send(Shutdown(drain=True))
        try:
            async with asyncio.timeout(timeout_s):
                await self.unless_failed(self._drained.wait())
        except TimeoutError:
            return False
        return True

    async def stop(self) -> None:
        """Send every actor Shutdown, kill one that stays, and free every resource. A second call does nothing.

        Cancellation: skips the Shutdown.
        """
        asked = self._stopping or self.failed.done() or not self._all_ready.is_set()
        self._stopping = True
        try:
            if not asked:
                await self._send_shutdown()
        finally:
            await self._close()

    def fail(self, error: ActorDied) -> None:
        """End the run with `error`: every child is killed at once. Later errors are ignored."""
        if self._stopping or self.failed.done():
            return
        self._end_recovery()
        self.failed.set_result(error)
        self._spawn(self._children.kill())

    def actor_died(self, error: ActorDied) -> None:
        """Recover, or end the run: every end of an actor that was not asked for comes here, be it an exit or a hang.

        A child that hung was abandoned before; one that has failed is about to exit, and is reported once.
        """
        if self._stopping or self.failed.done():
            return
        roles = self._lost_with(error.actor)
        what = {ALONE: "the frontend is", self._together: "scheduler and worker are"}.get(roles, "all processes are")
        if not self._recoveries.begin(error, what):
            self.fail(error)
            return
        self._end_recovery()
        self._starting = roles
        self._all_ready.clear()
        self._ready.difference_update(roles)
        generation = max(self._generations.values()) + 1
        self._generations.update(dict.fromkeys(roles, generation))
        for role in roles:
            self.watchdog.ended(role)
        self.killed.difference_update(roles)
        gone = self._children.drop(roles)
        self._recovery = self._spawn(self._recover(error, generation, gone))

    def _lost_with(self, actor: str) -> tuple[str, ...]:
        """The roles to be started again. What is being started already knows nothing of who dies meanwhile."""
        roles = ALONE if actor == FRONTEND else self._together
        return roles if self._starting in ((), roles) else tuple(self._roles)

    async def _recover(self, error: ActorDied, generation: int, gone: list[asyncio.Task[None]]) -> None:
        """Start actors again, as soon as those before have given back what they had."""
        assert self._settings is not None
        roles = self._starting
        if FRONTEND in roles:
            self.frontend_died(error)
        if gone and (await asyncio.wait(gone, timeout=GONE_S))[1]:
            self.fail(ActorDied(error.actor, f"killed processes are still there after {GONE_S:.0f} s"))
            return
        if FRONTEND not in roles:
            self._tell(FRONTEND, Recover(generation, error.actor, str(error), self._recoveries.died_at))
            self.watchdog.heard(FRONTEND)  # a probe over its old link is not answered
        self._links.update(dict.fromkeys(roles if roles == ALONE else self._roles, generation))
        for role in roles:
            self.watchdog.started(role)
        try:
            others = self._links[SCHEDULER]
            await self._children.start(self._run_dir.path, self._settings, roles, generation, others)
        except OSError as problem:  # no memory for another process
            self.fail(ActorDied(error.actor, f"cannot be started again: {problem}"))
            return
        if self._is_draining:
            self._lasting_outlet(FRONTEND).send(Shutdown(drain=True))
        await self._all_ready.wait()
        self._starting = ()
        if FRONTEND in roles:  # else the frontend notes when its requests go on
            log.info("started again %.1f s after the death of the %s", self.recovering_s, error.actor)
        self._recoveries.end()

    def _end_recovery(self) -> None:
        if self._recovery is not None:
            self._recovery.cancel()

    async def _send_shutdown(self) -> None:
        for role in self._roles:
            self._tell(role, Shutdown(drain=False))
        stop_s = min(STOP_S, max(LAST_STOP_S, self._leave_by - time.monotonic())) if self._leave_by else STOP_S
        if not await self._children.wait(stop_s):
            staying = self._children.running
            self.killed.update(staying)
            log.error("%s did not stop within %.1f s: killed", " and ".join(staying), stop_s)

    async def _close(self) -> None:
        self._end_recovery()
        try:
            await self._children.kill()
        finally:
            self._children.forget()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._context.destroy(linger=0)

    def _tell(self, role: str, message: Shutdown | Recover) -> None:
        """Send one message: the link is closed at once, and what it holds lingers in the context."""
        outlet = self._outlet(role)
        outlet.send(message)
        outlet.close()

    def _outlet(self, role: str) -> ZmqOutlet[Any]:
        return ZmqOutlet(self._context, Endpoints(self._run_dir.path, self._links[role]).inbox(role))

    async def unless_failed(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work`. Raises: ActorDied if an actor is gone first."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self.failed), return_when=asyncio.FIRST_COMPLETED)
            if self.failed.done():
                raise self.failed.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _watch(self) -> None:
        """Ask for heartbeats, and give up an actor that hangs."""
        while not self._stopping:
            await asyncio.sleep(self.watchdog.interval_s)
            for role in self.watchdog.tick({role: cpu_seconds(pid) for role, pid in self.pids.items()}):
                self._probe(role)
            for late in self.watchdog.hung():
                await self._give_up(late)

    def watch(self) -> list[Record]:
        """What the actors did in the last seconds, as far as they have told; they are asked for more."""
        for role in self.records.to_ask(self._ready):
            self._probe(role, WATCH_S)
        return self.records.newest()

    def _probe(self, role: str, watch_s: float = 0.0) -> None:
        """Ask for a heartbeat."""
        self._lasting_outlet(role).send(LivenessProbe(watch_s))

    def _lasting_outlet(self, role: str) -> ZmqOutlet[Any]:
        """A link that stays: an actor that was stopped, or is being started, reads it when it can."""
        links, outlet = self._lasting.get(role, (-1, None))
        if outlet is None or links != self._links[role]:
            if outlet is not None:
                outlet.close()
            outlet = self._outlet(role)
            self._lasting[role] = self._links[role], outlet
        return outlet

    async def _give_up(self, late: Late) -> None:
        """Let an actor that hangs write its stack, then treat it as dead."""
        actor, pid = late.actor, self.pids.get(late.actor)
        if self._stopping or pid is None:
            return
        self.killed.add(actor)
        log.error("%s: %s (--watchdog-timeout): %s", actor, late, request_dump(pid))
        await asyncio.sleep(DUMP_S)
        if self.pids.get(actor) != pid:
            return  # another death meanwhile: this actor was started again
        self.watchdog.ended(actor)
        self._children.abandon(actor)
        self.actor_died(ActorDied(actor, f"hung: {late}"))

    async def _listen(self) -> None:
        while True:
            self._dispatch(await self._inbox.recv())

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run one of the supervisor's own loops, without which no actor would ever be ready, or be missed."""
        try:
            await work
        except Exception as error:  # of a progress callback, say
            log.exception("the supervisor has failed")
            self.fail(ActorDied("supervisor", f"{type(error).__name__}: {error}"))

    def _dispatch(self, message: ToSupervisor) -> None:
        match message:
            case ActorReady() | ActorFailed() | ActorProgress() | Alive() if message.generation != self._of(
                message.actor
            ):
                pass  # of a process that has been started again since
            case ActorReady():
                self.watchdog.heard(message.actor)
                self._ready.add(message.actor)
                self.facts[message.actor] = message.facts
                if self._ready == self._roles.keys():
                    self._all_ready.set()
            case ActorFailed(on_purpose=True) if message.actor == FRONTEND:
                self.fail(ActorDied(message.actor, message.error, message.refused))  # or a fault of an audit, say
            case ActorFailed(lost_rank=True):  # another rank's death, which is about to be known, explains it
                self._spawn(self._died_later(ActorDied(message.actor, message.error), message.generation))
            case ActorFailed():
                self.actor_died(ActorDied(message.actor, message.error, message.refused))
            case Alive(waits_s=waits_s) if waits_s:
                self.watchdog.waits(message.actor, waits_s)
            case Alive():
                self.watchdog.heard(message.actor, message.step_s)
                self.records.add(message.actor, message.records)
                if message.draft is not DraftState.UNKNOWN:
                    self.draft = message.draft
            case ActorProgress():
                self.watchdog.heard(message.actor, phase=message.what)
                if self._settings is None:
                    self._progress(message.what, message.done, message.total)
            case Drained():
                self._drained.set()
            case _:
                assert_never(message)

    def _on_exit(self, role: str, status: int) -> None:
        if self._stopping:
            return
        self.watchdog.ended(role)
        error = ActorDied(role, f"the process {describe_exit(status)}")
        if status < 0:
            self.actor_died(error)
        else:
            self._spawn(self._died_later(error, self._of(role)))

    async def _died_later(self, error: ActorDied, generation: int) -> None:
        await asyncio.sleep(FAILURE_S)
        if generation == self._of(error.actor):
            self.actor_died(error)

    def _of(self, role: str) -> int:
        return self._generations.get(role, 0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
