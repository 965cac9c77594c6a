"""Targets in 8 and 4 bits in the whole ring: plain decoding of the same weights is what every method commits."""

import asyncio

import pytest
from support.random_schedules import run_schedules, run_seeds
from support.ring import RingConfig, running, tiny_loaded

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.quantization.linear import QuantizedLinear

FP8, INT4, NVFP4 = "llama in fp8", "llama in int4", "llama in nvfp4"
PROMPTS = [[(7 * i) % 100 + 10 for i in range(length)] for length in (1, 23)]
SAMPLINGS = [
    SamplingParams(max_new_tokens=24, temperature=0.0, seed=0, ignore_eos=True),
    SamplingParams(max_new_tokens=24, temperature=0.9, top_p=0.9, seed=5, ignore_eos=True),
]
Tokens = list[list[int]]


def answers(codec: TextCodec, config: RingConfig) -> tuple[Tokens, int]:
    """All tokens, and the number of verify steps."""

    async def main() -> tuple[Tokens, int]:
        models = tiny_loaded(
            3, config.num_steps, config.dtype, method=config.method, family=config.family, topk=config.topk
        )
        assert isinstance(models.target.layers[0].mlp.down, QuantizedLinear)
        async with running(models, config, codec) as ring:
            found = [await ring.ask(prompt, sampling) for prompt in PROMPTS for sampling in SAMPLINGS]
        return [answer.token_ids for answer in found], sum(answer.usage.spec_verify_ct for answer in found)

    return asyncio.run(main())


@pytest.fixture(scope="module")
def plain(codec: TextCodec) -> dict[str, Tokens]:
    return {family: answers(codec, RingConfig(num_steps=0, family=family))[0] for family in (FP8, INT4, NVFP4)}


@pytest.mark.full_but_every(20)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "method", "topk", "depth"),
    [
        (INT4, "EAGLE3", 1, 2),
        (INT4, "EAGLE3", 3, 1),
        (FP8, "STANDALONE", 1, 1),
        (FP8, "NGRAM", 1, 2),
        (FP8, "EAGLE with a token map", 1, 2),
        (NVFP4, "EAGLE3", 1, 2),
    ],
)
def test_speculation_changes_nothing(
    codec: TextCodec, plain: dict[str, Tokens], family: str, method: str, topk: int, depth: int
) -> None:
    tokens, num_steps = answers(codec, RingConfig(method=method, topk=topk, depth=depth, family=family))
    assert tokens == plain[family]
    assert 0 < num_steps < sum(map(len, tokens)) - len(tokens), "the first token is the prefill's; some guess was right"


@pytest.mark.slow
def test_formats_differ(plain: dict[str, Tokens]) -> None:
    assert plain[FP8] != plain[INT4]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_random_schedule(codec: TextCodec, depth: int) -> None:
    seen = run_seeds(range(depth, depth + 1), codec, {"family": INT4, "depth": depth})
    assert seen["finished"] >= 2


@pytest.mark.full
@pytest.mark.parametrize("family", [FP8, INT4])
@pytest.mark.parametrize("depth", [1, 2])
def test_random_schedules(codec: TextCodec, depth: int, family: str) -> None:
    run_schedules(6, codec, family=family, depth=depth)


@pytest.mark.full
@pytest.mark.parametrize("family", [NVFP4, "qwen3 moe in nvfp4", "mixtral in mxfp4"])
def test_random_schedules_of_4_bit_floats(codec: TextCodec, family: str) -> None:
    seen = run_seeds(range(3), codec, {"family": family})
    assert seen["accepted"] and seen["rejected"] and seen["finished"], dict(seen)
