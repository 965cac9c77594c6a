"""Audits in the scheduler: their turns, their pages, and their end. Invariants are checked after every event."""

from array import array

from support.fake_device import Bench, make_admit, make_ready

from overlap_spec.messages import Audit, FlushCache, Phase
from overlap_spec.scheduler.audits import MOST_STARTS, SHARE

PROMPT = list(range(1, 11))


def make_bench(num_pages: int = 65, **options: object) -> Bench:
    ready = make_ready(num_pages=num_pages, first_audit_slot=9, audit_slots=2, control_slots=4)
    return Bench(ready, **options)


def audit(uid: int, prompt: list[int] = PROMPT, num_served: int = 5, control: bool = False) -> Audit:
    return Audit(make_admit(uid, prompt, num_served), array("i", range(num_served)).tobytes(), control)


def test_an_idle_engine_runs_audits_to_their_end() -> None:
    bench = make_bench()
    bench.deliver(audit(1))
    bench.deliver(audit(2, [7]))  # nothing to prefill
    bench.finish_all()
    drawn = {message.uid: array("i", message.drawn).tolist() for message in bench.audited}
    assert drawn == {1: [0, 1, 2, 3, 4], 2: [0, 1, 2, 3, 4]}
    assert all(plan.audit and plan.padded_to == 0 for plan in bench.all_plans)
    bench.check_drained()


def test_controls_are_padded_and_take_turns_with_the_others() -> None:
    bench = make_bench()
    bench.deliver(audit(1))
    bench.deliver(audit(2, control=True))
    bench.finish_all()
    decodes = [plan for plan in bench.all_plans if plan.phase is Phase.DECODE]
    assert {len(plan.work) for plan in decodes} == {1} and {plan.padded_to for plan in decodes} == {0, 4}
    assert len(bench.audited) == 2
    bench.check_drained()


def test_one_step_in_64_is_an_audits_while_requests_run() -> None:
    bench = make_bench()
    bench.admit(make_admit(1, [3, 4], max_new=200))
    bench.deliver(audit(2))
    for _ in range(2 * SHARE + 6):
        bench.run_device()
        bench.deliver_result()
        if 1 in bench.finishes:
            break
    kinds = [plan.audit for plan in bench.all_plans[: bench.scheduler.planner._next_step_id]]
    gaps = [i for i, is_audit in enumerate(kinds) if is_audit and not all(kinds[i:])]
    assert all(later - earlier > SHARE for earlier, later in zip(gaps, gaps[1:], strict=False))
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()


def test_a_request_takes_an_audits_pages_at_once() -> None:
    """The pool holds the request or the audit: the audit begins again, and is given up at last."""
    bench = make_bench(num_pages=15, prefix_cache=False)
    bench.deliver(audit(1, list(range(1, 31)), 10))
    for uid in range(2, 2 + MOST_STARTS):
        assert bench.scheduler.queues.audits.running, "it has pages while no request wants them"
        bench.admit(make_admit(uid, list(range(1, 40)), max_new=4))
        assert not bench.scheduler.queues.audits.running and bench.scheduler.queues.running
        while not bench.scheduler.queues.idle:
            bench.run_device()
            bench.deliver_result()
    bench.finish_all()
    assert [message.drawn for message in bench.audited] == [b""]
    bench.check_streams()
    bench.check_drained()


def test_the_cache_is_flushed_while_audits_run() -> None:
    bench = make_bench()
    bench.deliver(audit(1))
    bench.deliver(FlushCache())
    assert bench.flushed == [True] and bench.scheduler.inflight
    bench.finish_all()
    bench.check_drained()
