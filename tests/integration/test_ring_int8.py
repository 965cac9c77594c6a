"""A target with int8 linears in the whole ring: speculation changes none of its tokens, whatever guesses for it.

Draft heads share its embedding and its head; a token map gathers rows of that head.
"""

import asyncio

import pytest
import torch
from support.int8_linears import Int8Linear, with_int8_linears
from support.ring import RingConfig, running, tiny_loaded

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams

PROMPTS = [[(7 * i) % 100 + 10 for i in range(length)] for length in (1, 5, 23)]
SAMPLINGS = [
    SamplingParams(max_new_tokens=24, temperature=0.0, seed=0, ignore_eos=True),
    SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True),
]
Tokens = list[list[int]]


def answers(codec: TextCodec, config: RingConfig) -> tuple[Tokens, int]:
    """All tokens, and the number of verify steps."""

    async def main() -> tuple[Tokens, int]:
        models = tiny_loaded(
            3, config.num_steps, config.dtype, method=config.method, topk=config.topk, convert=with_int8_linears
        )
        assert isinstance(models.target.head, Int8Linear)
        async with running(models, config, codec) as ring:
            found = [await ring.ask(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        return [answer.token_ids for answer in found], sum(answer.usage.spec_verify_ct for answer in found)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def plain(codec: TextCodec) -> Tokens:
    return answers(codec, RingConfig(num_steps=0))[0]


@pytest.mark.full_but_every(6)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "topk"),
    [("EAGLE3", 1), ("EAGLE3", 3), ("EAGLE with a token map", 1), ("NEXTN", 1), ("STANDALONE", 1), ("NGRAM", 1)],
)
def test_speculation_changes_nothing(codec: TextCodec, plain: Tokens, method: str, topk: int) -> None:
    tokens, num_steps = answers(codec, RingConfig(method=method, topk=topk))
    assert tokens == plain
    assert 0 < num_steps < sum(map(len, tokens)) - len(tokens), "the first token is the prefill's; some guess was right"


@pytest.mark.slow
def test_speculation_changes_nothing_in_float32(codec: TextCodec) -> None:
    tokens = [answers(codec, RingConfig(num_steps=steps, dtype=torch.float32))[0] for steps in (0, 3)]
    assert tokens[0] == tokens[1]
