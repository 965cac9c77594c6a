"""Margins against what they mean: their sign is the draw's, and no smaller change of the logits changes the draw."""

import pytest
import torch
from msgspec.structs import replace
from support.no_processors import no_processors
from torch import Tensor

from overlap_spec.features.audit.worker import margins_of
from overlap_spec.messages import BOUNDLESS, ResetSlot, SamplingParams, StepPlan
from overlap_spec.sampling.context import Sampling
from overlap_spec.sampling.sampler import draw_columns
from overlap_spec.worker.slots import SlotRows

VOCAB, ROWS = 24, 300
CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.3, top_k=4),
    "top_p": SamplingParams(temperature=0.9, top_p=0.7),
    "min_p": SamplingParams(temperature=1.1, min_p=0.1),
    "all filters": SamplingParams(temperature=0.8, top_k=6, top_p=0.8, min_p=0.05),
}
every_case = pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())


def sampling_of(params: SamplingParams) -> Sampling:
    """For `ROWS` requests alike, but for their seeds."""
    slots = SlotRows(ROWS, 1, 1, no_processors(VOCAB))
    resets = {i: ResetSlot(replace_seed(params, i), 1, (), 0) for i in range(ROWS)}
    count, changes = slots.pack_changes(StepPlan(0, 1, list(resets), resets=resets))
    slots.apply(torch.frombuffer(bytearray(changes), dtype=torch.int64), count)
    return slots.sampling(torch.arange(ROWS), slots.sampling_work(range(ROWS)))


def replace_seed(params: SamplingParams, seed: int) -> SamplingParams:
    return replace(params, seed=seed)


def drawn(logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    return draw_columns(logits[:, None], positions[:, None], sampling, torch.arange(VOCAB)).squeeze(1)


def random_rows(seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    """Logits of any peakedness, and positions."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(ROWS, VOCAB, generator=rng, dtype=torch.float64)
    return logits * torch.linspace(0.2, 4, ROWS)[:, None], torch.arange(ROWS) + 5, rng


@every_case
def test_the_sign_is_that_of_the_draw(params: SamplingParams) -> None:
    logits, positions, rng = random_rows(1)
    sampling = sampling_of(params)
    right = drawn(logits, positions, sampling)
    tokens = torch.where(torch.rand(ROWS, generator=rng) < 0.5, right, torch.randint(VOCAB, (ROWS,), generator=rng))
    assert torch.equal(margins_of(logits, positions, tokens, sampling) > 0, tokens == right)


@every_case
def test_no_smaller_change_of_the_logits_changes_the_draw(params: SamplingParams) -> None:
    """A difference of two logits changes by twice what each of them does."""
    logits, positions, rng = random_rows(2)
    sampling = sampling_of(params)
    tokens = drawn(logits, positions, sampling)
    tokens[::2] = torch.randint(VOCAB, (len(tokens[::2]),), generator=rng)
    is_drawn, margin = tokens == drawn(logits, positions, sampling), margins_of(logits, positions, tokens, sampling)
    for _ in range(40):
        change = torch.randint(-1, 2, logits.shape, generator=rng) * (0.499 * margin.abs())[:, None]
        assert torch.equal(tokens == drawn(logits + change, positions, sampling), is_drawn)


@pytest.mark.parametrize("case", ["greedy", "sampled"])
def test_a_little_more_does_change_it(case: str) -> None:
    logits, positions, _ = random_rows(3)
    sampling = sampling_of(CASES[case])
    tokens = drawn(logits, positions, sampling)
    margin = margins_of(logits, positions, tokens, sampling)
    changed = torch.zeros(ROWS, dtype=torch.bool)
    for other in range(VOCAB):
        change = torch.zeros_like(logits)
        change[:, other] += 0.501 * margin
        change[torch.arange(ROWS), tokens] -= 0.501 * margin
        changed |= drawn(logits + change, positions, sampling) != tokens
    assert bool(changed.all())


def test_a_forbidden_token_has_no_margin() -> None:
    logits, positions, _ = random_rows(4)
    logits[:, 3] = -torch.inf
    for params in CASES.values():
        margin = margins_of(logits, positions, torch.full((ROWS,), 3), sampling_of(params))
        assert bool((margin < -BOUNDLESS).all()) and not bool(margin.isnan().any())
