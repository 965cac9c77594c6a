"""The order of prompts in prefill steps, the turns of clients, and the longest that any of them waits."""

import random

import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready
from support.plans import parts_of

from overlap_spec.messages import Admit, Phase
from overlap_spec.scheduler.queues import MOST_PASSED

LONG = 600


def long_bench(**options) -> Bench:
    ready = make_ready(num_slots=16, num_pages=801, max_len=1000, chunk_tokens=32)
    return Bench(ready, **options)


def step(bench: Bench) -> None:
    bench.run_device()
    bench.deliver_result()


def chunks_until_first_token(bench: Bench, uid: int, most: int = 1000) -> int:
    """Steps of prompts that run until a request has its first token."""
    before = bench.scheduler.planner.counters.steps - bench.scheduler.planner.counters.decode_steps
    while not bench.tokens[uid]:
        step(bench)
        assert most > 0
        most -= 1
    return bench.scheduler.planner.counters.steps - bench.scheduler.planner.counters.decode_steps - before


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("decoding", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_short_prompt_waits_for_a_few_chunks_of_a_long_one(depth: int, decoding: bool):
    bench = long_bench(depth=depth)
    if decoding:
        bench.admit(make_admit(9, [9], 500))
        step(bench)
    bench.admit(make_admit(1, [1] * LONG, 4))
    bench.admit(make_admit(2, [2] * LONG, 4))
    for _ in range(7):
        step(bench)
    bench.admit(make_admit(3, [3] * 20, 4))
    assert chunks_until_first_token(bench, 3) <= depth + 2
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()


def test_the_oldest_prompt_has_every_other_step_whatever_arrives():
    bench, rng = long_bench(), random.Random(0)
    bench.admit(make_admit(1, [1] * LONG, 4))
    uid, taken = 1, 0
    while not bench.tokens[1]:
        queues = bench.scheduler.queues
        while len(queues.unfinished) + len(queues.waiting) < 4:  # shorter ones, each of which fills a step
            uid += 1
            bench.admit(make_admit(uid, [rng.randrange(90) for _ in range(rng.randint(30, 32))], 1))
        step(bench)
        taken += bench.all_plans[bench.device.last_step - 1].phase is Phase.PREFILL
        assert taken <= 2 * LONG / 32 + 4
    assert taken > 1.5 * LONG / 32, "others take turns with it"
    bench.finish_all()
    bench.check_streams()


def test_every_prompt_of_many_is_finished_in_bounded_time():
    """Each one is the oldest at last: it waits for at most twice the work of the older ones and its own."""
    bench, rng = long_bench(), random.Random(1)
    lengths = {uid: rng.choice((30, 90, 400)) for uid in range(1, 9)}
    for uid, length in lengths.items():
        bench.admit(make_admit(uid, [uid] * length, 1))
    ended: dict[int, int] = {}
    while len(ended) < len(lengths):
        step(bench)
        ended |= {uid: bench.device.last_step for uid in lengths if bench.tokens[uid] and uid not in ended}
    for uid, steps in ended.items():
        work = sum(-(-length // 32) + 1 for other, length in lengths.items() if other <= uid)
        assert steps <= 2 * work + 2, uid


def test_prompts_that_arrive_together_share_a_step_and_only_the_last_is_cut():
    bench = long_bench()
    bench.admit(make_admit(9, [9], 500))
    step(bench)
    for uid, length in enumerate((7, 5, 9, 8, 60), start=1):
        bench.admit(make_admit(uid, [uid] * length, 4))
    bench.finish_all()
    prefills = [plan for plan in bench.all_plans if plan.phase is Phase.PREFILL]
    for plan in prefills:
        assert sum(len(work.tokens) // 4 for work in parts_of(plan)) <= 32
        assert all(work.next_token == -1 for work in parts_of(plan)[:-1])
    assert [len(parts_of(plan)) for plan in prefills] == [1, 4, 1, 1], "the four short ones share a step"
    bench.check_streams()


def test_a_prompt_that_waits_starts_from_what_others_have_cached_since():
    """Both are admitted before anything is cached; the second begins when the first one's prompt is."""
    bench = long_bench()
    bench.admit(make_admit(9, [9] * 32, 1))
    bench.admit(make_admit(1, [1] * 64, 4))
    bench.admit(make_admit(2, [1] * 100, 4))
    step(bench)
    assert [request.cached_len for request in bench.scheduler.queues.running] == [0, 0]
    bench.finish_all()
    assert bench.usages[1].cached_tokens == 0 and bench.usages[2].cached_tokens >= 28
    bench.check_streams()
    bench.check_drained()


def lpm_bench() -> Bench:
    """One slot, and a cached prefix."""
    ready = make_ready(num_slots=1, num_pages=201, max_len=300)
    bench = Bench(ready, schedule_policy="lpm")
    bench.admit(make_admit(1, [5] * 40, 1))
    bench.finish_all()
    return bench


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [2, 3, 4, 5]), ("lpm", [2, 5, 4, 3])])
def test_the_longest_cached_prefix_goes_first_if_that_is_asked(policy: str, order: list[int]):
    ready = make_ready(num_slots=1, num_pages=201, max_len=300)
    bench = Bench(ready, schedule_policy=policy)
    bench.admit(make_admit(1, [5] * 40, 1))
    bench.finish_all()
    bench.admit(make_admit(2, [6] * 9, 4))
    for uid, shared in ((3, 0), (4, 16), (5, 32)):
        bench.admit(make_admit(uid, [5] * shared + [7] * 9, 4))
    bench.finish_all()
    assert [uid for uid in bench.finishes if uid > 1] == order
    bench.check_streams()
    bench.check_drained()


def test_a_request_without_a_prefix_is_passed_so_often_and_no_oftener():
    bench = lpm_bench()
    bench.admit(make_admit(2, [6] * 9, 2))
    bench.admit(make_admit(3, [7] * 9, 1))
    uid = 3
    while 3 not in bench.finishes:
        while len(bench.scheduler.queues.waiting) < 3:  # there are always some with a prefix
            uid += 1
            bench.admit(make_admit(uid, [5] * 32 + [uid % 90] * 4, 1))
        step(bench)
    passed = [other for other in bench.finishes if other > 3]
    assert len(passed) == MOST_PASSED
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()


# --- clients ----------------------------------------------------------------------------------------------


def of(client: str, uid: int, prompt: list[int], max_new: int = 2) -> Admit:
    return replace(make_admit(uid, prompt, max_new), client=client)


def flooded(slots: int = 2, size: int = 300, **options: object) -> Bench:
    bench = Bench(make_ready(num_slots=slots, num_pages=401), **options)
    for uid in range(1, size + 1):
        bench.admit(of("flood", uid, [uid % 90] * 3))
    return bench


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_one_request_waits_for_a_turn_and_not_for_a_flood(policy: str) -> None:
    bench = flooded(schedule_policy=policy)
    bench.admit(of("other", 5000, [7] * 9))
    while 5000 not in bench.finishes:
        step(bench)
    assert len(bench.finishes) <= 6, "those that ran, those admitted with it, and itself"


def test_clients_take_turns_whatever_each_has_sent() -> None:
    bench = Bench(make_ready(num_slots=1))
    sizes = {"a": 9, "b": 3, "c": 1}
    for index, (client, size) in enumerate(sizes.items()):
        for number in range(size):
            bench.admit(of(client, 100 * (index + 1) + number, [5] * 4))
    bench.finish_all()
    began = "".join(bench.admits[uid].client for uid in bench.finishes)
    assert began == "a" + "abc" + "ab" * 2 + "a" * 5, began  # the first was alone when it came
    bench.check_streams()
    bench.check_drained()


def test_a_client_that_asks_again_and_again_waits_for_a_turn_of_the_others_each_time() -> None:
    bench, uid = flooded(slots=1), 5000
    for _ in range(20):
        uid += 1
        bench.admit(of("other", uid, [uid % 90] * 3))
        before = len(bench.finishes)
        while uid not in bench.finishes:
            step(bench)
        assert len(bench.finishes) - before <= 3


def test_age_counts_from_the_first_start_so_that_a_flood_is_its_own_victim() -> None:
    """What it has sent before another's request, and begins after it, is younger. A victim comes back first."""
    bench = flooded(slots=3, size=20)
    bench.admit(of("other", 100, [7] * 4, 30))
    while not bench.tokens[100]:
        step(bench)
    while bench.scheduler.queues.running[-1].uid == 100:
        step(bench)
    queues = bench.scheduler.queues
    victim = queues.running[-1]
    assert victim.uid < 100 and any(request.uid == 100 for request in queues.running)
    bench.scheduler.planner._preempt(victim)
    while not victim.running:
        assert queues.victims_leaving or queues.waiting.next() is victim
        step(bench)
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()


def test_a_request_that_does_not_fit_yet_is_not_passed_by_another_client() -> None:
    bench = Bench(make_ready(num_slots=4, num_pages=30, max_len=150))
    bench.admit(of("a", 1, [1] * 4, 60))
    bench.admit(of("a", 2, [2] * 60, 30))
    step(bench)
    for uid in range(3, 20):
        bench.admit(of("b", uid, [uid] * 4, 2))
    while not bench.tokens[2]:
        step(bench)
    assert 1 in bench.finishes, "the large one had to wait for it"
    assert bench.scheduler.queues.open[2].order == 2, "it has begun before every one of the other client"
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()
