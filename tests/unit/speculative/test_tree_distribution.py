"""Verified trees keep the target's distribution: the tables, the samples and the G-test of test_spec_distribution.py.

Windows are trees of two levels: the draft's two best tokens, with the noise that the target will draw by or without it,
and the best three of the two best after each.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import judge_tree, select_tree
from support.given_logits import GivenLogits
from test_spec_distribution import (
    CHUNK,
    DRAFT_IDS,
    FULL,
    LENGTH,
    SIGNIFICANCE,
    TOKENS,
    VOCAB,
    Altered,
    Tables,
    batch_of,
    p_value,
    tables_for,
)
from torch import Tensor

from overlap_spec.speculative.interfaces import SlotBatch, Verifier, Window, level_context
from overlap_spec.speculative.proposers.tree import top_children
from overlap_spec.speculative.verifiers import ChainVerifier, GreedyVerifier, Thresholds, TreeThresholdVerifier

LEVELS, TOPK, WIDTH = 2, 2, 6
CANDIDATE_PARENTS = torch.tensor([-1, -1, 0, 0, 1, 1])

Grow = Callable[[Tables, Tensor, SlotBatch], tuple[Tensor, Tensor]]  # prefixes [B] -> tokens, parents [K, B]


def noisy(tables: Tables, prefix: Tensor, batch: SlotBatch) -> tuple[Tensor, Tensor]:
    """As trees are drafted."""
    first, columns = children(tables, prefix[:, None], batch, 0)
    tokens = DRAFT_IDS[columns]
    second, further = children(tables, prefix[:, None] * VOCAB + tokens[:, 0], batch, 1)
    log_probs = torch.cat((first[:, 0], (first[:, 0, :, None] + second).flatten(1)), 1)
    tokens = torch.cat((tokens[:, 0], DRAFT_IDS[further].flatten(1)), 1)
    return tuple(select_tree(log_probs, tokens, CANDIDATE_PARENTS.expand_as(tokens).contiguous(), WIDTH - 1))


def children(tables: Tables, prefixes: Tensor, batch: SlotBatch, level: int) -> tuple[Tensor, Tensor]:
    """Of nodes with these prefixes. Shapes: prefixes [B, R]."""
    context = level_context(batch, None, torch.full_like(prefixes, -1), level, DRAFT_IDS)
    return top_children(GivenLogits(tables.draft[tables.key(prefixes)]), context, TOPK)


def greedy(tables: Tables, prefix: Tensor, batch: SlotBatch) -> tuple[Tensor, Tensor]:
    """Without noise: the same tree for every sample of a prefix."""
    return noisy(tables, prefix, replace(batch, sampling=replace(batch.sampling, work=replace(WORK, sampled=False))))


WORK = batch_of(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).sampling.work


def tree_outcomes(tables: Tables, verifier: Verifier, grow: Grow, seeds: Tensor) -> Tensor:
    """The first three tokens of each sample, as one number. Shapes: seeds [n] i64 -> [n] i64."""
    size = len(seeds)
    prefix, lengths = torch.ones(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    tokens = torch.zeros(size, LENGTH + 2 * (LEVELS + 1), dtype=torch.int64)
    for _ in range(LENGTH):
        batch = batch_of(seeds, lengths, tables.temperature, tables.filters)
        window = window_of(prefix, lengths, *grow(tables, prefix, batch))
        logits = tables.target[tables.key(paths_of(prefix, window))]
        drawn = verifier.verify(window, GivenLogits(logits), batch)
        assert window.parents is not None
        judged = judge_tree(
            drawn.tokens, window.tokens, window.parents, batch.slots, lengths, lengths.clone(), window.tokens.clone(),
            size, LEVELS + 1, drawn.accept_len,
        )  # fmt: skip
        for column in range(LEVELS + 1):
            token = judged.tokens[:, column]
            stands = token >= 0
            tokens[torch.arange(size), lengths + column] = torch.where(stands, token, 0)
            prefix = torch.where(stands, prefix * VOCAB + token, prefix)
        lengths = judged.next_positions[0].contiguous()
    return (tokens[:, :LENGTH] * VOCAB ** torch.arange(LENGTH).flip(0)).sum(1)


def window_of(prefix: Tensor, lengths: Tensor, guesses: Tensor, parents: Tensor) -> Window:
    tokens = torch.cat((torch.full_like(prefix, -1)[None], guesses)).t().contiguous()
    parents = torch.cat((torch.zeros_like(prefix)[None], parents)).t().contiguous()
    depths = torch.zeros_like(tokens)
    for column in range(1, WIDTH):
        depths[:, column] = depths.gather(1, parents[:, column, None]).squeeze(1) + 1
    return Window(tokens, lengths[:, None] + depths, parents)


def paths_of(prefix: Tensor, window: Window) -> Tensor:
    """The prefix at each column. Shapes: [B] -> [B, W]."""
    assert window.parents is not None
    paths = prefix[:, None].repeat(1, WIDTH)
    for column in range(1, WIDTH):
        above = paths.gather(1, window.parents[:, column, None]).squeeze(1)
        paths[:, column] = above * VOCAB + window.tokens[:, column].clamp(min=0)
    return paths


EXACT: dict[str, tuple[Verifier, Grow]] = {
    "match": (ChainVerifier(TOKENS), noisy),
    "match, greedy drafts": (ChainVerifier(TOKENS), greedy),
    "thresholds at 1": (TreeThresholdVerifier(Thresholds(1.0, 1.0), TOKENS), noisy),
    "thresholds at 1, greedy drafts": (TreeThresholdVerifier(Thresholds(1.0, 1.0), TOKENS), greedy),
}


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_samples", [60_000, pytest.param(2_000_000, marks=FULL)])
def test_the_distribution_is_the_targets(name: str, num_samples: int) -> None:
    found = p_value(Tables.drawn(5), *EXACT[name], num_samples, 1, tree_outcomes)
    assert found > SIGNIFICANCE / len(EXACT)


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(10)
@pytest.mark.parametrize("way", ["hot", "filtered", "cold, filtered"])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_samples", [30_000, pytest.param(2_000_000, marks=FULL)])
def test_the_distribution_is_the_targets_at_temperatures_and_through_filters(
    name: str, way: str, num_samples: int
) -> None:
    found = p_value(tables_for(way), *EXACT[name], num_samples, 2, tree_outcomes)
    assert found > SIGNIFICANCE / len(EXACT) / 3


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"top_k": VOCAB}, {"top_p": 1.0}, {"min_p": 0.0}, {"temperature": 1.2}], ids=str)
@pytest.mark.parametrize("name", ["match", "thresholds at 1"])
def test_other_filters_or_temperatures_are_noticed(name: str, changes: dict[str, float]) -> None:
    verifier, grow = EXACT[name]
    altered = Altered(verifier, **changes)
    assert p_value(tables_for("filtered"), altered, grow, 30_000, 2, tree_outcomes) < SIGNIFICANCE


class CountsTwice(TreeThresholdVerifier):
    """Wrong: siblings that fell count twice."""

    def _accepts(self, coins: Tensor, p_guess: Tensor, parents: Tensor, column: Tensor) -> Tensor:
        before = (parents[:, :, None] == parents[:, None]) & (column[:, None] > column)
        return super()._accepts(coins - torch.where(before, p_guess[:, None], 0.0).sum(2), p_guess, parents, column)


class KeepsSiblings(TreeThresholdVerifier):
    """Wrong: what fell may be drawn again."""

    def _residual(self, p: Tensor, place: Tensor, guessed: Tensor) -> Tensor:
        return p


class OfWrongRow(TreeThresholdVerifier):
    """Wrong: a column's children are judged by the p of the column before."""

    def _draw(self, window: Window, logits: Tensor, positions: Tensor, batch: SlotBatch, part: slice) -> Tensor:
        shifted = torch.cat((logits[:, :1], logits[:, :-1]), 1)
        return super()._draw(window, shifted, positions, batch, part)


WRONG: dict[str, type[TreeThresholdVerifier]] = {
    "siblings counted twice": CountsTwice,
    "siblings drawn again": KeepsSiblings,
    "the row before": OfWrongRow,
}


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("num_seeds", [2, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_a_wrong_sampler_is_noticed(name: str, num_seeds: int) -> None:
    verifier = WRONG[name](Thresholds(1.0, 1.0), TOKENS)
    found = [
        p_value(Tables.drawn(100 + seed), verifier, noisy, CHUNK // 2, seed, tree_outcomes) < SIGNIFICANCE
        for seed in range(num_seeds)
    ]
    assert sum(found) >= 0.99 * num_seeds


@pytest.mark.slow
def test_thresholds_below_one_let_more_guesses_stand() -> None:
    """And change the distribution, which is why they are called lossy."""
    lossy = TreeThresholdVerifier(Thresholds(0.3, 0.5), TOKENS)
    assert p_value(Tables.drawn(5), lossy, noisy, CHUNK // 2, 1, tree_outcomes) < SIGNIFICANCE
    assert accepted(lossy) > accepted(TreeThresholdVerifier(Thresholds(1.0, 1.0), TOKENS))


def accepted(verifier: Verifier) -> int:
    """How many first guesses stand, of a thousand samples."""
    tables, seeds = Tables.drawn(5), torch.arange(1000)
    batch = batch_of(seeds, torch.zeros_like(seeds))
    window = window_of(torch.ones_like(seeds), batch.lengths, *greedy(tables, torch.ones_like(seeds), batch))
    logits = tables.target[tables.key(paths_of(torch.ones_like(seeds), window))]
    drawn = verifier.verify(window, GivenLogits(logits), batch).tokens[:, :1]
    assert window.parents is not None
    return int(((window.tokens == drawn) & (window.parents == 0))[:, 1:].any(1).sum())


def test_greedy_slots_are_matched() -> None:
    tables, seeds = Tables.drawn(6), torch.arange(6)
    batch = batch_of(seeds, torch.zeros_like(seeds))
    temperature = torch.tensor([0.0, 1.0] * 3, dtype=torch.float64)
    batch = replace(batch, sampling=replace(batch.sampling, temperature=temperature))
    prefix = torch.arange(1, 7)
    window = window_of(prefix, batch.lengths, *noisy(tables, prefix, batch))
    logits = tables.target[tables.key(paths_of(prefix, window))]
    drawn = TreeThresholdVerifier(Thresholds(0.5, 0.5), TOKENS).verify(window, GivenLogits(logits), batch)
    assert drawn.accept_len is None
    assert torch.equal(drawn.tokens[::2], logits.argmax(2)[::2])


def test_any_token_may_be_a_guess_that_is_accepted() -> None:
    """Token 0 too; -1 is none."""
    tables, seeds = Tables.drawn(6), torch.arange(VOCAB)
    batch = batch_of(seeds, torch.zeros_like(seeds))
    guesses = torch.stack((seeds, *[torch.full_like(seeds, -1)] * (WIDTH - 2)))
    window = window_of(torch.ones_like(seeds), batch.lengths, guesses, torch.zeros_like(guesses))
    logits = tables.target[tables.key(paths_of(torch.ones_like(seeds), window))]
    everything = TreeThresholdVerifier(Thresholds(1e-9, 1.0), TOKENS)
    assert everything.verify(window, GivenLogits(logits), batch).tokens[:, 0].equal(seeds)


def test_a_greedy_verifier_takes_the_largest_at_any_temperature() -> None:
    tables, seeds = Tables.drawn(6), torch.arange(6)
    batch, prefix = batch_of(seeds, torch.zeros_like(seeds)), torch.arange(1, 7)
    window = window_of(prefix, batch.lengths, *noisy(tables, prefix, batch))
    logits = tables.target[tables.key(paths_of(prefix, window))]
    drawn = GreedyVerifier(ChainVerifier(TOKENS)).verify(window, GivenLogits(logits), batch)
    assert torch.equal(drawn.tokens, logits.argmax(2))
