"""Coins instead of matching, through the whole ring: greedy requests as ever, sampled ones distributed as ever."""

import asyncio
import functools
import runpy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.joint_distribution import joint, p_value
from support.ring import Answer, RingConfig, running, tiny_loaded
from support.sampling_oracle import Filters, filtered
from torch import Tensor

from overlap_spec.config import AcceptSettings
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.speculative.verifiers import Rejection
from overlap_spec.worker.startup.geometry import LoadedModels

EXAMPLE = Path(__file__).parents[2] / "examples" / "06_typical_acceptance.py"
CONFIG = RingConfig(num_slots=16, num_pages=400, max_len=64)
REJECTION = AcceptSettings(rejection=True)
THRESHOLDS = AcceptSettings(threshold_single=0.9, threshold_acc=0.9)
PROMPT = [5, 17, 42, 9, 80]
FEW_SAMPLES = 600
TOGETHER = 500  # requests that are open at a time
SIGNIFICANCE = 1e-3
WRONG: dict[str, Callable[..., Tensor]] = {
    "residual": lambda self, p, guesses, slots: p,  # the guess may be drawn again, as if q had taken nothing of it
    "accepts": lambda self, guesses, p_guess, coins, slots: coins < p_guess,  # q is forgotten
}


def answers(config: RingConfig, codec: TextCodec, requests: list[SamplingParams]) -> list[tuple[int, ...]]:
    """Token ids, in order."""

    async def ask_all() -> list[tuple[int, ...]]:
        async with running(tiny_loaded(3, 3, topk=config.topk), config, codec) as ring:
            answered: list[Answer] = []
            for first in range(0, len(requests), TOGETHER):
                answered += await asyncio.gather(
                    *(ring.ask(PROMPT, sampling) for sampling in requests[first : first + TOGETHER])
                )
            return [tuple(answer.token_ids) for answer in answered]

    return asyncio.run(ask_all())


@pytest.mark.slow_but_every(7)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("accept", "topk"), [(REJECTION, 1), (THRESHOLDS, 1), (THRESHOLDS, 3)], ids=str)
def test_greedy_requests_are_plain_decoding(accept: AcceptSettings, topk: int, depth: int, codec: TextCodec) -> None:
    greedy = [SamplingParams(max_new_tokens=20, temperature=0.0, seed=0, ignore_eos=True)]
    config = replace(CONFIG, depth=depth)
    assert answers(replace(config, accept=accept, topk=topk), codec, greedy) == answers(config, codec, greedy)


@pytest.mark.slow
def test_low_thresholds_let_more_of_a_tree_stand(codec: TextCodec) -> None:
    """Lossy: other tokens than plain decoding's, though of the same number."""
    sampled = [SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    config = replace(CONFIG, topk=3)
    exact, lossy = (
        answers(replace(config, accept=accept), codec, sampled)
        for accept in (AcceptSettings(), AcceptSettings(threshold_single=0.05, threshold_acc=0.2))
    )
    assert exact == answers(CONFIG, codec, sampled)
    assert exact != lossy and all(len(tokens) == 20 for tokens in lossy)


def sampled(seeds: range) -> list[SamplingParams]:
    """Three tokens each, at a temperature and through two filters."""
    return [
        SamplingParams(max_new_tokens=3, temperature=1.5, top_k=3, top_p=0.9, seed=seed, ignore_eos=True)
        for seed in seeds
    ]


@functools.cache
def expected() -> dict[tuple[int, ...], float]:
    """The probability of every three tokens, by the target's logits and plain Python."""
    filters = Filters(top_k=3, top_p=0.9)
    return joint(tiny_loaded(3, 3).target, PROMPT, 3, lambda logits: filtered(logits, 1.5, filters))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    "num_samples", [FEW_SAMPLES, pytest.param(30_000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_rejection_keeps_the_distribution(num_samples: int, depth: int, codec: TextCodec) -> None:
    config = replace(CONFIG, depth=depth, accept=REJECTION)
    assert 8 <= len(expected()) <= 27
    assert p_value(Counter(answers(config, codec, sampled(range(num_samples)))), expected()) > SIGNIFICANCE


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_rejection_gone_wrong_is_noticed(wrong: str, codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rejection, wrong, WRONG[wrong])
    counts = Counter(answers(replace(CONFIG, accept=REJECTION), codec, sampled(range(FEW_SAMPLES))))
    assert p_value(counts, expected()) < SIGNIFICANCE


def with_typical_acceptance(models: LoadedModels) -> LoadedModels:
    """The same drafts, judged as examples/06_typical_acceptance.py does."""
    typical = runpy.run_path(str(EXAMPLE))["TYPICAL"]
    return replace(models, method=replace(models.method, verifications=typical.verifications))


@pytest.mark.slow
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_verifier_of_ones_own_keeps_greedy_answers_and_accepts_more_of_sampled_ones(
    depth: int, codec: TextCodec
) -> None:
    hot = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(16)]
    greedy = SamplingParams(max_new_tokens=40, temperature=0.0, seed=0, ignore_eos=True)
    config = replace(CONFIG, depth=depth)

    async def ask_all(models: LoadedModels) -> tuple[list[int], float]:
        async with running(models, config, codec) as ring:
            cold, *sampled = await asyncio.gather(*(ring.ask(PROMPT, sampling) for sampling in (greedy, *hot)))
            steps = sum(answer.usage.spec_verify_ct for answer in sampled)
            return cold.token_ids, 39 * len(hot) / steps

    models = tiny_loaded(3, 3)
    exact, lossy = (asyncio.run(ask_all(each)) for each in (models, with_typical_acceptance(models)))
    assert exact[0] == lossy[0]
    assert lossy[1] >= exact[1] > 1
