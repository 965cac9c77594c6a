"""Streams whose worker or scheduler is killed or stopped go on with the tokens that they would have had anyway."""

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest
from support.disturbed_streams import (
    BASE,
    EAGLE3,
    KINDS,
    PAIR,
    PATIENT_S,
    WATCHDOG_S,
    Disturbance,
    EngineOf,
    Flags,
    answers,
    asked,
    assert_nothing_is_left,
    assert_same,
    disturbed,
    quiet_audit,
    same_streams,
    set_watchdog,
)
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import tiny_target, write_checkpoint
from support.tiny.mtp import tiny_nextn
from support.tiny.tokenizer import write_tokenizer

from overlap_spec import Client, Engine, EngineConfig, SamplingParams
from overlap_spec.errors import ActorDied
from overlap_spec.messages import EngineState
from overlap_spec.runtime.actor import ROLES

METHODS: dict[str, Flags] = {
    "chain": EAGLE3 | {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4},
    "tree": EAGLE3 | {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 6},
    "ngram": {"algorithm": "NGRAM", "num_draft_tokens": 4, "ngram_max_bfs_breadth": 1},
}
ROWS = [  # method, depth, streams, what happens to them, each time to all
    pytest.param(
        "chain", 2, 17, [Disturbance("worker"), Disturbance("scheduler", signal.SIGSTOP)], marks=pytest.mark.full
    ),
    pytest.param("tree", 1, 17, [Disturbance("worker", signal.SIGSTOP)], marks=pytest.mark.full),
    pytest.param("ngram", 2, 16, [Disturbance("scheduler")], marks=pytest.mark.full),
]
EVERYTHING = [Disturbance(role, number) for role in PAIR for number in (signal.SIGKILL, signal.SIGSTOP)]


def flags_of(method: str, depth: int, tiny_model: Path) -> Flags:
    flags = {f"speculative_{name}": value for name, value in METHODS[method].items()}
    if "speculative_draft_model_path" in flags:
        flags["speculative_draft_model_path"] = str(tiny_model / "head")
    return BASE | flags | {"disable_overlap_schedule": depth == 1}


@pytest.mark.full
def test_streams_go_on_after_the_death_of_the_worker(engine_of: EngineOf, tiny_model: Path) -> None:
    async def scenario() -> None:
        async with engine_of(flags_of("chain", 2, tiny_model)) as engine:
            await same_streams(engine, len(KINDS), [Disturbance("worker")], random.Random(0))

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.slow
def test_streams_of_a_mixture_with_a_layer_of_its_own_go_on(engine_of: EngineOf, tmp_path: Path) -> None:
    checkpoint = tiny_nextn(8, tiny_target(7, **TINY_FAMILIES["glm 4.5"]))
    write_tokenizer(write_checkpoint(tmp_path, checkpoint))
    draft = {"algorithm": "NEXTN", "num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4}
    flags = BASE | {f"speculative_{name}": value for name, value in draft.items()} | {"model_path": str(tmp_path)}

    async def scenario() -> None:
        async with engine_of(flags) as engine:
            await same_streams(engine, len(KINDS), [Disturbance("worker")], random.Random(0))

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "depth", "count", "disturbances"), ROWS)
def test_fifty_streams_go_on_whoever_dies_or_hangs(
    engine_of: EngineOf, tiny_model: Path, method: str, depth: int, count: int, disturbances: list[Disturbance]
) -> None:
    async def scenario() -> None:
        flags = flags_of(method, depth, tiny_model) | {"watchdog_timeout": 4.0}
        async with engine_of(flags) as engine:
            await same_streams(engine, count, disturbances, random.Random(count))

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)])
def test_requests_and_questions_go_on_at_another_frontend(engine_of: EngineOf, tiny_model: Path, number: int) -> None:
    """Those of the engine's own client and of another one. A `detokenize` that is open is answered."""

    async def scenario() -> None:
        flags = flags_of("chain", 2, tiny_model) | {"zmq_endpoint": "tcp://127.0.0.1:0"}
        async with engine_of(flags) as engine, Client(engine.endpoint, heartbeat_s=0.2) as other:
            set_watchdog(engine, PATIENT_S)
            requests = asked(2 * len(KINDS))
            wanted = await answers(engine, requests)
            what = Disturbance("frontend", number)
            found = await disturbed(engine, requests, what, 0.3, (engine.client, other), asks=True)
            for ours, theirs in zip(found, wanted, strict=True):
                assert_same(ours, theirs)
            stats = await other.stats()
            assert stats.recoveries_total == 1 and stats.replayed_total > 0
            await assert_nothing_is_left(engine)

    asyncio.run(scenario())


class WithFrontend(Disturbance):
    """The frontend is killed with it."""

    def happen(self, engine: Engine) -> None:
        super().happen(engine)
        os.kill(engine.pids["frontend"], signal.SIGKILL)


@pytest.mark.full  # test_e2e_frontend_restart.py ends a frontend, soak/test_deaths.py every process
@pytest.mark.parametrize(
    "what",
    [WithFrontend("worker"), pytest.param(WithFrontend("scheduler", signal.SIGSTOP), marks=pytest.mark.full)],
    ids=str,
)
def test_requests_go_on_when_the_frontend_dies_with_another(
    engine_of: EngineOf, tiny_model: Path, what: Disturbance
) -> None:
    """With the worker all three are started again; a scheduler that is stopped is found by the new frontend's side."""

    async def impatient(engine: Engine) -> None:
        while True:
            set_watchdog(engine, WATCHDOG_S)
            await asyncio.sleep(0.05)

    async def scenario() -> None:
        async with engine_of(flags_of("chain", 2, tiny_model)) as engine:
            set_watchdog(engine, PATIENT_S)
            requests, before = asked(len(KINDS)), engine.pids
            wanted = await answers(engine, requests)
            watching = asyncio.create_task(impatient(engine))
            found = await disturbed(engine, requests, what, 0.3)
            watching.cancel()
            set_watchdog(engine, PATIENT_S)
            for ours, theirs in zip(found, wanted, strict=True):
                assert_same(ours, theirs)
            assert not set(engine.pids.values()) & set(before.values())
            await assert_nothing_is_left(engine)

    asyncio.run(scenario())


@pytest.mark.full
def test_a_request_is_not_sent_to_a_third_frontend(engine_of: EngineOf) -> None:
    """It may be what kills them. One that came later goes on."""

    async def scenario() -> None:
        async with engine_of(BASE | {"speculative_algorithm": "NONE"}) as engine:
            endless = SamplingParams(max_new_tokens=7000, ignore_eos=True)
            first, second = (engine.generate(prompt, endless) for prompt in ("One", "Two"))
            for stream in (first, second):
                await anext(stream)
                os.kill(engine.pids["frontend"], signal.SIGKILL)
                while engine.health.state is not EngineState.RECOVERING:
                    await asyncio.sleep(0.02)
            with pytest.raises(ActorDied, match="was killed by SIGKILL"):
                async for _ in first:
                    pass
            while engine.health.state is not EngineState.READY:
                await asyncio.sleep(0.02)
            for _ in range(5):
                assert (await anext(second)).token_ids
            await second.aclose()

    asyncio.run(scenario())


@pytest.mark.full
def test_a_busy_frontend_ends_nothing(tiny_model: Path) -> None:
    """For 12 s it reads nothing and answers nothing."""
    config = EngineConfig(model_path=str(tiny_model), dtype="float64", log_level="error", **BASE)
    roles = ROLES | {"frontend": "support.actors.busy_frontend"}

    async def scenario() -> None:
        async with Engine(config, roles=roles) as engine, Client(engine.endpoint) as other:
            pids, states = engine.pids, set[EngineState]()
            endless = SamplingParams(max_new_tokens=7000, ignore_eos=True)
            streams = [client.generate("On", endless) for client in (engine.client, other)]
            for stream in streams:
                await anext(stream)
            asking = asyncio.create_task(other.tokenize("busy 12"))
            while not asking.done():
                states.add(engine.health.state)
                await asyncio.sleep(0.1)
            for stream in streams:
                for _ in range(5):
                    assert (await anext(stream)).token_ids
                await stream.aclose()
            assert (states, engine.pids) == ({EngineState.READY}, pids)

    asyncio.run(scenario())


@pytest.mark.full
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_every_disturbance_of_every_method(engine_of: EngineOf, tiny_model: Path, method: str, depth: int) -> None:
    async def scenario() -> None:
        flags = flags_of(method, depth, tiny_model) | {"audit_rate": 0.1, "watchdog_timeout": 4.0}
        async with engine_of(flags) as engine, quiet_audit(engine):
            await same_streams(engine, 50, EVERYTHING, random.Random(depth))

    asyncio.run(scenario())
