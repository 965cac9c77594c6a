"""Settling: where a run is cut, and what is counted."""

import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready
from support.plans import parts_of

from overlap_spec.messages import NO_TOKEN, ErrorCode, FinishKind, StepResult
from overlap_spec.scheduler.ledger import _cut
from overlap_spec.scheduler.prefix_cache import Node, Share
from overlap_spec.scheduler.requests import Request, unpack_tokens

PROMPT = [1, 2, 3]


def request_with(max_new: int, stop_ids=(), min_new: int = 0, output=()) -> Request:
    root = Node(None, b"", [], Share("", 0.0))
    request = Request(make_admit(1, PROMPT, max_new, stop_ids, min_new_tokens=min_new), root)
    request.tokens.extend(output)
    return request


@pytest.mark.parametrize(
    ("request_", "run", "kept", "kind", "matched"),
    [
        (request_with(9), [5, 6, 7], [5, 6, 7], None, None),
        (request_with(9, (7,)), [5, 7, 7, 8], [5, 7], FinishKind.STOP, 7),
        (request_with(9, (5, 7)), [5, 7], [5], FinishKind.STOP, 5),
        (request_with(2), [5, 6, 7], [5, 6], FinishKind.LENGTH, None),
        (request_with(3), [5, 6, 7], [5, 6, 7], FinishKind.LENGTH, None),
        (request_with(2, (7,)), [5, 6, 7], [5, 6], FinishKind.LENGTH, None),  # the stop comes too late
        (request_with(3, (7,)), [5, 6, 7], [5, 6, 7], FinishKind.STOP, 7),  # both at once: the stop token
        (request_with(9, (7,), 2), [7, 6, 8], [7, 6, 8], None, None),  # before min_new_tokens
        (request_with(9, (7,), 2), [7, 6, 7], [7, 6, 7], FinishKind.STOP, 7),
        (request_with(9, (7,), 2, [6]), [7, 7, 8], [7, 7], FinishKind.STOP, 7),
        (request_with(5, (7,), 5, [6]), [7, 7, 7, 7], [7, 7, 7, 7], FinishKind.LENGTH, None),
    ],
)
def test_a_run_is_cut_at_the_token_that_ends_the_request(request_, run, kept, kind, matched):
    tokens, finish = _cut(request_, run)
    assert tokens == kept
    assert (finish and finish.kind, finish and finish.matched) == (kind, matched)


def step(bench: Bench, tokens: list[list[int]]) -> None:
    """Deliver a result of our own making for the oldest step in flight."""
    plan = bench.plans.popleft()
    bench.scheduler.dispatch(StepResult(plan.step_id, tokens, [3] * len(tokens), 0.01))
    bench.scheduler.plan_ahead()
    bench.scheduler.send_replies()
    bench.plans += bench.worker.drain()
    for message in bench.frontend.drain():
        bench._receive(message)


def test_whole_runs_count_before_the_cut_and_discarded_steps_do_not():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 6))
    step(bench, [[10]])
    step(bench, [[11, 12, 13, 14]])
    step(bench, [[15, 16, 17]])  # one of three is kept
    assert bench.tokens[1] == [10, 11, 12, 13, 14, 15]
    assert bench.usages[1].spec_verify_ct == 2
    while bench.plans:
        step(bench, [[18, 19, 20, 21]])  # planned before the finish was known
    stats = bench.scheduler.reporter.snapshot()
    assert (stats.verify_steps_total, stats.committed_tokens_total) == (2, 7)
    assert stats.accepted_per_position_total == (2, 2, 1)
    assert (stats.generation_tokens_total, stats.proposed_tokens_total) == (6, 6)
    bench.check_drained()


def test_late_results_of_a_finished_request_are_dropped():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 20, stop_ids=(11,)))
    step(bench, [[10]])
    step(bench, [[11, 12]])
    assert bench.finishes[1].matched == 11 and bench.scheduler.queues.leaving
    assert len(bench.plans) == 1
    step(bench, [[50, 51]])
    assert bench.tokens[1] == [10, 11]
    bench.check_drained()


def test_plain_decoding_reports_no_verify_steps():
    bench = Bench(make_ready(width=1))
    bench.admit(make_admit(1, PROMPT, 6))
    bench.finish_all()
    assert bench.usages[1].spec_verify_ct == 0
    assert bench.scheduler.reporter.snapshot().accepted_per_position_total == ()
    bench.check_streams()


def test_a_result_of_another_step_is_a_bug():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 6))
    with pytest.raises(AssertionError, match="result 9 for step 1"):
        bench.scheduler.dispatch(StepResult(9, [[1]], [0], 0.0))


def marked(result: StepResult, row: int, num_kept: int) -> StepResult:
    """The target could draw no token after so many of a slot's run."""
    tokens = [list(run) for run in result.tokens]
    tokens[row] = [*tokens[row][:num_kept], NO_TOKEN]
    return replace(result, tokens=tokens)


def with_two_running(width: int) -> Bench:
    """Requests 1 and 2 with some pages of output, and a step's result to be delivered."""
    bench = Bench(make_ready(page_size=4, width=width))
    for uid in (1, 2):
        bench.admit(make_admit(uid, [uid, 2, 3, 4, 5], 30))
    while len(bench.tokens[1]) < 9:
        bench.run_device()
        bench.deliver_result()
    bench.run_device()
    return bench


@pytest.mark.parametrize("num_kept", [0, 1])
def test_in_a_step_with_guesses_a_request_begins_again_where_its_output_ends(num_kept: int) -> None:
    """They may be the reason. What is in flight began after a token that there is not, and counts for nothing."""
    bench = with_two_running(width=4)
    said = list(bench.tokens[1])
    bench.results[0] = marked(bench.results[0], 0, num_kept)
    kept = bench.results[0].tokens[0][:num_kept]
    bench.deliver_result()
    assert bench.plans and bench.tokens[1] == said + kept
    bench.run_device()
    bench.deliver_result()
    assert bench.tokens[1] == said + kept and not bench.refused
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()
    counters = bench.scheduler.planner.counters
    assert (counters.computed_again, counters.not_finite, counters.preempted) == (1, 0, 0)
    resets = [item.reset for plan in bench.all_plans for item in parts_of(plan) if item.reset is not None]
    assert [reset.sampling.speculative.num_steps for reset in resets] == [None, None, 0]


def test_a_request_that_no_token_can_be_drawn_for_ends_and_leaves_nothing() -> None:
    """Without guesses: the token that was to be drawn is the only one of its step."""
    bench = with_two_running(width=1)
    said = len(bench.tokens[1])
    bench.results[0] = marked(bench.results[0], 0, 0)
    bench.deliver_result()
    refused = bench.refused[1]
    assert refused.code is ErrorCode.NOT_FINITE and f"after {5 + said} tokens" in refused.message
    assert len(bench.tokens[1]) == said and 1 not in bench.finishes
    bench.finish_all()
    cache = bench.scheduler.queues.memory.cache
    assert bench.scheduler.planner.counters.not_finite == 1 and bench.tokens[2] and 2 in bench.finishes
    text = unpack_tokens(bench.admits[1].prompt)
    text.fromlist(bench.tokens[1])
    assert len(text) >= 13 and len(cache.match(text, 99).pages) == 1, "what its prompt has shared, and no output"


def test_what_ends_a_run_before_the_mark_ends_the_request_as_ever() -> None:
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 30, stop_ids=(77,)))
    bench.run_device()
    bench.deliver_result()
    bench.run_device()
    bench.results[0] = replace(bench.results[0], tokens=[[77, NO_TOKEN]])
    bench.deliver_result()
    assert bench.finishes[1].kind is FinishKind.STOP and not bench.refused
