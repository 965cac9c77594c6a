"""A conversation's memory and figures, the background loop, stop signals and the start-up table, without an engine."""

import asyncio
import io
import os
import signal
import threading
import time
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from rich.console import Console
from support.fake_facts import fake_facts
from support.fake_settings import fake_settings

from overlap_spec.client.answers import Delta
from overlap_spec.config import AcceptSettings, AttentionSettings, Settings, SpecSettings
from overlap_spec.engine import Engine
from overlap_spec.entrypoints.cli.chat import DEFAULT_MAX_TOKENS, BackgroundLoop, Conversation, Figures
from overlap_spec.entrypoints.cli.service import StopSignals, curl_line, http_url, start_table
from overlap_spec.errors import ActorDied, RequestError
from overlap_spec.messages import (
    ChatPrompt,
    CudaFacts,
    EngineFacts,
    Finish,
    FinishKind,
    MemorySaving,
    RankFacts,
    SamplingParams,
    Usage,
)

STOP = Finish(FinishKind.STOP)


class ScriptedEngine:
    """Answers every prompt with "yes" in two steps; a prompt has as many tokens as letters."""

    def __init__(self, max_len: int = 2000) -> None:
        self.asked: list[tuple[ChatPrompt, SamplingParams]] = []
        self.client = self
        self.settings = SimpleNamespace(model=SimpleNamespace(max_len=max_len))

    async def tokenize(self, prompt: ChatPrompt) -> list[int]:
        return [0] * sum(len(message["content"]) for message in prompt.messages)

    async def generate(self, prompt: ChatPrompt, sampling: SamplingParams) -> AsyncGenerator[Delta, None]:
        self.asked.append((prompt, sampling))
        yield Delta("y", [1], None, Usage(3, 0, 1, 0))
        yield Delta("es", [2, 3, 4], STOP, Usage(3, 0, 4, 2))


def conversation(engine: ScriptedEngine, system: str | None = None, **sampling: Any) -> Conversation:
    params = SamplingParams(max_new_tokens=None, temperature=0.0) if not sampling else SamplingParams(**sampling)
    return Conversation(cast(Engine, engine), params, system)


def test_a_conversation_remembers_until_it_is_reset(capsys: pytest.CaptureFixture[str]) -> None:
    engine = ScriptedEngine()
    talk = conversation(engine, "Be brief.")

    async def scenario() -> None:
        await talk.answer("one?")
        await talk.answer("two?")
        talk.reset()
        await talk.answer("three?")

    asyncio.run(scenario())
    said = [[message["content"] for message in prompt.messages] for prompt, _ in engine.asked]
    assert said == [
        ["Be brief.", "one?"],
        ["Be brief.", "one?", "yes", "two?"],
        ["Be brief.", "three?"],
    ]
    output = capsys.readouterr()
    assert output.out == "yes\n" * 3
    assert "accept length 1.50" in output.err, "3 tokens after the first, in 2 steps"


def test_without_a_limit_an_answer_takes_what_the_context_leaves() -> None:
    async def limit(max_len: int, **sampling: Any) -> int | None:
        engine = ScriptedEngine(max_len)
        await conversation(engine, **sampling).answer("four")
        return engine.asked[0][1].max_new_tokens

    assert asyncio.run(limit(2000)) == DEFAULT_MAX_TOKENS
    assert asyncio.run(limit(100)) == 96
    assert asyncio.run(limit(100, max_new_tokens=5000)) == 5000, "the user's own limit is refused, never cut"
    with pytest.raises(RequestError, match="/reset"):
        asyncio.run(limit(4))


def test_figures_in_words() -> None:
    figures = Figures(began_at=1.0, first_at=1.5, ended_at=3.5, usage=Usage(9, 0, 41, 16), finish=STOP)
    assert figures.line() == "41 tokens, 20.0 tok/s, accept length 2.50, first token 0.50 s"
    late = Figures(began_at=1.0, first_at=1.5, num_first=21, ended_at=3.5, usage=Usage(9, 0, 41, 16), finish=STOP)
    assert "41 tokens, 10.0 tok/s, accept length 2.50" in late.line()
    at_once = Figures(began_at=1.0, first_at=1.5, num_first=5, ended_at=1.50001, usage=Usage(9, 0, 5, 2), finish=STOP)
    assert "tok/s" not in at_once.line()
    one = Figures(1.0, 1.5, 1, 1.5, Usage(9, 0, 1, 0), Finish(FinishKind.LENGTH))
    assert one.line() == "1 tokens, first token 0.50 s, cut at the token limit"


def test_the_background_loop_runs_raises_and_lives_between_calls() -> None:
    async def fail() -> None:
        raise ActorDied("worker", "gone")

    async def tick(times: list[float]) -> None:
        while True:
            times.append(time.monotonic())
            await asyncio.sleep(0.005)

    async def start(times: list[float]) -> "asyncio.Task[None]":
        return asyncio.create_task(tick(times))

    async def stop(task: "asyncio.Task[None]") -> None:
        task.cancel()

    times: list[float] = []
    with BackgroundLoop() as loop:
        ticking = loop.run(start(times))
        time.sleep(0.1)
        assert len(times) > 5, "heartbeats go on while the main thread waits for a line"
        with pytest.raises(ActorDied, match="gone"):
            loop.run(fail())
        loop.run(stop(ticking))


def test_an_interrupt_cancels_what_the_main_thread_waits_for_and_waits_for_its_cleanup() -> None:
    cleaned = threading.Event()

    async def work() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.set()

    with BackgroundLoop() as loop:
        with pytest.raises(KeyboardInterrupt):
            loop.run(work())
        assert cleaned.is_set()


@pytest.mark.parametrize("queued", [False, True])
def test_an_interrupt_while_work_is_handed_over_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    async def work(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    with BackgroundLoop() as loop:
        hand_over = loop._loop.call_soon_threadsafe

        def interrupted(callback: Callable[[], None]) -> None:
            monkeypatch.undo()
            if queued:
                hand_over(callback)
            raise KeyboardInterrupt

        monkeypatch.setattr(loop._loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            loop.run(work(60))
        assert loop.run(work(0)) == "done"


def test_the_first_signal_asks_and_the_second_forces() -> None:
    async def scenario() -> None:
        forced: list[bool] = []
        with StopSignals(force=lambda: forced.append(True)) as signals:
            assert not await signals.interrupt(asyncio.sleep(0))
            os.kill(os.getpid(), signal.SIGTERM)
            assert await signals.interrupt(asyncio.sleep(60))
            assert forced == []
            os.kill(os.getpid(), signal.SIGINT)
            while not forced:
                await asyncio.sleep(0.001)

    asyncio.run(scenario())


def test_a_closed_terminal_asks_once_however_often_it_says_so() -> None:
    async def scenario() -> None:
        forced: list[bool] = []
        with StopSignals(force=lambda: forced.append(True)) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert await signals.interrupt(asyncio.sleep(60))
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
            assert forced == []
            os.kill(os.getpid(), signal.SIGTERM)
            while not forced:
                await asyncio.sleep(0.001)

    asyncio.run(scenario())


def test_nohup_keeps_its_meaning() -> None:
    async def scenario() -> None:
        with StopSignals(force=lambda: None) as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not await signals.interrupt(asyncio.sleep(0.01))

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(scenario())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_is_interrupted_may_fail_first() -> None:
    async def fail() -> None:
        raise ActorDied("worker", "gone")

    async def scenario() -> None:
        with StopSignals(force=lambda: None) as signals, pytest.raises(ActorDied):
            await signals.interrupt(fail())

    asyncio.run(scenario())


def test_urls_that_a_person_on_this_machine_can_use() -> None:
    assert http_url("127.0.0.1", 1) == "http://127.0.0.1:1"
    assert http_url("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert http_url("::", 1) == http_url("[::]", 1) == http_url("[::1]", 1) == "http://[::1]:1"
    assert "Bearer $API_KEY" in curl_line("http://h:1", needs_key=True, takes_text=True)
    assert "Bearer" not in curl_line("http://h:1", needs_key=False, takes_text=True)
    assert "/generate" in curl_line("http://h:1", needs_key=False, takes_text=False)


def shown_table(settings: Settings, facts: EngineFacts) -> str:
    console = Console(width=120, file=io.StringIO())
    console.print(start_table(settings, facts, "http://h:1", "ipc:///x"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_names_method_memory_and_endpoints() -> None:
    settings = replace(fake_settings(), spec=SpecSettings("EAGLE3", "/heads/tiny", 3, 1, 4))
    shown = shown_table(settings, fake_facts())
    for words in (
        "EAGLE3 (3, 1, 4)",
        "/heads/tiny",
        "float64, cpu",
        "7 of 4 tokens (28 tokens)",
        "bigram",
        "513 MiB, 37 of",
    ):
        assert words in shown
    assert "http://h:1" in shown
    assert "ipc:///x" in shown


def test_the_table_says_what_was_chosen_why_and_what_is_lossy() -> None:
    spec = SpecSettings("NGRAM", None, 11, 10, 12, numbers_from="as many as a match may have")
    accept = AcceptSettings(ngram_force_greedy_verify=True)
    attention = AttentionSettings(target_torch=True, draft_window=64)
    settings = replace(fake_settings(), spec=replace(spec, accept=accept), attention=attention)
    memory = CudaFacts({"of workspace": 9 << 20}, 512, 0, (MemorySaving("--dtype", 4 << 20, 0),))
    shown = shown_table(settings, fake_facts(platform=memory, verification=str(accept)))
    for words in (
        "as many as a match may have",
        "LOSSY at temperature > 0",
        "torch operations for the target, the draft sees 64 keys",
        "9 MiB of workspace",
        "--dtype (4 MiB)",
    ):
        assert words in shown
    assert "sees" not in shown_table(fake_settings(), fake_facts())


def test_the_table_says_which_weights_are_made_up() -> None:
    settings = replace(fake_settings(), spec=SpecSettings("EAGLE3", "/heads/tiny", 3, 1, 4, draft_load_format="dummy"))
    assert "/heads/tiny, RANDOM WEIGHTS" in shown_table(settings, fake_facts())
    files = replace(settings.model.files, load_format="dummy")
    assert shown_table(replace(settings, model=replace(settings.model, files=files)), fake_facts()).count("RANDOM") == 2
    assert "RANDOM" not in shown_table(fake_settings(), fake_facts())


def test_the_table_shows_what_each_rank_holds() -> None:
    ranks = tuple(RankFacts(rank, "cpu", (500 + rank) << 20, (90 + rank) << 20) for rank in range(2))
    shown = " ".join(
        " ".join(shown_table(fake_settings(), facts).split())
        for facts in (fake_facts(), fake_facts(ranks=ranks[:1]), fake_facts(ranks=ranks))
    )
    assert shown.count("of weights") == 2, "one rank alone has nothing to add"
    assert "0: 500 MiB of weights, 90 MiB of KV pages; 1: 501 MiB of weights, 91 MiB of KV pages" in shown
    assert fake_facts(ranks=ranks).report()["worker"]["ranks"].startswith("0: 500 MiB")
    assert fake_facts().report()["worker"]["ranks"] == "one"
