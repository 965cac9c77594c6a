"""Heartbeats of the actors: when each gave its last one, which is late, which hangs. Nothing else judges that.

Every message of an actor to the supervisor is a heartbeat. An actor that has sent none for an interval is sent a
LivenessProbe, which the loop that does its work answers; the answer also tells how old the oldest step in flight is,
because a worker whose device hangs still answers. A start has no loop yet: its phases are named in the log while they
take long.

A process without a heartbeat that uses its share of a core is busy, and is late only after a longer time: what it does
ends, as a rule. One that uses none is stopped, or waits for something that does not come.

    heartbeat --- interval: a probe --- late_s: unresponsive, if idle --- busy_s: if busy --- timeout: it hangs

One that hangs is killed. The timeout is the same for both, since a loop without an end is busy, too.

**Ranks of a model** wait for each other, so if one hangs all give no heartbeat, or have an old step in flight. A rank
that waits for the others in the host's part of a step tells so from a thread (`Alive.waits_s`). Neither it nor one that
answers is given up while there is another that does not:

    worker      waits for the others for 60 s        worker      a step has been in flight for 60 s
    worker-1    no heartbeat for 60 s: it hangs      worker-1    no heartbeat for 60 s: it hangs

**While an engine is watched**, its processes record what they did in the last seconds:

    watch --LivenessProbe(watch_s)--> actor: it records for so long --Alive(records)--> WatchedRecords

The probe is the one that asks for heartbeats; nothing is added to what steps send. A question that is not answered
yet is not asked again, so a process that hangs collects none.

**A dead actor** is started again, but only so often.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from overlap_spec.config import RecoverySettings
from overlap_spec.config.ranks import rank_of
from overlap_spec.errors import ActorDied
from overlap_spec.messages import Record

LATE_S = 10.0  # without a heartbeat and without work: `/health` names it
BUSY_S = 30.0  # the same of a process that works
BUSY_SHARE = 0.05  # of a core that a process uses, at least, while it works
MOST_INTERVAL_S = 2.5
START_TIMEOUTS = 10  # that a phase of the start may take: kernels are compiled, weights come over a network
FIRST_PHASE = "loading"

log = logging.getLogger(__name__)


@dataclass
class Heartbeat:
    """What is known of one actor. `phase`: of its start, "" once it is ready; times are of `clock`.

    `cpu_s`: CPU time of its process at the last tick; `worked_at`: the last tick at which it had grown.
    """

    heard_at: float
    began_at: float  # the phase
    worked_at: float
    cpu_s: float = 0.0
    phase: str = FIRST_PHASE
    step_s: float = 0.0
    waits_s: float = 0.0  # for other ranks
    probed: bool = False
    num_warnings: int = 0


@dataclass(frozen=True)
class Late:
    """An actor that has given no heartbeat in time: since when, and its last known work.

    `idle_s`: the part of that time in which its process has not worked.
    """

    actor: str
    seconds: float
    doing: str
    idle_s: float = 0.0
    has_answered: bool = False  # the process has given heartbeats: what is late is its device, or another rank

    def __str__(self) -> str:
        return f"{self.doing} for {self.seconds:.1f} s"


class Watchdog:
    """Times of heartbeats. `timeout_s`: without one, or with one step, after which an actor hangs; 0: never."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._heartbeats: dict[str, Heartbeat] = {}
        self._ticked_at = clock()
        self.late_s = min(LATE_S, timeout_s / 2) if timeout_s else LATE_S
        self.busy_s = min(BUSY_S, timeout_s * 3 / 4) if timeout_s else BUSY_S
        self.interval_s = min(MOST_INTERVAL_S, self.late_s / 4)  # between two calls of `tick`

    def started(self, actor: str) -> None:
        """Note that the process of an actor is started, again perhaps."""
        now = self._clock()
        self._heartbeats[actor] = Heartbeat(now, now, now)

    def ended(self, actor: str) -> None:
        """Forget an actor that is dead."""
        self._heartbeats.pop(actor, None)

    def heard(self, actor: str, step_s: float = 0.0, phase: str = "") -> None:
        """Note a heartbeat. `phase`: of the actor's start; "": its loop runs."""
        beat = self._heartbeats.get(actor)
        if beat is None:
            return
        beat.heard_at, beat.step_s, beat.probed = self._clock(), step_s, beat.probed and bool(phase)
        beat.waits_s = 0.0
        if beat.phase != phase:
            beat.phase, beat.began_at, beat.num_warnings = phase, beat.heard_at, 0

    def waits(self, actor: str, waits_s: float) -> None:
        """Note that a rank has waited for others for so long. It is in the phase of its start that it was in."""
        beat = self._heartbeats.get(actor)
        if beat is not None:
            beat.heard_at, beat.waits_s = self._clock(), waits_s

    def tick(self, cpu_s: Mapping[str, float]) -> list[str]:
        """Call every `interval_s`, with the CPU time of each process. Returns the actors to probe.

        Phases of a start that take long are logged. An interval that took longer counts as one: this process was
        stopped or busy, and answers may wait to be read.
        """
        now = self._clock()
        interval, self._ticked_at = now - self._ticked_at, now
        slept = max(0.0, interval - 2 * self.interval_s)
        for actor, beat in self._heartbeats.items():
            beat.heard_at = min(now, beat.heard_at + slept)
            beat.worked_at = min(now, beat.worked_at + slept)
            self._note_work(beat, cpu_s.get(actor, beat.cpu_s), BUSY_SHARE * interval)
            self._name_phase(actor, beat, now)
        due_s = self.interval_s / 2
        silent = [actor for actor, beat in self._heartbeats.items() if not beat.probed and self._age(beat) > due_s]
        for actor in silent:
            self._heartbeats[actor].probed = True
        return silent

    def hung(self) -> list[Late]:
        """Actors that are to be given up: no rank that answers while another is silent, which will be late soon."""
        if not self._timeout_s:
            return []
        late = [late for late in self._late() if late.seconds > self._timeout_s * self._num_timeouts(late.actor)]
        ranks = {actor: beat for actor, beat in self._heartbeats.items() if rank_of(actor) is not None}
        one_is_silent = any(self._is_silent(beat) for beat in ranks.values())
        return [each for each in late if not (one_is_silent and each.has_answered and each.actor in ranks)]

    def unresponsive(self) -> Late | None:
        """The actor that is ready and should have given a heartbeat for longest; None if none is late."""
        ready = [late for late in self._late() if not self._heartbeats[late.actor].phase]
        late = [each for each in ready if each.idle_s > self.late_s or each.seconds > self.busy_s]
        silent = [each for each in late if not each.has_answered]
        return max(silent or late, key=lambda each: each.seconds, default=None)

    def starting(self) -> Late | None:
        """The actor that starts, with its phase, a named one before others; None if all are ready."""
        now = self._clock()
        found = [Late(actor, now - beat.began_at, beat.phase) for actor, beat in self._heartbeats.items() if beat.phase]
        return max(found, key=lambda each: (each.doing != FIRST_PHASE, each.seconds), default=None)

    def ages(self) -> dict[str, float]:
        """By actor, seconds since its last heartbeat."""
        return {actor: self._age(beat) for actor, beat in self._heartbeats.items()}

    def _late(self) -> Iterable[Late]:
        """What could be said against each actor. A step in flight is the device's work, not the process's."""
        for actor, beat in self._heartbeats.items():
            age, idle_s = self._age(beat), self._clock() - max(beat.heard_at, beat.worked_at)
            answers = not self._is_silent(beat)
            if beat.waits_s:
                yield Late(actor, beat.waits_s + age, "it has waited for the other ranks", age, answers)
            elif beat.phase:
                yield Late(actor, age, f"no heartbeat while {beat.phase}", idle_s, answers)
            elif beat.step_s:
                yield Late(actor, beat.step_s + age, "a step has been in flight", beat.step_s + age, answers)
            elif beat.worked_at < self._ticked_at:
                yield Late(actor, age, "no heartbeat", idle_s, answers)
            else:
                yield Late(actor, age, "busy without a heartbeat", idle_s, answers)

    def _is_silent(self, beat: Heartbeat) -> bool:
        """Whether a probe should have been answered by now."""
        return self._age(beat) > 2 * self.interval_s

    def _note_work(self, beat: Heartbeat, cpu_s: float, least_s: float) -> None:
        """A process that is seen for the first time has worked."""
        if cpu_s - beat.cpu_s >= least_s:
            beat.worked_at = self._ticked_at
        beat.cpu_s = cpu_s

    def _age(self, beat: Heartbeat) -> float:
        return self._clock() - beat.heard_at

    def _num_timeouts(self, actor: str) -> int:
        return START_TIMEOUTS if self._heartbeats[actor].phase else 1

    def _name_phase(self, actor: str, beat: Heartbeat, now: float) -> None:
        if beat.phase and self._timeout_s and now - beat.began_at > self._timeout_s * (beat.num_warnings + 1):
            beat.num_warnings += 1
            log.warning("%s: still %s, for %.0f s", actor, beat.phase, now - beat.began_at)


WATCH_S = 5.0  # for which a process records after a question
KEPT_S = 4.0
MOST_KEPT = 20_000
BETWEEN_S = 0.25  # questions, however many people watch
GIVEN_UP_S = 5.0  # a question that has no answer for so long: its process has ended, say


class WatchedRecords:
    """The newest records of all processes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._records: deque[Record] = deque(maxlen=MOST_KEPT)
        self._asked: dict[str, float] = {}  # by actor: when, of questions without an answer
        self._asked_at = -BETWEEN_S

    def to_ask(self, actors: Iterable[str]) -> list[str]:
        """Those to be asked now; they count as asked."""
        now = self._clock()
        if now - self._asked_at < BETWEEN_S:
            return []
        self._asked_at = now
        due = [actor for actor in actors if now - self._asked.get(actor, -GIVEN_UP_S) >= GIVEN_UP_S]
        self._asked.update(dict.fromkeys(due, now))
        return due

    def add(self, actor: str, records: Iterable[Record]) -> None:
        self._asked.pop(actor, None)
        self._records.extend(records)

    def newest(self) -> list[Record]:
        """Those of the last seconds, by their begin."""
        since = self._clock() - KEPT_S
        kept = [record for record in self._records if record.end >= since]
        self._records = deque(kept, maxlen=MOST_KEPT)
        return sorted(kept, key=lambda record: (record.begin, -record.end))


class RecoveryLimit:
    """At most `settings.most` recoveries within `settings.window_s`; none before the engine was ready."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = RecoverySettings()  # off, until the engine is ready
        self.cause: ActorDied | None = None  # of the recovery that is under way
        self.died_at = 0.0  # when that was; monotonic, in seconds
        self._clock = clock
        self._begun: deque[float] = deque()

    def begin(self, error: ActorDied, what: str) -> bool:
        """Begin a recovery, or begin again one that has met another death. False: the run is to end.

        `what`: is started again, for the log.
        """
        settings, now = self.settings, self._clock()
        while self._begun and now - self._begun[0] > settings.window_s:
            self._begun.popleft()
        if not settings.enabled:
            return False
        minutes = settings.window_s / 60
        if len(self._begun) >= settings.most:
            log.error("the engine has recovered %d times in %.0f minutes, which is the limit", settings.most, minutes)
            return False
        self._begun.append(now)
        if self.cause is None:
            self.died_at = now
        self.cause = error
        count = len(self._begun), settings.most, minutes
        log.error("%s; %s started again (%d of %d times in %.0f minutes)", error, what, *count)
        return True

    def end(self) -> None:
        self.cause = None
