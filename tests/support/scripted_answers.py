"""A client of an engine that answers with a given text, cut into pieces, and an app that reads a given format."""

import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

import openai
from msgspec.structs import replace

from overlap_spec.entrypoints.http.app import create_app
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.http_server import HttpServer
from overlap_spec.entrypoints.parsers.formats import call_format, reasoning_format
from overlap_spec.messages import ANY_TERMS, Finish, FinishKind, Prompt, SamplingParams, Terms, Usage
from support.fake_engine_client import INFO, FakeClient, FakeDelta, healthy

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "clock")
]


def cut(text: str, rng: random.Random, most: int = 8) -> list[str]:
    """The text in pieces of 0 to `most` characters."""
    pieces = []
    while text:
        size = rng.randint(0, most)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


@dataclass
class ScriptedClient(FakeClient):
    """Every request is answered with `pieces`, one a step."""

    pieces: list[str] = field(default_factory=list)
    kind: FinishKind = FinishKind.STOP

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, *, request_id: str | None = None, terms: Terms = ANY_TERMS
    ) -> AsyncGenerator[FakeDelta, None]:
        assert request_id is not None
        self.asked.append((request_id, prompt, sampling))
        last = len(self.pieces)
        for count, piece in enumerate(self.pieces, start=1):
            finish = Finish(self.kind, 2 if self.kind is FinishKind.STOP else None) if count == last else None
            yield FakeDelta(piece, [count], finish, Usage(3, 0, count, count))


def info(calls: str = "none", reasoning: str = "none") -> ServerInfo:
    """A server that reads these formats."""
    return replace(INFO, call_format=call_format(calls, ""), reasoning_format=reasoning_format(reasoning, ""))


class Serving:
    """A server on a loopback port and the openai client for it."""

    def __init__(self, client: FakeClient, what: ServerInfo) -> None:
        self._server = HttpServer(create_app(client, what, healthy), "127.0.0.1", 0)

    async def __aenter__(self) -> openai.AsyncOpenAI:
        await self._server.start()
        url = f"http://127.0.0.1:{self._server.port}/v1"
        self._api = openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0)
        return self._api

    async def __aexit__(self, *error: object) -> None:
        await self._api.close()
        await self._server.stop(1.0)


Use = Callable[[openai.AsyncOpenAI], Any]
