"""Requests with JSON schemas: whether every reply is valid and plain decoding's, what drafts itself, what masks cost.

    python benchmarks/structured_output.py --output benchmarks/results/structured_output_h200.json
    python benchmarks/structured_output.py --requests 20 --batches 1 --output FILE     (a CPU)

The schemas are made from a seed: objects of one to five properties, nested up to three deep, with strings, numbers,
enums, arrays, unions and constants; half of them without white space. Replies of plain decoding (NONE) and of every way
to draft are parsed, validated with `jsonschema`, and compared token for token. On a GPU logits depend on the batch in
their last bits, so all requests run alone, unless --together tells otherwise.

Accept lengths are measured with forced tokens proposed and without. Times are seconds a decode step: constrained, and
unconstrained with as many tokens.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jsonschema
from msgspec.structs import replace

from overlap_spec import Engine, EngineConfig, SamplingParams
from overlap_spec.bench.report import describe_run, write_report
from overlap_spec.config import Settings
from overlap_spec.messages import ChatPrompt, FinishKind, Grammar, GrammarKind

Json = dict[str, Any]
WAYS: dict[str, Json] = {  # to draft: flags
    "EAGLE-3 chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "EAGLE-3 tree": {"speculative_num_steps": 4, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 10},
    "NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
}
PLAIN: Json = {"speculative_algorithm": "NONE"}
NAMES = ("name", "age", "city", "email", "status", "items", "price", "unit", "note", "owner", "created_at", "score")
WORDS = ("red", "green", "blue", "open", "closed", "in progress", "not yet known", "north-west")
LONG_ARRAY = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "minItems": 400}


def make_schemas(count: int, seed: int = 0) -> list[Json]:
    """So many schemas, always the same."""
    rng = random.Random(seed)
    return [_schema(rng, index) for index in range(count)]


def _schema(rng: random.Random, index: int) -> Json:
    compact = {"x-guidance": {"whitespace_flexible": False}} if index % 2 else {}
    return {**compact, **_object(rng, depth=1 + index % 3)}


def _object(rng: random.Random, depth: int) -> Json:
    names = rng.sample(NAMES, rng.randint(1, 5 if depth > 1 else 3))
    required = [name for name in names if rng.random() < 0.8]
    properties = {name: _value(rng, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(rng: random.Random, depth: int) -> Json:
    simple: list[Json] = [
        {"type": "string", "maxLength": rng.randint(4, 12)},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        {"type": "integer", "minimum": 0, "maximum": rng.choice((9, 150, 5000))},
        {"enum": rng.sample(WORDS, 3)},
        {"type": "boolean"},
        {"const": rng.choice(WORDS)},
        {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 99}]},
        {"type": "array", "items": {"enum": rng.sample(WORDS, 4)}, "maxItems": 3},
    ]
    return _object(rng, depth) if depth > 0 and rng.random() < 0.4 else rng.choice(simple)


def request(schema: Json, temperature: float, index: int) -> tuple[ChatPrompt, SamplingParams]:
    """A chat that asks for an object of the schema."""
    names = ", ".join(schema["properties"])
    prompt = ChatPrompt([{"role": "user", "content": f"Give me an example of a record with {names}, as JSON."}])
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    return prompt, SamplingParams(max_new_tokens=400, temperature=temperature, seed=index, grammar=grammar)


@dataclass(frozen=True)
class Reply:
    """One answer, and how many decode steps it took."""

    text: str
    tokens: list[int]
    has_ended: bool
    steps: int
    seconds: float  # from the first token to the last


class UnforcedEngine(Engine):
    """Proposes no forced tokens."""

    def _resolve(self) -> tuple[Settings, list[str]]:
        settings, notes = super()._resolve()
        return replace(settings, proposes_forced=False), notes


async def ask(engine: Engine, prompt: ChatPrompt, sampling: SamplingParams) -> Reply:
    """The whole answer."""
    text, tokens, first, usage, finish = "", [], 0.0, None, None
    async for delta in engine.generate(prompt, sampling):
        first = first or time.perf_counter()
        text, usage, finish = text + delta.text, delta.usage, delta.finish
        tokens += delta.token_ids
    assert usage is not None and finish is not None
    steps = usage.spec_verify_ct or len(tokens) - 1
    return Reply(text, tokens, finish.kind is FinishKind.STOP, steps, time.perf_counter() - first)


async def ask_all(engine: Engine, schemas: list[Json], temperature: float, together: int) -> list[Reply]:
    """Every schema's answer, so many at once."""
    limit = asyncio.Semaphore(together)

    async def one(index: int, schema: Json) -> Reply:
        async with limit:
            return await ask(engine, *request(schema, temperature, index))

    return await asyncio.gather(*(one(index, schema) for index, schema in enumerate(schemas)))


def is_valid(schema: Json, reply: Reply) -> bool:
    """Whether a reply that has ended parses and validates; one that was cut off is not judged."""
    try:
        jsonschema.validate(json.loads(reply.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return not reply.has_ended
    return True


def summary(schemas: list[Json], replies: list[Reply], plain: list[Reply]) -> Json:
    """Counts, and committed tokens per verify step."""
    steps = sum(reply.steps for reply in replies)
    return {
        "requests": len(replies),
        "ended": sum(reply.has_ended for reply in replies),
        "valid": sum(is_valid(*pair) for pair in zip(schemas, replies, strict=True)),
        "equal_to_plain": sum(a.tokens == b.tokens for a, b in zip(replies, plain, strict=True)),
        "accept_length": sum(len(reply.tokens) - 1 for reply in replies) / steps,
    }


async def step_seconds(engine: Engine, batch: int, constrained: bool, num_tokens: int) -> float:
    """Seconds a decode step of so many requests that run together."""
    text = json.dumps(LONG_ARRAY)
    grammar = Grammar(GrammarKind.JSON_SCHEMA, text) if constrained else None
    prompt = ChatPrompt([{"role": "user", "content": "Give me a JSON array of random numbers."}])
    sampling = SamplingParams(
        max_new_tokens=num_tokens, temperature=0, seed=0, grammar=grammar, ignore_eos=not constrained
    )
    replies = await asyncio.gather(*(ask(engine, prompt, sampling) for _ in range(batch)))
    return max(reply.seconds / reply.steps for reply in replies)


async def costs(engine: Engine, batches: list[int], num_tokens: int) -> list[Json]:
    """Constrained and unconstrained steps, the fastest of three each."""
    found = []
    for batch in batches:
        times = {
            constrained: min([await step_seconds(engine, batch, constrained, num_tokens) for _ in range(3)])
            for constrained in (False, True)
        }
        row = {"batch": batch, "unconstrained_s": times[False], "constrained_s": times[True]}
        found.append({**row, "ratio": times[True] / times[False]})
    return found


@asynccontextmanager
async def started(arguments: argparse.Namespace, flags: Json, kind: type[Engine] = Engine) -> AsyncIterator[Engine]:
    config = EngineConfig(model_path=arguments.model, **{**json.loads(arguments.flags), **flags})
    async with kind(config) as engine:
        yield engine


async def measure(arguments: argparse.Namespace) -> Json:
    """Every way at both temperatures, against plain decoding."""
    schemas = make_schemas(arguments.requests)
    plain: dict[float, list[Reply]] = {}
    figures: list[Json] = []
    async with started(arguments, PLAIN) as engine:
        worker = engine.facts.worker
        run = describe_run(worker.device, engine.settings.num_threads)
        for temperature in arguments.temperatures:
            plain[temperature] = await ask_all(engine, schemas, temperature, arguments.together)
            found = summary(schemas, plain[temperature], plain[temperature])
            figures.append({"method": "NONE", "temperature": temperature, **found})
    times: Json = {}
    for name in arguments.ways:
        flags = WAYS[name]
        for kind in (Engine, UnforcedEngine):
            async with started(arguments, flags, kind) as engine:
                for temperature in arguments.temperatures:
                    replies = await ask_all(engine, schemas, temperature, arguments.together)
                    found = summary(schemas, replies, plain[temperature])
                    row = {"method": name, "proposes_forced": kind is Engine, "temperature": temperature, **found}
                    figures.append(row)
                    print(row, flush=True)
                if kind is Engine and arguments.batches:
                    times[name] = await costs(engine, arguments.batches, arguments.tokens)
                    print(times[name], flush=True)
    return {"benchmark": "structured_output", "run": run, "figures": figures, "step_times": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--flags", default="{}", help="more of EngineConfig, as JSON")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--together", type=int, default=1, help="requests that run at once")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8], help="batch sizes to time; none: no times")
    parser.add_argument("--tokens", type=int, default=256, help="of a request that is timed")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    write_report(arguments.output, asyncio.run(measure(arguments)))


if __name__ == "__main__":
    main()
