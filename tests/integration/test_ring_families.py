"""Every supported architecture in the whole ring: transformers' greedy tokens, and the storm with an EAGLE-3 head."""

import asyncio
from typing import Any

import pytest
import torch
from support.ring import RingConfig, running, tiny_loaded
from support.storm import run_storm
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import tiny_target
from transformers import AutoConfig, AutoModelForCausalLM

from overlap_spec.messages import SamplingParams
from overlap_spec.tokenizer.codec import TextCodec

OTHERS = [name for name in TINY_FAMILIES if name != "llama"]  # test_ring_storm.py
PROMPTS = [[(7 * i) % 100 + 10 for i in range(length)] for length in (1, 5, 23)]
NUM_TOKENS = 24


def greedy_tokens(family: str, seed: int, prompt: list[int]) -> list[int]:
    """Of transformers in float32, without its cache: one whole forward a token."""
    checkpoint = tiny_target(seed, **TINY_FAMILIES[family])
    settings: dict[str, Any] = {key: value for key, value in checkpoint.config.items() if key != "architectures"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).eval()
    model.load_state_dict(checkpoint.tensors, strict=False)
    model.tie_weights()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NUM_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


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


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_storm_of_20_schedules(codec: TextCodec, family: str) -> None:
    run_storm(20, codec, family=family)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", OTHERS)
def test_storm_of_400_schedules(codec: TextCodec, family: str, record_summary) -> None:
    seen = run_storm(400, codec, family=family)
    record_summary(f"storm_400_{family.replace(' ', '_')}", {"schedules": 400, **seen})
