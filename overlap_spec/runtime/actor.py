"""The frame of every child process: settings, links to the others, ready and failure reports.

    python -P -m overlap_spec.runtime.actor ROLE MODULE RUN_DIR GENERATION OTHERS PARENT_PID < SETTINGS

A child dies with its parent, leaves SIGINT and SIGTERM to it, and reports an exception as ActorFailed before it exits
with status 1.
"""

import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import uvloop
import zmq

from overlap_spec.config import Settings, decode_settings
from overlap_spec.config.ranks import WORKER, worker_roles
from overlap_spec.errors import CheckpointError, ConfigError, OverlapSpecError, RankLost
from overlap_spec.messages import (
    EXTENSIONS,
    ActorFacts,
    ActorFailed,
    ActorProgress,
    ActorReady,
    Alive,
    DraftState,
    LivenessProbe,
    ToSupervisor,
    carrying,
)
from overlap_spec.runtime.log_limits import limit_lines, traceback_text, without_quotes
from overlap_spec.runtime.processes import DUMP_SIGNAL
from overlap_spec.runtime.run_directory import Endpoints
from overlap_spec.runtime.step_link import QueuedOutlet, SharedOutlet, SpinPolicy, StepInbox, StepOutlet
from overlap_spec.runtime.tracing import recorder
from overlap_spec.runtime.transport import LAST_SEND_MS, BatchOutlet, Inbox, Outlet, ZmqInbox, ZmqOutlet

ROLES = {  # role -> module with `async def main(context: ActorContext) -> None`
    "frontend": "overlap_spec.frontend.frontend_actor",
    "scheduler": "overlap_spec.scheduler.scheduler_actor",
    WORKER: "overlap_spec.worker.entry",  # further ranks run it too (`config/ranks.py`)
}
PR_SET_PDEATHSIG = 1

Main = Callable[["ActorContext"], Awaitable[None]]


class ActorContext:
    """An actor's settings and links.

    `generation`: how often the engine had recovered when it was started. `others`: the same of the actors that it
    sends to, if they were not started with it.
    """

    def __init__(
        self, role: str, settings: Settings, run_dir: Path, generation: int = 0, others: int | None = None
    ) -> None:
        self.role = role
        self.settings = settings
        self.generation = generation
        self.trace = recorder(role, settings.trace_dir, settings.watched)
        self.endpoints = Endpoints(run_dir, generation)  # where it reads
        self.others = generation if others is None else others
        self.zmq: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: list[Inbox[Any] | Outlet[Any]] = []
        self._supervisor: Outlet[ToSupervisor] = ZmqOutlet(self.zmq, self.endpoints.supervisor())
        self._links.append(self._supervisor)

    def renew(self, generation: int) -> None:
        """Close every link but that to the supervisor: those made from now on are of another generation."""
        for link in self._links[1:]:
            link.close()
        del self._links[1:]
        self.endpoints = Endpoints(self.endpoints.run_dir, generation)
        self.others = generation

    @property
    def was_started_alone(self) -> bool:
        """Whether those that it sends to were there before it."""
        return self.others != self.generation

    def _of_others(self, generation: int | None = None) -> Endpoints:
        return Endpoints(self.endpoints.run_dir, self.others if generation is None else generation)

    def outlet(self, actor: str) -> Outlet[Any]:
        """Connect to another actor's inbox."""
        link: Outlet[Any] = ZmqOutlet(self.zmq, self._of_others().inbox(actor))
        self._links.append(link)
        return link

    def step_inbox(self, union: Any, spins: bool = True) -> StepInbox[Any]:
        """Bind this actor's inbox for messages of `union`, some of which come over a step link.

        `spins`: it may poll for a while, if the settings say so.
        """
        union = carrying(union, EXTENSIONS)
        others: ZmqInbox[Any] = ZmqInbox(self.zmq, self.endpoints.inbox(self.role), union)
        self._links.append(others)  # before the other one, which may find its path taken
        spin = SpinPolicy(self.settings.spin_s if spins else 0.0)
        link: StepInbox[Any] = StepInbox(others, self.endpoints.steps(self.role), union, spin, LivenessProbe)
        self._links.append(link)
        return link

    def step_outlet(self, actor: str) -> Outlet[Any]:
        """Results for another actor, from a plain thread; it must have bound its inbox when the first is sent."""
        link: Outlet[Any] = StepOutlet(self._of_others().steps(actor))
        self._links.append(link)
        return link

    def queued_outlet(self, actor: str, generation: int | None = None) -> BatchOutlet[Any]:
        """Requests, plans or tokens for another actor, over a step link. Needs a running loop.

        `generation`: of that actor, if it is another one than at the start.
        """
        link: BatchOutlet[Any] = QueuedOutlet(self._of_others(generation).steps(actor))
        self._links.append(link)
        return link

    def outlet_of_workers(self) -> BatchOutlet[Any]:
        """Plans, and whatever goes with them, for every rank of the worker. Needs a running loop."""
        steps = self._of_others().steps
        link: BatchOutlet[Any] = SharedOutlet([QueuedOutlet(steps(role)) for role in worker_roles(self.settings.ranks)])
        self._links.append(link)
        return link

    def ready(self, facts: ActorFacts) -> None:
        """Tell the supervisor that this actor is warm.

        Later garbage collections skip what is loaded by now, and so do not take milliseconds.
        """
        gc.collect()
        gc.freeze()
        self._supervisor.send(ActorReady(self.role, facts, self.generation))

    def progress(self, what: str, done: int, total: int) -> None:
        """Report a part of the start to the supervisor."""
        self._supervisor.send(ActorProgress(self.role, what, done, total, self.generation))

    def report_alive(self, step_s: float = 0.0, draft: DraftState = DraftState.UNKNOWN) -> None:
        """Answer a LivenessProbe; `step_s` is the age of the oldest step in flight."""
        self._supervisor.send(Alive(self.role, step_s, self.generation, draft, self.trace.take()))

    @contextmanager
    def waiting_reports(self) -> Iterator[Callable[[float], None]]:
        """What tells the supervisor for how long this actor has waited for other ranks, from the thread that asks."""
        link: ZmqOutlet[ToSupervisor] = ZmqOutlet(self.zmq, self.endpoints.supervisor())
        try:
            yield lambda seconds: link.send(Alive(self.role, generation=self.generation, waits_s=seconds))
        finally:
            link.close()

    def send_supervisor(self, message: ToSupervisor) -> None:
        self._supervisor.send(message)

    def close(self) -> None:
        """Close every link, then every socket that the role left open: none may keep the process alive."""
        for link in self._links:
            link.close()
        self.zmq.destroy(linger=LAST_SEND_MS)


def die_with_parent(expected_parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent dies (Linux); a parent already gone ends us at once."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected_parent:
        raise SystemExit(1)


def run_actor(
    role: str, module: str, run_dir: Path, settings: Settings, generation: int = 0, others: int | None = None
) -> int:
    """Run one role to its end. Returns the exit status."""
    logging.basicConfig(
        level=settings.log_level.upper(), format=f"%(asctime)s %(levelname)s {role}: %(message)s", stream=sys.stderr
    )
    limit_lines()
    context = ActorContext(role, settings, run_dir, generation, others)
    try:
        main = cast(Main, importlib.import_module(module).main)
        uvloop.run(_as_coroutine(main, context))
        context.trace.write()
    except Exception as error:
        context.send_supervisor(_failure(context, error))
        return 1
    finally:
        context.close()
    return 0


def _failure(context: ActorContext, error: Exception) -> ActorFailed:
    """The report to the supervisor. An error raised on purpose explains itself; any other is logged with its trace."""
    trace = traceback_text(error)
    if isinstance(error, OverlapSpecError):
        refused, lost_rank = isinstance(error, CheckpointError | ConfigError), isinstance(error, RankLost)
        about = {"on_purpose": True, "refused": refused, "lost_rank": lost_rank}
        return ActorFailed(context.role, str(error), trace, context.generation, **about)
    logging.getLogger(__name__).error("failed:\n%s", trace)
    said = f"{type(error).__name__}: {without_quotes(str(error))}"  # every client reads it
    return ActorFailed(context.role, said, trace, context.generation)


async def _as_coroutine(main: Main, context: ActorContext) -> None:
    await main(context)


def main() -> None:
    """Entry point of a child process."""
    role, module, run_dir, *generations, parent = sys.argv[1:7]
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the supervisor sends Shutdown, and kills an actor that stays
    settings = decode_settings(sys.stdin.buffer.read())
    sys.exit(run_actor(role, module, Path(run_dir), settings, *map(int, generations)))


if __name__ == "__main__":
    main()
