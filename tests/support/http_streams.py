"""HTTP streams of all kinds at once, for tests that kill the processes behind them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

Json = dict[str, Any]
NUM_TOKENS = 300  # long enough to be open when a process dies
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


def nothing() -> None:
    """Disturb no stream."""


class Round:
    """All streams at once. `due`: after so many events, `disturb` is called."""

    def __init__(self, url: str, due: float = float("inf"), disturb: Callable[[], None] = nothing) -> None:
        self._url = url
        self._left = due
        self._disturb = disturb
        # The longest one of a stream, between two of its events. A call of a tool has them seconds apart anyway.
        self.pause_s = 0.0
        self._came: list[float] = []  # when: streams were disturbed, and events came after it, of any stream

    @property
    def until_new_s(self) -> float:
        """From then to the first token of another frontend: the event after the longest time without any."""
        pairs = zip(self._came, self._came[1:], strict=False)
        return max(pairs, key=lambda pair: pair[1] - pair[0])[1] - self._came[0]

    async def run(self) -> list[Json]:
        """The answers, in the order of `bodies`."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
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
                self._disturb()
        return merged(events)
