"""HTTP streams of all kinds whose frontend is killed or stopped go on with the text that they would have had anyway."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.command_line import Service

from overlap_spec.runtime.actor import ROLES

Json = dict[str, Any]
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
        self.pause_s = 0.0  # the longest one of a stream, between two of its events

    async def run(self) -> list[Json]:
        """The answers, in the order of `bodies`."""
        async with httpx.AsyncClient(base_url=self._service.url, timeout=120) as client:
            return list(await asyncio.gather(*(self._follow(client, *each) for each in bodies())))

    async def _follow(self, client: httpx.AsyncClient, path: str, body: Json) -> Json:
        events: list[Json] = []
        last = time.monotonic()
        async for event in events_of(client, path, body):
            now = time.monotonic()
            self.pause_s, last = max(self.pause_s, now - last if events else 0.0), now
            events.append(event)
            before, self._left = self._left, self._left - 1
            if before >= 0 > self._left:
                os.kill(self._service.actors()["tokenizer"], self._number)
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
    tmp_path: Path, tiny_flags: tuple[str, ...], signals: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> list[float]:
        flags = "--served-model-name", "tiny", "--max-recoveries", "100", "--watchdog-timeout", "5"
        rng, pauses = random.Random(len(signals)), []
        with Service(tmp_path, *tiny_flags, *flags, "--tool-call-parser", "hermes") as service:
            wanted = await Round(service).run()
            for number in signals:
                disturbed = Round(service, rng.uniform(30, 400), number)
                for (_, body), ours, theirs in zip(bodies(), await disturbed.run(), wanted, strict=True):
                    assert ours == theirs, body
                pauses.append(disturbed.pause_s)
                await wait_ready(service)
            metrics = service.get("/metrics").text
            assert f"recoveries_total {len(signals)}" in metrics.replace(".0", "")
            assert set(service.actors()) == set(ROLES)
        return pauses

    pauses = asyncio.run(scenario())
    with capsys.disabled():
        print("\npauses in s:", *(f"{pause:.1f}" for pause in pauses))
