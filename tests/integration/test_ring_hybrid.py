"""Targets whose layers recur: speculation is exact, and a state shows nothing of what was rejected."""

import asyncio
import functools
import random
from array import array
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Normed, in_tiles, normalised
from support.plans import SlotPart, plan_of
from support.random_schedules import run_schedules, run_seeds
from support.ring import Answer, RingConfig, running, tiny_loaded, tiny_models
from support.tiny.families import HYBRIDS, TINY_FAMILIES
from support.tiny.models import CPU, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import ResetSlot, SamplingParams, StepPlan
from overlap_spec.models.layers.linear import AnyLinear, Linear
from overlap_spec.models.recurrent_state import LayerState
from overlap_spec.worker.build import build_executor

CHAINS = ("EAGLE3", "NGRAM of chains", "STANDALONE", "EAGLE", "NEXTN in DeepSeek's layout")  # of its own layers
QUICK = "EAGLE3"  # n-grams are in GRANITE
PROMPTS = [[(7 * i) % 100 + 10 for i in range(length)] for length in (1, 5, 71)]
NUM_TOKENS, PROMPT = 10, 9
SLOW = dict(zip(HYBRIDS, CHAINS[2:], strict=True))  # each family once, and each other method
CELLS = [
    pytest.param(family, method, marks=pytest.mark.slow if SLOW[family] == method else pytest.mark.full)
    if (family, method) != (HYBRIDS[0], QUICK)
    else (family, method)
    for family in HYBRIDS
    for method in CHAINS
]
GRANITE = [("granite 4", "NGRAM of chains"), pytest.param("granite 4", "STANDALONE", marks=pytest.mark.slow)]
GRANITE += [pytest.param(family, "EAGLE3", marks=pytest.mark.full) for family in ("granite 4", "granite 4 moe")]
# Layers that recur, then one that attends.
STACKS: dict[str, dict[str, Any]] = {
    "qwen3 next": {"layers": 4, "full_attention_interval": 4},
    "granite 4": {"layers": 4, "layer_types": ["mamba", "mamba", "mamba", "attention"]},
}


def answers_of(config: RingConfig, codec: TextCodec) -> tuple[list[list[int]], int]:
    """Tokens of greedy and of drawn answers that decode side by side, and the verify steps that they took."""
    kinds = [SamplingParams(max_new_tokens=NUM_TOKENS, temperature=t, seed=5, ignore_eos=True) for t in (0.0, 0.9)]
    models = tiny_loaded(3, config.num_steps, method=config.method, family=config.family)

    async def ask_all() -> list[Answer]:
        async with running(models, config, codec) as ring:
            return await asyncio.gather(*(ring.ask(prompt, kind) for prompt in PROMPTS for kind in kinds))

    answers = asyncio.run(ask_all())
    return [answer.token_ids for answer in answers], sum(answer.usage.spec_verify_ct for answer in answers)


@functools.cache
def plain_answers(family: str, codec: TextCodec) -> list[list[int]]:
    """One after another in one slot."""
    return answers_of(RingConfig(num_steps=0, family=family, num_slots=1, depth=1), codec)[0]


@pytest.mark.parametrize(("family", "method"), [*CELLS, *GRANITE])
def test_every_method_answers_as_plain_decoding(family: str, method: str, codec: TextCodec) -> None:
    config = RingConfig(method=method, family=family, num_slots=6)  # whose windows have more than FEW_ROWS rows
    drafted, steps = answers_of(config, codec)
    assert drafted == plain_answers(family, codec)
    assert steps < len(drafted) * (NUM_TOKENS - 1), "no guess was accepted"


def state_after(family: str, num_tokens: int, seed: int | None) -> tuple[list[int], tuple[LayerState, ...]]:
    """Greedy tokens of a request, and the states with all of them: by plain steps, or by steps of random widths.

    All layers that recur come before the one that attends, so they are given the same bits whatever the width.
    """
    checkpoint = tiny_target(3, **TINY_FAMILIES[family] | STACKS[family])
    num_steps, rng = (0, random.Random()) if seed is None else (3, random.Random(seed))
    config = RingConfig(num_steps=num_steps, num_slots=1, num_pages=400, max_len=1200, widths_seed=seed)
    models = tiny_models(checkpoint, load_tiny_target(checkpoint), 4, num_steps, "EAGLE3")
    geometry = config.geometry()
    executor = build_executor(models, geometry, CPU)
    sampling = SamplingParams(max_new_tokens=2000, temperature=0.0, seed=0, ignore_eos=True)
    part = SlotPart(
        slot=0,
        new_pages=list(range(1, geometry.num_page_columns + 1)),
        tokens=array("i", range(10, 10 + PROMPT)).tobytes(),
        reset=ResetSlot(sampling, PROMPT, (), PROMPT, PROMPT),
    )
    tokens = executor.launch(plan_of(0, [part], geometry.width)).wait().tokens[0]
    while (left := num_tokens - len(tokens)) > 0:
        width = min(rng.randint(1, geometry.width), left)
        tokens += executor.launch(StepPlan(0, width, [0])).wait().tokens[0]
    executor.launch(StepPlan(0, 1, [0])).wait()  # repeats what the last one accepted
    state = executor.decode_step.target._attention.cache.state
    return tokens, state.snapshot(torch.tensor([0]))


def in_rows_alone(self: Linear, x: Tensor | Normed) -> Tensor:
    """A linear whose rows have the same bits, however many there are: not so a CPU's BLAS."""
    product = in_tiles(lambda tile: tile @ self.matrix().t(), normalised(x), self.out_features)
    return product if self.bias is None else product + self.bias


@pytest.mark.parametrize("family", ["granite 4", pytest.param("qwen3 next", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "num_tokens",
    [
        24,
        pytest.param(150, marks=pytest.mark.full),
        pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
    ],
)
def test_the_state_has_the_bits_of_plain_decoding(
    family: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Linear, "__call__", in_rows_alone)
    for name in ("gated", "add"):
        monkeypatch.setattr(Linear, name, getattr(AnyLinear, name))
    tokens, plain = state_after(family, num_tokens, None)
    drafted, found = state_after(family, num_tokens, 5)
    assert drafted == tokens and len(plain) == 3
    for one, other in zip(found, plain, strict=True):
        assert int(one.position) == int(other.position) == PROMPT + num_tokens - 1
        assert torch.equal(one.memory, other.memory) and torch.equal(one.inputs, other.inputs)


FEW = [("qwen3 next", "EAGLE3"), ("granite 4", "NGRAM of chains")]
FEW += [pytest.param("qwen3 next", name, marks=pytest.mark.full) for name in CHAINS[1:3]]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method"), FEW)
def test_a_random_schedule(codec: TextCodec, family: str, method: str) -> None:
    """Too few requests for all that must happen; what does happen is plain decoding's."""
    seen = run_seeds(range(4, 5), codec, {"method": method, "family": family})
    assert seen["finished"] > 5 and seen["rejected"] > 0, dict(seen)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, method) for family in HYBRIDS for method in CHAINS),
        *(("granite 4", method) for method in CHAINS[:3]),
        ("granite 4 moe", "NGRAM of chains"),
    ],
)
def test_33_random_schedules(codec: TextCodec, family: str, method: str) -> None:
    run_schedules(33, codec, family=family, method=method)
