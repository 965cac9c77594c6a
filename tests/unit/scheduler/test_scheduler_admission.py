"""The new-token ratio, and who is preempted for whom."""

import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready

from overlap_spec.scheduler.queues import DECAY_STEPS, INITIAL_RATIO, MIN_RATIO, NewTokenRatio, why_refused


def test_the_ratio_sinks_to_its_least_and_jumps_after_a_preemption():
    ratio = NewTokenRatio()
    for _ in range(DECAY_STEPS // 2):
        ratio.decay()
    assert ratio.value == pytest.approx((INITIAL_RATIO + MIN_RATIO) / 2)
    for _ in range(DECAY_STEPS):
        ratio.decay()
    assert ratio.value == MIN_RATIO
    bench = Bench(make_ready())
    bench.admit(make_admit(1, [1, 2, 3], 59))
    ratio.raise_after_preemption(bench.scheduler.queues.running)
    assert ratio.value == pytest.approx((0 + 20) / (59 + 1))
    ratio.raise_after_preemption([])
    assert ratio.value == pytest.approx(20 / 60)  # never lowered by it
    bench.finish_all()


def test_a_request_that_would_never_find_room_alone_is_refused():
    limits = Bench(make_ready(num_slots=1)).scheduler.planner.limits
    most = min(limits.max_request_tokens, limits.max_len)
    assert limits.max_request_tokens < limits.pool_tokens
    assert why_refused(make_admit(1, [1, 2, 3], most - 3), limits) == ""
    assert f"exceeds {most} tokens" in why_refused(make_admit(1, [1, 2, 3], most - 2), limits)


def test_expected_growth_keeps_a_newcomer_waiting():
    """Pool of 256 tokens: 0.7 x 2 x 150 does not fit beside the prompts, though both prompts would."""
    bench = Bench(make_ready())
    bench.admit(make_admit(1, [1] * 30, 150))
    bench.admit(make_admit(2, [2] * 30, 150))
    queues = bench.scheduler.queues
    assert [request.uid for request in queues.running] == [1]
    assert [request.uid for request in queues.waiting] == [2]
    bench.finish_all()
    assert bench.scheduler.planner.counters.preempted == 0
    bench.check_streams()


def test_the_youngest_makes_room_and_comes_back_first():
    bench = Bench(make_ready(num_pages=33, num_slots=2, width=2))
    bench.scheduler.planner._admission.ratio.value = 0.0
    for uid in (1, 2, 3):
        bench.admit(make_admit(uid, [uid] * 4, 90))
        bench.scheduler.planner._admission.ratio.value = 0.0
    preempted: list[int] = []
    leave = bench.scheduler.queues.leave
    bench.scheduler.queues.leave = lambda r: (preempted.append(r.uid) if r.finish is None else None, leave(r))
    bench.finish_all()
    assert preempted and 1 not in preempted
    assert preempted[0] == 2
    assert list(bench.finishes) == [1, 2, 3]
    bench.check_streams()
    bench.check_drained()


def test_a_method_that_guesses_from_what_others_said_takes_no_salt():
    bench = Bench(make_ready(is_self_drafting=True, key_lookahead=0))
    bench.admit(replace(make_admit(1, [1] * 4), salt="s"))
    assert "cache_salt" in bench.refused[1].message and not bench.scheduler.queues.open


def test_slots_bound_who_runs():
    bench = Bench(make_ready(num_slots=8), max_running=2)
    for uid in range(1, 6):
        bench.admit(make_admit(uid, [uid] * 4, 6))
        assert len(bench.scheduler.queues.running) <= 2
    assert bench.scheduler.limits.engine_limits().max_running_requests == 2
    bench.finish_all()
    bench.check_streams()


def test_who_is_short_of_pages_makes_the_younger_wait():
    bench = Bench(make_ready(page_size=1, num_pages=257, num_slots=3))
    for uid in (1, 2, 3):
        bench.admit(make_admit(uid, [uid] * 4, 20))
    bench.run_device()
    bench.deliver_result()
    planner, asked = bench.scheduler.planner, []
    grow = planner._grow
    planner._grow = lambda request, upto: asked.append(request.uid) or ([] if request.uid == 1 else grow(request, upto))
    planner._decode()
    assert asked == [1]
