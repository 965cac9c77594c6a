"""Seeded random schedules: whatever arrives, ends or runs out, everyone gets exactly their tokens."""

import random
from collections import Counter
from os.path import commonprefix

import pytest
from msgspec.structs import replace
from support.fake_device import VOCAB, Bench, expected_stream, make_admit, make_ready

from overlap_spec.client.link import pack_ids
from overlap_spec.messages import TOKEN_BYTES, Abort, AbortReason, FlushCache, StepCosts
from overlap_spec.scheduler import queues

REASONS = list(AbortReason)


def random_bench(rng: random.Random, seed: int) -> Bench:
    page_size = rng.choice([1, 2, 4, 16])
    width = rng.choice([1, 2, 4, 6])
    pool_tokens = rng.choice([100, 130, 400])
    ready = make_ready(
        num_slots=rng.randint(1, 6),
        num_pages=pool_tokens // page_size + 1,
        page_size=page_size,
        width=width,
        max_depth=2,
        key_lookahead=rng.choice([0, 1, 1, 3]),
        chunk_tokens=rng.choice([3, 8, 16, 64]),
        chunk_pairs=200 if seed % 3 == 0 else 0,
        max_len=120,
        max_deferred=rng.choice([2, 5, 16]) if width > 1 and seed % 2 else 0,
    )
    if ready.max_deferred and seed % 4 == 1:  # as wide as pays
        seconds = tuple(1 + i * rng.random() / 2 for i in range(width))
        costs = StepCosts((1, 4), tuple(range(1, width + 1)), (seconds, tuple(2 * s * s for s in seconds)))
        ready = replace(ready, step_costs=costs)
    options = {
        "widths_seed": seed if ready.max_deferred and not ready.step_costs.widths else None,
        "chunks_seed": seed if seed % 5 == 0 else None,
        "schedule_policy": "lpm" if seed % 3 == 0 else "fcfs",
        "leaves_out": 0.3 if seed % 3 == 2 else 0.0,
        "branches": bool(ready.step_costs.widths) and seed % 8 == 1,
    }
    return Bench(ready, rng.choice([1, 2, 2]), seed, prefix_cache=rng.random() < 0.85, **options)


def random_long_admit(rng: random.Random, uid: int, prompts: list[list[int]]):
    """Short in, long out: admitted together, and then too long together."""
    prompt = prompts[0][: rng.randint(1, 6)] if prompts else [rng.randrange(VOCAB) for _ in range(12)]
    prompts.append(prompt)
    return make_admit(uid, prompt, rng.randint(30, 60))


def random_admit(rng: random.Random, uid: int, prompts: list[list[int]]):
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))]
    if prompts and rng.random() < 0.6:  # share a prefix with an earlier prompt, repeat it whole, or continue its answer
        other = rng.choice(prompts[-8:])[:50]
        prompt = other[: rng.choice([len(other), rng.randint(1, len(other))])] + prompt[: rng.choice([0, 0, 1, 5])]
    max_new = rng.choice([1, 2, 3, 5, 8, 20, 40])
    stop_ids = tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 6])))
    admit = make_admit(uid, prompt, max_new, stop_ids, min_new_tokens=rng.choice([0, 0, min(4, max_new)]))
    prompts += [prompt, prompt + expected_stream(admit)[0]]
    return admit


def run_schedule(seed: int) -> Counter:
    """One schedule. Returns how often the things that must work did happen."""
    rng = random.Random(seed)
    bench = random_bench(rng, seed)
    seen: Counter = Counter()
    prompts: list[list[int]] = []
    to_admit = rng.randint(2, 12)
    make = rng.choice([random_admit, random_admit, random_long_admit])
    uid = 0
    while to_admit or bench.plans or bench.results:
        event = rng.random()
        if to_admit and event < rng.choice([0.05, 0.4]):
            uid, to_admit = uid + 1, to_admit - 1
            # Neither draws anything: schedules stay.
            whose = {"client": "abc"[uid * uid % 3], "salt": {0: "s", 3: "a\0", 6: "b\0s"}.get(uid % 10, "")}
            admit = replace(make(rng, uid, prompts), **whose)
            public = len(commonprefix([admit.prompt, pack_ids(prompts[0])])) // TOKEN_BYTES
            bench.admit(replace(admit, public_len=public if uid % 10 in (3, 6) else 0))
        elif uid and event > 0.97:
            victim = rng.randint(1, uid)
            request = bench.scheduler.queues.open.get(victim)
            seen["mid-step aborts"] += request is not None and request.in_flight > 0
            reason = rng.choice(REASONS)
            if request is not None:
                bench.abort(victim, reason)
            else:
                bench.deliver(Abort(victim, reason))
        elif bench.results and rng.random() < 0.5:
            bench.deliver_result()
        elif bench.plans:
            bench.run_device()
        elif rng.random() < 0.05:
            bench.deliver(FlushCache())
    bench.check_streams()
    bench.check_drained()
    bench.deliver(FlushCache())
    assert bench.flushed[-1] and len(bench.scheduler.queues.memory.pool.free) == bench.device.ready.num_pages - 1
    seen["preemptions"] = bench.scheduler.planner.counters.preempted
    seen["chunk splits"] = bench.device.num_split_chunks
    seen["catch-ups of full rings"] = bench.device.num_catch_ups["full"]
    seen["catch-ups before wider steps"] = bench.device.num_catch_ups["wider"]
    seen["prefix hits"] = sum(usage.cached_tokens > 0 for usage in bench.usages.values())
    seen["left out"] = bench.device.num_left_out
    seen["mixed"] = bench.device.num_mixed
    seen["requests"] = uid
    seen["steps"] = bench.device.last_step
    check_counts(bench)
    return seen


def check_counts(bench: Bench) -> None:
    """Counters agree with the plans and with each other."""
    counters = bench.scheduler.planner.counters
    assert counters.verify_steps <= sum(len(p.slots) for p in bench.all_plans)
    assert counters.committed_tokens >= counters.verify_steps
    assert counters.generation_tokens == sum(len(tokens) for tokens in bench.tokens.values())
    width = bench.device.ready.width
    for usage in bench.usages.values():
        assert (usage.spec_verify_ct == 0) if width == 1 else (usage.spec_verify_ct <= usage.completion_tokens)


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 100), marks=pytest.mark.slow)])
def test_random_schedules_give_every_request_its_tokens(capsys, seeds: range):
    seen: Counter = Counter()
    for seed in seeds:
        try:
            seen += run_schedule(seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}") from error
    with capsys.disabled():
        print(f"\n{len(seeds)} schedules: {dict(seen)}")
    for what in ("preemptions", "chunk splits", "prefix hits", "mid-step aborts", "left out", "mixed"):
        assert seen[what] > len(seeds) / 25, what
    for what in ("catch-ups of full rings", "catch-ups before wider steps"):
        assert seen[what] > len(seeds) / 12, what


@pytest.mark.slow
def test_reckless_admission_preempts_much_and_still_ends(monkeypatch):
    monkeypatch.setattr(queues, "INITIAL_RATIO", 0.0)
    monkeypatch.setattr(queues, "MIN_RATIO", 0.0)
    monkeypatch.setattr(queues.NewTokenRatio, "raise_after_preemption", lambda self, remaining: None)
    seen: Counter = Counter()
    for seed in range(40):
        seen += run_schedule(seed)
    assert seen["preemptions"] > 33


@pytest.mark.full
def test_many_random_schedules():
    for seed in range(1_000, 2_000):
        run_schedule(seed)
