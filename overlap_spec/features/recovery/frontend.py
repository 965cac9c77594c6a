"""What goes on when processes are started again: open requests, from their next token, and totals of all schedulers.

The frontend keeps of a request what it has sent to the scheduler and which tokens have come back. Draws are keyed by
seed and position, so the tokens that follow are those that would have followed anyway.

    died -> [ old links dropped ] -> Recover -> open requests, flushes -> [ worker loads ] -> EngineLimits: recovered

Where the frontend itself is another one, its clients send their requests again, and the scheduler, which has stayed,
what the one before has counted (`Memo`).
"""

import logging
import time
from array import array

import msgspec
from msgspec.structs import replace

from overlap_spec.client.link import ClientLink, id_array, pack_ids
from overlap_spec.config.ranks import rank_of
from overlap_spec.frontend.hooks import Parts, RequestHook
from overlap_spec.frontend.lifecycle import Lifecycle, Outbox
from overlap_spec.frontend.open_requests import Follower, Gains, OpenRequest, Run
from overlap_spec.frontend.output import Piece
from overlap_spec.frontend.service import stats_reply
from overlap_spec.messages import (
    Admit,
    EngineLimits,
    ErrorCode,
    GetStats,
    Memo,
    Message,
    Recover,
    Resumed,
    Stats,
    TextDeltas,
    ToFrontend,
    Usage,
)

MOST_DEATHS = 2  # of workers that had a request in the batch: then it is not run again
NAME = "recovery"  # of the memo

log = logging.getLogger(__name__)


class Replay(Follower):
    """One request: as it was admitted, and what it has been given since."""

    __slots__ = ("admit", "is_started", "num_deaths", "output")

    def __init__(self, admit: Admit) -> None:
        self.admit = admit
        self.output = array("i") if admit.resumed is None else id_array(admit.resumed.output)
        self.is_started = False  # it has a slot
        self.num_deaths = 0  # of workers, while it had one

    def started(self) -> None:
        """It is in the batch if the worker dies."""
        self.is_started = True

    def gained(self, gains: Gains, run: Run, piece: Piece, reply: TextDeltas) -> None:
        """Keep what is served."""
        self.output.extend(piece.token_ids)

    def admission(self, usage: Usage) -> Admit:
        """Admits it again, to go on at its next token; `usage` is the last that it has reported."""
        if not self.output:
            return self.admit
        resumed = Resumed(pack_ids(self.output), usage.cached_tokens, usage.spec_verify_ct)
        return replace(self.admit, resumed=resumed)

    def died(self, actor: str) -> bool:
        """Note that an actor has died while the request was open. Returns whether the worker has too often."""
        self.num_deaths += self.is_started and rank_of(actor) is not None
        self.is_started = False
        return self.num_deaths >= MOST_DEATHS


def attach(parts: Parts) -> RequestHook | None:
    """Follows every request, unless the engine is not to recover."""
    if not parts.settings.recovery.enabled:
        return None
    hook = RecoveryHook(parts.lifecycle, parts.scheduler, parts.clients)
    hook.recoveries.count(parts.generation)
    return hook


class RecoveryHook(RequestHook):
    """Admits open requests to a new scheduler, and adds the figures of those that are gone to its figures."""

    def __init__(self, lifecycle: Lifecycle, scheduler: Outbox, clients: ClientLink) -> None:
        self.recoveries = Recoveries()
        self._lifecycle = lifecycle
        self._scheduler = scheduler
        self._clients = clients

    def admitted(self, request: OpenRequest, admit: Admit) -> Follower:
        """What has been served of a request is known row by row."""
        if admit.resumed is not None:
            self.recoveries.continued()
        return Replay(admit)

    def message(self, message: ToFrontend) -> bool:
        """The engine is warm again, or reports."""
        match message:
            case EngineLimits():
                self.recoveries.warm()
                self._note()
            case Stats():
                self.recoveries.reported(message)
                self._note()
            case Memo(feature=feature) if feature == NAME:
                self.recoveries.remember(message.state)
                return True
        return False

    def _note(self) -> None:
        """Let the scheduler keep what has changed, for another frontend."""
        if (state := self.recoveries.changed()) is not None:
            self._scheduler.send(Memo(NAME, state))

    def query(self, client: int, message: Message) -> bool:
        """Answer GetStats, with what was counted before this scheduler."""
        if not isinstance(message, GetStats):
            return False
        self._clients.send(client, stats_reply(message, self.recoveries.stats))
        return True

    def recovered(self, message: Recover) -> None:
        """Let every open request go on there. One whose prompt is still being read is admitted when it is known."""
        self.recoveries.begin(message)
        requests = self._lifecycle.requests
        admitted = [(request, replay) for request in requests if (replay := request.follower(Replay)) is not None]
        poisonous = [request for request, replay in admitted if replay.died(message.actor)]
        for request in poisonous:
            text = (
                f"the worker has died {MOST_DEATHS} times while request {request.name!r} was running: it is not"
                f" run again ({message.error})"
            )
            log.error("%s", text)
            self._lifecycle.reject(request, ErrorCode.FAILED, text)
        again = [(request, replay) for request, replay in admitted if request in requests]
        for request, replay in again:
            self._scheduler.send(replay.admission(request.usage))
        self.recoveries.replayed(len(again), len(poisonous))
        self._note()


class Recoveries:
    """Counts recoveries, times them, and adds the figures of the schedulers that are gone to those of the last."""

    def __init__(self) -> None:
        self.under_way: Recover | None = None
        self._own = Stats()  # what is counted here
        self._gone = Stats()  # totals of the schedulers that are gone
        self._last = Stats()
        self._noted = self._own, self._gone  # at the scheduler

    def changed(self) -> bytes | None:
        """What another frontend needs to count on; None if that is what the last call returned."""
        known = self._own, self._gone
        if known == self._noted:
            return None
        self._noted = known
        return msgspec.msgpack.encode(known)

    def remember(self, state: bytes) -> None:
        """Count on from what the frontend before has noted."""
        own, self._gone = msgspec.msgpack.decode(state, type=tuple[Stats, Stats])
        self._own = replace(own, recoveries_total=self._own.recoveries_total)
        self._noted = self._own, self._gone

    def count(self, num_recoveries: int) -> None:
        """So many there were before this process was started."""
        self._own = replace(self._own, recoveries_total=num_recoveries)

    def continued(self) -> None:
        """A request goes on that another frontend has begun."""
        self._own = replace(self._own, replayed_total=self._own.replayed_total + 1)

    def begin(self, message: Recover) -> None:
        """Scheduler and worker are being started again."""
        self.under_way = message
        self._gone, self._last = _added(self._last, self._gone), Stats()
        self._own = replace(self._own, recoveries_total=self._own.recoveries_total + 1)

    def replayed(self, num_requests: int, num_poisonous: int) -> None:
        """So many open requests were admitted again, and so many were not."""
        own = self._own
        self._own = replace(
            own,
            replayed_total=own.replayed_total + num_requests,
            poisonous_total=own.poisonous_total + num_poisonous,
        )
        log.info("open requests that go on when the engine is warm again: %d", num_requests)

    def warm(self) -> None:
        """The engine is warm, for the first time or again."""
        if self.under_way is not None:
            seconds = time.monotonic() - self.under_way.died_at
            self._own = replace(self._own, last_recovery=seconds)
            log.info("recovered from the death of the %s in %.1f s", self.under_way.actor, seconds)
            self.under_way = None

    def reported(self, stats: Stats) -> None:
        """Keep the scheduler's newest report."""
        self._last = stats

    @property
    def stats(self) -> Stats:
        """The newest report, with what was done before this scheduler."""
        return _added(_added(self._last, self._gone), self._own) if self._own.recoveries_total else self._last


def _added(stats: Stats, before: Stats) -> Stats:
    """`stats` with the totals of both; what is no total is the newer one's, if it has any."""
    totals = {
        name: _sum(getattr(stats, name), getattr(before, name))
        for name in Stats.__struct_fields__
        if name.endswith("_total")
    }
    return replace(stats, **totals, last_recovery=stats.last_recovery or before.last_recovery)


def _sum(one: float | tuple[int, ...], other: float | tuple[int, ...]) -> float | tuple[int, ...]:
    if isinstance(one, tuple) and isinstance(other, tuple):
        longer, shorter = (one, other) if len(one) >= len(other) else (other, one)
        return tuple(a + b for a, b in zip(longer, (*shorter, *[0] * (len(longer) - len(shorter))), strict=True))
    assert not isinstance(one, tuple) and not isinstance(other, tuple)
    return one + other
