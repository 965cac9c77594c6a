"""The prefix cache of targets whose layers recur: a request goes on from a snapshot as from its own prompt."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from overlap_spec_kernels import Normed, in_tiles, normalised
from support.random_schedules import run_schedules
from support.ring import Answer, Ring, RingConfig, running, tiny_models
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.models.layers.linear import AnyLinear, Linear
from overlap_spec.scheduler.snapshots import SnapshotStates

FAMILY = "qwen3 next"
CONFIG = RingConfig(
    family=FAMILY, num_slots=2, page_size=16, num_pages=60, chunk_tokens=64, max_len=400, num_snapshots=4
)
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, seed=0, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=8, temperature=0.9, seed=7, ignore_eos=True)
A = [(7 * i) % 100 + 10 for i in range(150)]
B = [(11 * i + 3) % 100 + 10 for i in range(140)]


def in_rows_alone(self: Linear, x: Tensor | Normed) -> Tensor:
    """A linear whose rows have the same bits, however many there are: not so a CPU's BLAS."""
    product = in_tiles(lambda tile: tile @ self.matrix().t(), normalised(x), self.out_features)
    return product if self.bias is None else product + self.bias


def states_of(ring: Ring) -> SnapshotStates:
    states = ring.scheduler.queues.memory.states
    assert isinstance(states, SnapshotStates)
    return states


@dataclass(frozen=True)
class Served:
    """What a ring has answered, one request after another, and the snapshots that are left."""

    tokens: list[list[int]]
    cached: list[int]  # tokens of each prompt
    counts: tuple[int, int]  # requests, and those that went on from a snapshot
    copies: tuple[Tensor, ...]


def serve(config: RingConfig, codec: TextCodec, asked: list[tuple[list[int], SamplingParams]], **shape: Any) -> Served:
    """`shape`: of the target, beside its family's."""
    checkpoint = tiny_target(3, **TINY_FAMILIES[config.family] | shape)
    models = tiny_models(checkpoint, load_tiny_target(checkpoint), 4, config.num_steps, config.method)

    async def ask_all() -> tuple[list[Answer], Ring]:
        async with running(models, config, codec) as ring:
            return [await ring.ask(prompt, sampling) for prompt, sampling in asked], ring

    answers, ring = asyncio.run(ask_all())
    states, copies = ring.scheduler.queues.memory.states, ring.executor._snapshots.copies
    counts = (states.num_begun, states.num_restored) if isinstance(states, SnapshotStates) else (0, 0)
    cached = [answer.usage.cached_tokens for answer in answers]
    return Served([answer.token_ids for answer in answers], cached, counts, copies)


# The layers of a model, all of which recur but the last one.
STACKS: dict[str, dict[str, Any]] = {
    FAMILY: {"layers": 4, "full_attention_interval": 4},
    "granite 4": {"layers": 4, "layer_types": ["mamba", "mamba", "mamba", "attention"]},
}
OTHERS = [(FAMILY, 1), ("granite 4", 2), ("granite 4", 1)]


@pytest.mark.parametrize(
    ("family", "depth"),
    [(FAMILY, 2), *(pytest.param(name, depth, marks=pytest.mark.slow) for name, depth in OTHERS)],
)
def test_a_then_b_then_a_answers_alike(codec: TextCodec, family: str, depth: int) -> None:
    """The probe of vllm#43559, and turns that go on: every answer is that of an engine without a cache."""
    asked = [(A, GREEDY), (B, DRAWN), (A, GREEDY), (B, DRAWN), ([*A, *B[:30]], GREEDY), (A[:70] + B[:30], GREEDY)]
    config = replace(CONFIG, family=family, depth=depth)
    found, cold = serve(config, codec, asked), serve(replace(config, num_snapshots=0, num_steps=0), codec, asked)
    assert found.tokens == cold.tokens and not any(cold.cached)
    assert found.cached == [0, 0, 128, 128, 128, 0]
    assert found.counts == (6, 3)


@pytest.mark.slow
def test_prompts_leave_a_snapshot_where_others_branch_off(codec: TextCodec) -> None:
    """The third prompt with the same beginning finds it, wherever the first two ended."""
    shared = A[:100]
    asked = [(shared + B[:90], GREEDY), (shared + B[20:100], GREEDY), (shared + B[40:90], GREEDY)]
    config = replace(CONFIG, chunk_tokens=192, num_snapshots=8)
    found = serve(config, codec, asked)
    assert found.cached == [0, 0, 64]
    assert found.tokens == serve(replace(config, num_snapshots=0, num_steps=0), codec, asked).tokens


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("family", STACKS)
def test_a_hit_has_the_bits_of_a_cold_prefill(family: str, codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts that go on from each other's snapshots leave at 128 the one of a prompt in one chunk up to there.

    All layers that recur come before the one that attends, so they are given the same bits however a prompt is cut.
    """
    monkeypatch.setattr(Linear, "__call__", in_rows_alone)
    for name in ("gated", "add"):
        monkeypatch.setattr(Linear, name, getattr(AnyLinear, name))
    shape, config = STACKS[family], replace(CONFIG, family=family)
    warm = serve(config, codec, [(A[:70], GREEDY), (A, DRAWN)], **shape)
    alone = replace(config, num_steps=0, depth=1, chunk_tokens=128)
    cold = serve(alone, codec, [(A, DRAWN)], **shape)
    assert warm.cached == [0, 64] and warm.tokens[1:] == cold.tokens
    assert warm.copies[2][:, :2].tolist() == [[64, 128]] * 3 and cold.copies[2][:, 0].tolist() == [128] * 3
    for one, other in zip(warm.copies, cold.copies, strict=True):
        assert torch.equal(one[:, 1], other[:, 0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((FAMILY, method) for method in ("EAGLE3", "NEXTN", "NGRAM of chains", "STANDALONE")),
        *(("granite 4", method) for method in ("EAGLE3", "NGRAM of chains", "STANDALONE")),
    ],
)
def test_40_random_schedules(codec: TextCodec, family: str, method: str) -> None:
    seen = run_schedules(40, codec, family=family, method=method)
    assert seen["prefix_hit_tokens"] > 50
