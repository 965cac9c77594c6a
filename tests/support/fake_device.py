"""A device played by hand: it keeps what the worker's rows would hold and checks every plan against it.

The token at position p of a request is a pure function of (seed, p), so every stream is known beforehand; accept
lengths are random. KV is played row by row: the row of position p holds the token at p and the one after it (what the
draft's row depends on), so a page that another request wrote to, a stale row or a wrong prefix hit is found when the
rows are read.
"""

import random
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from overlap_spec.config import CacheSettings, SchedulerSettings
from overlap_spec.messages import (
    Abort,
    AbortReason,
    Admit,
    EngineLimits,
    Extension,
    Finish,
    FinishKind,
    Flushed,
    Margins,
    Memo,
    Phase,
    Refused,
    Replayed,
    SamplingParams,
    Stats,
    StepPlan,
    StepResult,
    ToFrontend,
    TokenDeltas,
    ToScheduler,
    ToWorker,
    TreePaths,
    Usage,
    WorkerReady,
    find,
)
from overlap_spec.runtime.tracing import NO_TRACE
from overlap_spec.scheduler.build import build_scheduler
from overlap_spec.scheduler.loop import Links
from overlap_spec.worker.inputs import DraftLag
from support.memory_link import MemoryLink
from support.plans import SlotPart, is_audit, parts_of
from support.random_chunks import RandomChunks
from support.random_widths import RandomWidths
from support.scheduler_features import with_features
from support.scheduler_invariants import check_invariants

VOCAB = 97
GARBAGE = (-7, (-7,))  # what a rejected or proposed row leaves behind
NOT_ABSORBED = (-8,)  # draft KV of a row that a step of width 1 left behind


def draw_token(seed: int, position: int) -> int:
    return random.Random(seed * 1_000_003 + position).randrange(VOCAB)


def pick(seed: int, position: int, stop_ids: tuple[int, ...], stop_from: int) -> int:
    """The token at a position, stop ids masked before `stop_from`."""
    token = draw_token(seed, position)
    while position < stop_from and token in stop_ids:
        token = (token + 1) % VOCAB
    return token


def expected_stream(admit: Admit) -> tuple[list[int], Finish]:
    """The tokens and the finish that a request must get, computed without an engine."""
    start = len(admit.prompt) // 4
    stop_from = start + admit.sampling.min_new_tokens
    tokens: list[int] = []
    for position in range(start, start + admit.sampling.max_new_tokens):
        tokens.append(pick(admit.sampling.seed, position, admit.stop_ids, stop_from))
        if tokens[-1] in admit.stop_ids and position >= stop_from:
            return tokens, Finish(FinishKind.STOP, tokens[-1])
    return tokens, Finish(FinishKind.LENGTH)


def make_ready(**changes: Any) -> WorkerReady:
    fields = {
        "num_slots": 8,
        "num_pages": 65,
        "page_size": 4,
        "max_len": 256,
        "width": 4,
        "max_depth": 2,
        "key_lookahead": 1,
        "vocab_size": VOCAB,
        "chunk_tokens": 64,
    }
    return WorkerReady(**{**fields, **changes})


def make_admit(uid: int, prompt: list[int], max_new: int = 8, stop_ids: tuple[int, ...] = (), **sampling) -> Admit:
    params = SamplingParams(max_new_tokens=max_new, seed=sampling.pop("seed", uid), **sampling)
    return Admit(uid, array("i", prompt).tobytes(), params, stop_ids, 0.0)


@dataclass
class Row:
    """One slot of the device."""

    work: SlotPart  # the one with the reset
    tokens: list[int]  # every committed token, by position
    pages: list[int] = field(default_factory=list)
    prefilled: bool = False
    deferred: int = 0  # rows before the root without draft KV
    num_guesses: int = 0  # in the window


class FakeDevice:
    """Runs plans in order, one part per call of `run`. `branches`: guesses are no chain, and results have paths.

    `leaves_out`: how often a slot is left out of a decode step, as one whose masks are late.
    """

    def __init__(self, ready: WorkerReady, rng: random.Random, branches: bool = False, leaves_out: float = 0.0) -> None:
        self.ready = ready
        self.branches = branches
        self.leaves_out = leaves_out
        self.num_left_out = 0
        self.rng = rng
        self.rows: dict[int, Row] = {}
        self.kv: list[tuple[int, tuple[int, ...]] | None] = [None] * (ready.num_pages * ready.page_size)
        self.last_step = 0
        self._windows: set[int] | None = None  # slots of the step's first part, if its second one is to come
        self.num_mixed = 0
        self.num_split_chunks = 0
        self.num_catch_ups: Counter[str] = Counter()
        self.lag = DraftLag(ready.max_deferred)

    def lengths(self) -> dict[int, int]:
        return {slot: len(row.tokens) for slot, row in self.rows.items() if row.prefilled}

    def run(self, part: StepPlan, is_last: bool = True) -> StepResult:
        """Run a plan of one part. `is_last`: no other part of the step follows."""
        is_second = self._windows is not None
        assert part.step_id == self.last_step + (not is_second), "steps out of order"
        self.last_step = part.step_id
        if self._windows is not None:
            assert part.chunks and is_last and not is_audit(part), "prompts come second"
            assert not self._windows & set(part.rows), "a slot has a window and a chunk"
        self.num_mixed += is_second
        self._windows = None if is_last else set(part.slots)
        return replace(self._run(part), is_last=is_last)

    def _run(self, plan: StepPlan) -> StepResult:
        if is_audit(plan):
            return self._audit(plan)
        slots = plan.rows
        assert len(slots) == len(set(slots)) and slots
        assert 1 <= plan.width <= self.ready.width
        if plan.phase is Phase.PREFILL:
            tokens = [self._prefill(work, plan.width) for work in parts_of(plan)]
            assert sum(len(work.tokens) // 4 for work in parts_of(plan)) <= self.ready.chunk_tokens
            return StepResult(plan.step_id, tokens, [0] * len(tokens), 0.001)
        missed = self._catch_up(plan)
        num_guesses = [min(self.rows[slot].num_guesses, plan.width - 1) for slot in slots]
        late = self._late(plan)
        self.lag.after(slots, plan.width, missed, {work.slot for work in late})
        tokens = [self._leave_out(work, plan) if work in late else self._decode(work, plan) for work in parts_of(plan)]
        if not self.branches or plan.width == 1:
            return StepResult(plan.step_id, tokens, num_guesses, 0.001, caught_up=missed)
        paths = [self._path(*row) for row in zip(tokens, num_guesses, strict=True)]
        trees = (TreePaths(paths, num_guesses),)
        return StepResult(plan.step_id, tokens, num_guesses, 0.001, extensions=trees, caught_up=missed)

    def _catch_up(self, plan: StepPlan) -> bool:
        """Let drafts absorb what they missed, if the worker's count wants it before this step."""
        missed = self.lag.before(plan.slots, plan.width)
        for slot, count in zip(plan.slots, missed, strict=False):
            row = self.rows[slot]
            assert count == row.deferred <= self.ready.max_deferred
            self._write_committed(row, len(row.tokens) - 1 - count)
            row.deferred = 0
        if missed:
            self.num_catch_ups["full" if plan.width == 1 else "wider"] += 1
        return bool(missed)

    def _audit(self, plan: StepPlan) -> StepResult:
        """Plain decoding draws what was served; the KV of the positions before is the audit's own."""
        assert plan.phase is Phase.PREFILL or plan.width == 1
        replayed = find(plan.extensions, Replayed)
        assert not plan.drafts and set(plan.resets) == set(plan.new_pages)
        for part in parts_of(plan):
            assert part.slot > self.ready.num_slots, "an audit has a slot of requests, or the dummy"
            if part.reset is not None:
                self.rows[part.slot] = Row(part, [], list(part.new_pages))
        if plan.phase is Phase.PREFILL:
            for chunk in plan.chunks:
                self._replay(chunk.slot, chunk.start, array("i", chunk.tokens).tolist())
                assert chunk.next_token >= 0, "an audit draws while it prefills"
            return StepResult(plan.step_id, [[] for _ in plan.chunks], [0] * len(plan.chunks), 0.001)
        for slot, position, root in zip(plan.slots, replayed.positions, replayed.roots, strict=True):
            self._replay(slot, position, [root])
        drawn = [[token] for token in replayed.served]
        return StepResult(plan.step_id, drawn, [0] * len(drawn), 0.001, extensions=(Margins([1.0] * len(drawn)),))

    def _replay(self, slot: int, start: int, tokens: list[int]) -> None:
        row = self.rows[slot]
        assert start == len(row.tokens), "an audit leaves a gap"
        for position, token in enumerate(row.tokens):
            assert self._read(row, position) == (token, ("audit",)), "its KV is another's"
        row.tokens += tokens
        for position in range(start, len(row.tokens)):
            self._write(row, position, (row.tokens[position], ("audit",)))

    def _late(self, plan: StepPlan) -> list[SlotPart]:
        """Slots that are left out: never all."""
        if not self.leaves_out:
            return []
        late = [work for work in parts_of(plan) if self.rng.random() < self.leaves_out]
        return late if len(late) < len(parts_of(plan)) else late[1:]

    def _leave_out(self, work: SlotPart, plan: StepPlan) -> list[int]:
        """Only the window's rows are written."""
        row = self.rows[work.slot]
        row.pages += work.new_pages
        root = len(row.tokens) - 1
        for position in range(root, root + plan.width):
            self._write(row, position, GARBAGE)
        self.num_left_out += 1
        return []

    def _path(self, run: list[int], num_guesses: int) -> list[int]:
        """A path of any columns: this device keeps no tree."""
        return sorted(self.rng.sample(range(1, num_guesses + 1), len(run) - 1)) if run else []

    def _prefill(self, work: SlotPart, width: int) -> list[int]:
        chunk = array("i", work.tokens).tolist()
        assert chunk
        if work.reset is not None:
            row = self.rows[work.slot] = Row(work, [], list(work.new_pages))
            self.lag.forget([work.slot])
            row.tokens = [self._read(row, position)[0] for position in range(work.start)]
        row = self.rows[work.slot]
        row.pages += work.new_pages if work.reset is None else []
        assert not row.prefilled and work.start == len(row.tokens), "chunks leave a gap"
        self._check_kv(row, work.start, following=chunk[0])
        row.tokens += chunk
        reset, length = row.work.reset, len(row.tokens)
        first_output = reset.stop_from - reset.sampling.min_new_tokens
        assert reset.output_from == first_output <= reset.prompt_len, "the output begins where it first began"
        row.prefilled = length == reset.prompt_len
        assert row.prefilled == (work.next_token == -1)
        if row.prefilled:
            row.tokens.append(pick(reset.sampling.seed, length, reset.stop_ids, reset.stop_from))
            self._write_committed(row, work.start)
            self._propose(row, width)
            return row.tokens[-1:]
        self.num_split_chunks += 1
        row.tokens.append(work.next_token)
        self._write_committed(row, work.start)
        row.tokens.pop()
        return []

    def _decode(self, work: SlotPart, plan: StepPlan) -> list[int]:
        row = self.rows[work.slot]
        assert row.prefilled and work.reset is None and not work.tokens
        row.pages += work.new_pages
        root = len(row.tokens) - 1
        self._check_kv(row, root, following=row.tokens[root])
        for position in range(root, root + plan.width):  # the verify pass writes the whole window
            self._write(row, position, GARBAGE)
        reset = row.work.reset
        run = [
            pick(reset.sampling.seed, root + 1 + i, reset.stop_ids, reset.stop_from)
            for i in range(self.rng.randint(1, min(row.num_guesses + 1, plan.width)))
        ]
        row.tokens += run
        if plan.width == 1 and self.ready.max_deferred:
            self._write(row, root, (row.tokens[root], NOT_ABSORBED))
            row.deferred += 1
        else:
            self._write_committed(row, root)
        self._propose(row, plan.width)
        return run

    def _write_committed(self, row: Row, start: int) -> None:
        """Draft rows from `start` on, and those before that depend on tokens which are known by now."""
        ahead = self.ready.key_lookahead
        for position in range(max(start - max(ahead - 1, 0), row.work.start), len(row.tokens) - 1):
            after = tuple(row.tokens[position + 1 : position + 1 + ahead])
            self._write(row, position, (row.tokens[position], after))

    def _propose(self, row: Row, width: int) -> None:
        """Drafting the next window writes draft rows from the root on."""
        assert width == 1 or row.deferred == 0, "drafts with rows missing"
        most_steps = row.work.reset.sampling.speculative.num_steps
        row.num_guesses = width - 1 if most_steps is None else min(width - 1, most_steps)
        root = len(row.tokens) - 1
        for position in range(root, root + width - 1):
            self._write(row, position, GARBAGE)

    def _check_kv(self, row: Row, length: int, following: int) -> None:
        """Attention reads every row below `length`: it must hold this sequence's tokens."""
        absorbed = [*row.tokens[:length], following][: length - row.deferred + 1]
        for position in range(length):
            after = tuple(absorbed[position + 1 : position + 1 + self.ready.key_lookahead])
            token, draft = self._read(row, position)
            assert token == row.tokens[position], f"KV of position {position} is not this request's"
            if position >= length - row.deferred:
                assert draft == NOT_ABSORBED
                continue
            # A cached row may depend on later tokens: those are checked once the request has them.
            assert draft[: len(after)] == after, f"draft KV of position {position} is stale"

    def _address(self, row: Row, position: int) -> int:
        page_size = self.ready.page_size
        assert position // page_size < len(row.pages), f"position {position} is outside of the slot's pages"
        return row.pages[position // page_size] * page_size + position % page_size

    def _read(self, row: Row, position: int) -> tuple[int, tuple[int, ...]]:
        kv = self.kv[self._address(row, position)]
        assert kv is not None, "read before written"
        return kv

    def _write(self, row: Row, position: int, value: tuple[int, tuple[int, ...]]) -> None:
        assert position >= row.work.start, "wrote into the cached prefix"
        self.kv[self._address(row, position)] = value


class Bench:
    """A scheduler over memory links with a fake device, driven event by event; checks after each one."""

    def __init__(self, ready: WorkerReady, depth: int = 2, seed: int = 0, **options) -> None:
        self.rng = random.Random(seed)
        self.device = FakeDevice(ready, self.rng, options.pop("branches", False), options.pop("leaves_out", 0.0))
        self.now = 0.0
        self.inbox: MemoryLink = MemoryLink(ToScheduler)
        self.worker: MemoryLink = MemoryLink(ToWorker)
        self.frontend: MemoryLink = MemoryLink(ToFrontend)
        settings = SchedulerSettings(
            options.pop("max_running", 64), depth, options.pop("chunk_tokens", None), None,
            max_gap_s=options.pop("max_gap_s", None), schedule_policy=options.pop("schedule_policy", "fcfs"),
            windows_with_prompts=options.pop("windows_with_prompts", False),
            deterministic=options.pop("deterministic", False),
        )  # fmt: skip
        cache = CacheSettings(ready.page_size, None, 0.9, options.pop("prefix_cache", True))
        trace = options.pop("trace", NO_TRACE)
        links = Links(self.inbox, self.worker, self.frontend, trace, new_frontend=self._linked)
        self.scheduler = with_features(build_scheduler(ready, settings, cache, links, clock=lambda: self.now))
        widths_seed = options.pop("widths_seed", None)
        if widths_seed is not None:
            self.scheduler.planner.widths.policy = RandomWidths(widths_seed, ready.width)
        chunks_seed = options.pop("chunks_seed", None)
        if chunks_seed is not None:
            self.scheduler.planner.chunks = RandomChunks(chunks_seed, self.scheduler.limits)
        self.plans: deque[StepPlan] = deque()  # parts of what was sent, not yet run
        self.results: deque[StepResult] = deque()  # run, not yet delivered
        self.all_plans: list[StepPlan] = []
        self.admits: dict[int, Admit] = {}
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, Finish] = {}
        self.usages: dict[int, Usage] = {}
        self.refused: dict[int, Refused] = {}
        self.closed: set[int] = set()  # by the frontend, on a stop string
        self.flushed: list[bool] = []
        self.stats: list[Stats] = []
        self.to_worker: list[Extension] = []  # what features have told their other parts
        self.to_frontend: list[Extension] = []
        self.generation = 0  # of the frontend
        self.limits: list[EngineLimits] = []
        self.memos: list[Memo] = []

    def _linked(self, generation: int) -> MemoryLink:
        """The scheduler's link to another frontend."""
        self.generation, self.frontend = generation, MemoryLink(ToFrontend)
        return self.frontend

    # --- events

    def admit(self, admit: Admit) -> None:
        self.admits[admit.uid] = admit
        self.tokens[admit.uid] = []
        self.deliver(admit)

    def abort(self, uid: int, reason: AbortReason = AbortReason.REQUESTED) -> None:
        if reason is AbortReason.STOP_STRING:
            self.closed.add(uid)
        self.deliver(Abort(uid, reason))

    def run_device(self) -> None:
        """Let the device run the oldest part of a plan that it has."""
        part = self.plans.popleft()
        is_last = not (self.plans and self.plans[0].step_id == part.step_id)
        self.results.append(self.device.run(part, is_last))
        check_invariants(self.scheduler, self.device.lengths())

    def deliver_result(self) -> None:
        self.deliver(self.results.popleft())

    def deliver(self, message: ToScheduler) -> None:
        """One turn of the loop, with checks between its parts."""
        self.scheduler.dispatch(message)
        check_invariants(self.scheduler, self.device.lengths())
        self.scheduler.plan_ahead()
        self.scheduler.send_replies()
        check_invariants(self.scheduler, self.device.lengths())
        assert self.scheduler.inflight or self.scheduler.queues.idle, "work is left and nothing in flight"
        sent = self.worker.drain()
        plans = [each for each in sent if isinstance(each, StepPlan)]
        self.plans += [part for plan in plans for part in plan.parts()]
        self.all_plans += plans
        self.to_worker += [each for each in sent if isinstance(each, Extension)]
        for message in self.frontend.drain():
            self._receive(message)

    def finish_all(self) -> None:
        while self.plans or self.results:
            if self.results and (not self.plans or self.rng.random() < 0.5):
                self.deliver_result()
            else:
                self.run_device()

    # --- what the frontend receives

    def _receive(self, message: ToFrontend) -> None:
        match message:
            case TokenDeltas():
                rows = (message.uids, message.tokens, message.finishes, message.verify_steps)
                assert len(message.uids) == len(set(message.uids)) > 0
                for uid, tokens, finish, verify_steps in zip(*rows, strict=True):
                    assert uid not in self.finishes and uid not in self.closed, "a row of a closed request"
                    self.tokens[uid] += tokens
                    admit, cached = self.admits[uid], message.cached_tokens.get(uid)
                    before = self.usages.get(uid) or Usage(len(admit.prompt) // 4, 0, 0, 0)
                    cached = before.cached_tokens if cached is None else cached
                    self.usages[uid] = Usage(before.prompt_tokens, cached, len(self.tokens[uid]), verify_steps)
                    if finish is not None:
                        self.finishes[uid] = finish
            case Refused():
                self.refused[message.uid] = message
            case Flushed():
                self.flushed.append(message.success)
            case Stats():
                self.stats.append(message)
            case Extension():
                self.to_frontend.append(message)
            case EngineLimits():
                self.limits.append(message)
            case Memo():
                assert len(self.limits) < self.generation, "what is remembered comes before anything counts on"
                self.memos.append(message)

    def check_streams(self) -> None:
        """Every request got exactly its tokens; an aborted one, the beginning of them."""
        for uid, admit in self.admits.items():
            if uid in self.refused:
                continue
            tokens, finish = expected_stream(admit)
            if uid in self.closed or self.finishes[uid].kind is FinishKind.ABORT:
                assert self.tokens[uid] == tokens[: len(self.tokens[uid])]
            else:
                assert self.tokens[uid] == tokens, f"request {uid}"
                assert self.finishes[uid] == finish

    def check_drained(self) -> None:
        """Nothing runs, and every page is free or cached."""
        queues = self.scheduler.queues
        assert queues.idle and not self.scheduler.inflight and not queues.open
        assert queues.memory.num_used == 0
        assert queues.memory.num_available == queues.memory.pool.num_total
