"""Signs of life of the actors: when each gave its last one, which is late, which hangs.

Every message of an actor to the supervisor is a sign. One that has sent none for an interval is sent a LivenessProbe,
which the loop that does its work answers; the answer also tells how old the oldest step in flight is, because a worker
whose device hangs still answers. A start has no loop yet: its phases are named in the log while they take long.

    sign --- interval: a probe --- late_s: unresponsive --- timeout: it hangs, and is killed
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

LATE_S = 10.0  # without a sign: `/health` names it
MOST_INTERVAL_S = 2.5
START_TIMEOUTS = 10  # that a phase of the start may take: kernels are compiled, weights come over a network
FIRST_PHASE = "loading"

log = logging.getLogger(__name__)


@dataclass
class ActorSigns:
    """What is known of one actor. `phase`: of its start, "" once it is ready; times are of `clock`."""

    signed_at: float
    began_at: float  # the phase
    phase: str = FIRST_PHASE
    step_s: float = 0.0
    probed: bool = False
    num_warnings: int = 0


@dataclass(frozen=True)
class Late:
    """An actor that has given no sign of life in time: since when, and its last known work."""

    actor: str
    seconds: float
    doing: str

    def __str__(self) -> str:
        return f"{self.doing} for {self.seconds:.1f} s"


class Watchdog:
    """Times of signs. `timeout_s`: without one, or with one step, after which an actor hangs; 0: never."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._signs: dict[str, ActorSigns] = {}
        self._ticked_at = clock()
        self.late_s = min(LATE_S, timeout_s / 2) if timeout_s else LATE_S
        self.interval_s = min(MOST_INTERVAL_S, self.late_s / 4)  # between two calls of `tick`

    def started(self, actor: str) -> None:
        """Note that the process of an actor is started, again perhaps."""
        now = self._clock()
        self._signs[actor] = ActorSigns(now, now)

    def ended(self, actor: str) -> None:
        """Forget an actor that is dead."""
        self._signs.pop(actor, None)

    def heard(self, actor: str, step_s: float = 0.0, phase: str = "") -> None:
        """Note a sign of life. `phase`: of the actor's start; "": its loop runs."""
        signs = self._signs.get(actor)
        if signs is None:
            return
        signs.signed_at, signs.step_s, signs.probed = self._clock(), step_s, signs.probed and bool(phase)
        if signs.phase != phase:
            signs.phase, signs.began_at, signs.num_warnings = phase, signs.signed_at, 0

    def tick(self) -> list[str]:
        """Call every `interval_s`. Returns the actors to probe; logs phases of a start that take long.

        An interval that took longer counts as one: this process was stopped or busy, and answers may wait to be read.
        """
        now = self._clock()
        slept, self._ticked_at = now - self._ticked_at - 2 * self.interval_s, now
        if slept > 0:
            for signs in self._signs.values():
                signs.signed_at = min(now, signs.signed_at + slept)
        for actor, signs in self._signs.items():
            self._name_phase(actor, signs, now)
        due_s = self.interval_s / 2
        silent = [actor for actor, signs in self._signs.items() if not signs.probed and self._age(signs) > due_s]
        for actor in silent:
            self._signs[actor].probed = True
        return silent

    def hung(self) -> list[Late]:
        """Actors that are to be given up."""
        if not self._timeout_s:
            return []
        return [late for late in self._late() if late.seconds > self._timeout_s * self._num_timeouts(late.actor)]

    def unresponsive(self) -> Late | None:
        """The actor that is ready and should have given a sign for longest; None if none is late."""
        late = [late for late in self._late() if late.seconds > self.late_s and not self._signs[late.actor].phase]
        return max(late, key=lambda each: each.seconds, default=None)

    def starting(self) -> Late | None:
        """The actor that starts, with its phase, a named one before others; None if all are ready."""
        now = self._clock()
        found = [Late(actor, now - signs.began_at, signs.phase) for actor, signs in self._signs.items() if signs.phase]
        return max(found, key=lambda each: (each.doing != FIRST_PHASE, each.seconds), default=None)

    def ages(self) -> dict[str, float]:
        """By actor, seconds since its last sign."""
        return {actor: self._age(signs) for actor, signs in self._signs.items()}

    def _late(self) -> Iterable[Late]:
        """What could be said against each actor."""
        for actor, signs in self._signs.items():
            age = self._age(signs)
            if signs.phase:
                yield Late(actor, age, f"no sign of life while {signs.phase}")
            elif signs.step_s:
                yield Late(actor, signs.step_s + age, "a step has been in flight")
            else:
                yield Late(actor, age, "no sign of life")

    def _age(self, signs: ActorSigns) -> float:
        return self._clock() - signs.signed_at

    def _num_timeouts(self, actor: str) -> int:
        return START_TIMEOUTS if self._signs[actor].phase else 1

    def _name_phase(self, actor: str, signs: ActorSigns, now: float) -> None:
        if signs.phase and self._timeout_s and now - signs.began_at > self._timeout_s * (signs.num_warnings + 1):
            signs.num_warnings += 1
            log.warning("%s: still %s, for %.0f s", actor, signs.phase, now - signs.began_at)
