"""The planner: builds the next step from the running batch, the waiting queue and the free pages.

The planner does not know the accept lengths of steps in flight, so it plans with upper bounds. It keeps two promises.
The pages of a planned slot cover `reserved_len` + w positions, w being the step's width: `reserved_len` includes the
step's window, and the step proposes the next w positions. And no step is planned for a request that its steps in flight
must finish; each of them commits at least one token.

How wide a decode step is, is `width.py`'s decision.

**The order of prompts** (`PromptTurns`) that share a prefill step: those that the step can finish go first, the
shortest before the others; the rest follow by age. Every other step begins with the oldest prompt. So a short prompt
waits for a few chunks of a long one, and a long one has at least half of the steps from the time on at which it is the
oldest, whatever else arrives.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from overlap_spec.messages import ChunkWork, Phase, StepPlan
from overlap_spec.scheduler.hooks import Hooks
from overlap_spec.scheduler.limits import Beside, ChunkRoom, ChunkSizes, Limits
from overlap_spec.scheduler.queues import Admission, RequestQueues
from overlap_spec.scheduler.requests import Request, Step
from overlap_spec.scheduler.stats import Counters
from overlap_spec.scheduler.width import BatchWidths

MOST_PASSED = 1  # steps in a row that begin with another prompt than the oldest
MOST_DRAWN = 512  # tokens of output that a step computes again, where layers take them one after another


class PromptTurns:
    """Puts the unfinished prompts in order for each prefill step."""

    def __init__(self) -> None:
        self._num_passed = 0

    def order(self, prompts: list[Request], room: ChunkRoom) -> list[Request]:
        """The first of them takes what it can of the step, and leaves the rest to the next. `prompts`: oldest first."""
        if len(prompts) == 1:
            return list(prompts)
        short, long = _parted(prompts, room)
        oldest = prompts[0]
        ordered = short + long
        if ordered[0] is oldest:
            self._num_passed = 0
        elif self._num_passed < MOST_PASSED:
            self._num_passed += 1
        else:
            self._num_passed = 0
            ordered.remove(oldest)
            ordered.insert(0, oldest)
        return ordered


def _parted(prompts: list[Request], room: ChunkRoom) -> tuple[list[Request], list[Request]]:
    """Prompts that the whole step holds, shortest first; and the others."""
    short: list[Request] = []
    long: list[Request] = []
    for request in prompts:
        left = request.target - request.planned_len
        fits = room.fitting(request.planned_len, left, request.before_out, request.out_bytes) == left
        (short if fits else long).append(request)
    short.sort(key=lambda request: request.target - request.planned_len)  # of equals the older one stays first
    return short, long


@dataclass(frozen=True)
class Policies:
    """What steps are sized by; the ledger tells them what steps took and committed."""

    widths: BatchWidths
    chunks: ChunkSizes


class Planner:
    """Windows and prompts share steps, or take turns while there is work for both; features have steps between."""

    def __init__(
        self,
        queues: RequestQueues,
        admission: Admission,
        limits: Limits,
        counters: Counters,
        policies: Policies,
        hooks: Hooks,
    ) -> None:
        self.limits = limits
        self._hooks = hooks
        self.widths = policies.widths
        self.chunks = policies.chunks
        self._turns = PromptTurns()
        self._queues = queues
        self._admission = admission
        self.counters = counters
        self._next_step_id = 0
        self._last = Phase.DECODE
        self._prompts_next = False  # the last step's windows were to share it with prompts, and no size held both

    def next_step(self) -> Step | None:
        """Plan one more step, or None if nothing can run before a result arrives."""
        return self._of_a_feature(idle=False) or self._serve() or self._of_a_feature(idle=self._queues.idle)

    def number_from(self, step_id: int) -> None:
        """Give the next step the id after this one."""
        self._next_step_id = step_id

    def take_step_id(self) -> int:
        self._next_step_id += 1
        return self._next_step_id

    def _serve(self) -> Step | None:
        """Windows, prompts, or both."""
        if self._prompts_next:
            self._prompts_next = False
        else:
            self._admit()
            if self._queues.unfinished and self.chunks.with_windows() and (step := self._decode_narrowed()) is not None:
                return self._with_prompts(step)
        if self._last is Phase.DECODE:
            return self._prefill() or self._decode()
        return self._decode() or self._prefill()

    def _with_prompts(self, step: Step) -> Step:
        """Add prompts to a step of windows, as many as a step of both holds."""
        beside = self.chunks.beside(len(step.windows), step.plan.width)
        if beside is None:
            self._prompts_next = True
            return step
        return self._prefill(step, beside) or step

    def _of_a_feature(self, idle: bool) -> Step | None:
        for next_step in self._hooks.next_step:
            step = next_step(idle)
            if step is not None:
                return step
        return None

    # --- prefill --------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._admission.admit_next():
            pass

    def _prefill(self, windows: Step | None = None, beside: Beside | None = None) -> Step | None:
        """Fill a step with chunks of the unfinished prompts; at most one chunk is cut for want of room.

        `windows`: the step that they are added to; `beside`: what its windows leave to them.
        """
        self._admit()
        unfinished = self._queues.unfinished
        if not unfinished:
            return None
        chunks: list[ChunkWork] = []
        rows: list[tuple[Request, int]] = []
        begun: list[Request] = []  # those whose first chunk it is
        room = self.chunks.room(decoding=beside is not None or self._some_decode(), beside=beside)
        for request in self._turns.order(unfinished, room):
            begins = request.planned_len == request.cached_len
            if begins:
                self._queues.memory.match_again(request)
            if chunks and self._is_drawn(request):
                continue
            end = self._chunk_end(request, room, alone=not chunks)
            if end == request.planned_len:
                break
            chunk = self._chunk(request, end)
            room.take(chunk.start, end - chunk.start, chunk.rows_out[1] - chunk.rows_out[0], request.out_bytes)
            chunks.append(chunk)
            rows.append((request, end))
            if begins:
                begun.append(request)
            if chunk.num_drawn or (end < request.target and end not in request.cuts):
                break
        width = self.widths.after_prompts(self._queues, any(chunk.next_token < 0 for chunk in chunks))
        if windows is not None and self.chunks.narrows_again(len(self._queues.running) - len(unfinished)):
            width = windows.plan.width  # the next step would lose wider windows' guesses
        pages = {request.slot: list(request.pages) for request in begun}
        resets = {request.slot: request.reset() for request in begun}
        if windows is None:
            plan = StepPlan(self._next_id(Phase.PREFILL), width, [], pages, chunks, resets)
            return Step(plan, [], rows, room.expected_s)
        self._last, plan = Phase.PREFILL, windows.plan
        plan = replace(plan, new_pages=plan.new_pages | pages, chunks=chunks, resets=resets, first_width=width)
        return Step(plan, windows.windows, rows, room.expected_s)

    def _some_decode(self) -> bool:
        """Whether a decode step could be planned now, so that requests wait for a step of prompts."""
        return any(
            request.planned_len == request.target
            and len(request.tokens) + request.pending_min < request.committed_limit
            for request in self._queues.running
        )

    def _chunk_end(self, request: Request, room: ChunkRoom, alone: bool) -> int:
        """Where the next chunk ends: with the prompt, else at a page boundary, else (alone) where the room ends."""
        apart = self.limits.drawn_apart and not self._is_drawn(request)
        target = min(request.target, request.prompt_len) if apart else request.target
        unit = self.limits.state_chunk if apart else self.limits.page_size
        most = room.fitting(request.planned_len, target - request.planned_len, request.before_out, request.out_bytes)
        if self._is_drawn(request):
            most = min(most, MOST_DRAWN)
        end = request.planned_len + (max(most, unit if apart else 1) if alone else most)
        if (cut := self._queues.memory.states.cut(request, end)) < end:
            return cut
        if end >= target:
            return self._with_output(request, room) if alone and target < request.target else target
        aligned = end - end % unit
        if aligned > request.planned_len:
            return aligned
        return end if alone else request.planned_len

    def _with_output(self, request: Request, room: ChunkRoom) -> int:
        """Where a chunk of one request ends that ends its prompt, and has as much of the output after it as fits."""
        start, wanted = request.planned_len, request.target - request.planned_len
        end = start + room.fitting(start, wanted, request.before_out, request.out_bytes)
        end = min(end, request.prompt_len + MOST_DRAWN)
        return end if end == request.target else max(end - end % self.limits.page_size, request.prompt_len)

    def _is_drawn(self, request: Request) -> bool:
        """Whether what is to be planned of it is output, which is computed apart."""
        return self.limits.drawn_apart and request.planned_len >= request.prompt_len

    def _chunk(self, request: Request, end: int) -> ChunkWork:
        start, completes = request.planned_len, end == request.target
        num_drawn = max(end - max(start, request.prompt_len), 0) if self.limits.drawn_apart else 0
        states = self._queues.memory.states
        restored = states.restore(request) if start == request.cached_len else -1
        if request.cached_tokens < 0:
            request.cached_tokens = request.cached_len
            self.counters.admitted(request)
        request.planned_len = end
        request.pending_chunks += not completes
        if completes:  # exactly one token follows; the pages for it are there since the request was placed
            self._queues.unfinished.remove(request)
            request.pending_min += 1
            request.pending_max += 1
        next_token = -1 if completes else request.tokens[end]
        packed = request.tokens[start:end].tobytes()
        rows_out, snapshot = request.rows_out(start, end), states.take(request, end)
        self.counters.recomputed_tokens += num_drawn
        return ChunkWork(request.slot, start, packed, next_token, rows_out, restored, snapshot, num_drawn)

    # --- decode ---------------------------------------------------------------------------------------------

    def _decode_narrowed(self) -> Step | None:
        """A step of windows that prompts are to share, narrow if that is better for all."""
        unfinished = self._queues.unfinished
        num_windows = len(self._queues.running) - len(unfinished)
        lengths = [request.target - request.planned_len for request in unfinished]
        return self._decode(self.chunks.narrowing(num_windows, lengths))

    def _decode(self, narrowing: int = 0) -> Step | None:
        """One window for every request that can take one, oldest first: if pages are short, the younger wait.

        `narrowing`: the width that prompts beside them ask for; 0: none does.
        """
        if not self._queues.running:
            return None
        width = self.widths.choose(self._queues, narrowing)
        requests, new_pages = self._windows(width)
        if not requests:
            return None
        self._admission.ratio.decay()
        plan = StepPlan(
            self._next_id(Phase.DECODE),
            width,
            [request.slot for request in requests],
            new_pages,
            drafts=self.limits.draft_lags or self.widths.drafts(),
        )
        return Step(plan, requests, [])

    def _windows(self, width: int) -> tuple[list[Request], dict[int, list[int]]]:
        """Who takes part in a decode step of this width, and new pages by slot.

        This loop and the ledger's take most of a step's time.
        """
        page_size, reach = self.limits.page_size, 2 * width  # this step's window, and the one proposed after it
        candidates = self._beyond_prompts()
        requests: list[Request] = []
        grown: dict[int, list[int]] = {}
        short = False
        for request in candidates:
            committed, pending, most = len(request.tokens), request.pending_min, request.pending_max
            if committed + pending >= request.committed_limit:
                continue  # its steps in flight finish it
            if committed + most + reach > len(request.pages) * page_size:
                new_pages = [] if short else self._grow(request, committed + most + reach)
                while candidates and not candidates[-1].running:
                    candidates.pop()  # preempted for it, the youngest first
                if not new_pages:
                    short = True
                    continue
                grown[request.slot] = new_pages
            request.pending_min = pending + 1
            request.pending_max = most + width
            requests.append(request)
        return requests, grown

    def _beyond_prompts(self) -> list[Request]:
        """The running requests whose prompts are planned, oldest first."""
        running = self._queues.running
        if not self._queues.unfinished:
            return running.copy()
        return [request for request in running if request.planned_len == request.target]

    def _grow(self, request: Request, upto: int) -> list[int]:
        """Append pages so that positions 0..upto-1 are covered. Returns them; none if the request must wait."""
        count = self.limits.pages_for(upto) - len(request.pages)
        return self._queues.memory.extend(request, count) if self._make_room(request, count) else []

    def _make_room(self, request: Request, count: int) -> bool:
        """Preempt the youngest until `count` pages are free. False if that takes a step, or preempts the request."""
        queues, memory = self._queues, self._queues.memory
        while len(memory.pool.free) < count and memory.num_available < count:
            if memory.num_available + sum(len(other.pages) for other in queues.leaving) >= count:
                return False  # pages are freed when steps in flight settle
            if queues.running == [request]:
                assert request.in_flight, "a request that is alone always fits"
                return False
            victim = queues.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request) -> None:
        self._queues.leave(victim)
        self._admission.ratio.raise_after_preemption(self._queues.running)
        self.counters.preempted += 1

    def _next_id(self, phase: Phase) -> int:
        """The id of the step that is planned."""
        self._last = phase
        return self.take_step_id()
