"""Joint samples of three tokens through the whole engine against the target's own probabilities, worked out by hand.

A target of six tokens; requests differ in their seeds alone. G-tests of every verifier that keeps the distribution, at
1e-3 for all of them together. `-m full`; a verifier that is wrong is found with a tenth of the samples.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from support.joint_distribution import PAGE_SIZE, joint, p_value
from support.ring import Ring, RingConfig, running, tiny_loaded
from support.sampling_oracle import softmax

from overlap_spec.config import AcceptSettings
from overlap_spec.frontend.codec import TextCodec
from overlap_spec.messages import SamplingParams
from overlap_spec.speculative.verifiers import Rejection, ResidualVerifier, Thresholds, TreeThresholdVerifier
from overlap_spec.worker.startup.geometry import LoadedModels

VOCAB, LENGTH = 6, 3
PROMPT = [1, 3]
TEMPERATURE = 1.5
NUM_SAMPLES, FEW_SAMPLES = 100_000, 10_000
TOGETHER = 800  # requests that are open at a time
SIGNIFICANCE = 1e-3

CHAIN = RingConfig(
    method="EAGLE", num_slots=128, page_size=PAGE_SIZE, num_pages=400, chunk_tokens=1024, max_len=32, prefix_cache=False
)


@dataclass(frozen=True)
class Way:
    """How guesses are made and judged. `prepare` changes a ring before it serves."""

    config: RingConfig
    prepare: Callable[[Ring], None] = lambda ring: None


def at_one(ring: Ring) -> None:
    """Thresholds that keep the distribution: the flags mean matching then, which is the same and cheaper."""
    step = ring.executor.decode_step
    kind = ResidualVerifier if step.method.tree is None else TreeThresholdVerifier
    step.method = replace(step.method, verifier=kind(Thresholds(1.0, 1.0), torch.arange(VOCAB)))


TREE = replace(CHAIN, topk=2, num_draft_tokens=6)
WAYS = {
    "match, chain": Way(CHAIN),
    "match, tree": Way(TREE),
    "rejection": Way(replace(CHAIN, accept=AcceptSettings(rejection=True))),
    "thresholds at 1": Way(CHAIN, at_one),
    "thresholds at 1, tree": Way(TREE, at_one),
}


def loaded(config: RingConfig) -> LoadedModels:
    return tiny_loaded(3, config.num_steps, method=config.method, topk=config.topk, vocab=VOCAB, layers=1, hidden=16)


def expected(models: LoadedModels) -> dict[tuple[int, ...], float]:
    """The probability of every three tokens."""
    return joint(models.target, PROMPT, LENGTH, lambda logits: softmax(logits, TEMPERATURE))


def sampled(way: Way, models: LoadedModels, codec: TextCodec, num_samples: int) -> Counter[tuple[int, ...]]:
    """Three tokens of so many requests, each with its seed."""
    counts: Counter[tuple[int, ...]] = Counter()

    async def ask(ring: Ring, seeds: range) -> None:
        for seed in seeds:
            sampling = SamplingParams(max_new_tokens=LENGTH, temperature=TEMPERATURE, seed=seed, ignore_eos=True)
            ring.start(str(seed), PROMPT, sampling)
        answers = [ring.clients.answers[str(seed)] for seed in seeds]
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        counts.update(tuple(answer.token_ids) for answer in answers)
        ring.clients.answers.clear()

    async def ask_all() -> None:
        async with running(models, way.config, codec) as ring:
            ring.inbox.scheduler = None  # invariants are checked elsewhere, and take longer than the steps
            way.prepare(ring)
            for first in range(0, num_samples, TOGETHER):
                await ask(ring, range(first, min(first + TOGETHER, num_samples)))
            stats = ring.scheduler.reporter.snapshot()
            accepted = stats.committed_tokens_total - stats.verify_steps_total
            assert 0.2 < accepted / stats.proposed_tokens_total < 0.9, "guesses stand, and fall"

    asyncio.run(ask_all())
    assert sum(counts.values()) == num_samples
    return counts


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", WAYS)
def test_three_tokens_are_distributed_as_the_target_says(name: str, codec: TextCodec, record_summary) -> None:
    way = WAYS[name]
    models = loaded(way.config)
    found = p_value(sampled(way, models, codec, NUM_SAMPLES), expected(models))
    record_summary(f"distribution_{name.replace(', ', '_').replace(' ', '_')}", {"samples": NUM_SAMPLES, "p": found})
    assert found > SIGNIFICANCE / len(WAYS)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_residual_that_forgets_the_draft_would_be_noticed(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rejection, "residual", lambda self, p, guesses, slots: p)
    way = WAYS["rejection"]
    models = loaded(way.config)
    assert p_value(sampled(way, models, codec, FEW_SAMPLES), expected(models)) < 1e-6
