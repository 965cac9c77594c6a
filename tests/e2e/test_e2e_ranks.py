"""Engines of several ranks: their answers, and what becomes of streams when a rank dies or hangs."""

import asyncio
import functools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.command_line import is_running
from support.disturbed_streams import (
    BASE,
    EAGLE3,
    KINDS,
    Disturbance,
    Flags,
    answers,
    asked,
    assert_same,
    same_streams,
)
from support.ranked_engine import RankedEngine
from support.ring import RingConfig, running
from support.ring_server import RingClient
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import tiny_target, write_checkpoint
from support.tiny.mtp import tiny_nextn
from support.tiny.standalone import tiny_language_draft
from support.tiny.tokenizer import write_tokenizer

from overlap_spec import Engine, EngineConfig, SamplingParams, hub
from overlap_spec.client.calls import Completion
from overlap_spec.config.ranks import worker_roles
from overlap_spec.config.resolve import resolve
from overlap_spec.errors import ActorDied
from overlap_spec.frontend.codec import load_codec
from overlap_spec.messages import EngineState, RankFacts
from overlap_spec.runtime import machine
from overlap_spec.worker.build import load_models

EngineOf = Callable[[Flags], Engine]
CHAIN: Flags = {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
METHODS: dict[str, Flags] = {
    "chain": EAGLE3 | CHAIN,
    "tree": EAGLE3 | {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6},
    "adaptive": EAGLE3,
    "ngram": {"algorithm": "NGRAM", "num_draft_tokens": 4, "ngram_max_bfs_breadth": 1},
    "plain": {"algorithm": "NONE"},
}
RANKS = [2, 4]
NUMBERS = [signal.SIGKILL, signal.SIGSTOP]


def flags_of(method: str, depth: int, tiny_model: Path, **others: object) -> Flags:
    flags = {f"speculative_{name}": value for name, value in METHODS[method].items()}
    if "speculative_draft_model_path" in flags:
        flags["speculative_draft_model_path"] = str(tiny_model / "head")
    model = {"model_path": str(tiny_model), "dtype": "float64", "log_level": "error"}
    return model | BASE | flags | {"disable_overlap_schedule": depth == 1} | others


def ranked(ranks: int, flags: Flags) -> RankedEngine:
    return RankedEngine(EngineConfig(**flags), ranks)


@functools.cache
def one_rank(tiny_model: Path) -> tuple[list[Completion], int]:
    """What one rank answers, whatever drafts and however many steps are in flight, and the bytes of its weights."""
    return answers_of_one_rank(EngineConfig(**flags_of("chain", 2, tiny_model)))


def answers_of_one_rank(config: EngineConfig) -> tuple[list[Completion], int]:
    """By plain decoding in this process: an engine of its own would cost as much as that of the ranks."""
    files = hub.resolve_model(config)
    settings, _ = resolve(config, files, machine.inspect())
    spec, _ = hub.resolve_drafting(settings.spec, files, config)
    models = load_models(replace(settings, spec=spec), torch.device("cpu"), lambda done, total: None)
    codec, requests = load_codec(Path(config.model_path)), asked(len(KINDS))
    plain = RingConfig(num_steps=0, num_slots=1, depth=1, grammars=True, prefix_cache=False)

    async def ask() -> list[Completion]:
        async with running(models, plain, codec) as ring, RingClient(ring) as client:
            return list(await asyncio.gather(*(client.complete(*request) for request in requests)))

    return asyncio.run(ask()), models.target.num_bytes + models.proposer.profile.num_bytes


async def answering_alike(several: Engine, ranks: int, wanted: list[Completion]) -> tuple[RankFacts, ...]:
    """Assert that several ranks answer as one does. Returns what each of them holds."""
    async with several as engine:
        found, parts = await answers(engine, asked(len(wanted))), engine.facts.worker.ranks
        assert list(engine.pids) == ["frontend", "scheduler", *worker_roles(ranks)]
    assert [each.rank for each in parts] == list(range(ranks))
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs)
    return parts


@pytest.mark.full
@pytest.mark.parametrize("depth", [2, 1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", RANKS)
def test_answers_are_those_of_one_rank(tiny_model: Path, ranks: int, method: str, depth: int) -> None:
    """Greedy and seeded, with penalties, log-probs, grammars, filters and stop strings."""
    several = ranked(ranks, flags_of(method, depth, tiny_model))
    parts = asyncio.run(answering_alike(several, ranks, one_rank(tiny_model)[0]))
    assert all(each.kv_bytes for each in parts)


@pytest.mark.full_but_every(20)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 1])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", RANKS)
def test_a_divided_model_answers_as_a_whole_one(tiny_model: Path, ranks: int, method: str, depth: int) -> None:
    """In float64, where sums in another order decide no token."""
    several = Engine(EngineConfig(**flags_of(method, depth, tiny_model), tp_size=ranks))
    wanted, whole = one_rank(tiny_model)
    parts = asyncio.run(answering_alike(several, ranks, wanted))
    # A log of n-grams is whole on each rank, and larger than this model.
    assert method == "ngram" or all(each.weight_bytes < whole for each in parts), "each has a part"


@pytest.fixture
def latent(tmp_path: Path) -> Flags:
    """A target with latent attention, experts and a layer of its own that drafts."""
    write_tokenizer(write_checkpoint(tmp_path, tiny_nextn(8, tiny_target(7, **TINY_FAMILIES["deepseek v3"]))))
    return {"model_path": str(tmp_path), "speculative_algorithm": "NEXTN"}


@pytest.fixture
def mixture(tmp_path: Path) -> Flags:
    """A target with experts, and a small model that drafts."""
    target = tiny_target(7, **TINY_FAMILIES["qwen3 moe"])
    draft = write_checkpoint(tmp_path / "draft", tiny_language_draft(8, tiny_target(7)))
    for path in (write_checkpoint(tmp_path, target), draft):
        write_tokenizer(path)
    own = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    return {"model_path": str(tmp_path)} | own


@pytest.mark.full
@pytest.mark.parametrize("target", ["latent", "mixture"])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_target_with_experts_answers_as_a_whole_one(request: pytest.FixtureRequest, target: str, ranks: int) -> None:
    sizes = {f"speculative_{name}": value for name, value in CHAIN.items()}
    flags = BASE | {"dtype": "float64", "log_level": "error"} | sizes | request.getfixturevalue(target)
    wanted, whole = answers_of_one_rank(EngineConfig(**flags))
    parts = asyncio.run(answering_alike(Engine(EngineConfig(**flags, tp_size=ranks)), ranks, wanted))
    assert all(each.weight_bytes < whole for each in parts)


async def note_blamed(engine: Engine, blamed: set[str | None]) -> None:
    """Who is said to have died or to hang, until this is cancelled."""
    while True:
        if engine.health.state is EngineState.RECOVERING:
            blamed.add(engine.health.actor)
        await asyncio.sleep(0.02)


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("role", worker_roles(2))
def test_streams_go_on_whichever_rank_dies_or_hangs(tiny_model: Path, role: str, number: int) -> None:
    async def scenario() -> None:
        flags = flags_of("chain", 2, tiny_model, watchdog_timeout=4.0)
        async with ranked(2, flags) as engine:
            before, blamed = engine.pids, set[str | None]()
            watching = asyncio.create_task(note_blamed(engine, blamed))
            await same_streams(engine, len(KINDS), [Disturbance(role, number)], random.Random(number))
            watching.cancel()
            assert blamed == {role}, "neither a rank that lost it nor one that waits for it"
            assert engine.pids["frontend"] == before["frontend"]
            assert not any(is_running(before[each]) for each in ("scheduler", *worker_roles(2)))
        assert not any(is_running(pid) for pid in engine.pids.values())

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("depth", [1, 2])
def test_twenty_deaths_and_hangs_of_ranks(tiny_model: Path, depth: int) -> None:
    """Of two ranks and of four, each in turn, by each signal."""

    async def scenario(ranks: int, count: int) -> None:
        async with ranked(ranks, flags_of("tree", depth, tiny_model, watchdog_timeout=4.0)) as engine:
            what = [Disturbance(role, number) for number in NUMBERS for role in worker_roles(ranks)]
            await same_streams(engine, 17, (what * count)[:count], random.Random(depth))

    for ranks, count in ((2, 4), (4, 6)):
        asyncio.run(scenario(ranks, count))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("failing_rank", "has no GPU"),
        pytest.param(
            *("taken_socket", "cannot bind its socket .*/worker-1.steps: .*already in use"), marks=pytest.mark.full
        ),
    ],
)
def test_a_rank_that_cannot_start_ends_the_start_by_its_own_name(tiny_model: Path, worker: str, said: str) -> None:
    config = EngineConfig(**flags_of("plain", 2, tiny_model))

    async def scenario() -> None:
        engine = RankedEngine(config, 2, f"support.actors.{worker}")
        with pytest.raises(ActorDied, match=f"^worker-1: --tp-size: rank 1 {said}") as caught:
            await engine.start()
        assert caught.value.refused, "exit status 2"
        assert not any(is_running(pid) for pid in engine.pids.values())

    asyncio.run(scenario())


@pytest.mark.full
def test_without_recovery_the_death_of_a_rank_ends_the_engine(tiny_model: Path) -> None:
    async def scenario() -> None:
        flags = flags_of("plain", 2, tiny_model) | {"recover": False, "max_recoveries": None}
        async with ranked(2, flags) as engine:
            stream = engine.generate("On", SamplingParams(max_new_tokens=7000, ignore_eos=True))
            await anext(stream)
            os.kill(engine.pids["worker-1"], signal.SIGKILL)
            with pytest.raises(ActorDied, match="worker-1: the process was killed by SIGKILL"):
                async for _ in stream:
                    pass
            failed = await engine.wait_failed()
            assert failed.actor == "worker-1"
        assert not any(is_running(pid) for pid in engine.pids.values())

    asyncio.run(scenario())
