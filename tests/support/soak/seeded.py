"""Seeded requests of all parameters, at every endpoint and over ZMQ, and whether two servers' answers are equal.

The parameters are those of `support.parameter_cases`. Request number i of a seed is always the same.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import httpx
import msgspec

from overlap_spec import Client
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import SamplingParams
from support.http_streams import merged
from support.parameter_cases import (
    BODIES,
    CASES,
    CHAT,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    PROMPTS,
    RESPONSES,
    comparable,
    with_prompt,
)
from support.soak.requests import zmq_request

Json = dict[str, Any]
ZMQ = "zmq"
LENGTHS = dict.fromkeys(("max_tokens", "max_new_tokens", "max_output_tokens"), (8, 24, 64))
SALTS = "", "first", "second"
WHOLE = {"best_of", "prompt_logprobs"}  # parameters that streams refuse
TOPS = {"top_logprobs", "output_top_logprobs", "input_top_logprobs", "prompt_logprobs"}
CLOSE = 1e-3  # log-probs of float32 in batches of other shapes
ANSWER_S = 120.0  # what takes longer is lost


@dataclass(frozen=True)
class Asked:
    """One request. Over ZMQ `body` is a prompt and its `sampling`."""

    number: int
    path: str
    body: Json


class EndedEarly(Exception):
    """A request had no whole answer: another status, an error event, a cut connection, silence."""


def asked(seed: int, number: int) -> Asked:
    """Request `number` of a seed, of an engine with a method.

    Every eighth comes over ZMQ, and each other one has one case of the parameters.
    """
    random = Random(f"{seed} {number}")
    if random.randrange(8) == 0:
        return Asked(number, ZMQ, zmq_request(random))
    case = random.choice(CASES[random.choice(sorted(CASES))])
    fields = {name: random.choice(LENGTHS.get(name, (value,))) for name, value in BODIES[case.endpoint].items()}
    fields |= {"seed": random.randrange(1 << 30), **case.beside, **case.fields}
    body = with_prompt(case.endpoint, prompt(random), fields)
    if random.random() < 0.6 and WHOLE.isdisjoint(fields):
        body["stream"] = True
        if case.endpoint in (COMPLETIONS, CHAT):
            body["stream_options"] = {"include_usage": True}
    if salt := random.choice(SALTS):
        body["extra_key" if case.endpoint == GENERATE else "cache_salt"] = salt
    return Asked(number, case.endpoint, body)


def for_plain(request: Asked) -> Asked:
    """The same request for an engine without a method, which refuses a number of steps."""
    if request.path != ZMQ or "speculative" not in request.body["sampling"]:
        return request
    sampling = {name: value for name, value in request.body["sampling"].items() if name != "speculative"}
    return replace(request, body=request.body | {"sampling": sampling})


def prompt(random: Random) -> str:
    """One of a few beginnings, then letters of its own."""
    own = "".join(chr(random.randrange(97, 123)) for _ in range(random.choice((0, 1, 9, 40))))
    return random.choice(PROMPTS) + own


class Sender:
    """A server's clients. Every answer is brought into a form in which streamed and whole ones can be compared."""

    def __init__(self, url: str, zmq_client: Client) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self.http = httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits)
        self._zmq = zmq_client

    async def answer(self, request: Asked) -> Any:
        """Raises: EndedEarly."""
        try:
            if request.path == ZMQ:
                return await self._over_zmq(request)
            if "stream" in request.body:
                return await self._streamed(request)
            reply = await self.http.post(request.path, json=request.body)
            _check_status(reply)
            return comparable(reply.json())
        except (httpx.HTTPError, OverlapSpecError) as error:
            raise EndedEarly(f"{type(error).__name__}: {error}") from error

    async def _over_zmq(self, request: Asked) -> Any:
        sampling = msgspec.convert(request.body["sampling"], SamplingParams)
        found = await self._zmq.complete(request.body["prompt"], sampling)
        counts = found.usage.prompt_tokens, found.usage.completion_tokens
        return [found.text, found.token_ids, msgspec.to_builtins(found.finish), counts]

    async def _streamed(self, request: Asked) -> Any:
        async with self.http.stream("POST", request.path, json=request.body) as reply:
            if reply.status_code != 200:
                await reply.aread()
            _check_status(reply)
            data = [line.removeprefix("data: ") async for line in reply.aiter_lines() if line.startswith("data: ")]
        events = [json.loads(each) for each in data if each != "[DONE]"]
        if wrong := [each for each in events if each.get("error") or each.get("type") == "error"]:
            raise EndedEarly(f"an error event: {wrong[0]}")
        if not events:
            raise EndedEarly("a stream without events")
        return comparable(WHOLE_OF[request.path](events))


def _check_status(reply: httpx.Response) -> None:
    if reply.status_code != 200:
        raise EndedEarly(f"{reply.status_code}: {reply.text[:300]}")


def _openai(events: Sequence[Json]) -> Any:
    found = merged(events)
    if not found["finishes"]:
        raise EndedEarly("a stream without a finish")
    return found


def _generate(events: Sequence[Json]) -> Any:
    """Each event holds all of a choice so far."""
    last = {event.get("index", 0): event for event in events}
    if not all(event["meta_info"]["finish_reason"] for event in last.values()):
        raise EndedEarly("a stream without a finish")
    return [last[index] for index in sorted(last)]


def _messages(events: Sequence[Json]) -> Any:
    """The text of each block of each kind, why it ended, and tokens of the answer."""
    if events[-1]["type"] != "message_stop":
        raise EndedEarly(f"a stream that ends with {events[-1]['type']}")
    texts: dict[str, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            for kind, piece in event["delta"].items():
                if kind != "type":
                    name = f"{event['index']} {kind}"
                    texts[name] = texts.get(name, "") + piece
    end = next(each for each in events if each["type"] == "message_delta")
    return {"texts": texts, **end["delta"], "output_tokens": end["usage"]["output_tokens"]}


def _responses(events: Sequence[Json]) -> Any:
    """The last event has the whole response."""
    if events[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise EndedEarly(f"a stream that ends with {events[-1]['type']}")
    return events[-1]["response"]


WHOLE_OF = {COMPLETIONS: _openai, CHAT: _openai, GENERATE: _generate, MESSAGES: _messages, RESPONSES: _responses}


def alike(found: Any, wanted: Any) -> bool:
    """Equal, but for the rounding of log-probs.

    Of the likeliest tokens at a position only the log-probs are compared: two that are equally likely change places.
    """
    if isinstance(found, float) and isinstance(wanted, float):
        return found == wanted or math.isclose(found, wanted, rel_tol=CLOSE, abs_tol=CLOSE)
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(
            alike(numbers(found[name]), numbers(wanted[name])) if name in TOPS else alike(found[name], wanted[name])
            for name in found
        )
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return bool(found == wanted)


def numbers(tops: Any) -> list[Any]:
    """The log-probs at each position, the largest first."""
    return [sorted(floats(position), reverse=True) for position in tops or ()]


def floats(value: Any) -> list[float]:
    """All that are in it."""
    if isinstance(value, float):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [each for part in inner for each in floats(part)]
