"""Every supported architecture in the whole ring: transformers' greedy tokens, and random schedules with EAGLE-3.

Those that are not Llama with switches run every other drafting method too.
"""

import asyncio
import functools
from typing import Any

import pytest
import torch
from support.random_schedules import run_schedules, run_seeds
from support.ring import Answer, RingConfig, running, tiny_loaded
from support.tiny.families import TINY_FAMILIES
from support.tiny.layouts import fused_experts
from support.tiny.methods import EVERY_METHOD, MULTI_LAYER
from support.tiny.models import tiny_target
from support.transformers_model import model_of

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams

SLOW = ("olmo 2", "phi 3 in part", "mixtral")
QUICK = ["gemma 3", "qwen3 moe", "gpt oss", "deepseek v3"]
OWN_LAYERS = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
OWN_LAYERS += [
    pytest.param(name, marks=pytest.mark.full)
    for name in ("glm 4.5", "mimo v2 flash", "step 3.5", "gemma 4 e", "gemma 4 moe")
]
OTHERS = [name for name in TINY_FAMILIES if name != "llama"]  # test_ring_random_schedules.py
OWN_LAYER = "NEXTN in DeepSeek's layout"
TREES = ("EAGLE3", "EAGLE", "NEXTN", OWN_LAYER, "STANDALONE")
METHODS = [(name, 1) for name in EVERY_METHOD] + [(name, 3) for name in TREES]
OF_EXPERTS = (
    "qwen3 moe",
    "mixtral",
    "gpt oss",
    "deepseek v3",
    "deepseek v2 lite",
    "glm 4.7 flash",
    "glm 4.5",
    "mimo v2 flash",
    "step 3.5",
    "gemma 4 moe",
)
MIXTURES = [(family, name) for family in OF_EXPERTS for name in ("EAGLE3", "EAGLE", "STANDALONE", "NGRAM")]
MIXTURES += [("mimo v2 flash", MULTI_LAYER[0]), ("step 3.5", MULTI_LAYER[1])]
MIXTURES += [(family, OWN_LAYER) for family in ("deepseek v3", "glm 4.7 flash", "glm 4.5")]
MIXTURES += [("gemma 4 e", name) for name in ("EAGLE3", "STANDALONE", "NGRAM")]  # layers without K and V of their own
PROMPTS = [[(7 * i) % 100 + 10 for i in range(length)] for length in (1, 5, 23)]
NUM_TOKENS = 24


def greedy_tokens(family: str, seed: int, prompt: list[int]) -> list[int]:
    """Of transformers in float32, without its cache: one whole forward a token."""
    checkpoint = tiny_target(seed, **TINY_FAMILIES[family])
    settings: dict[str, Any] = {key: value for key, value in checkpoint.config.items() if key != "architectures"}
    model = model_of(settings, torch.float32)
    model.load_state_dict(fused_experts(checkpoint.tensors), strict=False)
    model.tie_weights()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.full_but_every(10)
@pytest.mark.slow_but_every(40)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_greedy_tokens_are_those_of_transformers(family: str, codec: TextCodec) -> None:
    sampling = SamplingParams(max_new_tokens=NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True)

    async def answers(num_steps: int) -> list[list[int]]:
        config = RingConfig(num_steps=num_steps, dtype=torch.float32)
        models = tiny_loaded(3, num_steps, torch.float32, family=family)
        async with running(models, config, codec) as ring:
            return [(await ring.ask(prompt, sampling)).token_ids for prompt in PROMPTS]

    expected = [greedy_tokens(family, 3, prompt) for prompt in PROMPTS]
    for num_steps in (0, 3):
        assert asyncio.run(answers(num_steps)) == expected, f"{num_steps} steps"


def answers_of(config: RingConfig, codec: TextCodec) -> tuple[list[list[int]], int]:
    """Tokens of greedy and of drawn answers, and the verify steps that they took."""
    kinds = [SamplingParams(max_new_tokens=NUM_TOKENS, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.9)]
    models = tiny_loaded(3, config.num_steps, method=config.method, family=config.family, topk=config.topk)

    async def ask_all() -> list[Answer]:
        async with running(models, config, codec) as ring:
            return [await ring.ask(prompt, sampling) for prompt in PROMPTS for sampling in kinds]

    answers = asyncio.run(ask_all())
    return [answer.token_ids for answer in answers], sum(answer.usage.spec_verify_ct for answer in answers)


@functools.cache
def plain_answers(family: str, codec: TextCodec) -> list[list[int]]:
    return answers_of(RingConfig(num_steps=0, family=family), codec)[0]


@pytest.mark.full_but_every(108)
@pytest.mark.slow
@pytest.mark.parametrize(("method", "topk"), METHODS)
@pytest.mark.parametrize("family", OWN_LAYERS)
def test_every_method_answers_as_plain_decoding(family: str, method: str, topk: int, codec: TextCodec) -> None:
    plain = plain_answers(family, codec)
    drafted, steps = answers_of(RingConfig(method=method, topk=topk, family=family), codec)
    assert drafted == plain
    assert steps < len(plain) * (NUM_TOKENS - 1), "no guess was accepted"


@pytest.mark.slow
@pytest.mark.full_but_every(56)
@pytest.mark.parametrize(("family", "method"), MIXTURES)
def test_a_schedule_of_mixtures(codec: TextCodec, family: str, method: str) -> None:
    """Too few requests for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(4, 5), codec, {"method": method, "family": family})
    assert seen["finished"] > 5 and seen["accepted"] > 0, dict(seen)


@pytest.mark.full
@pytest.mark.parametrize(("family", "method"), MIXTURES)
def test_33_random_schedules_of_mixtures(codec: TextCodec, family: str, method: str) -> None:
    run_schedules(33, codec, family=family, method=method)  # in fewer none of DeepSeek-V3 is preempted


@pytest.mark.full
@pytest.mark.parametrize("family", OTHERS)
def test_20_random_schedules(codec: TextCodec, family: str) -> None:
    run_schedules(20, codec, family=family)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", OTHERS)
def test_400_random_schedules(codec: TextCodec, family: str, record_summary) -> None:
    seen = run_schedules(400, codec, family=family)
    record_summary(f"schedules_400_{family.replace(' ', '_')}", {"schedules": 400, **seen})
