"""`best_of` through server and ring: the best answers of plain decoding, whatever is guessed.

Expected ones are plain decoding's with each choice's seed, ranked by log-probs that are worked out from the tokens.
"""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.log_prob_oracle import LogProbOracle
from support.plain_oracle import PlainOracle
from support.ring import RingConfig, tiny_loaded
from support.ring_server import serving

from overlap_spec.entrypoints.openai.requests import choice_seed
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams

MODELS_SEED, NUM_TOKENS, BEST_OF = 10, 9, 5
PROMPTS = [[(7 * i + j) % 100 + 10 for i in range(4 + j)] for j in range(2)]
SHAPES = {"chain": RingConfig(num_steps=3, num_slots=8), "tree": RingConfig(num_steps=3, topk=3, num_slots=8)}
Ranked = list[tuple[list[int], float]]  # tokens and their mean log-prob, best first


@pytest.fixture(scope="module")
def ranked(codec: TextCodec) -> Iterator[list[Ranked]]:
    """Of each prompt."""
    tokens, log_probs = PlainOracle(MODELS_SEED, codec), LogProbOracle(MODELS_SEED)

    def candidate(prompt: list[int], index: int) -> tuple[list[int], float]:
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=1.0, seed=choice_seed(3, index))
        ids = tokens.expected(prompt, sampling).token_ids
        after = log_probs.log_probs_after(prompt + ids)
        return ids, math.fsum(after[len(prompt) + i - 1][token] for i, token in enumerate(ids)) / len(ids)

    yield [
        sorted((candidate(prompt, index) for index in range(BEST_OF)), key=lambda each: -each[1]) for prompt in PROMPTS
    ]
    tokens.close()
    log_probs.close()


@pytest.mark.slow
@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_best_of_plain_decodings_answers_are_returned(codec: TextCodec, ranked: list[Ranked], shape: str) -> None:
    config = SHAPES[shape]
    body = {"prompt": PROMPTS, "max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 3, "best_of": BEST_OF, "n": 2}

    async def ask() -> Any:
        async with serving(tiny_loaded(MODELS_SEED, config.num_steps, topk=config.topk), config, codec) as http:
            asked = ({**body, "return_token_ids": True, **more} for more in ({}, {"logprobs": 0}))
            return [(await http.post("/v1/completions", json=each)).json() for each in asked]

    quiet, told = asyncio.run(ask())
    expected = [each for of_prompt in ranked for each in of_prompt[:2]]
    assert [of_prompt[0][0] for of_prompt in ranked] != [of_prompt[1][0] for of_prompt in ranked]
    for reply in (quiet, told):
        assert [choice["token_ids"] for choice in reply["choices"]] == [tokens for tokens, _ in expected]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert reply["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
        assert reply["usage"]["completion_tokens"] == sum(len(tokens) for each in ranked for tokens, _ in each)
    assert all(choice["logprobs"] is None for choice in quiet["choices"])
    for choice, (_, mean) in zip(told["choices"], expected, strict=True):
        log_probs = choice["logprobs"]["token_logprobs"]
        assert math.fsum(log_probs) / len(log_probs) == pytest.approx(mean, abs=1e-12)
