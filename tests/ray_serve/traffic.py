"""Chats that are sent with the openai package, and the same chats run alone by plain decoding."""

import asyncio
import itertools
import random
import string
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openai

from overlap_spec import Engine, EngineConfig, SamplingParams

MODEL = "tiny"
SYSTEM = 1000  # characters, and so tokens, before a conversation
READS_S = 2.0  # most that a user reads an answer; without it the next turn finds the place free that the last one left
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Chat:
    """A request: greedy without a seed."""

    messages: Messages
    max_tokens: int
    seed: int | None = None

    def body(self) -> dict[str, Any]:
        """As the API takes it."""
        drawing = {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        own = {"ignore_eos": True}
        return {"messages": self.messages, "max_tokens": self.max_tokens, **drawing, "extra_body": own}


@dataclass
class Outcome:
    """What became of a chat. Times are `time.monotonic()`; 0: it did not come to that."""

    replica: str = ""
    text: str = ""
    error: str = ""
    begun_at: float = 0.0
    ended_at: float = 0.0
    usage: Mapping[str, int] = field(default_factory=dict)


def chats(count: int, max_tokens: int, seed: int = 0) -> list[Chat]:
    """Different ones; every second has a seed."""
    draw = random.Random(seed)
    return [
        Chat([{"role": "user", "content": words(draw, 40)}], max_tokens, None if index % 2 else index)
        for index in range(count)
    ]


def words(draw: random.Random, length: int) -> str:
    """Random text."""
    return "".join(draw.choices(string.ascii_lowercase + " ", k=length))


async def stream(client: openai.AsyncOpenAI, chat: Chat, begun: Callable[[], None] = lambda: None) -> Outcome:
    """Send one chat and read its stream to the end. `begun` is called when its answer begins."""
    outcome = Outcome()
    usage = {"include_usage": True}
    try:
        create = client.chat.completions.with_raw_response.create
        response = await create(model=MODEL, stream=True, stream_options=usage, **chat.body())
        outcome.replica, outcome.begun_at = response.headers["x-replica-id"], time.monotonic()
        begun()
        async for chunk in response.parse():
            outcome.text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if chunk.usage is not None:
                details = chunk.usage.prompt_tokens_details
                cached = details.cached_tokens or 0 if details else 0
                outcome.usage = {"prompt": chunk.usage.prompt_tokens, "cached": cached}
    except openai.OpenAIError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.ended_at = time.monotonic()
    return outcome


async def stream_all(
    url: str, chats: Sequence[Chat], at_once: int, begun: Callable[[int], None] = lambda number: None
) -> list[Outcome]:
    """Send all, so many at once; `begun` is called with the number of answers that have. Nothing is tried again."""
    room, numbers = asyncio.Semaphore(at_once), itertools.count(1)
    limits = openai.DefaultAsyncHttpxClient(limits=openai.DEFAULT_CONNECTION_LIMITS)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, http_client=limits) as client:

        async def one(chat: Chat) -> Outcome:
            async with room:
                return await stream(client, chat, lambda: begun(next(numbers)))

        return await asyncio.gather(*(one(chat) for chat in chats))


async def converse(url: str, conversations: int, turns: int, seed: int) -> dict[str, float]:
    """Conversations beside each other, each turn with all before it; returns tokens of prompts, and those cached.

    `moves`: turns that another replica answered than the turn before.
    """
    totals = {"prompt": 0, "cached": 0, "moves": 0}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:

        async def one(number: int) -> None:
            draw = random.Random(seed * 1000 + number)
            await asyncio.sleep(draw.uniform(0, READS_S))
            messages, replica = [{"role": "system", "content": words(draw, SYSTEM)}], ""
            for _ in range(turns):
                messages.append({"role": "user", "content": words(draw, 60)})
                outcome = await stream(client, Chat(messages, 12))
                assert not outcome.error, outcome.error
                messages.append({"role": "assistant", "content": outcome.text})
                for name, count in outcome.usage.items():
                    totals[name] += count
                totals["moves"] += replica not in ("", outcome.replica)
                replica = outcome.replica
                await asyncio.sleep(draw.uniform(READS_S / 4, READS_S))

        await asyncio.gather(*(one(number) for number in range(conversations)))
    return {**totals, "hit_rate": round(totals["cached"] / totals["prompt"], 3)}


async def alone(engine: Mapping[str, Any], chats: Sequence[Chat]) -> list[str]:
    """The text of each chat run by itself, by plain decoding, in this process's own engine."""
    plain = {name: value for name, value in engine.items() if not name.startswith("speculative")}
    texts = []
    async with Engine(EngineConfig(**plain, speculative_algorithm="NONE")) as running:
        for chat in chats:
            drawn = {"temperature": 0.0} if chat.seed is None else {"temperature": 1.0, "seed": chat.seed}
            sampling = SamplingParams(max_new_tokens=chat.max_tokens, ignore_eos=True, **drawn)
            texts.append((await running.client.complete(chat.messages, sampling)).text)
    return texts
