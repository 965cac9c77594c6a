"""Where features attach to the scheduler: a hook overrides the points that it needs, and the others cost nothing.

    admitted ──► (held) ──► started ──► next_step .. settled ──► closed        a request
                    ▲
                    └─ Hooks.release, or Hooks.fail, by the hook that held it

The loop, the planner, the ledger and the queues call points, and know no feature.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from overlap_spec.errors import RequestError
from overlap_spec.messages import Extension, Stats, StepResult
from overlap_spec.scheduler.requests import Request, Step

# How many rows of a decode step have each way to draw (one of `DRAWS`; None: nothing is guessed), length of the run and
# number of guesses.
Runs = Mapping[tuple[str | None, int, int], int]


class SchedulerHook:
    """Base of what a feature does in the scheduler. Every point does nothing: a feature overrides some."""

    def admitted(self, request: Request) -> bool:
        """A new request. True: it waits for no slot until this hook releases it."""
        return False

    def started(self, request: Request) -> None:
        """A request has got a slot, maybe once more."""

    def closed(self, request: Request) -> None:
        """A request is gone, and no step in flight has it."""

    def next_step(self, idle: bool) -> Step | None:
        """A step of the feature's own, whose `owner` is this hook and whose id the planner gives.

        It is asked before the requests' step, and after it if there is none; `idle`: no request waits, runs or leaves.
        """
        return None

    def verified(self, runs: Runs, was_drafted: bool) -> None:
        """What a decode step of requests committed. `was_drafted`: the step before has asked the draft for guesses."""

    def settled(self, step: Step, result: StepResult) -> None:
        """A result has come, of a step or of one of its parts; if requests own the step, it is applied to them."""

    def message(self, message: Extension) -> bool:
        """A message of a feature. True: of this one."""
        return False

    def abandoned(self) -> None:
        """The frontend is another one. Its requests have been closed: what else it has asked for ends."""

    def replies(self) -> Sequence[Extension | Stats]:
        """What the frontend is to be told, once in each turn of the loop, after plans have left."""
        return ()

    def report(self, stats: Stats) -> Stats:
        """The periodic report with what this feature knows."""
        return stats


class RequestOwner(Protocol):
    """Whose a request is: the loop's, or a feature's that runs requests of its own."""

    def released(self, request: Request) -> None:
        """No hook holds it any longer."""

    def failed(self, request: Request, error: RequestError) -> None:
        """A hook can do no more for it, whether it still held it or not."""


@dataclass
class _Held:
    """A request that hooks have held, until it is closed. `holds`: how many still do."""

    request: Request
    owner: RequestOwner
    holds: int


class Hooks:
    """The features that are attached, by name, and for each point the bound methods of those that override it."""

    def __init__(self) -> None:
        self.by_name: dict[str, SchedulerHook] = {}
        self.admitted: list[Callable[[Request], bool]] = []
        self.started: list[Callable[[Request], None]] = []
        self.closed: list[Callable[[Request], None]] = []
        self.next_step: list[Callable[[bool], Step | None]] = []
        self.verified: list[Callable[[Runs, bool], None]] = []
        self.settled: list[Callable[[Step, StepResult], None]] = []
        self.message: list[Callable[[Extension], bool]] = []
        self.abandoned: list[Callable[[], None]] = []
        self.replies: list[Callable[[], Sequence[Extension | Stats]]] = []
        self.report: list[Callable[[Stats], Stats]] = []
        self._held: dict[int, _Held] = {}  # by uid

    def add(self, name: str, hook: SchedulerHook) -> None:
        """Attach a feature."""
        self.by_name[name] = hook
        for point, attached in vars(self).items():
            base = getattr(SchedulerHook, point, None)
            if base is not None and getattr(type(hook), point) is not base:
                attached.append(getattr(hook, point))

    def missing(self, needed: Iterable[str]) -> str:
        """The first of these features that is not attached; "" without one."""
        return next((name for name in needed if name not in self.by_name), "")

    # --- requests -------------------------------------------------------------------------------------------

    def admit(self, request: Request, owner: RequestOwner) -> bool:
        """Tell of a new request. Returns whether a hook holds it: then its owner is told when none does any longer."""
        if not self.admitted:
            return False
        holds = sum([admitted(request) for admitted in self.admitted])
        if holds:
            self._held[request.uid] = _Held(request, owner, holds)
        return holds > 0

    def release(self, uid: int) -> None:
        """Let go of a request: by a hook that holds it."""
        held = self._held[uid]
        held.holds -= 1
        if not held.holds:
            held.owner.released(held.request)

    def fail(self, uid: int, error: RequestError) -> None:
        """End a request that a hook has held; nothing if it is gone."""
        held = self._held.get(uid)
        if held is not None:
            held.owner.failed(held.request, error)

    def close(self, request: Request) -> None:
        """Tell that a request is gone."""
        self._held.pop(request.uid, None)
        for closed in self.closed:
            closed(request)
