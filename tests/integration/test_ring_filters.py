"""Every pair of filters, and all three, through the whole ring: plain decoding, chains and trees.

What each token must be is worked out in plain Python from one row of logits (support/sampling_oracle.py, by way of
tests/support/plain_oracle.py); the ring's answers must be those tokens, however they were guessed.
"""

import asyncio
from collections.abc import Iterator

import pytest
from support.plain_oracle import PlainOracle
from support.ring import Answer, RingConfig, running, tiny_loaded
from support.sampling_oracle import Filters, subsets

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams

MODELS_SEED, NUM_REQUESTS, NUM_TOKENS = 10, 12, 24
PROMPTS = [[(7 * i + j) % 100 + 10 for i in range(3 + j)] for j in range(NUM_REQUESTS)]
RINGS = {
    "plain": RingConfig(num_steps=0, num_slots=6),
    "chain": RingConfig(num_steps=3, num_slots=6),
    "tree": RingConfig(num_steps=3, topk=3, num_slots=6, num_pages=400),
}
TEMPERATURES = (0.7, 1.3)
ALL = Filters(top_k=4, top_p=0.6, min_p=0.25)
COMBINATIONS = {" and ".join(filters.names): filters for filters in subsets(ALL, fewest=2)}


@pytest.fixture
def oracle(codec: TextCodec) -> Iterator[PlainOracle]:
    oracle = PlainOracle(MODELS_SEED, codec)
    yield oracle
    oracle.close()


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("filters", COMBINATIONS.values(), ids=COMBINATIONS)
@pytest.mark.parametrize("kind", RINGS)
def test_tokens_are_those_that_all_filters_keep(
    codec: TextCodec, oracle: PlainOracle, kind: str, filters: Filters
) -> None:
    config = RINGS[kind]
    requests = [
        SamplingParams(
            max_new_tokens=NUM_TOKENS,
            temperature=TEMPERATURES[seed % 2],
            seed=seed,
            ignore_eos=True,
            top_k=filters.top_k,
            top_p=filters.top_p,
            min_p=filters.min_p,
        )
        for seed in range(NUM_REQUESTS)
    ]

    async def ask_all() -> list[Answer]:
        async with running(tiny_loaded(MODELS_SEED, config.num_steps, topk=config.topk), config, codec) as ring:
            answers = [ring.ask(*request) for request in zip(PROMPTS, requests, strict=True)]
            return await asyncio.gather(*answers)

    for i, answer in enumerate(asyncio.run(ask_all())):
        oracle.check(PROMPTS[i], requests[i], answer, f"request {i}")
    assert set(oracle.strictest) == set(filters.names), "each of them decides somewhere, whatever the others say"
    assert min(oracle.strictest.values()) > 20, oracle.strictest
