"""Another frontend takes the place of one that has died; scheduler and device stay. Invariants after each event."""

import random

import pytest
from support.fake_device import Bench, make_admit, make_ready
from support.new_frontend import ask_again, kill_frontend

from overlap_spec.messages import Abort, AbortReason, FlushCache, Memo

PROMPT = list(range(1, 11))


def run_for_a_while(bench: Bench, rng: random.Random) -> None:
    for _ in range(rng.randrange(1, 60)):
        if bench.results and (not bench.plans or rng.random() < 0.5):
            bench.deliver_result()
        elif bench.plans:
            bench.run_device()


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("depth", [1, 2])
def test_streams_go_on_with_the_same_tokens_and_nothing_is_left(depth: int) -> None:
    """No row of an old request reaches the new frontend: the bench knows none of them."""
    for seed in range(25):
        rng = random.Random(seed)
        bench = Bench(make_ready(num_slots=rng.choice((2, 8))), depth, seed)
        for uid in range(1, 13):
            prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 40))]
            bench.admit(make_admit(uid, prompt, rng.randrange(1, 30), (3, 5), min_new_tokens=rng.choice((0, 1))))
        for _ in range(3):
            run_for_a_while(bench, rng)
            again = kill_frontend(bench, rng)
            if rng.random() < 0.5:  # else they come while steps of the old ones are in flight
                bench.finish_all()
                bench.check_drained()
            ask_again(bench, again)
        bench.finish_all()
        bench.check_streams()
        bench.check_drained()


def test_the_prefix_cache_keeps_what_the_dropped_requests_computed() -> None:
    bench = Bench(make_ready())
    bench.admit(make_admit(1, list(range(40)), 30))
    while len(bench.tokens[1]) < 12:
        bench.run_device()
        bench.deliver_result()
    (again,) = kill_frontend(bench, random.Random(0))
    bench.finish_all()
    ask_again(bench, [again])
    (request,) = bench.scheduler.queues.open.values()
    assert request.cached_len >= 40
    bench.finish_all()
    bench.check_streams()


def test_counters_go_on_and_dropped_requests_are_not_counted_as_aborted() -> None:
    bench = Bench(make_ready())
    for uid in (1, 2):
        bench.admit(make_admit(uid, PROMPT, 40))
    for _ in range(6):
        bench.run_device()
        bench.deliver_result()
    before = bench.scheduler.reporter.snapshot()
    again = kill_frontend(bench, random.Random(0))
    assert bench.stats[-1].generation_tokens_total == before.generation_tokens_total > 0
    ask_again(bench, again)
    bench.finish_all()
    counters = bench.scheduler.planner.counters
    assert counters.aborted == 0 and counters.generation_tokens > before.generation_tokens_total
    assert counters.requests == 2, "they have tokens, and so go on"


def test_an_old_frontends_questions_are_answered_to_none() -> None:
    """Neither a flush that waits for steps to end, nor slots that were taken, nor what a request has ended with."""
    bench = Bench(make_ready())
    bench.scheduler.tells_started = True
    bench.admit(make_admit(1, PROMPT, 20))
    bench.deliver(Abort(1, AbortReason.STOP_STRING))
    bench.deliver(FlushCache())
    assert bench.scheduler.inflight and not bench.flushed
    bench.scheduler.dispatch(make_admit(2, PROMPT, 20))
    bench.scheduler.dispatch(make_admit(3, [], 20))
    bench.scheduler.plan_ahead()
    assert bench.scheduler.outbox
    bench.admits.clear()
    kill_frontend(bench, random.Random(0))
    bench.finish_all()
    assert not bench.flushed and not bench.refused
    bench.check_drained()
    bench.deliver(FlushCache())
    assert bench.flushed == [True]


def test_memos_reach_the_next_frontend_and_the_newest_of_each_feature() -> None:
    bench = Bench(make_ready())
    for feature, state in (("a", b"1"), ("b", b"2"), ("a", b"3")):
        bench.deliver(Memo(feature, state))
    for _ in range(2):
        bench.memos.clear()
        kill_frontend(bench, random.Random(0))
        assert bench.memos == [Memo("a", b"3"), Memo("b", b"2")]
