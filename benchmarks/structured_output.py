"""Requests with JSON schemas: whether every reply is valid and plain decoding's, what drafts itself, what masks cost.

    python benchmarks/structured_output.py --output benchmarks/results/structured_output_h200.json
    python benchmarks/structured_output.py --requests 20 --batches 1 --output FILE     (a CPU)

The schemas are made from a seed: objects of one to five properties, nested up to three deep, with strings, numbers,
enums, arrays, unions and constants; half of them without white space. Replies of plain decoding (NONE) and of every way
to draft are parsed, validated with `jsonschema`, and compared token for token.

On a GPU logits depend on the batch in their last bits. So every reply is audited: plain decoding follows its tokens one
by one, with the same masks, and the audit tells a near-tie (a margin within the measured noise of batch shapes) from a
fault. Where a reply differs from plain decoding's, one of the two has a token that the audit does not draw, at the
first place where they differ; the report counts what the audit says of it.

Accept lengths are measured with forced tokens proposed and without. Times are seconds a decode step: constrained, and
unconstrained with as many tokens, in turns and several times, by an engine that audits nothing.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import jsonschema
from msgspec.structs import replace

from overlap_spec import Engine, EngineConfig, SamplingParams
from overlap_spec.bench.report import describe_engine, write_report
from overlap_spec.config import Settings
from overlap_spec.messages import ChatPrompt, Difference, FinishKind, Grammar, GrammarKind

Json = dict[str, Any]
WAYS: dict[str, Json] = {  # to draft: flags
    "EAGLE-3 chain": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    "EAGLE-3 tree": {"speculative_num_steps": 4, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 10},
    "NGRAM": {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8},
}
PLAIN: Json = {"speculative_algorithm": "NONE"}
POLL_S = 0.05  # between looks at the backlog of audits
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
    num_prompt: int
    steps: int
    seconds: float  # from the first token to the last


class UnforcedEngine(Engine):
    """Proposes no forced tokens."""

    def _resolve(self) -> tuple[Settings, list[str]]:
        settings, notes = super()._resolve()
        return replace(settings, proposes_forced=False), notes


@dataclass(frozen=True)
class Replies:
    """Every schema's reply in one engine at one temperature, and what the audit has found in them."""

    replies: list[Reply]
    audited: int  # replies
    tokens: int  # audited
    bound: float  # margins up to it are noise, in logits
    skipped: dict[str, int]  # replies that were not audited, by the reason
    differences: dict[tuple[int, int], Difference]  # by request and position: what plain decoding does not draw


async def ask(engine: Engine, prompt: ChatPrompt, sampling: SamplingParams, request_id: str | None = None) -> Reply:
    """The whole answer."""
    text, tokens, first, usage, finish = "", [], 0.0, None, None
    async for delta in engine.generate(prompt, sampling, request_id):
        first = first or time.perf_counter()
        text, usage, finish = text + delta.text, delta.usage, delta.finish
        tokens += delta.token_ids
    assert usage is not None and finish is not None
    steps = usage.spec_verify_ct or len(tokens) - 1
    seconds = time.perf_counter() - first
    return Reply(text, tokens, finish.kind is FinishKind.STOP, usage.prompt_tokens, steps, seconds)


async def ask_all(engine: Engine, schemas: list[Json], temperature: float, together: int) -> Replies:
    """Every schema's answer, so many at once, and what their audits say."""
    limit, before = asyncio.Semaphore(together), (await engine.client.audit()).figures

    async def one(index: int, schema: Json) -> Reply:
        async with limit:
            return await ask(engine, *request(schema, temperature, index), f"{temperature}/{index}")

    replies = await asyncio.gather(*(one(index, schema) for index, schema in enumerate(schemas)))
    while (report := await engine.client.audit()).figures.backlog:
        await asyncio.sleep(POLL_S)
    after, skipped = report.figures, {**report.skipped_because, **report.dropped_because}
    found = {place: each for each in report.recent if (place := _place(each, temperature)) is not None}
    return Replies(replies, after.requests - before.requests, after.tokens - before.tokens, after.bound, skipped, found)


def _place(difference: Difference, temperature: float) -> tuple[int, int] | None:
    asked, index = difference.request_id.split("/")
    return (int(index), difference.position) if float(asked) == temperature else None


def is_valid(schema: Json, reply: Reply) -> bool:
    """Whether a reply that has ended parses and validates; one that was cut off is not judged."""
    try:
        jsonschema.validate(json.loads(reply.text), schema)
    except (ValueError, jsonschema.ValidationError):
        return not reply.has_ended
    return True


def summary(schemas: list[Json], found: Replies, plain: Replies) -> Json:
    """Counts, and committed tokens per verify step."""
    replies = found.replies
    return {
        "requests": len(replies),
        "ended": sum(reply.has_ended for reply in replies),
        "valid": sum(is_valid(*pair) for pair in zip(schemas, replies, strict=True)),
        "equal_to_plain": sum(a.tokens == b.tokens for a, b in zip(replies, plain.replies, strict=True)),
        "different": differences_from(plain, found),
        "audit": {
            "replies": found.audited,
            "tokens": found.tokens,
            "near_ties": sum(not each.is_fault for each in found.differences.values()),
            "faults": sum(each.is_fault for each in found.differences.values()),
            "bound": found.bound,
            "not_audited": found.skipped,
        },
        "accept_length": sum(len(reply.tokens) - 1 for reply in replies) / sum(reply.steps for reply in replies),
    }


def differences_from(plain: Replies, found: Replies) -> Json:
    """What the audit says of each reply's first token that is not plain decoding's; margins in logits."""
    verdicts: Counter[str] = Counter({"near_tie": 0, "fault": 0, "unexplained": 0})
    largest = 0.0
    for index, (reply, other) in enumerate(zip(found.replies, plain.replies, strict=True)):
        place = first_difference(reply.tokens, other.tokens)
        if place is None:
            continue
        position = (index, reply.num_prompt + place)
        told = [each for run in (found, plain) if (each := run.differences.get(position)) is not None]
        largest = max(largest, *(each.margin or 0.0 for each in told), 0.0)
        verdicts[_verdict(told)] += 1
    return {**verdicts, "largest_margin": largest}


def first_difference(one: list[int], other: list[int]) -> int | None:
    """Where two replies first differ, one of them ending included."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _verdict(told: list[Difference]) -> str:
    if not told:
        return "unexplained"
    return "fault" if any(each.is_fault for each in told) else "near_tie"


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


async def costs(engine: Engine, arguments: argparse.Namespace) -> list[Json]:
    """Constrained and unconstrained steps in turns: the median of all repeats, and each."""
    found = []
    for batch in arguments.batches:
        times: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(arguments.repeats + 1):  # the first compiles the grammar, and fills its caches
            for constrained in times:
                seconds = await step_seconds(engine, batch, constrained, arguments.tokens)
                if repeat:
                    times[constrained].append(seconds)
        free, masked = (statistics.median(times[constrained]) for constrained in (False, True))
        row = {"batch": batch, "unconstrained_s": free, "constrained_s": masked, "ratio": masked / free}
        found.append({**row, "unconstrained_repeats_s": times[False], "constrained_repeats_s": times[True]})
    return found


@asynccontextmanager
async def started(arguments: argparse.Namespace, flags: Json, kind: type[Engine] = Engine) -> AsyncIterator[Engine]:
    config = EngineConfig(model_path=arguments.model, **{**json.loads(arguments.flags), **flags})
    async with kind(config) as engine:
        yield engine


class Report:
    """What is known so far, in a file that is written anew with every figure."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        asked = {name: getattr(arguments, name) for name in ("requests", "together", "repeats", "tokens")}
        self._found: Json = {"benchmark": "structured_output", "run": {}, **asked, "figures": [], "step_times": {}}
        self._output: str = arguments.output
        self._begun = time.monotonic()

    def of(self, engine: Engine) -> None:
        """Note where figures come from."""
        self._found["run"] = self._found["run"] or describe_engine(engine)

    def add(self, row: Json) -> None:
        """Add what the replies of one way to draft were."""
        self._found["figures"].append(row)
        self._write(row)

    def add_times(self, name: str, rows: list[Json]) -> None:
        """Add the step times of one way to draft."""
        self._found["step_times"][name] = rows
        self._write({name: rows})

    def _write(self, news: Json) -> None:
        print(f"{time.monotonic() - self._begun:.0f} s", news, flush=True)
        write_report(self._output, self._found)


async def measure(arguments: argparse.Namespace) -> None:
    """Every way at all temperatures, against plain decoding; then times."""
    report = Report(arguments)
    if arguments.requests:
        await compare_replies(arguments, report)
    for name in arguments.timed if arguments.batches else ():
        async with started(arguments, {**WAYS[name], "audit_rate": 0.0}) as engine:
            report.of(engine)
            report.add_times(name, await costs(engine, arguments))


async def compare_replies(arguments: argparse.Namespace, report: Report) -> None:
    """Plain decoding's replies, then those of every way."""
    schemas = make_schemas(arguments.requests)
    plain: dict[float, Replies] = {}
    async with started(arguments, {**PLAIN, "audit_rate": 1.0}) as engine:
        report.of(engine)
        for temperature in arguments.temperatures:
            found = plain[temperature] = await ask_all(engine, schemas, temperature, arguments.together)
            report.add({"method": "NONE", "temperature": temperature, **summary(schemas, found, found)})
    for name in arguments.ways:
        for kind in (Engine, UnforcedEngine) if name in arguments.unforced else (Engine,):
            async with started(arguments, {**WAYS[name], "audit_rate": 1.0}, kind) as engine:
                for temperature in arguments.temperatures:
                    found = await ask_all(engine, schemas, temperature, arguments.together)
                    row = {"method": name, "proposes_forced": kind is Engine, "temperature": temperature}
                    report.add({**row, **summary(schemas, found, plain[temperature])})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--flags", default="{}", help="more of EngineConfig, as JSON")
    parser.add_argument("--requests", type=int, default=500, help="0: times alone")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    chain = ["EAGLE-3 chain"]
    parser.add_argument("--unforced", nargs="*", default=chain, choices=WAYS, help="ways to run without forced tokens")
    parser.add_argument("--timed", nargs="*", default=chain, choices=WAYS, help="ways whose steps are timed")
    parser.add_argument("--together", type=int, default=8, help="requests that run at once")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8], help="batch sizes to time; none: no times")
    parser.add_argument("--tokens", type=int, default=256, help="of a request that is timed")
    parser.add_argument("--repeats", type=int, default=5, help="of each time")
    parser.add_argument("--output", required=True)
    arguments = parser.parse_args()
    asyncio.run(measure(arguments))


if __name__ == "__main__":
    main()
