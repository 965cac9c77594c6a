"""Coins instead of matching, through the whole ring: greedy requests as ever, sampled ones distributed as ever."""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
import torch
from ring import RingConfig, running, tiny_loaded

from overlap_spec.config import AcceptSettings
from overlap_spec.messages import SamplingParams
from overlap_spec.tokenizer.codec import TextCodec

CONFIG = RingConfig(num_slots=16, num_pages=400, max_len=64)
REJECTION = AcceptSettings(rejection=True)
THRESHOLDS = AcceptSettings(threshold_single=0.9, threshold_acc=0.9)
PROMPT = [5, 17, 42, 9, 80]
NUM_SAMPLES = 400
SIGNIFICANCE = 1e-3


def answers(config: RingConfig, codec: TextCodec, requests: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Token ids, in order."""

    async def ask_all() -> list[tuple[int, ...]]:
        async with running(tiny_loaded(3, 3, topk=config.topk), config, codec) as ring:
            waiting = [ring.ask(PROMPT, sampling) for sampling in requests]
            return [tuple(answer.token_ids) for answer in await asyncio.gather(*waiting)]

    return asyncio.run(ask_all())


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("accept", "topk"), [(REJECTION, 1), (THRESHOLDS, 1), (THRESHOLDS, 3)], ids=str)
def test_greedy_requests_are_plain_decoding(accept: AcceptSettings, topk: int, depth: int, codec: TextCodec) -> None:
    greedy = [SamplingParams(max_new_tokens=20, temperature=0.0, seed=0, ignore_eos=True)]
    config = replace(CONFIG, depth=depth)
    assert answers(replace(config, accept=accept, topk=topk), codec, greedy) == answers(config, codec, greedy)


def test_low_thresholds_let_more_of_a_tree_stand(codec: TextCodec) -> None:
    """Lossy: other tokens than plain decoding's, though of the same number."""
    sampled = [SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    config = replace(CONFIG, topk=3)
    exact, lossy = (
        answers(replace(config, accept=accept), codec, sampled)
        for accept in (None, AcceptSettings(threshold_single=0.05, threshold_acc=0.2))
    )
    assert exact == answers(CONFIG, codec, sampled)
    assert exact != lossy and all(len(tokens) == 20 for tokens in lossy)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("depth", [1, 2])
def test_rejection_keeps_the_distribution(depth: int, codec: TextCodec) -> None:
    """Three tokens, two choices each: as often as plain decoding draws them, which matching is token for token."""
    requests = [
        SamplingParams(max_new_tokens=3, temperature=1.5, top_k=2, seed=seed, ignore_eos=True)
        for seed in range(NUM_SAMPLES)
    ]
    config = replace(CONFIG, depth=depth)
    matched = Counter(answers(config, codec, requests))
    drawn = Counter(answers(replace(config, accept=REJECTION), codec, [replace_seed(r) for r in requests]))
    cells = sorted(matched.keys() | drawn.keys())
    assert 4 <= len(cells) <= 8
    counts = torch.tensor([[matched[cell], drawn[cell]] for cell in cells], dtype=torch.float64)
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / counts.sum()
    g = 2 * torch.xlogy(counts, counts / expected).sum()
    assert torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2, dtype=torch.float64), g / 2) > SIGNIFICANCE


def replace_seed(sampling: SamplingParams) -> SamplingParams:
    """Another sample: the first token is drawn as ever, and would be the same."""
    assert sampling.seed is not None
    return SamplingParams(
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        seed=sampling.seed + NUM_SAMPLES,
        ignore_eos=True,
    )
