"""`overlap_spec.Engine` in a user's own event loop, with real processes."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop
from support.command_line import cpu_ticks, is_running

from overlap_spec import Client, Engine, EngineConfig, SamplingParams
from overlap_spec.errors import ActorDied, ConfigError, Overloaded, RequestError

LOOPS: dict[str, Callable[..., None]] = {"asyncio": asyncio.run, "uvloop": uvloop.run}
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0)
END_S = 2.0


@pytest.fixture(autouse=True)
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def config_of(tiny_model: Path) -> EngineConfig:
    return EngineConfig(
        model_path=str(tiny_model),
        dtype="float64",
        max_total_tokens=20000,
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(tiny_model / "head"),
        log_level="warning",
    )


@asynccontextmanager
async def running(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Engine]:
    engine = Engine(config_of(tiny_model))
    async with engine:
        yield engine
    assert not any(is_running(pid) for pid in engine.pids.values())
    assert list(tmp_path.glob("overlap-spec-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", pytest.param("uvloop", marks=pytest.mark.full)])
def test_it_generates_in_any_loop_and_leaves_nothing(tiny_model: Path, tmp_path: Path, loop: str) -> None:
    async def scenario() -> None:
        async with running(tiny_model, tmp_path) as engine:
            text, ids = "", []
            async for delta in engine.generate("The sky is", GREEDY):
                text += delta.text
                ids += delta.token_ids
            assert len(ids) == 16
            whole = await engine.client.complete("The sky is", GREEDY)
            assert (whole.text, whole.token_ids) == (text, ids)
            assert engine.facts.worker.num_pages == 20000 // 16
            async with Client(engine.endpoint) as other:
                assert (await other.complete("The sky is", GREEDY)).token_ids == ids

    LOOPS[loop](scenario())


@pytest.mark.full  # test_ring.py compares requests in any company
def test_many_requests_at_once_equal_each_alone(tiny_model: Path, tmp_path: Path) -> None:
    """In uvloop. A request that is refused among them changes no answer of the others."""

    async def scenario() -> None:
        async with running(tiny_model, tmp_path) as engine:
            prompts = [f"Number {index} is" for index in range(12)]
            alone = [await engine.client.complete(prompt, GREEDY) for prompt in prompts]
            together = asyncio.gather(*(engine.client.complete(prompt, GREEDY) for prompt in prompts))
            with pytest.raises(RequestError, match="maximum context length"):
                await engine.client.complete("x" * 20000, GREEDY)
            assert [answer.token_ids for answer in await together] == [answer.token_ids for answer in alone]
            assert {len(answer.token_ids) for answer in alone} == {16}

    uvloop.run(scenario())


@pytest.mark.full  # test_e2e_faults.py ends an actor
def test_a_dead_actor_fails_open_and_later_requests(tiny_model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, tmp_path) as engine:
            deltas = engine.generate("On", SamplingParams(max_new_tokens=8000, ignore_eos=True))
            await anext(deltas)
            began = time.monotonic()
            os.kill(engine.pids["worker"], signal.SIGKILL)
            with pytest.raises(ActorDied, match="worker: .*SIGKILL"):
                async for _ in deltas:
                    pass
            assert (await engine.wait_failed()).actor == "worker"
            assert time.monotonic() - began < END_S
            assert engine.failure is not None
            with pytest.raises(ActorDied):
                await engine.client.complete("again")
            assert not await engine.drain(1)

    asyncio.run(scenario())


@pytest.mark.full
def test_stop_lets_open_requests_finish_within_its_time(tiny_model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tiny_model, tmp_path) as engine:
            sampling = SamplingParams(max_new_tokens=400, ignore_eos=True, temperature=0.0)
            answer = asyncio.create_task(engine.client.complete("On", sampling))
            while (await engine.client.stats()).requests_total == 0 and not answer.done():
                await asyncio.sleep(0.02)
            drained = await engine.drain(30)
            assert drained
            assert len((await answer).token_ids) == 400
            with pytest.raises(Overloaded):
                await engine.client.complete("late")

    asyncio.run(scenario())


def test_what_is_wrong_is_said_before_any_process_starts(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--page-size"):
        Engine(EngineConfig(page_size=0))

    async def scenario() -> None:
        with pytest.raises(ConfigError, match="--model-path: .*does not exist"):
            await Engine(EngineConfig(model_path=str(tmp_path / "nowhere"))).start()
        with pytest.raises(ConfigError, match="--context-length"):
            await Engine(EngineConfig(model_path=str(tiny_model), context_length=9000)).start()
        with pytest.raises(Overloaded, match="not been started"):
            await Engine(config_of(tiny_model)).wait_failed()

    asyncio.run(scenario())
    assert list(tmp_path.glob("overlap-spec-*")) == []


def test_a_cancelled_start_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = Engine(config_of(tiny_model))
        start = asyncio.create_task(engine.start())
        while not list(tmp_path.glob("overlap-spec-*/supervisor.sock")):
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not any(is_running(pid) for pid in engine.pids.values())

    asyncio.run(scenario())
    assert list(tmp_path.glob("overlap-spec-*")) == []


@pytest.mark.full
def test_an_idle_engine_sleeps(tiny_model: Path, tmp_path: Path) -> None:
    """Over 10 s, after work: each actor at most one clock tick, the process around them at most 0.5%."""

    async def scenario() -> None:
        async with running(tiny_model, tmp_path) as engine:
            await engine.client.complete("x", GREEDY)
            await asyncio.sleep(1)
            everyone = {**engine.pids, "parent": os.getpid()}
            before = {role: cpu_ticks(pid) for role, pid in everyone.items()}
            await asyncio.sleep(10)
            spent = {role: cpu_ticks(pid) - before[role] for role, pid in everyone.items()}
            assert spent.pop("parent") <= 0.005 * 10 * os.sysconf("SC_CLK_TCK")
            assert max(spent.values()) <= 1, spent

    asyncio.run(scenario())
