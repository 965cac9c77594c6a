"""gpt-oss's channels through the whole ring: reasoning with a budget, then a forced call, or an answer with a schema.

The tokenizer has the format's special tokens. Replies are plain decoding's, whole and streamed.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from support.fake_engine_client import INFO
from support.ring import RingConfig, tiny_loaded
from support.ring_server import serving
from support.tiny.grammars import tiny_tokenizer_dir

from overlap_spec.entrypoints.parsers.formats import call_format, reasoning_format
from overlap_spec.entrypoints.parsers.harmony import MARKERS, START
from overlap_spec.frontend.codec import load_codec

pytestmark = pytest.mark.slow

Json = dict[str, Any]
VOCAB_SIZE = 128
WORDS = "analysis", "commentary", "final", "assistant"  # as few tokens as in the model's own vocabulary
PLAIN = RingConfig(grammars=True, num_steps=0, num_slots=1, depth=1, prefix_cache=False, max_len=250)
DRAFTED = RingConfig(grammars=True, num_steps=3, num_slots=8, num_pages=400, depth=2, max_len=250)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SHARED = {"model": "tiny", "max_tokens": 160, "temperature": 0.9, "messages": [{"role": "user", "content": "Hi?"}]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
CALL = SHARED | {"tools": [TOOL], "tool_choice": "required"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
FIRST = VOCAB_SIZE - len(WORDS) - len(MARKERS)  # the first marker's token
BIAS = {str(FIRST + MARKERS.index(START)): -100, str(VOCAB_SIZE - len(WORDS)): 100}  # "analysis" is likely
BUDGET = {"thinking_budget": 6, "logit_bias": BIAS}
BODIES: list[Json] = [
    *(CALL | BUDGET | {"seed": seed} for seed in range(2)),
    *(SHARED | BUDGET | {"response_format": FORMAT, "seed": seed} for seed in range(2)),
    CALL | {"seed": 3},
    SHARED | {"seed": 4, "max_tokens": 30},
]


def joined(lines: Sequence[str]) -> Json:
    """The message of a stream, as far as it is compared."""
    found: Json = {"content": "", "reasoning_content": "", "calls": []}
    for event in (json.loads(line[6:]) for line in lines if line.startswith("data: {")):
        for choice in event["choices"]:
            for field in ("content", "reasoning_content"):
                found[field] += choice["delta"].get(field) or ""
            for piece in choice["delta"].get("tool_calls") or ():
                if "name" in piece["function"]:
                    found["calls"].append([piece["function"]["name"], ""])
                found["calls"][-1][1] += piece["function"].get("arguments") or ""
            found["finish"] = choice["finish_reason"] or found.get("finish")
    return found


def of_reply(reply: Json) -> Json:
    """The same of a whole answer."""
    (choice,) = reply["choices"]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls") or ()]
    texts = {field: message.get(field) or "" for field in ("content", "reasoning_content")}
    return texts | {"calls": calls, "finish": choice["finish_reason"]}


async def replies(http: httpx.AsyncClient, body: Json) -> tuple[Json, Json, int]:
    """Whole, streamed, and how many tokens."""
    whole = (await http.post("/v1/chat/completions", json=body)).json()
    assert "choices" in whole, whole
    stream = await http.post("/v1/chat/completions", json=body | {"stream": True})
    return of_reply(whole), joined(stream.text.splitlines()), whole["usage"]["completion_tokens"]


@cache
def answers(config: RingConfig) -> list[tuple[Json, Json, int]]:
    config = replace(config, markers=(*MARKERS, *WORDS))
    codec = load_codec(Path(tiny_tokenizer_dir(VOCAB_SIZE, config.markers)))
    formats = {"call_format": call_format("gpt-oss", ""), "reasoning_format": reasoning_format("gpt-oss", "")}

    async def run() -> list[tuple[Json, Json, int]]:
        info = msgspec.structs.replace(INFO, **formats)
        async with serving(tiny_loaded(4, config.num_steps), config, codec, info) as http:
            return [await replies(http, body) for body in BODIES]

    return asyncio.run(run())


@pytest.mark.full
def test_channels_are_plain_decodings_whole_and_streamed() -> None:
    plain, drafted = answers(PLAIN), answers(DRAFTED)
    assert drafted == plain
    for whole, streamed, _ in plain:
        assert whole == streamed


@pytest.mark.full_but_every(4)
@pytest.mark.parametrize("index", range(4))
def test_what_follows_the_reasoning_follows_the_schema(index: int) -> None:
    whole, _, num_tokens = answers(DRAFTED)[index]
    text = whole["calls"][0][1] if index < 2 else whole["content"]
    jsonschema.validate(json.loads(text), SCHEMA)
    assert whole["finish"] == ("tool_calls" if index < 2 else "stop") and num_tokens < 160
    assert bool(whole["content"]) == (index >= 2) and "<|" not in whole["reasoning_content"]


def test_answers_reason_within_the_budget() -> None:
    thoughts = [whole["reasoning_content"] for whole, _, _ in answers(DRAFTED)[:4]]
    assert sum(map(bool, thoughts)) >= 3 and all(len(thought) <= 6 * max(map(len, WORDS)) for thought in thoughts)
