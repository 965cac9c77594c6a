"""Seeded random schedules over the whole ring: every request gets its plain, solo tokens, whatever else happens.

Arrivals, lengths, aborts, preemption from a tiny pool, chunks, prefix hits, stop strings, seeds, temperatures; depth
1 and 2, one to five draft steps, page sizes 1 to 16, steps of changing width. Invariants are checked after every
event (tests/support/ring.py); answers when all have ended, by an oracle.
"""

import asyncio
import functools
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import msgspec
import torch

from overlap_spec.config import NGRAM
from overlap_spec.features import is_there
from overlap_spec.frontend.codec import TextCodec, load_codec
from overlap_spec.messages import FinishKind, SamplingParams, Thinking
from overlap_spec.models.layers.parallel import Rank
from overlap_spec.scheduler.snapshots import SnapshotCache
from overlap_spec.worker.startup.geometry import LoadedModels
from support.kept_answers import from_another_start
from support.plain_oracle import PlainOracle
from support.ranked_models import RankedModels, ranked_models
from support.ring import Answer, Ring, RingConfig, running, tiny_loaded
from support.scheduler_features import audits_of
from support.speculation import check_report, limited
from support.tiny.families import RECURRENT
from support.tiny.methods import KNOWN_METHODS
from support.tiny.tokenizer import write_tokenizer

NUM_MODELS = 4
CHARACTERS = "etaoin shrdlu,.EQZ0123"
FILTERS: dict[str, tuple[float, ...]] = {"top_k": (1, 2, 4, 20), "top_p": (0.6, 0.8, 0.95), "min_p": (0.02, 0.1, 0.3)}
CHANGES: dict[str, Callable[[random.Random], Any]] = {
    "repetition_penalty": lambda rng: rng.choice((0.8, 1.3, 2.0)),
    "presence_penalty": lambda rng: rng.choice((-1.0, 0.5, 2.0)),
    "frequency_penalty": lambda rng: rng.choice((-0.3, 0.4, 1.5)),
    "logit_bias": lambda rng: {token: rng.choice((-100, -0.7, 0.3, 4)) for token in rng.sample(range(128), 30)},
    "allowed_token_ids": lambda rng: tuple(rng.sample(range(128), 60)),
    "bad_word_ids": lambda rng: (
        *((token,) for token in rng.sample(range(128), 20)),
        *((token, rng.randrange(20)) for token in range(128)),
        *((token, rng.randrange(128), rng.randrange(128)) for token in range(30)),
    ),
}
STRICTEST = tuple(f"{name}_strictest_of_several" for name in FILTERS)
CATCH_UPS = ("catch_ups_before_wide_steps", "catch_ups_of_full_rings")
MUST_HAPPEN = (
    "preemptions",
    "chunk_splits",
    "prefix_hit_tokens",
    "mid_step_aborts",
    "accepted",
    "rejected",
    "stop_strings",
    "narrow_steps",
    "device_ahead",
    "limited_steps",
    "mixed_steps",
    "steps_of_plain_requests",
    *CATCH_UPS,
    "decided_by_penalties",
    "decided_by_logit_bias",
    "decided_by_allowed_token_ids",
    "decided_by_bad_words",
    "decided_by_thinking_budgets",
    *STRICTEST,
)


@dataclass(frozen=True)
class Request:
    """What a client asks for, and after how many tokens it goes away (None: it stays)."""

    prompt: list[int]
    sampling: SamplingParams
    abort_after: int | None


class Oracle(Protocol):
    """Checks answers."""

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        """Raises: AssertionError beginning with `what`."""
        ...


class Counting:
    """Passes answers on to another oracle, and keeps its errors instead of ending at the first."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self.wrong: list[str] = []

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        """See `Oracle`, but for the error."""
        try:
            self._oracle.check(prompt, sampling, answer, what)
        except AssertionError as error:
            self.wrong.append(str(error).partition("\n")[0])


def random_config(rng: random.Random, crowded: bool) -> RingConfig:
    page_size = rng.choice([1, 4, 16])
    num_steps = rng.choice([0, 1, 3, 3, 5])
    pool_tokens = rng.choice([110, 150, 600]) if not crowded else 100
    return RingConfig(
        num_steps=num_steps,
        depth=rng.choice([1, 2, 2]),
        page_size=page_size,
        num_pages=pool_tokens // page_size + 1,
        num_slots=rng.randint(2, 6),
        chunk_tokens=max(page_size, rng.choice([5, 16, 64])),
        chunk_pairs=rng.choice([0, 300]),
        max_len=120,
        prefix_cache=rng.random() < 0.8,
        widths_seed=rng.randrange(1 << 30) if num_steps and rng.random() < 0.6 else None,
    )


def with_room(config: RingConfig) -> RingConfig:
    """The windows of trees are wider: a request takes as many pages more."""
    more = 3 * max(config.width - 6, 0)  # as many windows may be in flight
    return replace(config, num_pages=config.num_pages + -(-more // config.page_size))


def random_requests(rng: random.Random, count: int, crowded: bool = False, filters: bool = True) -> list[Request]:
    """Some share a prefix. `filters`: with top_k, top_p and min_p among them."""
    prompts: list[list[int]] = []
    return [
        Request(
            random_prompt(rng, prompts, crowded),
            random_sampling(rng, crowded, filters),
            rng.choice([None] * 5 + [0, 1, 3]),
        )
        for _ in range(count)
    ]


def random_sampling(rng: random.Random, crowded: bool, filters: bool) -> SamplingParams:
    max_new = rng.randint(30, 50) if crowded else rng.choice([1, 2, 4, 8, 16, 30])
    filtered = rng.randrange(6) >= 2 and filters
    sampling = SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=rng.choice([0, 0, 0, min(3, max_new)]),
        temperature=rng.choice([0.0, 0.0, 0.7, 1.0]),
        seed=rng.randrange(1 << 40),
        stop=() if crowded else tuple(rng.sample(CHARACTERS, rng.choice([0, 0, 1, 2]))),
        stop_token_ids=() if crowded else tuple(rng.sample(range(128), rng.choice([0, 0, 2]))),
        ignore_eos=crowded or rng.random() < 0.3,
    )
    changes = random_changes(random.Random(rng.randrange(1 << 40))) if filters else {}
    if filtered:
        changes |= random_filters(random.Random(sampling.seed))
    thinking = random_thinking(random.Random(sampling.seed)) if filters else None
    return msgspec.structs.replace(sampling, thinking=thinking, **changes)


def random_thinking(rng: random.Random) -> Thinking | None:
    """Markers of frequent characters, so that some reasoning ends by itself. None for most requests."""
    opening, closing = (tuple(rng.choices(range(6, 128), k=rng.randint(1, 3))) for _ in range(2))
    return Thinking(rng.randint(0, 12), rng.random() < 0.8, opening, closing) if rng.random() < 0.3 else None


def random_changes(rng: random.Random) -> dict[str, Any]:
    """Of logits: none for half of the requests, else one parameter or several."""
    names = rng.sample(list(CHANGES), rng.choice([0, 0, 1, len(CHANGES)]))
    return {name: CHANGES[name](rng) for name in names}


def random_filters(rng: random.Random) -> dict[str, float]:
    """One of them, two, or all three."""
    return {name: rng.choice(FILTERS[name]) for name in rng.sample(list(FILTERS), rng.randint(1, len(FILTERS)))}


def random_prompt(rng: random.Random, earlier: list[list[int]], crowded: bool) -> list[int]:
    prompt = [rng.randrange(6, 128) for _ in range(rng.randint(1, 8 if crowded else 40))]
    if earlier and rng.random() < 0.6:  # share a prefix with an earlier prompt, or repeat it whole
        other = rng.choice(earlier)
        prompt = other[: rng.randint(1, len(other))] + prompt[: rng.choice([0, 0, 1, 5])]
    earlier.append(prompt)
    return prompt[:60]


def run_schedule(seed: int, models_seed: int, oracle: Oracle, codec: TextCodec, **engine: Any) -> Counter[str]:
    """One schedule. Returns how often each tested event happened."""
    rng = random.Random(seed)
    crowded = rng.random() < 0.25  # long answers that together exceed the pool: a request must be preempted
    cuts = {"chunks_seed": seed if seed % 2 else None, "schedule_policy": "lpm" if seed % 3 == 0 else "fcfs"}
    if engine.get("family") in RECURRENT:  # few snapshots, at places that short prompts have
        cuts |= {"num_snapshots": 1 + seed % 5, "state_chunk": 4, "snapshot_interval": 4 * (1 + seed % 3)}
    config = with_room(replace(random_config(rng, crowded), **{**cuts, **engine}))
    requests = [
        replace(request, sampling=limited(request.sampling, config.num_steps))
        for request in random_requests(rng, rng.randint(4, 10), crowded)
    ]
    models = ranked_models(config.ranks, lambda rank: load(models_seed, config, rank))
    return run_requests(requests, models, config, codec, oracle, f"schedule {seed}")


def load(models_seed: int, config: RingConfig, rank: Rank) -> LoadedModels:
    """What a rank has of a tiny model."""
    return tiny_loaded(
        models_seed,
        config.num_steps,
        config.dtype,
        config.place,
        config.method,
        config.family,
        config.topk,
        rank=rank,
        **config.shape,
    )


def run_requests(
    requests: list[Request],
    models: LoadedModels | RankedModels,
    config: RingConfig,
    codec: TextCodec,
    oracle: Oracle,
    what: str,
    watch: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Counter[str]:
    """Serve requests in one ring and check the answers; `watch` is around all that happens once the ring is ready."""
    seen: Counter[str] = Counter()
    answers = asyncio.run(serve(requests, models, config, codec, random.Random(what), seen, watch))
    answered = list(enumerate(zip(requests, answers, strict=True)))
    for i, (request, answer) in from_another_start(answered, what):
        assert answer.rejected is None, f"{what} request {i}: {answer.rejected}"
        oracle.check(request.prompt, request.sampling, answer, f"{what} request {i}")
        check_report(request.sampling, answer, config.num_steps, seen)
        assert answer.finish is not None
        aborted = answer.finish.kind is FinishKind.ABORT
        seen["aborted" if aborted else "finished"] += 1
        seen["stop_strings"] += isinstance(answer.finish.matched, str) and not aborted
    return seen


async def serve(
    requests: list[Request],
    models: LoadedModels | RankedModels,
    config: RingConfig,
    codec: TextCodec,
    rng: random.Random,
    seen: Counter[str],
    watch: Callable[[], AbstractContextManager[object]],
) -> list[Answer]:
    """Send requests at random times and wait for all ends; nothing may be left of them."""
    async with running(models, config, codec) as ring:
        with watch():
            answers, tasks = [], []
            for i, request in enumerate(requests):
                answers.append(ring.start(f"r{i}", request.prompt, request.sampling))
                tasks.append(asyncio.create_task(follow(ring, f"r{i}", answers[-1], request.abort_after, seen)))
                await asyncio.sleep(rng.choice([0, 0, 0.001, 0.005]))
            await asyncio.gather(*tasks)
            await ring.idle()
        count(ring, seen)
        if is_there("audit"):
            check_audit(ring, seen)
        assert_nothing_leaked(ring)
    ring.assert_ranks_agree()
    return answers


async def follow(ring: Ring, request_id: str, answer: Answer, abort_after: int | None, seen: Counter[str]) -> None:
    """Wait for the end; abort once the answer has this many tokens, if it lives that long."""
    if abort_after is not None:
        while len(answer.token_ids) < abort_after and not answer.done.is_set():
            answer.grew.clear()
            await asyncio.wait_for(answer.grew.wait(), 60)
        if not answer.done.is_set():
            seen["mid_step_aborts"] += bool(ring.scheduler.inflight)
            ring.cancel(request_id)
    await asyncio.wait_for(answer.done.wait(), 60)


def count(ring: Ring, seen: Counter[str]) -> None:
    counters = ring.scheduler.planner.counters
    stats = ring.scheduler.reporter.snapshot()
    seen["preemptions"] += counters.preempted
    seen["chunk_splits"] += ring.plans.chunk_splits
    seen["narrow_steps"] += sum(ring.plans.widths.values()) - ring.plans.widths[ring.scheduler.limits.width]
    seen["device_ahead"] += ring.inbox.times_ahead
    seen["catch_ups_before_wide_steps"] += ring.inbox.sent.catch_ups[True]
    seen["catch_ups_of_full_rings"] += ring.inbox.sent.catch_ups[False]
    seen["steps_at_rest"] += sum(ring.plans.rests)
    seen["left_out"] += ring.inbox.sent.left_out
    seen["mixed_steps"] += ring.counted.num_together
    seen["prefix_hit_tokens"] += stats.cached_tokens_total
    seen["accepted"] += stats.committed_tokens_total - stats.verify_steps_total
    seen["rejected"] += stats.proposed_tokens_total - (stats.committed_tokens_total - stats.verify_steps_total)


def check_audit(ring: Ring, seen: Counter[str]) -> None:
    """In float64 a token that is not plain decoding's is a fault; every request was audited, if any were."""
    report = ring.auditor.report()
    figures = report.figures
    assert not report.recent and not figures.faults, report.recent
    assert not figures.control_differences and not figures.backlog
    seen["audited_requests"] += figures.requests
    seen["audited_tokens"] += figures.tokens
    seen["audits_given_up"] += sum(report.dropped_because.values())
    if "audit" in ring.scheduler.hooks.by_name:
        seen["audits_begun_again"] += audits_of(ring.scheduler).num_restarts
    seen["audit_steps_between_others"] += ring.plans.audits_between


def assert_nothing_leaked(ring: Ring) -> None:
    """Only the cache holds pages, and it can drop every one."""
    memory = ring.scheduler.queues.memory
    memory.cache.evict(memory.cache.num_evictable)
    assert len(memory.pool.free) == memory.pool.num_total
    if isinstance(memory.cache, SnapshotCache):
        assert sorted(memory.cache.free) == list(range(ring.scheduler.limits.num_snapshots))


def defers(method: str) -> bool:
    """Whether its steps of width 1 leave something to catch up with."""
    return KNOWN_METHODS[method][0] != NGRAM


def run_schedules(num_schedules: int, codec: TextCodec, **engine: Any) -> Counter[str]:
    """Run schedules 0, 1, ..; `engine` overrides what a ring is made of (device, dtype, graphs).

    On a CPU every other one runs in a second process, unless pytest-xdist has started one: a schedule keeps one core
    busy, and CI has two.
    """
    if "place" in engine or "PYTEST_XDIST_WORKER" in os.environ:
        seen = run_seeds(range(num_schedules), codec, engine)
    else:
        others = second_process().submit(run_seeds_elsewhere, range(1, num_schedules, 2), engine)
        seen = run_seeds(range(0, num_schedules, 2), codec, engine) + others.result()
    print(f"{num_schedules} random schedules: {dict(seen)}")
    spared = () if defers(engine.get("method", "EAGLE3")) else CATCH_UPS
    if engine.get("family", "llama") != "llama":
        spared += STRICTEST  # logits may be so peaked that one of the filters never decides
    must_happen = [what for what in MUST_HAPPEN if what not in spared]
    must_happen += [] if defers(engine.get("method", "EAGLE3")) else ["steps_at_rest"]
    assert all(seen[what] > 0 for what in must_happen), dict(seen)
    return seen


@functools.cache
def second_process() -> ProcessPoolExecutor:
    """It lives as long as this one, and imports torch once."""
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))


def run_seeds_elsewhere(seeds: range, engine: dict[str, Any]) -> Counter[str]:
    """In a process with a codec of its own, the same as the fixture: one cannot be sent."""
    with TemporaryDirectory() as directory:
        codec = load_codec(write_tokenizer(Path(directory)))
    return run_seeds(seeds, codec, engine)


def run_seeds(seeds: range, codec: TextCodec, engine: dict[str, Any]) -> Counter[str]:
    """These schedules, one after another."""
    place = {name: engine[name] for name in ("dtype", "place", "family", "processor", "kv_dtype") if name in engine}
    models = sorted({seed % NUM_MODELS for seed in seeds})
    oracles = {which: PlainOracle(10 * which, codec, **place) for which in models}
    seen: Counter[str] = Counter()
    try:
        for seed in from_another_start(seeds, repr(engine)):
            which = seed % NUM_MODELS
            seen += run_schedule(seed, 10 * which, oracles[which], codec, **engine)
        for oracle in oracles.values():
            seen.update({f"{name}_strictest_of_several": count for name, count in oracle.strictest.items()})
            seen["forbidden"] += oracle.num_forbidden
            seen.update({f"decided_by_{name}": count for name, count in oracle.decided.items()})
    finally:
        for oracle in oracles.values():
            oracle.close()
    return seen
