"""HTTP streams of all kinds whose frontend is killed or stopped go on with the text that they would have had anyway."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.command_line import Service

from overlap_spec.runtime.actor import ROLES

Json = dict[str, Any]
Pause = tuple[int, float, float]  # the signal; until the first new token, and the longest pause of a stream: s
MOST_S, BUSY = 3.0, 4.0  # from a SIGKILL to the first new token; how many times longer it may take on busy cores
NUM_TOKENS = 300  # long enough to be open when the frontend dies
SCHEMA = {"type": "string", "minLength": NUM_TOKENS // 2, "maxLength": NUM_TOKENS - 20}
PARAMETERS = {"type": "object", "properties": {"a": SCHEMA}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "note", "parameters": PARAMETERS}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
CHATS: dict[str, Json] = {
    "plain": {"temperature": 0, "ignore_eos": True},
    "seeded": {"seed": 3, "temperature": 0.9, "ignore_eos": True},
    "log-probs": {"seed": 4, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    "stop": {"seed": 5, "stop": ["qz", "zzz"], "ignore_eos": True},
    "schema": {"seed": 6, "response_format": FORMAT},
    "tools": {"seed": 7, "tools": [TOOL], "tool_choice": "required"},
}
COMPLETION: Json = {"seed": 8, "n": 2, "echo": True, "logprobs": 1, "ignore_eos": True}


def bodies() -> list[tuple[str, Json]]:
    """Paths and bodies, one of each kind."""
    shared = {"model": "tiny", "max_tokens": NUM_TOKENS, "stream": True, "stream_options": {"include_usage": True}}
    chats = [
        ("/v1/chat/completions", shared | {"messages": [{"role": "user", "content": kind}]} | asked)
        for kind, asked in CHATS.items()
    ]
    return [*chats, ("/v1/completions", shared | {"prompt": "Once"} | COMPLETION)]


async def events_of(client: httpx.AsyncClient, path: str, body: Json) -> AsyncIterator[Json]:
    """What a stream sends."""
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def merged(events: Sequence[Json]) -> Json:
    """The whole answer of a stream, whatever its pieces are."""
    texts: dict[str, str] = {}
    log_probs: dict[int, list[Any]] = {}
    finishes: dict[int, str] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            index, delta = choice["index"], choice.get("delta", choice)
            for call in delta.get("tool_calls") or ():
                for name, value in call["function"].items():
                    key = f"{index} call {call['index']} {name}"
                    texts[key] = texts.get(key, "") + (value or "")
            for name in ("content", "text"):
                texts[f"{index} {name}"] = texts.get(f"{index} {name}", "") + (delta.get(name) or "")
            if found := choice.get("logprobs"):
                tokens = found.get("tokens") or [each["token"] for each in found["content"]]
                log_probs.setdefault(index, []).extend(tokens)
            if choice.get("finish_reason"):
                assert index not in finishes
                finishes[index] = choice["finish_reason"]
    counts = {name: events[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"texts": texts, "log_probs": log_probs, "finishes": finishes, "usage": counts}


class Round:
    """All streams at once. `due`: after so many events, the frontend gets a signal."""

    def __init__(self, service: Service, due: float = float("inf"), number: int = signal.SIGKILL) -> None:
        self._service = service
        self._left = due
        self._number = number
        # The longest one of a stream, between two of its events. A call of a tool has them seconds apart anyway.
        self.pause_s = 0.0
        self._came: list[float] = []  # when: the signal was sent, and events came after it, of any stream

    @property
    def until_new_s(self) -> float:
        """From the signal to the first token of another frontend: the event after the longest time without any."""
        pairs = zip(self._came, self._came[1:], strict=False)
        return max(pairs, key=lambda pair: pair[1] - pair[0])[1] - self._came[0]

    async def run(self) -> list[Json]:
        """The answers, in the order of `bodies`."""
        async with httpx.AsyncClient(base_url=self._service.url, timeout=120) as client:
            return list(await asyncio.gather(*(self._follow(client, *each) for each in bodies())))

    async def _follow(self, client: httpx.AsyncClient, path: str, body: Json) -> Json:
        events: list[Json] = []
        last = time.monotonic()
        async for event in events_of(client, path, body):
            now = time.monotonic()
            if events and "tools" not in body:
                self.pause_s = max(self.pause_s, now - last)
            last = now
            events.append(event)
            if self._came:
                self._came.append(now)
            before, self._left = self._left, self._left - 1
            if before >= 0 > self._left:
                self._came.append(time.monotonic())
                os.kill(self._service.actors()["frontend"], self._number)
        return merged(events)


async def wait_ready(service: Service) -> None:
    deadline = time.monotonic() + 120
    while service.get("/health").status_code != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signals",
    [
        [signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL],
        pytest.param([signal.SIGKILL, signal.SIGSTOP] * 10, marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
    ids=len,
)
def test_streams_go_on_at_another_frontend(
    tmp_path: Path,
    tiny_flags: tuple[str, ...],
    signals: list[int],
    capsys: pytest.CaptureFixture[str],
    record_summary: Callable[..., None],
) -> None:
    async def scenario() -> list[Pause]:
        flags = "--served-model-name", "tiny", "--max-recoveries", "100", "--watchdog-timeout", "5"
        rng, pauses = random.Random(len(signals)), list[Pause]()
        with Service(tmp_path, *tiny_flags, *flags, "--tool-call-parser", "hermes") as service:
            wanted = await Round(service).run()
            first = service.actors()
            for number in signals:
                disturbed = Round(service, rng.uniform(30, 400), number)
                for (_, body), ours, theirs in zip(bodies(), await disturbed.run(), wanted, strict=True):
                    assert ours == theirs, body
                pauses.append((number, disturbed.until_new_s, disturbed.pause_s))
                await wait_ready(service)
            metrics = service.get("/metrics").text
            assert f"recoveries_total {len(signals)}" in metrics.replace(".0", "")
            last = service.actors()
            assert set(last) == set(ROLES) and all(last[role] == first[role] for role in ("scheduler", "worker"))
        return pauses

    pauses = asyncio.run(scenario())
    figures = {
        signal.Signals(kind).name: {
            "deaths": len(own := [each for each in pauses if each[0] == kind]),
            "until_new_token_s": [round(until_new_s, 2) for _, until_new_s, _ in own],
            "longest_pause_of_a_stream_s": [round(pause_s, 2) for *_, pause_s in own],
        }
        for kind in (signal.SIGKILL, signal.SIGSTOP)
    }
    record_summary("frontend_restart", {"streams": len(bodies()) + 1, "equal_to_undisturbed": len(pauses), **figures})
    with capsys.disabled():
        print("\nfrontend restarts:", figures)
    after_kills = [until_new_s for kind, until_new_s, _ in pauses if kind == signal.SIGKILL]
    assert min(after_kills) <= MOST_S and max(after_kills) <= BUSY * MOST_S, after_kills
