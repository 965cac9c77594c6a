"""The ledger: adds what a step committed to its requests, finishes some of them, and returns the deltas.

After every settled or aborted event, for each request with a slot:

    committed_len <= device length <= reserved_len = committed_len + widths of the decode steps in flight
                                                                   + 1 if its prompt's last chunk is in flight
    late results of a finished request are dropped; a slot and its pages are free only when their request
    is finished or preempted, and in no step in flight; allocated + cached + free pages = total.

Tokens of a preempted request's steps in flight are kept: they are prefilled again with the rest.
"""

import logging
from collections.abc import Sequence

from overlap_spec.errors import RequestError
from overlap_spec.messages import (
    NO_TOKEN,
    AbortReason,
    ErrorCode,
    Finish,
    FinishKind,
    PackedRows,
    Refused,
    StepResult,
    TokenDeltas,
    Verified,
)
from overlap_spec.metrics.step_floor import step_floor
from overlap_spec.scheduler.hooks import Hooks
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.planner import Policies
from overlap_spec.scheduler.queues import RequestQueues
from overlap_spec.scheduler.requests import Request, Step, rows_of
from overlap_spec.scheduler.stats import Counters

NOT_FINITE = (
    "the model's logits after {} tokens are NaN or infinite, so no token can be drawn: this request ends here,"
    " others go on; a weight that its tokens reach is damaged, or values exceed the range of the dtype"
)

NOT_FINITE_HERE = (
    "request %d: the logits after %d tokens are NaN or infinite in a step with guesses, which may be theirs; they are"
    " computed again, and nothing is guessed for this request any more"
)

log = logging.getLogger(__name__)


class Ledger:
    """Applies results and aborts to the queues."""

    def __init__(
        self, queues: RequestQueues, limits: Limits, counters: Counters, policies: Policies, hooks: Hooks
    ) -> None:
        self._hooks = hooks
        self._queues = queues
        self._counters = counters
        self._limits = limits
        self._widths = policies.widths
        self._chunks = policies.chunks
        self._speculative = limits.width > 1
        self._roofline = limits.roofline
        self._failed: list[Refused] = []
        self._drafts = limits.width > 1  # whether the last settled decode step asked for guesses; prefill does
        self._some_unabsorbed = False  # whether some request has rows that its draft has not absorbed
        self._windows_s: float | None = None  # what the windows took of a step whose prompts' result is to come
        self._had_work = False  # when the last step settled: the idle time of an idle engine is no gap

    @property
    def awaits_prompts(self) -> bool:
        """Whether the windows of the oldest step in flight are settled, and its prompts are not."""
        return self._windows_s is not None

    def settle(self, step: Step, result: StepResult) -> TokenDeltas | None:
        """Apply a result of the oldest step in flight. Returns what its requests gained, if anything."""
        assert step.plan.step_id == result.step_id, f"result {result.step_id} for step {step.plan.step_id}"
        self._counters.timed(result, self._had_work, self._floor(step))
        self._widths.timed(step.plan, result)
        deltas = TokenDeltas([], [], [], [], result.step_id)
        if step.chunks and result.is_last:
            assert self.awaits_prompts == bool(step.windows), "the windows of a step are settled before its prompts"
            self._chunks.observe(step.expected_s, (self._windows_s or 0.0) + result.gpu_time)
            self._windows_s = None
            self._settle_prompts(step, result, deltas)
        else:
            assert not self.awaits_prompts, "a part of a step is settled once"
            if not result.is_last:
                self._windows_s = result.gpu_time
            self._settle_windows(step, result, deltas)
        self._had_work = not self._queues.idle
        return deltas if deltas.uids or deltas.extensions else None

    def fail(self, uid: int, error: RequestError) -> Refused | None:
        """End a request that a feature can do no more for."""
        request = self._queues.open.get(uid)
        if request is None:
            return None
        request.finish = Finish(FinishKind.ABORT, message=str(error))
        self._queues.close(request)
        self._counters.aborted += 1
        return Refused(uid, ErrorCode.BAD_REQUEST, str(error), error.field)

    def take_failed(self) -> list[Refused]:
        """The requests that the last results have ended because the target could draw no token for them."""
        failed, self._failed = self._failed, []
        return failed

    def abort(self, uid: int, reason: AbortReason) -> TokenDeltas | None:
        """End a request now. Returns its last row, unless the frontend closed it itself on a stop string."""
        request = self._queues.open.get(uid)
        if request is None:
            return None
        request.finish = Finish(FinishKind.ABORT, message=reason.value)
        self._queues.close(request)
        if reason is AbortReason.STOP_STRING:
            return None
        self._counters.aborted += 1
        return TokenDeltas([uid], [[]], [request.finish], [request.verify_steps], cached_tokens=_cached([request]))

    def drop_all(self) -> None:
        """End every request, with no row and no count: those of a frontend that has died, which come again."""
        for request in list(self._queues.open.values()):
            request.finish = Finish(FinishKind.ABORT)
            self._queues.close(request)
        self._failed.clear()

    def _floor(self, step: Step) -> float | None:
        """Seconds that a decode step takes at least; None where chunks are in it."""
        if step.chunks:
            return None
        context = sum([len(request.tokens) for request in step.windows])
        return step_floor(self._roofline, len(step.windows), step.plan.width, context)

    def _settle_windows(self, step: Step, result: StepResult, deltas: TokenDeltas) -> None:
        width, windows = step.plan.width, step.windows
        assert len(windows) == len(result.tokens) == len(result.num_proposed), "a result has one row per slot"
        was_drafted, self._drafts = self._drafts and width > 1, width > 1
        self._widths.observe(windows, result, width if was_drafted else 0)
        self._counters.step_width = width
        requests, gained = windows, result
        if self._queues.leaving or not all(result.tokens):
            requests, gained = _gaining(windows, self._queues.leaving, result)
        runs = self._counters.verified(requests, gained)
        for verified in self._hooks.verified:
            verified(runs, was_drafted)
        if self._limits.draft_lags and (width == 1 or self._some_unabsorbed):
            for request in requests:
                request.unabsorbed = self._limits.unabsorbed_after(request.unabsorbed, width, result)
            self._some_unabsorbed = any([request.unabsorbed for request in self._queues.running])
        _pass_on(requests, gained, deltas)
        _report(requests, gained, deltas)
        self._commit(requests, gained.tokens, deltas, width)
        for request in windows:
            request.pending_min -= 1
            request.pending_max -= width  # last: until here the step holds slot and pages
            if not request.running:
                self._queues.step_settled(request)

    def _settle_prompts(self, step: Step, result: StepResult, deltas: TokenDeltas) -> None:
        rows = step.chunks
        assert len(rows) == len(result.tokens) == len(result.num_proposed), "a result has one row per slot"
        unfinished = [row for row, (request, _) in enumerate(rows) if request.finish is None]
        _pass_on([rows[row][0] for row in unfinished], rows_of(result, unfinished), deltas)
        begun = [row for row in unfinished if rows[row][1] == rows[row][0].target]
        requests, first = [rows[row][0] for row in begun], rows_of(result, begun)
        assert all(len(run) == 1 for run in first.tokens), "one token after a completed prompt"
        _report(requests, first, deltas)
        for request, end in rows:
            request.prefilled_len = end
            request.out_from = max(request.out_from, min(end, request.prompt_len - 1))
        deltas.cached_tokens.update(_cached(requests))
        self._commit(requests, first.tokens, deltas)
        for request, end in rows:
            if end == request.target:
                request.pending_min -= 1
                request.pending_max -= 1
            else:
                request.pending_chunks -= 1
            if request.running:
                self._queues.memory.share(request)
            else:
                self._queues.step_settled(request)

    def _commit(
        self, requests: Sequence[Request], runs: Sequence[list[int]], deltas: TokenDeltas, width: int = 0
    ) -> None:
        """Append each run to its unfinished request, up to the token that finishes it.

        `width`: of a decode step.
        """
        lengths = list(map(len, runs))
        assert 0 not in lengths and max(lengths, default=0) <= self._limits.width, "a run has 1 to W tokens"
        counts = self._speculative and width > 0
        ending: list[int] = []
        for row, (request, run) in enumerate(zip(requests, runs, strict=True)):
            tokens = request.tokens
            tokens.fromlist(run)
            if len(tokens) >= request.committed_limit or not request.stops_at.isdisjoint(run):
                ending.append(row)
            if counts and not request.is_plain:
                request.verify_steps += 1
        deltas.uids.extend([request.uid for request in requests])
        deltas.tokens.extend(runs)
        deltas.finishes.extend([None] * len(requests))
        deltas.verify_steps.extend([request.verify_steps for request in requests])
        broken = [requests[row] for row in ending if self._take_back(requests[row], row, deltas)]
        num_lost = sum([lengths[row] - len(deltas.tokens[row]) for row in ending])
        self._counters.generation_tokens += sum(lengths) - num_lost
        for request in broken:
            if width > 1:  # the windows had guesses
                self._compute_again(request)
            else:
                self._fail(request)

    def _take_back(self, request: Request, row: int, deltas: TokenDeltas) -> bool:
        """Take back what a request does not keep of its run, and finish it if it ends there.

        Returns whether it goes on although the target could draw no token.
        """
        run = deltas.tokens[row]
        del request.tokens[-len(run) :]
        is_cut_short = run[-1] == NO_TOKEN
        kept, finish = _cut(request, run[:-1] if is_cut_short else run)
        request.tokens.fromlist(kept)
        deltas.tokens[row], deltas.finishes[row] = kept, finish
        if finish is not None:
            request.finish = finish
            self._queues.close(request)
        return is_cut_short and finish is None

    def _compute_again(self, request: Request) -> None:
        """Let a request whose logits are not finite begin again where its output ends, without guesses.

        A guess that the target makes NaN of is masked for the rows before it, and a masked value of NaN is NaN: what
        the target would draw without that guess is not known. If there is none then either, the request ends.
        """
        log.warning(NOT_FINITE_HERE, request.uid, len(request.tokens))
        if request.running:
            self._queues.leave(request)
        request.is_broken = True
        request.make_plain()
        self._counters.computed_again += 1

    def _fail(self, request: Request) -> None:
        """End a request whose logits are not finite. What it would leave to others in the prefix cache is not kept."""
        text = NOT_FINITE.format(len(request.tokens))
        request.finish, request.is_broken = Finish(FinishKind.ABORT, message=text), True
        self._queues.close(request)
        self._counters.not_finite += 1
        self._failed.append(Refused(request.uid, ErrorCode.NOT_FINITE, text))
        log.error("request %d: %s", request.uid, text)


def _gaining(requests: list[Request], leaving: list[Request], result: StepResult) -> tuple[list[Request], StepResult]:
    """The requests that gain something, and their rows.

    One that has ended, or begins again, is leaving. One without a run was left out of the step.
    """
    lost = [each for each in leaving if each.finish is not None or each.is_broken]
    without = {requests.index(each) for each in lost if each in requests}
    if not all(result.tokens):
        without.update(row for row, run in enumerate(result.tokens) if not run)
    if not without:
        return requests, result
    rows = [row for row in range(len(requests)) if row not in without]
    return [requests[row] for row in rows], rows_of(result, rows)


def _cached(requests: Sequence[Request]) -> dict[int, int]:
    """How much of each prompt was found in the cache."""
    return {request.uid: max(0, request.cached_tokens) for request in requests}


def _pass_on(requests: Sequence[Request], result: StepResult, deltas: TokenDeltas) -> None:
    """What features have of unfinished requests, also of tokens that they will not keep."""
    rows = [each for each in result.extensions if isinstance(each, PackedRows)]
    if rows:
        deltas.extensions.extend(rows)
        deltas.extended.extend([request.uid for request in requests])


def _report(requests: Sequence[Request], result: StepResult, deltas: TokenDeltas) -> None:
    """What the step verified, of requests that report it. A prefill step verifies nothing."""
    if not any([request.is_reported for request in requests]):
        return
    for request, run, num_proposed in zip(requests, result.tokens, result.num_proposed, strict=True):
        if request.is_reported and run[0] != NO_TOKEN:
            deltas.verified[request.uid] = Verified(result.step_id, num_proposed, len(run) - 1)


def _cut(request: Request, run: list[int]) -> tuple[list[int], Finish | None]:
    """Keep a run's tokens up to the one that ends the request: a stop token first, then the length."""
    position = len(request.tokens)
    room = request.committed_limit - position
    for i, token in enumerate(run[:room]):
        if token in request.stops_at and position + i >= request.stop_from:
            return run[: i + 1], Finish(FinishKind.STOP, token)
    return (run[:room], Finish(FinishKind.LENGTH)) if len(run) >= room else (run, None)
