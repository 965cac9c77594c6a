"""The scheduler's counters and the reports made of them: a Stats message and the log lines.

There is no timer: a report is sent about once a second while there is work, and once when it ends, so an idle scheduler
sleeps.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from overlap_spec.messages import Stats, StepResult
from overlap_spec.scheduler.hooks import Hooks, Runs
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.queues import RequestQueues
from overlap_spec.scheduler.requests import Request

REPORT_S = 1.0
LOG_S = 5.0  # between log lines while there is work
LOG_IDLE_S = 1.0  # between a log line and the one that is written when work ends

log = logging.getLogger(__name__)


@dataclass
class Counters:
    """Everything since start.

    `runs[n]`: runs of n tokens, one per request and decode step. Discarded ones are not counted, nor are those of
    requests that asked for no speculation.
    """

    runs: list[int]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    proposed_tokens: int = 0
    drafts: int = 0  # runs with guesses
    prefilled_requests: int = 0
    requests: int = 0
    aborted: int = 0
    preempted: int = 0
    recomputed_tokens: int = 0  # of output, where one order of sums takes them token by token (`Limits.drawn_apart`)
    not_finite: int = 0  # requests that ended because the target could draw no token
    computed_again: int = 0  # .. that went on without guesses, because those may have been the reason
    steps: int = 0
    # Seconds of the device. A gap counts if the step before it left work to do; only decode steps have a floor.
    gpu_time: float = 0.0
    gpu_gap: float = 0.0
    following_steps: int = 0  # those with a gap
    decode_steps: int = 0
    decode_time: float = 0.0  # with the gaps before them
    step_width: int = 0  # of the last one
    decode_floor: float = 0.0  # what the device's ceilings allow (`metrics/step_floor.py`)
    # Seconds of the host.
    scheduling_time: float = 0.0
    launch_time: float = 0.0

    def admitted(self, request: Request) -> None:
        """Note a request's first admission."""
        self.prefilled_requests += 1
        self.prompt_tokens += request.prompt_len
        self.cached_tokens += request.cached_tokens

    def verified(self, requests: Sequence[Request], result: StepResult) -> Runs:
        """Note the runs of a decode step, those of requests that are speculated for. Returns the count of all."""
        counted = _counted(requests, result)
        for (draw, length, num_proposed), count in counted.items():
            if draw is not None:
                self.runs[length] += count
                self.proposed_tokens += num_proposed * count
                self.drafts += count if num_proposed else 0
        return counted

    def timed(self, result: StepResult, follows: bool, floor: float | None) -> None:
        """Note a result, by whose last one a step is counted.

        `follows`: the engine had work since the step before; `floor`: None of a step with prompts.
        """
        gap = result.gpu_gap if follows else 0.0
        if result.is_last:
            self.steps += 1
            self.following_steps += follows
        self.gpu_time += result.gpu_time
        self.gpu_gap += gap
        self.launch_time += result.launch_time
        if floor is not None:
            self.decode_steps += 1
            self.decode_time += result.gpu_time + gap
            self.decode_floor += floor

    @property
    def verify_steps(self) -> int:
        return sum(self.runs)

    @property
    def committed_tokens(self) -> int:
        """Whole runs, before a finish cut the last one."""
        return sum(length * count for length, count in enumerate(self.runs))

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """Guesses accepted at positions 1..K: a run of n tokens accepted the first n - 1 (the last is the bonus)."""
        return tuple(sum(self.runs[length:]) for length in range(2, len(self.runs)))

    @property
    def first_accepted(self) -> int:
        """Runs whose first guess was accepted."""
        return sum(self.runs[2:])

    def copy(self) -> "Counters":
        return replace(self, runs=list(self.runs))


@dataclass
class Interval:
    """Counters since `started_at`: seconds on the scheduler's clock, moved on by the time spent idle."""

    started_at: float
    before: Counters
    now: Counters = field(repr=False)

    def accept_length(self) -> float:
        """Mean committed tokens per verify step, bonus included; 0 without any."""
        return _ratio(
            self.now.committed_tokens - self.before.committed_tokens, self.now.verify_steps - self.before.verify_steps
        )

    def accept_rate(self) -> float:
        """Guesses accepted of those verified."""
        now, before = self.now, self.before
        accepted = now.committed_tokens - now.verify_steps - before.committed_tokens + before.verify_steps
        return _ratio(accepted, now.proposed_tokens - before.proposed_tokens)

    def step_time(self) -> float:
        """Mean seconds the device worked on a step."""
        return _ratio(self.now.gpu_time - self.before.gpu_time, self.now.steps - self.before.steps)

    def gpu_gap(self) -> float:
        """Mean seconds the device waited for a step."""
        return _ratio(self.now.gpu_gap - self.before.gpu_gap, self.now.following_steps - self.before.following_steps)

    def efficiency(self) -> float | None:
        """Time that decode steps must take over the time they took; None where either is not known."""
        floor, taken = self.now.decode_floor - self.before.decode_floor, self.now.decode_time - self.before.decode_time
        return floor / taken if floor > 0 and taken > 0 else None

    def host_time(self) -> float:
        """Mean seconds of scheduling and launching a step."""
        now, before = self.now, self.before
        spent = now.scheduling_time + now.launch_time - before.scheduling_time - before.launch_time
        return _ratio(spent, now.steps - before.steps)

    def throughput(self, at: float) -> float:
        """Generated tokens per second."""
        return _ratio(self.now.generation_tokens - self.before.generation_tokens, at - self.started_at)


class Reporter:
    """Decides when a report is due and makes it."""

    def __init__(
        self, queues: RequestQueues, limits: Limits, counters: Counters, clock: Callable[[], float], hooks: Hooks
    ) -> None:
        self.last = Stats()  # the report that was made last
        self._hooks = hooks
        self._queues = queues
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._active = False
        self._idle_since = clock()
        self._logged_at = -math.inf
        self._reported, self._logged = self._interval(self._idle_since), self._interval(self._idle_since)
        self._resumed_at = self._idle_since

    def resume(self) -> None:
        """Call when a message has arrived: the scheduler works again."""
        self._resumed_at = self._clock()

    def pause(self) -> None:
        """Call before waiting for a message: the time since `resume` is the scheduler's part of a step."""
        self._counters.scheduling_time += self._clock() - self._resumed_at

    def poll(self) -> Stats | None:
        """Call after every event. Returns a report when one is due."""
        busy = not self._queues.idle
        if not busy and not self._active:
            return None
        now = self._clock()
        if not self._active:
            self._active = True
            for interval in (self._reported, self._logged):
                interval.started_at += now - self._idle_since
        if busy and now - self._reported.started_at < REPORT_S:
            return None
        stats = self.snapshot()
        self._active, self._idle_since = busy, now
        self._reported = self._interval(now)
        since, wait = (self._logged.started_at, LOG_S) if busy else (self._logged_at, LOG_IDLE_S)
        if now - since >= wait:
            self._write_log(now)
        return stats

    def snapshot(self) -> Stats:
        self.last = self._queues.memory.states.report(self._of_engine())
        for report in self._hooks.report:
            self.last = report(self.last)
        return self.last

    def _of_engine(self) -> Stats:
        queues, counters, page_size = self._queues, self._counters, self._limits.page_size
        num_used = queues.memory.num_used
        host_time, gpu_gap = self._reported.host_time(), self._reported.gpu_gap()
        return Stats(
            num_running=len(queues.running),
            num_queued=len(queues.waiting) + len(queues.held),
            num_used_tokens=num_used * page_size,
            num_cached_tokens=queues.memory.cache.num_evictable * page_size,
            max_total_tokens=self._limits.pool_tokens,
            token_usage=num_used / queues.memory.pool.num_total,
            gen_throughput=self._reported.throughput(self._clock()),
            accept_length=self._reported.accept_length(),
            accept_rate=self._reported.accept_rate(),
            drafts_total=counters.drafts,
            step_width=counters.step_width,
            num_steps=min(self._limits.num_steps, max(counters.step_width - 1, 0)),
            step_time=self._reported.step_time(),
            prompt_tokens_total=counters.prompt_tokens,
            cached_tokens_total=counters.cached_tokens,
            generation_tokens_total=counters.generation_tokens,
            verify_steps_total=counters.verify_steps,
            committed_tokens_total=counters.committed_tokens,
            proposed_tokens_total=counters.proposed_tokens,
            requests_total=counters.requests,
            aborted_total=counters.aborted,
            preempted_total=counters.preempted,
            recomputed_tokens_total=counters.recomputed_tokens,
            steps_total=counters.steps,
            accepted_per_position_total=counters.accepted_per_position,
            step_efficiency=self._reported.efficiency(),
            gpu_gap=gpu_gap,
            host_time=host_time,
            host_time_hidden=max(host_time - gpu_gap, 0.0),
            decode_steps_total=counters.decode_steps,
            decode_floor_total=counters.decode_floor,
            decode_time_total=counters.decode_time,
            not_finite_total=counters.not_finite,
        )

    def _write_log(self, now: float) -> None:
        """Write what happened since the last line, in the words that SGLang's users search for."""
        since, counters, queues = self._logged, self._counters, self._queues
        num_used = queues.memory.num_used
        usage = f"token usage: {num_used / queues.memory.pool.num_total:.2f}"
        running, queued = f"#running-req: {len(queues.running)}", f"#queue-req: {len(queues.waiting)}"
        if new_seqs := counters.prefilled_requests - since.before.prefilled_requests:
            num_cached = counters.cached_tokens - since.before.cached_tokens
            num_new = counters.prompt_tokens - since.before.prompt_tokens - num_cached
            log.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, %s, %s, %s",
                *(new_seqs, num_new, num_cached, usage, running, queued),
            )
        if counters.decode_steps > since.before.decode_steps:
            synthetic = " (synthetic acceptance)" if self._limits.synthetic_acceptance else ""
            accept = f"accept len{synthetic}: {since.accept_length():.2f}, " if self._limits.width > 1 else ""
            log.info(
                "Decode batch, %s, #token: %d, %s, %sgen throughput (token/s): %.2f, %s",
                *(running, num_used * self._limits.page_size, usage, accept, since.throughput(now), queued),
            )
        self._logged_at = now
        self._logged = self._interval(now)

    def _interval(self, now: float) -> Interval:
        return Interval(now, self._counters.copy(), self._counters)


def _counted(requests: Sequence[Request], result: StepResult) -> Runs:
    lengths, draws = list(map(len, result.tokens)), [request.draw for request in requests]
    if len(set(draws)) == len(set(result.num_proposed)) == 1:  # as a rule; numbers are counted faster than tuples
        draw, num_proposed = draws[0], result.num_proposed[0]
        return {(draw, length, num_proposed): lengths.count(length) for length in set(lengths)}
    return Counter(zip(draws, lengths, result.num_proposed, strict=True))


def _ratio(amount: float, of: float) -> float:
    return amount / of if of > 0 else 0.0
