"""Audits in the scheduler: finished requests that are run again in slots of their own, when the device has time.

An audit knows all its tokens before it begins, so it needs all its pages at once and never grows:

    positions    0 ............ P - 1 | P ............ P + N - 1        P prompt tokens, N served ones
    prefill      [ chunks of P - 1 ]    (no prefix cache, no draft)
    decode                      [ one position a step: N of them, from the prompt's last token on ]

Where layers recur (`Limits.state_chunk`), a state begins with a chunk, and a prompt's last position has its bits in a
chunk alone. Chunks have all P then, cut where requests' are cut, and the first served token is not compared.

It holds pages that no request needs. When one does, the youngest audit loses its pages and starts again later. Pages
are handed on while an audit's step is in flight: the next owner's steps come after it on the device.

The request of an audit is told to the other features under the negated uid, as a request of the queues is: one that
they hold waits here until it is released.
"""

import logging
from array import array
from collections import deque
from collections.abc import Sequence

from msgspec.structs import replace

from overlap_spec.errors import RequestError
from overlap_spec.features.audit import Audit, Audited, StopSpeculating
from overlap_spec.messages import (
    AuditRoom,
    ChunkWork,
    Extension,
    Margins,
    Replayed,
    ResetSlot,
    StepPlan,
    StepResult,
    find,
)
from overlap_spec.scheduler.build import Parts
from overlap_spec.scheduler.hooks import SchedulerHook
from overlap_spec.scheduler.requests import Request, Step, unpack_tokens
from overlap_spec.scheduler.width import WidthPolicy

SHARE = 64  # of so many steps one is an audit's, while requests run and at most `LOW_RATE` of them are audited
LOW_RATE = 0.01
CHUNK_BUDGET = 1 / 8  # of a prefill step: what an audit's chunk may keep a request waiting for
MOST_STARTS = 4  # an audit that has lost its pages so often is given up
PAGES_NEEDED = "requests needed its pages"
ABANDONED = "the frontend died meanwhile"
GRAMMAR_ENDED = "its grammar could be followed no further"

log = logging.getLogger(__name__)


def share_of(rate: float) -> int:
    """Of how many steps one is an audit's while requests run: more steps where more requests are to be audited."""
    return max(1, round(SHARE * LOW_RATE / max(rate, LOW_RATE)))


def attach(parts: Parts) -> SchedulerHook | None:
    """Run audits, if the worker keeps slots for them."""
    room = find(parts.limits.extensions, AuditRoom)
    if room is None:
        return None
    audits = Audits(parts, room)
    audits.share = share_of(parts.settings.audit.rate)
    return audits


class AuditRun:
    """One audit: what is planned of it, and what it has found."""

    def __init__(self, audit: Audit, request: Request, first: int) -> None:
        self.audit = audit
        self.request = request  # how tokens are drawn; it is in no queue
        self.first = first  # number of the first token that is compared
        self.prefill_len = request.prompt_len - 1 + first  # positions that chunks have
        self.tokens = request.tokens + unpack_tokens(audit.output)
        self.num_starts = 0
        self.reset()

    def reset(self) -> None:
        self.slot = -1
        self.pages: list[int] = []
        self.is_new = True  # no step of it has been planned
        self.has_failed = False  # the step in flight drew nothing that counts
        self.planned_len = 0  # positions whose KV is written, or will be by the step in flight
        self.drawn = array("i")
        self.margins = array("d")

    @property
    def prefills(self) -> bool:
        """Whether tokens of the prompt are left for chunks."""
        return self.planned_len < self.prefill_len

    @property
    def is_done(self) -> bool:
        """Whether every served token that is compared has been drawn."""
        return self.first + len(self.drawn) >= len(self.tokens) - self.request.prompt_len

    def chunk(self, end: int) -> ChunkWork:
        """Run the positions up to `end`."""
        start, self.planned_len = self.planned_len, end
        return ChunkWork(self.slot, start, self.tokens[start:end].tobytes(), self.tokens[end])


class Audits(SchedulerHook):
    """Owner of the audits' slots and pages. At most one step of theirs is in flight."""

    def __init__(self, parts: Parts, room: AuditRoom) -> None:
        self.waiting: deque[AuditRun] = deque()
        self.running: list[AuditRun] = []  # oldest first
        self.held: dict[int, AuditRun] = {}  # by the uid of the request that other hooks know of, until it is closed
        self._memory = parts.queues.memory
        self._limits = parts.limits
        self.room = room
        self._planner = parts.planner
        self._chunks = parts.planner.chunks
        self._hooks = parts.hooks
        self.free_slots = [room.first_slot + i for i in reversed(range(room.num_slots))]
        self._in_step: list[AuditRun] | None = None
        self._controls_next = False
        self.share = SHARE
        self.num_restarts = 0
        self._num_others = 0  # steps since the last one of an audit
        self._outcomes: list[Audited] = []
        self._ended: list[Request] = []  # which the step in flight may have
        self._memory.borrower = self

    @property
    def num_pages(self) -> int:
        """Pages that requests can have back at once."""
        return sum(len(run.pages) for run in self.running)

    def give_back(self) -> None:
        """Take the youngest audit's pages from it."""
        run = self.running.pop()
        self._memory.pool.drop(reversed(run.pages))
        self._leave_slot(run)
        run.reset()
        self.num_restarts += 1
        if run.num_starts < MOST_STARTS:
            self.waiting.appendleft(run)
        else:
            self._finish(run, PAGES_NEEDED)

    def message(self, message: Extension) -> bool:
        """An audit to run, or that a fault was found after which nothing is to be guessed."""
        match message:
            case Audit():
                self._add(message)
            case StopSpeculating():
                self._planner.widths.policy = WidthPolicy(1)
            case _:
                return False
        return True

    def abandoned(self) -> None:
        """Give up all audits. One in the step in flight takes nothing of it."""
        for run in self.running:
            self._memory.pool.drop(reversed(run.pages))
            self._leave_slot(run)
            run.reset()
        left = [*self.running, *self.waiting, *self.held.values()]
        self.running.clear()
        self.waiting.clear()
        for run in dict.fromkeys(left):
            self._finish(run, ABANDONED)
        self._outcomes.clear()

    def replies(self) -> list[Audited]:
        """What became of audits since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _add(self, audit: Audit) -> None:
        """Queue an audit, unless another hook holds its request."""
        sampling = replace(audit.admit.sampling, log_probs=None)  # tokens are compared, and nothing else
        admit = replace(audit.admit, uid=-audit.admit.uid, sampling=sampling)
        run = AuditRun(audit, Request(admit, self._memory.cache.root), int(self._limits.state_chunk > 0))
        if run.is_done:
            self._outcomes.append(Audited(audit.admit.uid, first=run.first))
        elif self._hooks.admit(run.request, self):
            self.held[admit.uid] = run
        else:
            self.waiting.append(run)

    def released(self, request: Request) -> None:
        self.waiting.append(self.held[request.uid])

    def failed(self, request: Request, error: RequestError) -> None:
        """See `RequestOwner`. The request is still held, or the step in flight cannot run it further."""
        run = self.held.get(request.uid)
        if run is None:
            return
        log.warning("audit: %s", error)
        if run.slot >= 0:
            run.has_failed = True
        elif run not in self.waiting:  # one that has lost its pages is
            self._finish(run, GRAMMAR_ENDED)

    # --- planning -------------------------------------------------------------------------------------------

    def next_step(self, idle: bool) -> Step | None:
        """Plan a step if it is the audits' turn, or no request wants one (`idle`), and an audit has room."""
        if self._in_step is not None or not (idle or self._num_others >= self.share):
            return None
        self._start_waiting()
        if not self.running:
            return None
        self._num_others = 0
        return Step(self._prefill() or self._decode(), [], [], owner=self, holds_cache=False)

    def _start_waiting(self) -> None:
        """Give slots and pages to those that wait, while there are any that no request holds."""
        while self.waiting and self.free_slots:
            pages = self._memory.borrow(self._limits.pages_for(len(self.waiting[0].tokens)))
            if not pages:
                return
            run = self.waiting.popleft()
            run.pages, run.slot = pages, self.free_slots.pop()
            run.num_starts += 1
            run.request.target = run.request.prompt_len
            self.running.append(run)
            for started in self._hooks.started:
                started(run.request)

    def _prefill(self) -> StepPlan | None:
        budget, room = CHUNK_BUDGET, self._chunks.room(decoding=True)
        runs: list[AuditRun] = []
        chunks: list[ChunkWork] = []
        for run in self.running:
            if not run.prefills:
                continue
            most = min(self._limits.affordable(budget, run.planned_len), room.fitting(run.planned_len, len(run.tokens)))
            end = self._chunk_end(run, most, alone=not chunks)
            if end == run.planned_len:
                break
            room.take(run.planned_len, end - run.planned_len)
            budget = max(budget - self._limits.chunk_cost(run.planned_len, end - run.planned_len), 0.0)
            chunks.append(run.chunk(end))
            runs.append(run)
        if not chunks:
            return None
        self._in_step = runs
        pages, resets = _begun(runs)
        step_id, width = self._planner.take_step_id(), self._limits.width
        return StepPlan(step_id, width, [], pages, chunks, resets, drafts=False, extensions=(Replayed(),))

    def _chunk_end(self, run: AuditRun, most: int, alone: bool) -> int:
        """Where the next chunk of at most `most` tokens ends; one that is alone has at least its least size."""
        unit = self._limits.state_chunk or 1
        end, left = run.planned_len + max(most, unit if alone else 0), run.prefill_len - run.planned_len
        last = run.prefill_len - (run.audit.cut if left > run.audit.cut else 0)
        return last if end >= last else end - end % unit

    def _decode(self) -> StepPlan:
        """All that are prefilled; controls and the others take turns, because only controls' steps are padded."""
        kinds = {run.audit.control for run in self.running}
        control = self._controls_next if len(kinds) > 1 else kinds.pop()
        self._controls_next = not control
        self._in_step = runs = [run for run in self.running if run.audit.control == control]
        positions = [run.planned_len for run in runs]
        for run in runs:
            run.planned_len += 1
        replayed = Replayed(
            positions,
            [run.tokens[run.planned_len - 1] for run in runs],
            [run.tokens[run.planned_len] for run in runs],
            self.room.control_slots if control else 0,
        )
        pages, resets = _begun(runs)
        step_id, slots = self._planner.take_step_id(), [run.slot for run in runs]
        return StepPlan(step_id, 1, slots, pages, resets=resets, drafts=False, extensions=(replayed,))

    # --- results --------------------------------------------------------------------------------------------

    def settled(self, step: Step, result: StepResult) -> None:
        """Apply a result of an audit's step; count the others."""
        if step.owner is not self:
            self._num_others += 1
            return
        assert self._in_step is not None and step.plan.step_id == result.step_id, "one step of audits is in flight"
        runs, self._in_step = self._in_step, None
        if not step.plan.chunks:
            self._take(runs, step.plan, result)
        ended, self._ended = self._ended, []
        for request in ended:
            self._hooks.close(request)

    def _take(self, runs: list[AuditRun], plan: StepPlan, result: StepResult) -> None:
        """One that has lost its pages meanwhile takes nothing."""
        replayed, rows = find(plan.extensions, Replayed), find(result.extensions, Margins)
        assert replayed is not None and rows is not None, "a decode step of audits compares"
        for run, position, drawn, margin in zip(runs, replayed.positions, result.tokens, rows.values, strict=True):
            if run.planned_len != position + 1:
                continue  # it has lost its pages since, and begins again
            if run.has_failed:
                self._end(run, GRAMMAR_ENDED)
                continue
            run.drawn.extend(drawn)
            run.margins.append(margin)
            if run.is_done:
                self._end(run)

    def _end(self, run: AuditRun, dropped: str = "") -> None:
        self.running.remove(run)
        self._memory.pool.drop(reversed(run.pages))
        self._leave_slot(run)
        self._finish(run, dropped)

    def _finish(self, run: AuditRun, dropped: str) -> None:
        """Note what became of an audit. Other hooks are told as soon as no step in flight can have its request."""
        drawn, margins = run.drawn.tobytes(), run.margins.tobytes()
        self._outcomes.append(Audited(run.audit.admit.uid, drawn, margins, dropped, run.first))
        self.held.pop(run.request.uid, None)
        if self._in_step is None:
            self._hooks.close(run.request)
        else:
            self._ended.append(run.request)

    def _leave_slot(self, run: AuditRun) -> None:
        self.free_slots.append(run.slot)
        run.slot, run.pages = -1, []


def _begun(runs: Sequence[AuditRun]) -> tuple[dict[int, list[int]], dict[int, ResetSlot]]:
    """Pages and resets, by slot, of those that have a step for the first time since they got their slot."""
    new = [run for run in runs if run.is_new]
    for run in new:
        run.is_new = False
    return {run.slot: list(run.pages) for run in new}, {run.slot: run.request.reset() for run in new}
