"""Structured output through the whole ring: tokens are those of plain constrained decoding, whatever is guessed."""

import asyncio
import functools
import json
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import jsonschema
import msgspec
import pytest
from structured_output import make_schemas
from support.grammar_oracle import GrammarOracle
from support.late_grammars import grammars_of
from support.random_schedules import (
    Request,
    assert_nothing_leaked,
    random_config,
    random_requests,
    run_requests,
    with_room,
)
from support.ring import Ring, RingConfig, running, tiny_loaded
from support.ring_links import Answer
from support.tiny.grammars import BAD_GRAMMARS, TINY_GRAMMARS, schema
from support.tiny.methods import CHAINS, EVERY_METHOD
from support.tiny.tokenizer import write_tokenizer

from overlap_spec.errors import RequestError
from overlap_spec.features.grammar import PrepareGrammar
from overlap_spec.features.grammar.grammars import Grammars, RequestGrammar
from overlap_spec.frontend.codec import TextCodec, load_codec
from overlap_spec.messages import (
    ErrorCode,
    FinishKind,
    Grammar,
    GrammarKind,
    SamplingParams,
    Speculative,
)
from overlap_spec.worker.step import StepHandle

PROMPT = [11, 40, 71, 9, 80, 33]
CONFIG = RingConfig(grammars=True, max_len=200)


@pytest.fixture(scope="module")
def oracle(codec: TextCodec) -> GrammarOracle:
    return GrammarOracle(0, codec)


def sampling(grammar: Grammar | None, temperature: float = 0.0, **params: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=48, temperature=temperature, seed=7, grammar=grammar, **params)


def every_request(temperature: float) -> list[SamplingParams]:
    return [sampling(grammar, temperature) for grammar in (*TINY_GRAMMARS.values(), None)]


async def answers(ring: Ring, requests: list[SamplingParams], prompt: list[int] = PROMPT) -> list[Answer]:
    found = await asyncio.gather(*(ring.ask(prompt, each) for each in requests))
    await ring.idle()
    await nothing_leaked(ring)
    return found


async def nothing_leaked(ring: Ring) -> None:
    async with asyncio.timeout(30):  # the last message to the worker is on its way
        while len(grammars_of(ring.executor).grammars):
            await asyncio.sleep(0.005)


def check(oracle: GrammarOracle, requests: list[SamplingParams], found: list[Answer], what: str) -> None:
    for request, answer in zip(requests, found, strict=True):
        assert answer.rejected is None, answer.rejected
        oracle.check(PROMPT, request, answer, f"{what} {request.grammar}")
        grammar = request.grammar
        ended = answer.finish is not None and answer.finish.kind is FinishKind.STOP
        if ended and grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(answer.text), json.loads(grammar.text))


def run(config: RingConfig, codec: TextCodec, oracle: GrammarOracle, requests: list[SamplingParams]) -> Ring:
    async def serve() -> Ring:
        models = tiny_loaded(0, config.num_steps, method=config.method, topk=config.topk)
        async with running(models, config, codec) as ring:
            check(oracle, requests, await answers(ring, requests), str(config))
            return ring

    return asyncio.run(serve())


@pytest.mark.slow
@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("method", ["EAGLE3", "NONE"])
def test_requests_one_after_another_take_over_a_matcher(
    codec: TextCodec, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the one before said last, which no step followed, is not the next one's. Results take a while here."""
    ready = StepHandle.ready
    monkeypatch.setattr(
        StepHandle, "ready", lambda handle: time.monotonic() > handle.host.launch_begin + 0.01 and ready(handle)
    )

    async def serve() -> list[list[int]]:
        config = replace(CONFIG, method=method, num_steps=0 if method == "NONE" else CONFIG.num_steps)
        async with running(tiny_loaded(0, config.num_steps, method="EAGLE3"), config, codec) as ring:
            long = Grammar(GrammarKind.REGEX, "([ab]{4}[01]){60}")  # whose 48th character may be a first one
            return [(await ring.ask(PROMPT, sampling(long))).token_ids for _ in range(3)]

    first, *others = asyncio.run(serve())
    assert len(first) == 48 and all(tokens == first for tokens in others)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_plain_decoding(codec: TextCodec, oracle: GrammarOracle, temperature: float) -> None:
    run(replace(CONFIG, num_steps=0, depth=1), codec, oracle, every_request(temperature))


CASES = [
    (name, topk) for name in EVERY_METHOD for topk in (1, 3) if topk == 1 or "NGRAM" not in name and name not in CHAINS
]


@pytest.mark.full_but_every(29)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("method", "topk"), CASES)
def test_every_method(codec: TextCodec, oracle: GrammarOracle, method: str, topk: int, temperature: float) -> None:
    run(replace(CONFIG, method=method, topk=topk), codec, oracle, every_request(temperature))


def constrained(rng: random.Random, request: Request) -> Request:
    """The same request with a grammar, two times in three, and without what the oracle of grammars leaves out."""
    plain = msgspec.structs.replace(
        request.sampling, repetition_penalty=1, presence_penalty=0, frequency_penalty=0, logit_bias={},
        allowed_token_ids=None, bad_words=(), bad_word_ids=(), thinking=None,
    )  # fmt: skip
    if rng.random() < 1 / 3:
        return replace(request, sampling=plain)
    grammar = rng.choice(list(TINY_GRAMMARS.values()))
    return replace(
        request, sampling=msgspec.structs.replace(plain, grammar=grammar, ignore_eos=False, min_new_tokens=0)
    )


def run_schedule(seed: int, codec: TextCodec, oracle: GrammarOracle, **engine: object) -> Counter[str]:
    """Arrivals, aborts, preemptions, chunks, prefix hits, stop strings, filters, changing widths; with grammars."""
    rng = random.Random(seed)
    crowded = rng.random() < 0.4
    config = with_room(replace(random_config(rng, crowded), grammars=True, **engine))
    requests = [constrained(rng, request) for request in random_requests(rng, rng.randint(4, 8), crowded)]
    models = tiny_loaded(0, config.num_steps, method=config.method, topk=config.topk)
    return run_requests(requests, models, config, codec, oracle, f"schedule {seed}")


SCHEDULES = [
    ("EAGLE3", 1, ()),
    ("EAGLE3", 3, (1, 2, 4)),
    ("STANDALONE", 1, (1, 2, 4)),
    ("NGRAM", 1, (1, 2, 4)),
    ("NEXTN of several layers", 1, ()),
    ("NEXTN", 3, (1, 2)),
]


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize(("method", "topk", "graphs"), SCHEDULES)
def test_random_schedules(
    codec: TextCodec, oracle: GrammarOracle, method: str, topk: int, graphs: tuple[int, ...]
) -> None:
    """Some of it with captured steps; in half of it steps go on without slots whose masks are late."""
    seen: Counter[str] = Counter()
    for seed in range(4):
        late = 0.004 if seed % 2 else 0.0
        engine = {"method": method, "topk": topk, "graph_batch_sizes": graphs, "late_grammars": late}
        seen += run_schedule(seed, codec, oracle, **engine)
    assert oracle.num_forbidden > 0
    must_happen = ("finished", "mid_step_aborts", "accepted", "rejected", "prefix_hit_tokens", "left_out")
    assert all(seen[what] for what in must_happen), dict(seen)


LONG = Grammar(GrammarKind.REGEX, r"([a-z ]{3}[0-9][.,])*")


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_preempted_request_goes_on_where_its_output_ends(codec: TextCodec, oracle: GrammarOracle, depth: int) -> None:
    config = replace(CONFIG, depth=depth, page_size=1, num_pages=102, prefix_cache=False)
    ring = run(
        config, codec, oracle, [sampling(LONG), sampling(LONG, 1.0), sampling(TINY_GRAMMARS["schema"]), sampling(None)]
    )
    assert ring.scheduler.planner.counters.preempted > 0


def steps_of(config: RingConfig, codec: TextCodec, request: SamplingParams) -> tuple[list[int], int]:
    """The tokens of a request that runs alone, and how many steps they took."""

    async def serve() -> tuple[list[int], int]:
        models = tiny_loaded(0, config.num_steps, method=config.method, topk=config.topk)
        async with running(models, config, codec) as ring:
            (answer,) = await answers(ring, [request])
            return answer.token_ids, len(ring.plans.sent)

    return asyncio.run(serve())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("NGRAM", 1)])
def test_what_must_follow_drafts_itself(codec: TextCodec, method: str, topk: int) -> None:
    """With keys and punctuation proposed, the same tokens take far fewer steps."""
    keys = {name: {"enum": [True]} for name in ("the first of all", "a second key", "one more of them")}
    request = sampling(schema(False, **keys))
    config = replace(CONFIG, method=method, topk=topk, depth=1, num_steps=5)
    tokens, with_forced = steps_of(config, codec, request)
    same, without = steps_of(replace(config, proposes_forced=False), codec, request)
    assert tokens == same and len(tokens) > 40
    assert with_forced < 0.6 * without


def test_no_more_is_proposed_than_a_request_wants_although_it_must_follow(codec: TextCodec) -> None:
    request = sampling(schema(False, **{"a long key that must follow": {"enum": [True]}}))
    config = replace(CONFIG, num_steps=5)
    limited = msgspec.structs.replace(request, speculative=Speculative(num_steps=1, provenance=True))

    async def serve() -> list[Answer]:
        async with running(tiny_loaded(0, config.num_steps), config, codec) as ring:
            return await answers(ring, [limited])

    (answer,) = asyncio.run(serve())
    assert max(count for _, count in answer.verified) == 2
    assert answer.token_ids == steps_of(config, codec, request)[0]


def test_a_grammar_that_fails_ends_its_request_alone(
    codec: TextCodec, oracle: GrammarOracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its first step, as when the library gives up on a text; or when it is compiled."""
    bad, good = sampling(TINY_GRAMMARS["regex"]), sampling(TINY_GRAMMARS["compact schema"])

    compiled, advanced = Grammars._compiled, RequestGrammar.advance
    failing: list[RequestGrammar] = []

    def marked(grammars: Grammars, message: PrepareGrammar) -> RequestGrammar:
        if message.grammar.text == "x":
            raise RequestError("grammar", "not today")
        grammar = compiled(grammars, message)
        if message.grammar == bad.grammar:
            failing.append(grammar)
        return grammar

    def advance(grammar: RequestGrammar, tokens: list[int]) -> None:
        advanced(grammar, tokens)
        if grammar in failing:
            grammar.failure = "too complex"

    monkeypatch.setattr(Grammars, "_compiled", marked)
    monkeypatch.setattr(RequestGrammar, "advance", advance)

    async def serve() -> None:
        async with running(tiny_loaded(0, 3), CONFIG, codec) as ring:
            requests = [good, bad, sampling(Grammar(GrammarKind.REGEX, "x")), sampling(None)]
            found = await answers(ring, requests)
            assert found[1].rejected is not None and "too complex" in found[1].rejected.message
            assert found[2].rejected is not None and "not today" in found[2].rejected.message
            check(oracle, [good, sampling(None)], [found[0], found[3]], "beside a failure")
            assert_nothing_leaked(ring)

    asyncio.run(serve())


def test_bad_grammars_are_refused_and_leave_nothing(codec: TextCodec, oracle: GrammarOracle) -> None:
    async def serve() -> None:
        async with running(tiny_loaded(0, 3), CONFIG, codec) as ring:
            good = sampling(TINY_GRAMMARS["choice"])
            bad = [sampling(Grammar(kind, text)) for kind, text, _ in BAD_GRAMMARS]
            found = await answers(ring, [good, *bad, good])
            for (_, _, reason), answer in zip(BAD_GRAMMARS, found[1:-1], strict=True):
                assert answer.rejected is not None and answer.rejected.field == "grammar"
                assert answer.rejected.code is ErrorCode.BAD_REQUEST and reason in answer.rejected.message
            check(oracle, [good, good], [found[0], found[-1]], "beside bad ones")
            assert_nothing_leaked(ring)

    asyncio.run(serve())


def test_an_abort_while_the_grammar_is_compiled_leaves_nothing(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Grammars._compiled

    def slowly(grammars: Grammars, message: PrepareGrammar) -> RequestGrammar:
        time.sleep(0.1)
        return compiled(grammars, message)

    monkeypatch.setattr(Grammars, "_compiled", slowly)

    async def serve() -> None:
        async with running(tiny_loaded(0, 3), CONFIG, codec) as ring:
            answer = ring.start("r", PROMPT, sampling(LONG))
            async with asyncio.timeout(30):
                while not ring.scheduler.queues.held:
                    await asyncio.sleep(0.001)
            ring.cancel("r")
            await answer.done.wait()
            await nothing_leaked(ring)
            assert not ring.scheduler.queues.held and not ring.scheduler.queues.open
            check_plain = await answers(ring, [sampling(None)])
            assert check_plain[0].finish is not None

    asyncio.run(serve())


SCHEMAS = make_schemas(40)[1::2]  # 20 without white space, of which a model that was not trained writes too much


@functools.cache
def generated_answers(method: str | None, topk: int) -> list[Answer]:
    """Of a ring, every second at temperature 1; None: plain decoding."""

    async def serve() -> list[Answer]:
        config = replace(CONFIG, max_len=200, num_pages=800, num_slots=6)
        config = replace(config, num_steps=0, depth=1) if method is None else replace(config, method=method, topk=topk)
        models = tiny_loaded(0, config.num_steps, method=config.method, topk=topk)
        texts = [Grammar(GrammarKind.JSON_SCHEMA, json.dumps(each)) for each in SCHEMAS]
        requests = [
            msgspec.structs.replace(sampling(text, float(i % 2)), max_new_tokens=150) for i, text in enumerate(texts)
        ]
        with TemporaryDirectory() as directory:
            codec = load_codec(write_tokenizer(Path(directory)))
        async with running(models, config, codec) as ring:
            return [answer for part in batched(requests, 5) for answer in await answers(ring, part)]

    return asyncio.run(serve())


def batched(requests: list[SamplingParams], size: int) -> list[list[SamplingParams]]:
    return [requests[first : first + size] for first in range(0, len(requests), size)]


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("NGRAM", 1)])
def test_generated_schemas(method: str, topk: int) -> None:
    """Those of benchmarks/structured_output.py: every reply parses, validates and is plain decoding's."""
    plain, found = generated_answers(None, 1), generated_answers(method, topk)
    ended = 0
    for each, expected, answer in zip(SCHEMAS, plain, found, strict=True):
        assert answer.rejected is None and answer.token_ids == expected.token_ids
        if answer.finish is not None and answer.finish.kind is FinishKind.STOP:
            jsonschema.validate(json.loads(answer.text), each)
            ended += 1
    assert ended > len(SCHEMAS) / 2


@pytest.mark.slow
def test_a_slot_is_unconstrained_once_its_grammar_is_gone(codec: TextCodec, oracle: GrammarOracle) -> None:
    """The next request of the slot has none, beside another that has one."""
    long = msgspec.structs.replace(sampling(LONG), max_new_tokens=100)
    requests = [long, sampling(TINY_GRAMMARS["choice"]), msgspec.structs.replace(sampling(None), max_new_tokens=16)]

    async def serve() -> None:
        async with running(tiny_loaded(0, 3), replace(CONFIG, num_slots=2, depth=1), codec) as ring:
            beside = asyncio.create_task(ring.ask(PROMPT, requests[0]))
            found = [await ring.ask(PROMPT, each) for each in requests[1:]]
            assert not beside.done()
            check(oracle, requests, [await beside, *found], "one after another")

    asyncio.run(serve())
