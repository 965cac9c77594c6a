"""Are tokens and log-probs those of the request alone, to the last bit, with --enable-deterministic-inference?

    python benchmarks/bits_of_alone.py --part smollm2 --seconds 200 --output benchmarks/results/bits_h200.json
    python benchmarks/bits_of_alone.py --part fp8 ..     the 8B's shape; also bf16, int4, kv8
    python benchmarks/bits_of_alone.py --part tiny ..    on a CPU
    python benchmarks/bits_of_alone.py --part recurring ..    a tiny mixture with Gated DeltaNet layers, on any device

One engine decodes each request plainly and alone: one slot, no prefix cache. Others, the part's ways, have the same
requests in bursts: by guesses of a head, by n-grams, in plain batches. Their pools are small, so requests are
preempted; prompts begin alike, and are computed in chunks; clients leave, and in some bursts the worker is killed.
Request number i of a part is always the same. FILE is written after each burst, and the next run goes on behind each
way's last number. The status is 1 if an answer differs.
"""

import argparse
import asyncio
import fcntl
import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import _tests_path
import msgspec
from support.soak.deaths import write_models

from overlap_spec.bench.report import describe_engine, write_report
from overlap_spec.client.answers import Delta
from overlap_spec.client.calls import Completion, completion_of
from overlap_spec.config import EngineConfig
from overlap_spec.engine import Engine
from overlap_spec.errors import OverlapSpecError
from overlap_spec.messages import (
    Finish,
    FinishKind,
    Grammar,
    GrammarKind,
    LogProbParams,
    SamplingParams,
    Speculative,
    Stats,
)

SHAPES = Path(__file__).parent / "shapes"
CHATS = _tests_path.ROOT / "tests/data/greedy64.json"
BEGINNINGS = (0, 0, 40, 150, 400, 900)  # tokens that prompts share
LEAVES, KILLED = 0.06, 0.25  # shares of requests whose client leaves, and of bursts in which the worker dies
EXAMPLES = 5  # of differences, in a report
STOP_S = 12.0  # of the limit, to stop engines in
CHAIN = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
NGRAM = {"speculative_algorithm": "NGRAM", "chunked_prefill_size": 96}
ALONE = {"speculative_algorithm": "NONE", "max_running_requests": 1, "disable_radix_cache": True}
ALONE |= {"chunked_prefill_size": -1}
INT4 = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


@dataclass(frozen=True)
class Part:
    """Requests of one model. `ways`: the engines that are compared with plain decoding alone, by name."""

    requests: int
    rounds: int  # each way has all of them so often, in other company
    tokens: int  # of an answer, at most
    burst: int  # requests that are sent at once
    kills: bool
    model: dict[str, Any]
    ways: dict[str, dict[str, Any]]
    context: int = 2048
    vocabulary: int = 49152
    has_text: bool = True  # a tokenizer, which grammars need

    @property
    def answers(self) -> int:
        """Of each way."""
        return self.requests * self.rounds


def of_8b(**own: Any) -> Part:
    """240 answers of 48 tokens to 60 requests. Weights are drawn: what differs in a bit differs in them as well."""
    head = {"speculative_draft_model_path": str(SHAPES / "llama-3.1-8b-eagle3")}
    fixed = {"model_path": str(SHAPES / "llama-3.1-8b"), "load_format": "dummy", "skip_tokenizer_init": True}
    ways = {
        "EAGLE3": {**head, "speculative_algorithm": "EAGLE3", **CHAIN, "max_running_requests": 24},
        "NGRAM": {**NGRAM, "max_running_requests": 16, "max_total_tokens": 2560},
    }
    ways["EAGLE3"] |= {"max_total_tokens": 2560, "chunked_prefill_size": 256}
    return Part(60, 2, 48, 40, False, {**fixed, "dtype": "bfloat16", **own}, ways, has_text=False)


SMOL_WAYS: dict[str, dict[str, Any]] = {
    "EAGLE3": {"max_running_requests": 24, "max_total_tokens": 2560, "chunked_prefill_size": 256},
    "NGRAM": {
        **NGRAM,
        "max_running_requests": 12,
        "max_total_tokens": 2304,
        "disable_overlap_schedule": True,
    },
    "NONE": {"speculative_algorithm": "NONE", "max_running_requests": 32, "max_total_tokens": 3072},
}
TINY_WAYS = {
    "EAGLE3": {"speculative_algorithm": "EAGLE3", **CHAIN, "max_running_requests": 12, "max_total_tokens": 640},
    "NGRAM": {**NGRAM, "max_running_requests": 12, "max_total_tokens": 640, "disable_overlap_schedule": True},
}
PARTS = {
    "smollm2": Part(672, 1, 64, 48, True, {"dtype": "bfloat16"}, SMOL_WAYS),
    "bf16": of_8b(),
    "fp8": of_8b(quantization="fp8"),
    "int4": of_8b(),
    "kv8": of_8b(kv_cache_dtype="fp8_e4m3"),
    "tiny": Part(32, 2, 24, 24, True, {"dtype": "float32", "device": "cpu"}, TINY_WAYS, context=512, vocabulary=100),
    "recurring": Part(250, 2, 48, 32, True, {"page_size": 16}, TINY_WAYS, context=512, vocabulary=100),
}
TINY = {"tiny": "llama", "recurring": "qwen3 next"}  # families


@dataclass(frozen=True)
class Asked:
    """One request. `leaves_after`: tokens that its client waits for; None: all."""

    prompt: list[int]
    sampling: SamplingParams
    leaves_after: int | None


def asked(name: str, number: int) -> Asked:
    """Request `number` of a part."""
    part, random = PARTS[name], Random(f"{name} {number}")
    chats = all_chats()
    length = random.choice([each for each in BEGINNINGS if each < part.context // 3])
    shared = [token for chat in Random(length).sample(chats, 40) for token in chat][:length]
    words = shared + random.choice(chats)[: random.randint(2, 40)] + [random.randrange(1000) for _ in range(3)]
    prompt = [token % (part.vocabulary - 10) + 10 for token in words] if part.vocabulary < 1000 else words
    log_probs = LogProbParams(top=2, token_ids=(5, 77), prompt_from=random.choice([None, None, None, 0]))
    own = _parameters(random, part)
    if "grammar" not in own:
        own["ignore_eos"] = True
    sampling = SamplingParams(
        max_new_tokens=part.tokens, seed=random.randrange(1 << 30), log_probs=log_probs, **_drawn(random), **own
    )
    leaves = random.random() < LEAVES
    return Asked(prompt, sampling, random.randrange(1, part.tokens) if leaves else None)


@functools.cache
def all_chats() -> list[list[int]]:
    """Short prompts as token ids."""
    return [row["prompt_ids"] for row in json.loads(CHATS.read_text())["rows"]]


def _drawn(random: Random) -> dict[str, Any]:
    """Greedy, or drawn, with filters or without."""
    filters: dict[str, Any] = random.choice([{}, {}, {"top_p": 0.8}, {"top_k": 20, "min_p": 0.02}])
    return random.choice([{"temperature": 0.0}, {"temperature": random.choice([0.7, 1.0]), **filters}])


def _parameters(random: Random, part: Part) -> dict[str, Any]:
    tokens = [random.randrange(10, part.vocabulary) for _ in range(8)]
    kinds: list[dict[str, Any]] = [
        {"presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"repetition_penalty": 1.3},
        {"logit_bias": {token: random.choice([-100.0, 2.5, 6.0]) for token in tokens}},
        {"bad_word_ids": tuple((token,) for token in tokens)},
        {"allowed_token_ids": tuple(range(10, part.vocabulary, 3))},
        {"stop_token_ids": tuple(tokens[:2])},
    ]
    if part.has_text:
        numbers = {"type": "array", "items": {"type": "integer"}, "minItems": 12}
        schema = {"type": "object", "properties": {"a": numbers}, "required": ["a"], "additionalProperties": False}
        kinds += [
            {"grammar": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))},
            {"grammar": Grammar(GrammarKind.REGEX, "([a-z]{1,9} ){30}")},
            {"grammar": Grammar(GrammarKind.EBNF, 'root ::= "x" ("ab" | "cd" root | "long way" root)')},
        ]
    return {**random.choice(kinds)} if random.random() < 0.55 else {}


def steps_of(name: str, number: int) -> Speculative:
    """How far the request is speculated for, by an engine with a method: mostly as far as the engine does."""
    return Random(f"{name} steps {number}").choice([Speculative()] * 5 + [Speculative(num_steps=n) for n in (0, 1, 2)])


def differs(found: Completion, alone: Completion, whole: bool) -> str:
    """What of an answer is not, to the last bit, what the request alone has; empty: nothing.

    `whole`: False if its client left: then it is the beginning.
    """
    count = len(found.token_ids)
    if whole and (found.finish.kind, count) != (alone.finish.kind, len(alone.token_ids)):
        return f"{count} tokens and {found.finish.kind}, alone {len(alone.token_ids)} and {alone.finish.kind}"
    for place, tokens in enumerate(zip(found.token_ids, alone.token_ids, strict=False)):
        if tokens[0] != tokens[1]:
            return f"token {place}: {tokens[0]}, alone {tokens[1]}"
    for what, ours, only in (
        ("prompt log-probs", found.prompt_log_probs, alone.prompt_log_probs),
        ("log-probs", found.log_probs, list(alone.log_probs)[:count]),
    ):
        pairs = list(zip(map(_numbers, ours), map(_numbers, only), strict=False))
        if len(ours) != len(only):
            return f"{len(ours)} {what}, alone {len(only)}"
        for place, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                return f"{what} of {place}: {mine}, alone {theirs}"
    return ""


def _numbers(token: Any) -> list[Any]:
    """A token's log-probs, of which every bit counts."""
    others = [(each.token_id, each.log_prob) for each in (*token.top, *token.listed)]
    return [(token.token_id, token.log_prob), *others]


class Alone:
    """The requests of a part, each by plain decoding alone. One more waits at the engine, so that it never idles."""

    def __init__(self, name: str, engine: Engine) -> None:
        self._name = name
        self._engine = engine
        self._turns = asyncio.Semaphore(2)
        self._answers: dict[int, asyncio.Task[Completion]] = {}  # by number

    def begin(self, numbers: Sequence[int]) -> "list[asyncio.Task[Completion]]":
        """Their answers, after those that were asked for before. Raises: OverlapSpecError."""
        for number in numbers:
            if number not in self._answers:
                self._answers[number] = asyncio.create_task(self._answer(number))
        return [self._answers[number] for number in numbers]

    async def _answer(self, number: int) -> Completion:
        async with self._turns:
            request = asked(self._name, number)
            return await self._engine.client.complete(request.prompt, request.sampling)

    def stop(self) -> None:
        for task in self._answers.values():
            task.cancel()


def numbers_of(name: str, first: int) -> list[int]:
    """The requests of the burst at places `first` and on of a way. From the second round on their order is another."""
    part, numbers = PARTS[name], []
    for place in range(first, min(first + part.burst, part.answers)):
        order = list(range(part.requests))
        if place >= part.requests:
            Random(f"{name} round {place // part.requests}").shuffle(order)
        numbers.append(order[place % part.requests])
    return numbers


class Burst:
    """Requests at places `first` and on, in one of a part's ways."""

    def __init__(self, name: str, first: int, way: str, engine: Engine) -> None:
        self._name = name
        self._way = way
        self._engine = engine
        self._numbers = numbers_of(name, first)
        self._random = Random(f"{name} {way} burst {first}")
        self._come = 0  # tokens of answers
        self._open = 0
        self._has_ended = 0
        self.counts: Counter[str] = Counter()
        self.examples: list[dict[str, Any]] = []

    async def run(self, alone: "Sequence[asyncio.Task[Completion]]") -> None:
        """Compare all of them. Raises: OverlapSpecError if the engine alone cannot answer."""
        requests = [asked(self._name, number) for number in self._numbers]
        kills = PARTS[self._name].kills and self._random.random() < KILLED
        found, _ = await asyncio.gather(
            asyncio.gather(*map(self._ask, self._numbers, requests)), self._kill() if kills else asyncio.sleep(0)
        )
        for number, request, answer, only in zip(
            self._numbers, requests, found, await asyncio.gather(*alone), strict=True
        ):
            self._compare(number, request, answer, only)

    async def _ask(self, number: int, request: Asked) -> Completion | str:
        """An answer, or its beginning, or why there is none."""
        steps = steps_of(self._name, number) if self._way != "NONE" else Speculative()
        sampling = msgspec.structs.replace(request.sampling, speculative=steps)
        await asyncio.sleep(self._random.uniform(0, 0.3))
        deltas: list[Delta] = []
        self._open += 1
        try:
            async with aclosing(self._engine.generate(request.prompt, sampling)) as stream:
                async for delta in stream:
                    deltas.append(delta)
                    self._come += len(delta.token_ids)
                    if request.leaves_after and sum(len(each.token_ids) for each in deltas) >= request.leaves_after:
                        break
        except OverlapSpecError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._open -= 1
            self._has_ended += 1
        return completion_of(deltas) if deltas[-1].finish else _beginning(deltas)

    async def _kill(self) -> None:
        """End the worker with requests in their middle."""
        some = len(self._numbers) * PARTS[self._name].tokens * self._random.uniform(0.1, 0.6)
        while self._come < some and self._has_ended < len(self._numbers) // 2:
            await asyncio.sleep(0.005)
        self.counts["kills"] += 1
        self.counts["open_at_a_kill"] += self._open
        os.kill(self._engine.pids["worker"], signal.SIGKILL)

    def _compare(self, number: int, request: Asked, answer: Completion | str, alone: Completion) -> None:
        what = answer if isinstance(answer, str) else differs(answer, alone, request.leaves_after is None)
        if what:
            self.examples.append({"number": number, "way": self._way, "what": what[:600]})
        tokens = 0 if isinstance(answer, str) else len(answer.token_ids)
        sampling = request.sampling
        self.counts += Counter(
            requests=1,
            differ=bool(what),
            tokens=tokens,
            clients_that_left=request.leaves_after is not None,
            greedy=sampling.greedy,
            grammars=sampling.grammar is not None,
            other_parameters=sampling.changes_logits,
            prompts_with_log_probs=bool(alone.prompt_log_probs),
        )


def _beginning(deltas: Sequence[Delta]) -> Completion:
    """Of an answer whose client left."""
    last = msgspec.structs.replace(deltas[-1], finish=Finish(FinishKind.ABORT))
    return completion_of([*deltas[:-1], last])


class Run:
    """A part, from each way's request on at which the last run ended, until `ends_at`."""

    def __init__(self, name: str, ends_at: float, output: str | None) -> None:
        self._name = name
        self._part = PARTS[name]
        new = {"of": self._part.answers * len(self._part.ways), "requests": 0, "differ": 0, "examples": []}
        new["ways"] = {way: {"requests": 0} for way in self._part.ways}
        self.row: dict[str, Any] = read(output)["parts"].get(name, new)
        self._described: dict[str, Any] = {}
        self._ends_at = ends_at
        self._output = output
        self._seen: dict[str, Stats] = {}

    async def run(self, scratch: Path) -> None:
        """Raises: SystemExit if an engine does not start."""
        configs = {way: config_of(self._part, self._name, own, scratch) for way, own in self._part.ways.items()}
        configs = {"alone": config_of(self._part, self._name, ALONE, scratch), **configs}
        async with AsyncExitStack() as stack:
            engines = {way: Engine(config) for way, config in configs.items()}
            starting = map(stack.enter_async_context, engines.values())
            for way, started in zip(configs, await asyncio.gather(*starting, return_exceptions=True), strict=True):
                if isinstance(started, BaseException):
                    raise SystemExit(f"{way}: {type(started).__name__}: {started}")
            self._described = {"part": self._name, **describe_engine(engines["alone"])}
            begun, alone = time.monotonic(), Alone(self._name, engines.pop("alone"))
            print(f"{self._name}: {self._ends_at - begun:.0f} s are left after the start", flush=True)
            await asyncio.gather(*(self._run_way(way, engine, alone) for way, engine in engines.items()))
            alone.stop()
            self.row["seconds"] = round(self.row.get("seconds", 0.0) + time.monotonic() - begun, 1)
            self._write()

    async def _run_way(self, way: str, engine: Engine, alone: Alone) -> None:
        """Burst after burst; none that would end too late, as long as the slowest so far takes."""
        figures, slowest = self.row["ways"][way], 0.0
        while figures["requests"] < self._part.answers and time.monotonic() + slowest < self._ends_at:
            first, begun = figures["requests"], time.monotonic()
            expected, burst = alone.begin(numbers_of(self._name, first)), Burst(self._name, first, way, engine)
            alone.begin(numbers_of(self._name, first + self._part.burst))  # no engine waits for another's clients
            await burst.run(expected)
            slowest = max(slowest, time.monotonic() - begun)
            await self._add(way, engine, burst)

    async def _add(self, way: str, engine: Engine, burst: Burst) -> None:
        """What was compared, and what happened in the engine meanwhile; where its worker died, since then."""
        stats, before = await engine.client.stats(), self._seen.get(way, Stats())
        before = before if stats.steps_total >= before.steps_total else Stats()
        self._seen[way] = stats
        names = "preempted_total", "cached_tokens_total", "generation_tokens_total", "drafts_total"
        happened = {name: getattr(stats, name) - getattr(before, name) for name in names}
        accepted = sum(stats.accepted_per_position_total) - sum(before.accepted_per_position_total)
        figures = self.row["ways"][way]
        for name, count in {**burst.counts, **happened, "accepted_total": accepted}.items():
            figures[name] = figures.get(name, 0) + count
        self.row |= {name: self.row[name] + burst.counts[name] for name in ("requests", "differ")}
        self.row["examples"] = (self.row["examples"] + burst.examples)[:EXAMPLES]
        print(json.dumps({"part": self._name, "way": way, **self.row, "ways": figures}), flush=True)
        self._write()

    def _write(self) -> None:
        """Put the part's row into the file, beside those of parts that run at the same time."""
        if self._output:
            with open(f"{self._output}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                report = read(self._output)
                report["parts"][self._name] = self.row
                report["runs"] = [run for run in report["runs"] if run != self._described] + [self._described]
                write_report(self._output, report)


def read(output: str | None) -> dict[str, Any]:
    """The report so far."""
    if output and Path(output).exists():
        found: dict[str, Any] = json.loads(Path(output).read_text())
        return found
    return {"benchmark": "bits_of_alone", "runs": [], "parts": {}}


def config_of(part: Part, name: str, own: dict[str, Any], scratch: Path) -> EngineConfig:
    """An engine of a part. In int4 the 8B's shape is a GPTQ checkpoint's."""
    model = dict(part.model)
    if name in TINY:
        model["model_path"] = str(scratch / "tiny")
        if own.get("speculative_algorithm") == "EAGLE3":
            model["speculative_draft_model_path"] = str(scratch / "tiny" / "head")
    if name == "int4":
        model["model_path"] = str(scratch / "llama-3.1-8b-gptq")
    if own is ALONE:
        own = own | {"max_total_tokens": 2 * part.context}
    fixed = {"context_length": part.context, "recover": True, "max_recoveries": 10_000, "audit_rate": 0.0}
    return EngineConfig(enable_deterministic_inference=True, log_level="warning", **{**fixed, **model, **own})


def write_models_of(name: str, scratch: Path) -> None:
    """Those that are no files of this project."""
    if name in TINY:
        write_models(scratch / "tiny", TINY[name])
    if name == "int4":
        shutil.copytree(SHAPES / "llama-3.1-8b", scratch / "llama-3.1-8b-gptq")
        config = scratch / "llama-3.1-8b-gptq" / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": INT4}))


def main() -> int:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="for everything, start and end included")
    parser.add_argument("--output")
    arguments = parser.parse_args()
    run = Run(arguments.part, begun + arguments.seconds - STOP_S, arguments.output)
    with tempfile.TemporaryDirectory() as scratch:
        write_models_of(arguments.part, Path(scratch))
        asyncio.run(run.run(Path(scratch)))
    return 1 if run.row["differ"] else 0


if __name__ == "__main__":
    sys.exit(main())
