"""The ledger: adds what a step committed to its requests, finishes some of them, and returns the deltas.

After every settled or aborted event, for each request with a slot:

    committed_len <= device length <= reserved_len = committed_len + widths of the decode steps in flight
                                                                   + 1 if its prompt's last chunk is in flight
    late results of a finished request are dropped; a slot and its pages are free only when their request
    is finished or preempted, and in no step in flight; allocated + cached + free pages = total.

Tokens of a preempted request's steps in flight are kept: they are prefilled again with the rest.
"""

from overlap_spec.messages import (
    AbortReason,
    ErrorCode,
    Finish,
    FinishKind,
    Phase,
    Refused,
    StepResult,
    TokenDeltas,
    Verified,
)
from overlap_spec.metrics.step_floor import step_floor
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.planner import Policies
from overlap_spec.scheduler.queues import RequestQueues
from overlap_spec.scheduler.requests import Request, Step
from overlap_spec.scheduler.stats import Counters


class Ledger:
    """Applies results and aborts to the queues."""

    def __init__(self, queues: RequestQueues, limits: Limits, counters: Counters, policies: Policies) -> None:
        self._queues = queues
        self._counters = counters
        self._limits = limits
        self._widths = policies.widths
        self._chunks = policies.chunks
        self._speculative = limits.width > 1
        self._roofline = limits.roofline
        self._had_work = False  # when the last step settled: the idle time of an idle engine is no gap

    def settle(self, step: Step, result: StepResult) -> TokenDeltas | None:
        """Apply the result of the oldest step in flight. Returns what its requests gained, if anything."""
        assert step.plan.step_id == result.step_id, f"result {result.step_id} for step {step.plan.step_id}"
        assert len(step.requests) == len(result.tokens) == len(result.num_proposed), "a result has one row per slot"
        self._counters.timed(result, self._had_work, self._floor(step))
        deltas = TokenDeltas([], [], [], [], result.step_id)
        if step.plan.phase is Phase.DECODE:
            self._settle_decode(step, result, deltas)
        else:
            self._chunks.observe(step.expected_s, result.gpu_time)
            self._settle_prefill(step, result, deltas)
        self._had_work = not self._queues.idle
        return deltas if deltas.uids or deltas.prompt_log_probs else None

    def fail(self, uid: int, error: str) -> Refused | None:
        """End a request whose grammar cannot be followed."""
        request = self._queues.open.get(uid)
        if request is None:
            return None
        request.finish = Finish(FinishKind.ABORT, message=error)
        self._queues.close(request)
        self._counters.aborted += 1
        return Refused(uid, ErrorCode.BAD_REQUEST, error)

    def abort(self, uid: int, reason: AbortReason) -> TokenDeltas | None:
        """End a request now. Returns its last row, unless the tokenizer closed it itself on a stop string."""
        request = self._queues.open.get(uid)
        if request is None:
            return None
        request.finish = Finish(FinishKind.ABORT, message=reason.value)
        self._queues.close(request)
        if reason is AbortReason.STOP_STRING:
            return None
        self._counters.aborted += 1
        return TokenDeltas([uid], [[]], [request.finish], [request.usage(self._speculative)])

    def _floor(self, step: Step) -> float | None:
        """Seconds that a decode step takes at least."""
        if step.plan.phase is Phase.PREFILL:
            return None
        context = sum(len(request.tokens) for request in step.requests)
        return step_floor(self._roofline, len(step.requests), step.plan.width, context)

    def _settle_decode(self, step: Step, result: StepResult, deltas: TokenDeltas) -> None:
        counters, width, catch_up = self._counters, step.plan.width, step.plan.catch_up
        self._widths.observe(step.requests, result)
        counters.step_width = width
        for row, request in enumerate(step.requests):
            run, num_proposed = result.tokens[row], result.num_proposed[row]
            request.pending_min -= 1
            request.pending_max -= width
            if request.finish is None and run:  # without a run it was left out: its grammar was late
                if not request.is_plain:
                    request.verify_steps += 1
                    counters.verified(len(run), num_proposed)
                request.unabsorbed = self._limits.deferred_after(request.unabsorbed, width, catch_up)
                _pass_on(result, row, request, deltas)
                self._commit(request, run, deltas, num_proposed)
            request.in_flight -= 1  # last: until here the step holds slot and pages
            if not request.running:
                self._queues.step_settled(request)

    def _settle_prefill(self, step: Step, result: StepResult, deltas: TokenDeltas) -> None:
        for row, (request, end) in enumerate(zip(step.requests, step.chunk_ends, strict=True)):
            run = result.tokens[row]
            if request.finish is None:
                _pass_on(result, row, request, deltas)
            request.prefilled_len = end
            request.scored_len = max(request.scored_len, min(end, request.prompt_len - 1))
            if end == request.target:
                request.pending_min -= 1
                request.pending_max -= 1
                if request.finish is None:
                    assert len(run) == 1, f"{len(run)} tokens after a completed prompt"
                    self._commit(request, run, deltas)
            request.in_flight -= 1
            if request.running:
                self._queues.memory.share(request)
            else:
                self._queues.step_settled(request)

    def _commit(self, request: Request, run: list[int], deltas: TokenDeltas, num_proposed: int = 0) -> None:
        """Append a run to an unfinished request, up to the token that finishes it."""
        assert 0 < len(run) <= self._limits.width, f"a run of {len(run)} tokens"
        kept, finish = _cut(request, run)
        request.tokens.extend(kept)
        self._counters.generation_tokens += len(kept)
        deltas.uids.append(request.uid)
        deltas.tokens.append(kept)
        deltas.finishes.append(finish)
        deltas.usages.append(request.usage(self._speculative))
        if request.admit.sampling.speculative.is_reported:
            deltas.verified[request.uid] = Verified(deltas.step_id, num_proposed, len(run) - 1)
        if finish is not None:
            request.finish = finish
            self._queues.close(request)


def _pass_on(result: StepResult, row: int, request: Request, deltas: TokenDeltas) -> None:
    """The log-probs of an unfinished request, also of tokens that it will not keep."""
    if result.log_probs and result.log_probs[row]:
        deltas.log_probs[request.uid] = result.log_probs[row]
    if result.prompt_log_probs and result.prompt_log_probs[row]:
        deltas.prompt_log_probs[request.uid] = result.prompt_log_probs[row]


def _cut(request: Request, run: list[int]) -> tuple[list[int], Finish | None]:
    """Keep a run's tokens up to the one that ends the request: a stop token first, then the length."""
    position = len(request.tokens)
    room = request.committed_limit - position
    if len(run) < room and request.stop_ids.isdisjoint(run):
        return run, None
    for i, token in enumerate(run[:room]):
        if token in request.stop_ids and position + i >= request.stop_from:
            return run[: i + 1], Finish(FinishKind.STOP, token)
    return (run[:room], Finish(FinishKind.LENGTH)) if len(run) >= room else (run, None)
