"""Forced calls in every format through the whole ring: the same with speculation as without, whole and streamed.

The tokenizer has the format's markers as special tokens, as the family's own has. Every endpoint is asked.
"""

import asyncio
import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from support.fake_engine_client import INFO
from support.ring import RingConfig, tiny_loaded
from support.ring_server import serving
from support.tiny.grammars import tiny_tokenizer_dir

from overlap_spec.entrypoints.parsers.formats import CALL_FORMATS, call_format
from overlap_spec.frontend.codec import load_codec

VOCAB_SIZE = 128
Json = dict[str, Any]
PLAIN = RingConfig(grammars=True, num_steps=0, num_slots=1, depth=1, prefix_cache=False, max_len=300)
DRAFTED = RingConfig(grammars=True, num_steps=3, num_slots=8, num_pages=400, depth=2, max_len=300)
PROPERTIES = {
    "city": {"type": "string", "maxLength": 6},
    "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 1, "maxItems": 3},
    "unit": {"enum": ["C", "F"]},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}
FUNCTION = {"name": "weather", "parameters": SCHEMA, "strict": True}
SHARED = {"model": "tiny", "max_tokens": 220, "temperature": 0.8}
USER = [{"role": "user", "content": "Weather?"}]
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "parallel_tool_calls": False}
CHAT = SHARED | TOOLS | {"messages": USER, "seed": 5}
MESSAGES = SHARED | {
    "messages": USER,
    "tools": [{"name": "weather", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "weather"},
}
RESPONSES: Json = {
    "model": "tiny",
    "input": "Weather?",
    "temperature": 0,
    "max_output_tokens": 220,
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "weather"},
}
FORMATS = [known.name for known in CALL_FORMATS]


async def of_stream(http: httpx.AsyncClient) -> Json:
    """Name, arguments, finish and usage of a stream."""
    text: Json = {"name": "", "arguments": ""}
    body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
    reply = await http.post("/v1/chat/completions", json=body)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    for choice in (event["choices"][0] for event in events if event["choices"]):
        for piece in choice["delta"].get("tool_calls") or ():
            assert piece["index"] == 0
            for key in ("name", "arguments"):
                text[key] += piece["function"].get(key) or ""
        assert not choice["delta"].get("content")
        text["finish"] = choice["finish_reason"] or text.get("finish")
    return text | {"usage": events[-1]["usage"]}


async def asked(http: httpx.AsyncClient) -> Json:
    """What every endpoint answers. Those that take no seed are asked at temperature 0."""
    chat = (await http.post("/v1/chat/completions", json=CHAT)).json()
    (call,) = chat["choices"][0]["message"]["tool_calls"]
    whole = call["function"] | {"finish": chat["choices"][0]["finish_reason"], "usage": chat["usage"]}
    message = (await http.post("/v1/messages", json=MESSAGES | {"temperature": 0})).json()
    (use,) = message["content"]
    response = (await http.post("/v1/responses", json=RESPONSES)).json()
    (item,) = response["output"]
    found = {
        "chat": whole,
        "stream": await of_stream(http),
        "messages": (message["stop_reason"], use["name"], use["input"], message["usage"]["output_tokens"]),
        "responses": (item["type"], item["name"], item["arguments"], response["usage"]["output_tokens"]),
    }
    for usage in (found["chat"]["usage"], found["stream"]["usage"]):
        usage.pop("prompt_tokens_details")  # what the prefix cache had
    return found


@cache
def answers(name: str, config: RingConfig) -> Json:
    known = call_format(name, "")
    assert known is not None
    config = replace(config, markers=known.markers)
    codec = load_codec(Path(tiny_tokenizer_dir(VOCAB_SIZE, known.markers)))

    async def run() -> Json:
        info = msgspec.structs.replace(INFO, call_format=known)
        async with serving(tiny_loaded(4, config.num_steps), config, codec, info) as http:
            return await asked(http)

    return asyncio.run(run())


@pytest.mark.full_but_every(12)
@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_plain_decodings(name: str) -> None:
    plain, drafted = answers(name, PLAIN), answers(name, DRAFTED)
    assert drafted == plain
    assert plain["stream"] == plain["chat"] and plain["chat"]["finish"] == "tool_calls"
    (stop, used, given, _), (kind, called, text, _) = plain["messages"], plain["responses"]
    assert (stop, used, kind, called) == ("tool_use", "weather", "function_call", "weather")
    for arguments in (json.loads(plain["chat"]["arguments"]), given, json.loads(text)):
        assert arguments.keys() == PROPERTIES.keys() and arguments["unit"] in ("C", "F")
        assert len(arguments["city"]) <= 6 and all(day in range(10) for day in arguments["days"])
