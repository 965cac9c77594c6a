"""The loop: plan ahead, then speak, then sleep; and how prefill and decode take turns."""

import asyncio
import random

import pytest
from support.fake_device import Bench, FakeDevice, make_admit, make_ready
from support.memory_link import MemoryLink
from support.plans import parts_of
from support.scheduler_features import with_features

from overlap_spec.config import CacheSettings, SchedulerSettings
from overlap_spec.errors import ConfigError
from overlap_spec.messages import (
    Abort,
    AbortReason,
    FinishKind,
    FlushCache,
    Phase,
    Shutdown,
    StepPlan,
    StepResult,
    ToFrontend,
    TokenDeltas,
    ToScheduler,
    ToWorker,
)
from overlap_spec.scheduler.build import build_scheduler
from overlap_spec.scheduler.loop import Links

PROMPT = list(range(1, 11))


class Recorder(MemoryLink):
    """A link that notes what is sent on it, in one list for all links."""

    def __init__(self, union, events: list) -> None:
        super().__init__(union)
        self.events = events

    def send(self, message) -> None:
        self.events.append(message)
        super().send(message)


def run_loop(depth: int, admits, wait_s: float = 0.0) -> list:
    """Run the real loop against a device task until every request is finished. Returns all events in order."""

    async def inner() -> list:
        events: list = []
        inbox, worker, frontend = MemoryLink(ToScheduler), Recorder(ToWorker, events), Recorder(ToFrontend, events)
        settings = SchedulerSettings(8, depth, None, None)
        ready = make_ready()
        links = Links(inbox, worker, frontend)
        scheduler = with_features(build_scheduler(ready, settings, CacheSettings(4, None, 0.9, True), links))
        dispatch = scheduler.dispatch
        scheduler.dispatch = lambda message: (events.append(message), dispatch(message))
        device = FakeDevice(ready, random.Random(0))

        async def work() -> None:
            while True:
                result = device.run(await worker.recv())
                await asyncio.sleep(0.001)  # a step takes time: results arrive one by one
                inbox.send(result)

        async def talk() -> None:
            for admit in admits:
                inbox.send(admit)
            left = len(admits)
            while left:
                message = await frontend.recv()
                if isinstance(message, TokenDeltas):
                    left -= sum(finish is not None for finish in message.finishes)
            await asyncio.sleep(wait_s)
            inbox.send(Shutdown(drain=False))

        working = asyncio.create_task(work())
        await asyncio.gather(scheduler.run(), talk())
        working.cancel()
        return events

    return asyncio.run(inner())


def orders(events: list) -> list[tuple[int, int]]:
    """(plan, result) for each result dispatched: which plan had been sent last."""
    last, pairs = 0, []
    for event in events:
        if isinstance(event, StepPlan):
            last = event.step_id
        elif isinstance(event, StepResult):
            pairs.append((last, event.step_id))
    return pairs


def test_depth_2_sends_plan_n_plus_1_before_it_dispatches_result_n():
    pairs = orders(run_loop(2, [make_admit(1, PROMPT, 40)]))
    assert len(pairs) > 8
    ahead = [plan == result + 1 for plan, result in pairs]
    # Every step but those at the very end, when the steps in flight must finish the request.
    assert all(ahead[:-2])


def test_a_plan_answers_each_of_two_results_that_are_out_at_once():
    """And a request that has come with them is in the first of these plans."""
    bench = Bench(make_ready(), depth=2)
    bench.admit(make_admit(1, PROMPT, 40))
    for _ in range(2):
        bench.run_device()
    settled: list[int] = []
    dispatch = bench.scheduler.dispatch
    bench.scheduler.dispatch = lambda message: (settled.append(len(bench.worker.drain())), dispatch(message))
    bench.scheduler.take([*bench.results, make_admit(2, PROMPT, 40)])
    assert settled == [0, 0, 1], "the request, the first result, and before the second the plan that answers the first"
    assert len(bench.worker.drain()) == 1
    assert bench.scheduler.planner.counters.prefilled_requests == 2


def test_depth_1_never_does():
    pairs = orders(run_loop(1, [make_admit(1, PROMPT, 40), make_admit(2, PROMPT, 7)]))
    assert len(pairs) > 8
    assert all(plan == result for plan, result in pairs)


def test_depths_give_the_same_tokens():
    def streams(depth: int) -> dict[int, list[int]]:
        out: dict[int, list[int]] = {}
        for event in run_loop(depth, [make_admit(uid, PROMPT, 20 + uid) for uid in range(1, 5)]):
            if isinstance(event, TokenDeltas):
                for uid, tokens in zip(event.uids, event.tokens, strict=True):
                    out.setdefault(uid, []).extend(tokens)
        return out

    assert streams(1) == streams(2)


def test_deltas_leave_after_the_next_plan():
    events = run_loop(2, [make_admit(1, PROMPT, 40)])
    results = [i for i, event in enumerate(events) if isinstance(event, StepResult)]
    for i in results[:-3]:
        after = [type(event) for event in events[i + 1 : i + 3]]
        assert after == [StepPlan, TokenDeltas]


def test_an_idle_loop_sleeps():
    events = run_loop(2, [make_admit(1, PROMPT, 3)], wait_s=0.05)
    last_result = max(i for i, event in enumerate(events) if isinstance(event, StepResult))
    received = [event for event in events[last_result + 1 :] if isinstance(event, ToScheduler)]
    assert received == [Shutdown(drain=False)]


def test_prefill_and_decode_take_turns():
    bench = Bench(make_ready(chunk_tokens=8, num_slots=4))
    bench.admit(make_admit(1, PROMPT[:4], 60))
    bench.run_device()
    bench.deliver_result()
    bench.admit(make_admit(2, list(range(60)), 4))
    bench.finish_all()
    prefills = [i for i, plan in enumerate(bench.all_plans) if plan.phase is Phase.PREFILL]
    second = prefills[1:]  # request 2's chunks: every other step, neither starved nor starving
    assert len(second) == 8
    assert [b - a for a, b in zip(second, second[1:], strict=False)] == [2] * 7
    bench.check_streams()


def test_a_prefill_step_holds_several_prompts_and_cuts_at_a_page():
    bench = Bench(make_ready(chunk_tokens=16, num_slots=4))
    for uid in (1, 2, 3):
        bench.scheduler.dispatch(make_admit(uid, [uid] * 7, 4))
    bench.admit(make_admit(4, PROMPT, 4))
    first, second = bench.all_plans[:2]
    assert [len(work.tokens) // 4 for work in first.chunks] == [7, 7]  # 2 tokens left: less than a page
    assert second.phase is Phase.DECODE
    bench.admits.update({uid: make_admit(uid, [uid] * 7, 4) for uid in (1, 2, 3)})
    bench.tokens.update({1: [], 2: [], 3: []})
    bench.finish_all()
    bench.check_streams()
    third = bench.all_plans[2]
    assert [len(work.tokens) // 4 for work in third.chunks] == [7, 8]
    assert [work.next_token for work in third.chunks] == [-1, PROMPT[8]]


def test_unbounded_chunks_never_split_a_prompt():
    bench = Bench(make_ready(num_pages=200, max_len=300, chunk_tokens=300), chunk_tokens=-1)
    bench.admit(make_admit(1, [1] * 250, 4))
    assert len(bench.all_plans[0].chunks[0].tokens) == 250 * 4


def test_asked_chunk_size_is_obeyed():
    bench = Bench(make_ready(), chunk_tokens=12)
    bench.admit(make_admit(1, [1] * 30, 4))
    bench.finish_all()
    sizes = [len(w.tokens) // 4 for plan in bench.all_plans for w in parts_of(plan) if plan.phase is Phase.PREFILL]
    assert sizes == [12, 12, 6]


def test_nothing_is_planned_for_a_request_that_its_steps_in_flight_finish():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 1))
    assert [plan.phase for plan in bench.all_plans] == [Phase.PREFILL]
    bench.finish_all()
    assert len(bench.all_plans) == 1 and len(bench.tokens[1]) == 1
    bench.admit(make_admit(2, PROMPT, 2))
    assert [plan.phase for plan in bench.all_plans[1:]] == [Phase.PREFILL, Phase.DECODE]
    bench.finish_all()
    assert len(bench.all_plans) == 3
    bench.check_streams()


def test_abort_in_flight_says_so_at_once_and_frees_later():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 40))
    assert len(bench.plans) == 2
    bench.abort(1, AbortReason.CLIENT_GONE)
    assert bench.finishes[1].kind is FinishKind.ABORT and bench.finishes[1].message == "client_gone"
    assert len(bench.all_plans) == 2 and bench.scheduler.queues.leaving
    bench.run_device()
    bench.deliver_result()
    assert bench.scheduler.queues.memory.num_used > 0
    bench.run_device()
    bench.deliver_result()
    bench.check_drained()
    assert len(bench.all_plans) == 2
    assert bench.scheduler.reporter.snapshot().aborted_total == 1


def test_stop_string_abort_is_silent_and_keeps_what_is_valid():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 40))
    for _ in range(3):
        bench.run_device()
        bench.deliver_result()
    bench.abort(1, AbortReason.STOP_STRING)
    bench.finish_all()
    bench.check_drained()
    assert 1 not in bench.finishes
    assert bench.scheduler.queues.memory.cache.num_pages >= len(PROMPT) // 4
    assert bench.scheduler.reporter.snapshot().aborted_total == 0


def test_abort_of_a_waiting_and_of_an_unknown_request():
    bench = Bench(make_ready(num_slots=1))
    bench.admit(make_admit(1, PROMPT, 8))
    bench.admit(make_admit(2, PROMPT, 8))
    bench.abort(2)
    bench.deliver(Abort(77, AbortReason.REQUESTED))
    assert bench.finishes[2].kind is FinishKind.ABORT and bench.usages[2].completion_tokens == 0
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()


def test_flush_only_when_nothing_runs():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 8))
    bench.deliver(FlushCache())
    bench.finish_all()
    assert bench.scheduler.queues.memory.cache.num_pages > 0
    bench.deliver(FlushCache())
    assert bench.flushed == [False, True]
    assert bench.scheduler.queues.memory.cache.num_pages == 0
    assert bench.stats[-1].num_cached_tokens == 0 < bench.stats[-2].num_cached_tokens


def test_a_flush_waits_for_the_last_step_of_a_request_that_has_finished():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 8))
    while not bench.scheduler.queues.leaving:
        bench.run_device()
        bench.deliver_result()
    bench.deliver(FlushCache())
    bench.deliver(FlushCache())
    assert bench.flushed == [], "a step with the finished request is in flight"
    bench.finish_all()
    assert bench.flushed == [True, True]
    assert bench.scheduler.queues.memory.cache.num_pages == 0
    bench.check_drained()


def test_a_flush_that_waits_is_refused_once_another_request_runs():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 8))
    while not bench.scheduler.queues.leaving:
        bench.run_device()
        bench.deliver_result()
    bench.deliver(FlushCache())
    bench.admit(make_admit(2, PROMPT, 8))
    bench.finish_all()
    assert bench.flushed == [False]
    bench.check_drained()


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_repeated_prompt_is_found_in_the_cache(depth, lookahead, page_size):
    ready = make_ready(page_size=page_size, num_pages=400 // page_size, key_lookahead=lookahead)
    bench = Bench(ready, depth)
    for uid, n in enumerate((1, 15, 16, 17, 33, 48), start=1):
        for again in (0, 10):
            bench.admit(make_admit(uid + again, [n + i for i in range(n)], 6, seed=uid))
            bench.finish_all()
        assert bench.usages[uid].cached_tokens == 0
        assert bench.usages[uid + 10].cached_tokens >= n - page_size - max(1, lookahead)
        assert bench.usages[uid + 10].cached_tokens < n
    bench.check_streams()


def test_a_prompt_is_shared_while_its_first_request_still_runs():
    bench = Bench(make_ready())
    bench.admit(make_admit(1, PROMPT, 60))
    bench.run_device()
    bench.deliver_result()
    bench.admit(make_admit(2, PROMPT, 5))
    bench.finish_all()
    assert bench.usages[2].cached_tokens == 8
    bench.check_streams()


def test_without_a_prefix_cache_nothing_is_kept():
    bench = Bench(make_ready(), prefix_cache=False)
    for uid in (1, 2):
        bench.admit(make_admit(uid, PROMPT, 5))
        bench.finish_all()
    assert bench.usages[2].cached_tokens == 0
    assert bench.scheduler.queues.memory.cache.num_pages == 0


@pytest.mark.parametrize(
    ("prompt", "max_new", "words"),
    [
        ([], 4, "at least one token"),
        ([1] * 250, 7, "maximum context length of 256"),
        ([1] * 200, 40, "max_total_tokens"),
    ],
)
def test_what_can_never_run_is_refused(prompt, max_new, words):
    bench = Bench(make_ready(num_pages=61))
    bench.admit(make_admit(1, prompt, max_new))
    assert words in bench.refused[1].message
    bench.check_drained()


def test_the_largest_request_that_is_not_refused_runs_alone_to_its_end():
    for depth in (1, 2):
        bench = Bench(make_ready(num_pages=31, num_slots=2), depth)
        most = bench.scheduler.limits.max_request_tokens
        bench.admit(make_admit(1, [1] * 20, most - 20))
        bench.admit(make_admit(2, [2] * (most - 1), 1))
        bench.finish_all()
        bench.check_streams()
        bench.check_drained()


def test_a_pool_that_holds_no_request_is_an_error():
    with pytest.raises(ConfigError, match="max-total-tokens"):
        Bench(make_ready(num_pages=3))


def test_a_victim_in_flight_is_not_passed_in_the_queue():
    """A newcomer that would fit waits until the preempted request is back in front of it."""
    bench = Bench(make_ready(num_pages=65, num_slots=4))
    for uid in (1, 2):
        bench.admit(make_admit(uid, [uid] * 8, 30))
    for _ in range(3):
        bench.run_device()
        bench.deliver_result()
    queues = bench.scheduler.queues
    victim = queues.running[-1]
    assert victim.in_flight
    queues.leave(victim)
    bench.admit(make_admit(3, [3] * 4, 4))
    assert [request.uid for request in queues.waiting] == [3]
    bench.finish_all()
    assert victim.cached_tokens == 0 and list(bench.tokens) == [1, 2, 3]
    bench.check_streams()
    bench.check_drained()


def test_chunks_get_shorter_deep_in_a_context():
    limits = Bench(make_ready(chunk_tokens=64, chunk_pairs=64 * 100)).scheduler.limits
    lengths = [limits.affordable(1.0, start) for start in (0, 100, 200)]
    assert lengths == sorted(lengths, reverse=True) and lengths[2] >= 1
    for start, length in zip((0, 100, 200), lengths, strict=True):
        assert limits.chunk_cost(start, length) <= 1 + 1e-6 < limits.chunk_cost(start, length + 1)
    assert Bench(make_ready(chunk_tokens=64)).scheduler.limits.affordable(1.0, 5000) == 64
