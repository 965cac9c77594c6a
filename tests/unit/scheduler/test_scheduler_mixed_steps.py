"""Steps of windows and prompts: planned as one, settled part by part, and over with the last part."""

import random
from collections import Counter

import msgspec
import pytest
from support.fake_device import VOCAB, Bench, make_admit, make_ready
from support.random_widths import RandomWidths

from overlap_spec.messages import (
    AbortReason,
    FinishKind,
    FlushCache,
    ForwardShape,
    Phase,
    PrefillCosts,
    Roofline,
    StepPlan,
)
from overlap_spec.scheduler.limits import ChunkRoom

PROMPT = list(range(1, 11))
LONG = [3] * 60
PART_S, GAP_S = 0.001, 0.0002  # of the device that is played


def mixed_bench(depth: int = 2, **options) -> Bench:
    """Request 1 decodes, and request 2, whose prompt takes several steps, has come."""
    ready = make_ready(chunk_tokens=options.pop("chunk_tokens", 16), page_size=4, num_pages=101, **options)
    bench = Bench(ready, depth, windows_with_prompts=True)
    bench.admit(make_admit(1, PROMPT, 60))
    while bench.plans or bench.results:
        bench.run_device()
        bench.deliver_result()
        if len(bench.tokens[1]) > 1:
            break
    bench.admit(make_admit(2, LONG, 8))
    return bench


def is_mixed(plan: StepPlan) -> bool:
    return bool(plan.slots and plan.chunks)


def to_second_part(bench: Bench) -> StepPlan:
    """Play until the windows of a step with prompts are settled, and its prompts are not. Returns its plan."""
    while not bench.scheduler.ledger.awaits_prompts:
        bench.run_device()
        bench.deliver_result()
    return bench.scheduler.inflight[0].plan


def ended(bench: Bench) -> None:
    bench.finish_all()
    bench.check_streams()
    bench.check_drained()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_of_both_is_one_in_flight_until_its_last_part(depth: int) -> None:
    """At depth 2 the next step is sent before the first part's result has come, and none more after it."""
    bench = mixed_bench(depth)
    seen: Counter[int] = Counter()
    while bench.plans or bench.results:
        if bench.scheduler.inflight and is_mixed(bench.scheduler.inflight[0].plan):
            seen[len(bench.scheduler.inflight)] += 1
            oldest = bench.scheduler.inflight[0]
            for is_last in (False, True):
                assert bench.scheduler.inflight[0] is oldest
                bench.run_device()
                assert bench.results[0].is_last == is_last and bench.results[0].step_id == oldest.plan.step_id
                num_planned = len(bench.all_plans)
                bench.deliver_result()
                assert is_last or len(bench.all_plans) == num_planned, "a part makes no room for a step"
            assert not bench.scheduler.inflight or bench.scheduler.inflight[0] is not oldest
        else:
            bench.run_device()
            bench.deliver_result()
    assert seen[depth] > 1
    assert [plan.step_id for plan in bench.all_plans] == list(range(1, len(bench.all_plans) + 1))
    ended(bench)


def test_windows_come_first_in_a_plan_and_have_the_first_result() -> None:
    bench = mixed_bench()
    plan = to_second_part(bench)
    windows, prompts = plan.parts()
    assert windows.slots == plan.slots and not windows.chunks and not windows.resets
    assert prompts.chunks == plan.chunks and not prompts.slots and prompts.width == plan.first_width
    assert windows.new_pages | prompts.new_pages == plan.new_pages and prompts.new_pages.keys() == plan.resets.keys()
    ended(bench)


@pytest.mark.parametrize("uid", [1, 2])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_ends_between_the_parts_gains_nothing_more(depth: int, uid: int) -> None:
    """One whose prompt is in the step keeps slot and pages until the last part; one whose window was may lose them."""
    bench = mixed_bench(depth, chunk_tokens=64)  # the prompt ends in its first step
    plan = to_second_part(bench)
    assert plan.chunks[0].next_token < 0
    num_tokens, slot = len(bench.tokens[uid]), bench.scheduler.queues.open[uid].slot
    bench.abort(uid)
    held = slot not in bench.scheduler.queues.free_slots
    assert held == (uid == 2 or depth == 2), "a step in flight holds it"
    ended(bench)
    assert len(bench.tokens[uid]) == num_tokens and bench.finishes[uid].kind is FinishKind.ABORT


def test_the_cache_is_not_emptied_between_the_parts() -> None:
    bench = mixed_bench(1)
    to_second_part(bench)
    for uid in (1, 2):
        bench.abort(uid)
    bench.deliver(FlushCache())
    assert not bench.flushed, "the step still writes pages"
    bench.run_device()
    bench.deliver_result()
    assert bench.flushed == [True]
    bench.check_drained()


def test_the_time_of_both_parts_is_what_the_step_took() -> None:
    """So it is one step, without a lower bound of decoding, and no gap is between its parts."""
    roofline = Roofline(1e6, 0.0, ForwardShape(weight_bytes=400))
    bench = mixed_bench(prefill_costs=PrefillCosts(0.0, 1e-6), roofline=roofline)
    taken: list[float] = []
    bench.scheduler.planner.chunks.observe = lambda expected_s, taken_s: taken.append(taken_s)
    counters = bench.scheduler.planner.counters
    before, num_planned = counters.copy(), len(bench.all_plans) - len(bench.scheduler.inflight)
    while bench.plans or bench.results:
        bench.run_device()
        gap = 0.0 if bench.scheduler.ledger.awaits_prompts else GAP_S
        bench.results[0] = msgspec.structs.replace(bench.results[0], gpu_gap=gap)
        bench.deliver_result()
    plans = bench.all_plans[num_planned:]
    mixed = [plan for plan in plans if is_mixed(plan)]
    assert len(mixed) > 2 and taken == pytest.approx([2 * PART_S if is_mixed(p) else PART_S for p in plans if p.chunks])
    assert counters.steps - before.steps == counters.following_steps - before.following_steps == len(plans)
    assert counters.decode_steps - before.decode_steps == sum(not plan.chunks for plan in plans)
    assert counters.gpu_time - before.gpu_time == pytest.approx(PART_S * (len(plans) + len(mixed)))
    assert counters.gpu_gap - before.gpu_gap == pytest.approx(GAP_S * len(plans))


def test_prompts_beside_windows_propose_for_the_width_that_follows() -> None:
    bench = mixed_bench(chunk_tokens=64)
    bench.scheduler.planner.widths.policy = policy = RandomWidths(1, 4)
    policy.choose = lambda *_: 2
    policy.after_prompts = lambda _: 3
    for uid in range(3, 9):
        bench.admit(make_admit(uid, [uid] * 20, 8))
        bench.run_device()
        bench.deliver_result()
    ended(bench)
    mixed = [plan for plan in bench.all_plans if is_mixed(plan)]
    widths = {(plan.width, plan.first_width) for plan in mixed if any(chunk.next_token < 0 for chunk in plan.chunks)}
    assert (2, 3) in widths and widths <= {(2, 3), (4, 4)}
    assert all(plan.first_width == 0 for plan in bench.all_plans if not is_mixed(plan))


def test_windows_have_the_turn_after_a_step_of_both() -> None:
    bench = mixed_bench(1)
    to_second_part(bench)
    bench.scheduler.planner.chunks.with_windows = lambda: False
    num_planned = len(bench.all_plans)
    for _ in range(4):
        bench.run_device()
        bench.deliver_result()
    phases = [plan.phase for plan in bench.all_plans[num_planned:]]
    assert phases[:3] == [Phase.DECODE, Phase.PREFILL, Phase.DECODE]
    ended(bench)


class Sharing:
    """Chunk sizes by which prompts and windows share every step that they can; prompts are cut anywhere."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self._rng = random.Random(seed)
        chunks, room = bench.scheduler.planner.chunks, bench.scheduler.planner.chunks.room
        limits = bench.scheduler.limits

        def cut(decoding: bool, beside=None) -> ChunkRoom:
            found = room(decoding, beside)
            found.take(0, self._rng.randrange(limits.chunk_tokens))
            return found

        chunks.with_windows = lambda: True
        chunks.room = cut


def random_bench(rng: random.Random, seed: int, depth: int) -> Bench:
    page_size = rng.choice([1, 2, 4])
    width = rng.choice([1, 2, 4])
    ready = make_ready(
        num_slots=rng.randint(2, 6), num_pages=rng.choice([80, 80, 120]) // page_size + 1, page_size=page_size,
        width=width, key_lookahead=rng.choice([0, 1, 2]), chunk_tokens=rng.choice([4, 8, 16]), max_len=70,
        max_deferred=3 if width > 1 and seed % 2 else 0,
    )  # fmt: skip
    options = {"widths_seed": seed if ready.max_deferred else None, "leaves_out": 0.2 if seed % 3 == 2 else 0.0}
    bench = Bench(ready, depth, seed, schedule_policy="lpm" if seed % 4 == 0 else "fcfs", **options)
    Sharing(bench, seed)
    return bench


def abort_between(bench: Bench, rng: random.Random, seen: Counter[str]) -> None:
    """End a request of the step whose windows are settled."""
    step = bench.scheduler.inflight[0]
    kind = rng.choice(["window", "prompt"])
    requests = step.windows if kind == "window" else [request for request, _ in step.chunks]
    request = rng.choice(requests)
    if request.finish is None:
        seen[f"aborts of a {kind}"] += 1
        bench.abort(request.uid, rng.choice(list(AbortReason)))


def run_schedule(seed: int, depth: int) -> Counter[str]:
    """One schedule, whose requests end between the parts of a step, among other times."""
    rng = random.Random(seed)
    bench = random_bench(rng, seed, depth)
    seen: Counter[str] = Counter()
    to_admit = rng.randint(4, 14)
    longest, lengths = (6, [40]) if rng.random() < 0.4 else (30, [1, 2, 8, 30])  # answers that outgrow the pool, or not
    uid = 0
    while to_admit or bench.plans or bench.results:
        event = rng.random()
        if bench.scheduler.ledger.awaits_prompts:
            seen["flushes"] += event < 0.1
            if event < 0.1:
                bench.deliver(FlushCache())
            elif event < 0.3:
                abort_between(bench, rng, seen)
        if to_admit and rng.random() < 0.2:
            uid, to_admit = uid + 1, to_admit - 1
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))]
            bench.admit(make_admit(uid, prompt, rng.choice(lengths), tuple(rng.sample(range(VOCAB), 1))))
        elif bench.results and rng.random() < 0.5:
            bench.deliver_result()
        elif bench.plans:
            bench.run_device()
    bench.check_streams()
    bench.check_drained()
    seen["mixed"] += bench.device.num_mixed
    seen["preemptions"] += bench.scheduler.planner.counters.preempted
    seen["depth"] += max(plan.step_id for plan in bench.all_plans) == bench.scheduler.planner.counters.steps
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.full), 2])
def test_requests_end_between_the_parts_of_steps_and_everyone_gets_their_tokens(depth: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        try:
            seen += run_schedule(seed, depth)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error
    for what in ("mixed", "aborts of a window", "aborts of a prompt", "flushes", "preemptions"):
        assert seen[what] > 20, dict(seen)
    assert seen["depth"] == 60, "a step is counted once"
