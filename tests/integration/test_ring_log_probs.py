"""Log-probs through the whole ring: of output and prompt, whatever the method, beside requests that ask for none.

Expected ones are worked out from the tokens alone, one at a time (support/log_prob_oracle.py), to 1e-12 in float64.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from support.log_prob_oracle import LogProbOracle
from support.plain_oracle import PlainOracle
from support.random_schedules import Request, random_config, random_requests, run_requests, with_room
from support.ring import Answer, RingConfig, running, tiny_loaded
from support.tiny.methods import EVERY_METHOD

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import Finish, FinishKind, LogProbParams, SamplingParams

SEED = 10
PROMPTS = [[(7 * i + j) % 100 + 10 for i in range(5 + 3 * j)] for j in range(6)]
ASKED = (
    LogProbParams(),
    LogProbParams(top=5, prompt_from=0),
    LogProbParams(top=20, token_ids=(3, 99, 3)),
    LogProbParams(top=1, prompt_from=4, token_ids=(0,)),
    None,
    LogProbParams(top=2, prompt_from=0),
)
SHAPES = {
    "tree, captured, of any width": RingConfig(
        num_steps=2, topk=2, num_pages=400, graph_batch_sizes=(1, 4), widths_seed=1
    ),
    "plain": RingConfig(num_steps=0),
    "chain": RingConfig(num_steps=3),
    "chain, captured": RingConfig(num_steps=3, graph_batch_sizes=(1, 2, 4)),
    "tree": RingConfig(num_steps=3, topk=3, num_pages=400),
    "one step in flight": RingConfig(num_steps=2, depth=1),
}


class Oracle:
    """Tokens and log-probs."""

    def __init__(self, seed: int, codec: TextCodec) -> None:
        self._tokens, self._log_probs = PlainOracle(seed, codec), LogProbOracle(seed)

    def close(self) -> None:
        self._tokens.close()
        self._log_probs.close()

    def check(self, prompt: list[int], sampling: SamplingParams, answer: Answer, what: str) -> None:
        if sampling.max_new_tokens == 0:
            assert answer.token_ids == [] and answer.text == "", what
            assert answer.finish in (Finish(FinishKind.LENGTH), ABORTED), what
        else:
            self._tokens.check(prompt, sampling, answer, what)
        self._log_probs.check(prompt, sampling, answer, what)


ABORTED = Finish(FinishKind.ABORT, message="aborted on request")


@pytest.fixture(scope="module")
def oracle(codec: TextCodec) -> Iterator[Oracle]:
    oracle = Oracle(SEED, codec)
    yield oracle
    oracle.close()


def samplings() -> list[SamplingParams]:
    """Greedy ones, drawn ones with filters, and one that only scores its prompt."""
    drawn = SamplingParams(max_new_tokens=8, seed=3, ignore_eos=True, temperature=0.0)
    filtered = msgspec.structs.replace(drawn, temperature=1.2, top_k=3, min_new_tokens=4)
    kinds = [drawn, filtered, drawn, filtered, drawn, msgspec.structs.replace(drawn, max_new_tokens=0)]
    return [msgspec.structs.replace(kind, log_probs=asked) for kind, asked in zip(kinds, ASKED, strict=True)]


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(6)
@pytest.mark.parametrize("kind", SHAPES)
def test_every_returned_token_has_its_log_probs(codec: TextCodec, oracle: Oracle, kind: str) -> None:
    check_ring(codec, oracle, SHAPES[kind])


@pytest.mark.full_but_every(8)
@pytest.mark.slow
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_log_probs_with_every_method(codec: TextCodec, oracle: Oracle, method: str) -> None:
    check_ring(codec, oracle, RingConfig(method=method, num_steps=2))


def check_ring(codec: TextCodec, oracle: Oracle, config: RingConfig) -> None:
    requests = list(zip(PROMPTS, samplings(), strict=True))
    models = tiny_loaded(SEED, config.num_steps, method=config.method, topk=config.topk)

    async def ask_all() -> list[Answer]:
        async with running(models, config, codec) as ring:
            first = [await ring.ask(*request) for request in requests]  # they leave their prefixes in the cache
            return first + await asyncio.gather(*(ring.ask(*request) for request in requests))

    for i, answer in enumerate(asyncio.run(ask_all())):
        oracle.check(*requests[i % len(requests)], answer, f"request {i}")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [range(15, 16), pytest.param(range(8, 16), marks=pytest.mark.full)], ids=str)
def test_random_schedules_with_random_log_probs(codec: TextCodec, oracle: Oracle, rounds: range) -> None:
    """Preemption, chunks, prefix hits, aborts, stop strings: entries are neither lost nor repeated."""
    seen: Counter[str] = Counter()
    for round_ in rounds:
        rng, crowded = random.Random(f"log-probs {round_}"), round_ % 2 == 0
        config = with_room(random_config(rng, crowded))
        requests = [with_log_probs(request, rng) for request in random_requests(rng, rng.randint(5, 9), crowded)]
        models = tiny_loaded(SEED, config.num_steps, method=config.method, topk=config.topk)
        seen += run_requests(requests, models, config, codec, oracle, f"schedule {round_}")
    assert seen["chunk_splits"] and seen["prefix_hit_tokens"] and seen["accepted"], seen
    assert len(rounds) == 1 or (seen["preemptions"] and seen["mid_step_aborts"]), seen


def with_log_probs(request: Request, rng: random.Random) -> Request:
    if rng.random() < 0.3:
        return request
    listed = tuple(rng.randrange(128) for _ in range(rng.choice([0, 0, 1, 32])))
    prompt_from = rng.choice([None, 0, rng.randrange(len(request.prompt))])
    asked = LogProbParams(top=rng.choice([0, 1, 5, 20]), token_ids=listed, prompt_from=prompt_from)
    max_new = 0 if rng.random() < 0.1 else request.sampling.max_new_tokens
    least = 0 if max_new == 0 else request.sampling.min_new_tokens
    changed = {"log_probs": asked, "max_new_tokens": max_new, "min_new_tokens": least}
    return replace(request, sampling=msgspec.structs.replace(request.sampling, **changed))
