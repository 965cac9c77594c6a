"""A target of integers with scales (a .gguf file on a CPU) in the whole ring: guesses change none of its tokens."""

import asyncio

import pytest
import torch
from support.random_schedules import run_schedules
from support.ring import RingConfig, running, tiny_loaded
from support.tiny.grouped import GROUPED

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.quantization.grouped import GroupedLinear

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
            3, config.num_steps, torch.float32, method=config.method, topk=config.topk, family=config.family
        )
        assert isinstance(models.target.head, GroupedLinear)
        async with running(models, config, codec) as ring:
            found = [await ring.ask(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        return [answer.token_ids for answer in found], sum(answer.usage.spec_verify_ct for answer in found)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def plain(codec: TextCodec) -> Tokens:
    return answers(codec, RingConfig(num_steps=0, family=GROUPED, dtype=torch.float32))[0]


@pytest.mark.full_but_every(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "topk"),
    [("EAGLE3", 1), ("EAGLE3", 3), ("EAGLE with a token map", 1), ("STANDALONE", 1), ("NGRAM", 1)],
)
def test_speculation_changes_nothing(codec: TextCodec, plain: Tokens, method: str, topk: int) -> None:
    tokens, num_steps = answers(codec, RingConfig(method=method, topk=topk, family=GROUPED, dtype=torch.float32))
    assert tokens == plain
    assert 0 < num_steps < sum(map(len, tokens)) - len(tokens), "the first token is the prefill's; some guess was right"


@pytest.mark.full
@pytest.mark.parametrize("topk", [3, 1])
def test_20_random_schedules(codec: TextCodec, topk: int) -> None:
    """Depth 1 and 2, and whatever else schedules draw."""
    run_schedules(20, codec, family=GROUPED, dtype=torch.float32, topk=topk)
