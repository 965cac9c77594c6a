"""Every pair of filters, and all three: what is drawn and judged by is what plain Python keeps of a row.

One row feels only the strictest of its filters (support/sampling_oracle.py), so each combination meets rows in which
each of its filters is that in turn; whoever ignores one of them keeps other tokens in some row.
"""

import math
import random

import pytest
import torch
from support.given_logits import GivenLogits, commit
from support.no_processors import no_processors
from support.sampling_oracle import Filters, drawn, filtered, kept, softmax, strictest, subsets
from torch import Tensor

from overlap_spec.sampling.context import Sampling, SamplingWork
from overlap_spec.sampling.sampler import draw_columns, log_weights
from overlap_spec.speculative.interfaces import SlotBatch, Window, level_context
from overlap_spec.speculative.proposers.tree import top_children
from overlap_spec.speculative.verifiers import ChainVerifier

ALL = Filters(top_k=3, top_p=0.8, min_p=0.2)
COMBINATIONS = {" and ".join(filters.names): filters for filters in subsets(ALL, fewest=1)}
TEMPERATURES = [0.6, 1.5]
# Probabilities at the temperature of the test, in no order.
ROWS = [
    [0.08, 0.17, 0.05, 0.19, 0.12, 0.14, 0.15, 0.10],  # flat: the strictest is top_k, without it top_p
    [0.40, 0.02, 0.10, 0.01, 0.45, 0.01, 0.005, 0.005],  # two of them: top_p
    [0.01, 0.12, 0.03, 0.70, 0.10, 0.01, 0.02, 0.01],  # one: min_p, without it top_p
]
VOCAB = len(ROWS[0])
NUM_SEEDS, FIRST_POSITION = 1000, 17
TREE_PARENTS, TREE_DEPTHS = [0, 0, 0, 1, 1, 2], [0, 1, 1, 2, 2, 2]

by_combination = pytest.mark.parametrize("filters", COMBINATIONS.values(), ids=COMBINATIONS)
at_temperatures = pytest.mark.parametrize("temperature", TEMPERATURES)


def logits_of(row: list[float], temperature: float) -> list[float]:
    return [temperature * math.log(p) + 0.5 for p in row]


def sampling(filters: Filters, temperature: float, size: int = NUM_SEEDS) -> Sampling:
    """Seeds 0, 1, .."""
    doubles, ids = torch.ones(size, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    top_k = 1 << 62 if filters.top_k == -1 else filters.top_k
    work = SamplingWork(sampled=True, filtered=True, processed=False)
    params = (doubles * temperature, ids + top_k, doubles * filters.top_p, doubles * filters.min_p)
    return Sampling(*params, torch.arange(size), ids, ids[:, None] - 1, ids, ids, work, no_processors(VOCAB))


def columns(temperature: float, num_columns: int) -> tuple[list[list[float]], Tensor]:
    """The rows, again and again, as a list and for every seed. Shapes: -> .., [seeds, num_columns, V]."""
    rows = [logits_of(ROWS[i % len(ROWS)], temperature) for i in range(num_columns)]
    return rows, torch.tensor(rows, dtype=torch.float64).expand(NUM_SEEDS, -1, -1)


@by_combination
@at_temperatures
def test_each_filter_is_the_strictest_of_some_row(filters: Filters, temperature: float) -> None:
    found = [strictest(softmax(logits_of(row, temperature), temperature), filters) for row in ROWS]
    assert set().union(*found) == set(filters.names)
    assert all(len(names) <= 1 for names in found)


@pytest.mark.slow_but_every(2)
@by_combination
@at_temperatures
def test_tokens_are_those_of_plain_python(filters: Filters, temperature: float) -> None:
    rows, logits = columns(temperature, len(ROWS))
    positions = (FIRST_POSITION + torch.arange(len(ROWS))).expand(NUM_SEEDS, -1)
    tokens = draw_columns(logits, positions, sampling(filters, temperature), torch.arange(VOCAB))
    for seed in range(NUM_SEEDS):
        expected = [drawn(row, temperature, filters, seed, FIRST_POSITION + i) for i, row in enumerate(rows)]
        assert tokens[seed].tolist() == expected, f"seed {seed}"


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(7)
@by_combination
@at_temperatures
def test_a_chain_is_judged_by_what_filters_keep(filters: Filters, temperature: float) -> None:
    """Guesses are the most probable tokens of their rows, and are accepted while they are what is drawn."""
    rows, logits = columns(temperature, len(ROWS))
    guesses = [max(range(VOCAB), key=row.__getitem__) for row in rows[:-1]]
    tokens = torch.tensor([[0, *guesses]] * NUM_SEEDS)
    window = Window(tokens, (FIRST_POSITION - 1 + torch.arange(len(ROWS))).expand(NUM_SEEDS, -1))
    verdict = commit(
        tokens, ChainVerifier(torch.arange(VOCAB)).verify(window, GivenLogits(logits), batch(filters, temperature))
    )
    for seed in range(NUM_SEEDS):
        expected = [drawn(row, temperature, filters, seed, FIRST_POSITION + i) for i, row in enumerate(rows)]
        accepted = next((i for i, guess in enumerate(guesses) if guess != expected[i]), len(guesses))
        assert [token for token in verdict.tokens[seed].tolist() if token >= 0] == expected[: accepted + 1]
    assert len(set(verdict.accept_len.tolist())) == len(ROWS), "all lengths"


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(7)
@by_combination
@at_temperatures
def test_a_tree_is_judged_by_what_filters_keep(filters: Filters, temperature: float) -> None:
    """After every node its own token is drawn, at the node's position."""
    rows, logits = columns(temperature, len(TREE_PARENTS))
    tokens = torch.arange(len(TREE_PARENTS)).expand(NUM_SEEDS, -1)
    parents, depths = torch.tensor(TREE_PARENTS), torch.tensor(TREE_DEPTHS)
    window = Window(tokens, (FIRST_POSITION - 1 + depths).expand(NUM_SEEDS, -1), parents.expand(NUM_SEEDS, -1))
    found = ChainVerifier(torch.arange(VOCAB)).verify(window, GivenLogits(logits), batch(filters, temperature)).tokens
    for seed in range(NUM_SEEDS):
        nodes = zip(rows, TREE_DEPTHS, strict=True)
        expected = [drawn(row, temperature, filters, seed, FIRST_POSITION + depth) for row, depth in nodes]
        assert found[seed].tolist() == expected, f"seed {seed}"


@by_combination
@at_temperatures
def test_coins_are_thrown_for_what_filters_keep(filters: Filters, temperature: float) -> None:
    """The p of verifiers that match nothing, chains' and trees' alike."""
    rows, logits = columns(temperature, len(ROWS))
    p = log_weights(logits[:1], sampling(filters, temperature, 1), slice(0, 1)).softmax(1)
    expected = [filtered(row, temperature, filters) for row in rows]
    assert torch.equal(p > 0, torch.tensor(expected) > 0)
    assert torch.allclose(p, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)


@by_combination
@at_temperatures
def test_children_of_trees_are_what_filters_keep(filters: Filters, temperature: float) -> None:
    rows, logits = columns(temperature, len(ROWS))
    of_one = SlotBatch(
        torch.arange(1), torch.tensor([9]), torch.zeros(1, 1, dtype=torch.int32), sampling(filters, temperature, 1)
    )
    context = level_context(of_one, None, torch.full((1, len(ROWS)), -1), 0, torch.arange(VOCAB))
    logs, children = top_children(GivenLogits(logits[:1]), context, VOCAB)
    for row, worth, ids in zip(rows, logs[0], children[0].tolist(), strict=True):
        alive = kept(softmax(row, temperature), filters)
        assert set(ids[: len(alive)]) == alive and ids[0] == drawn(row, temperature, filters, 0, 10)
        assert worth.isfinite().sum() == len(alive)


def batch(filters: Filters, temperature: float) -> SlotBatch:
    none = torch.zeros(NUM_SEEDS, dtype=torch.int64)
    return SlotBatch(torch.arange(NUM_SEEDS), none, none[:, None].int(), sampling(filters, temperature))


def test_random_rows_under_filters_of_their_own() -> None:
    """One batch: every row has its temperature and its filters, some none, some are greedy."""
    rng, size, vocab = random.Random(3), 400, 60
    rows = [[rng.gauss(0, 3) for _ in range(vocab)] for _ in range(size)]
    filters = [
        Filters(rng.choice([-1, 1, 2, 7, 100]), rng.choice([1.0, 0.5, 0.9, 0.99]), rng.choice([0.0, 0.01, 0.3]))
        for _ in range(size)
    ]
    temperatures = [rng.choice([0.0, 0.3, 1.0, 2.0]) for _ in range(size)]
    params = sampling(Filters(), 1.0, size)
    for i, chosen in enumerate(filters):
        params.temperature[i], params.top_p[i], params.min_p[i] = temperatures[i], chosen.top_p, chosen.min_p
        params.top_k[i] = vocab if chosen.top_k == -1 else chosen.top_k
    logits = torch.tensor(rows, dtype=torch.float64)[:, None]
    tokens = draw_columns(logits, torch.arange(size)[:, None], params, torch.arange(vocab)).squeeze(1).tolist()
    for i, row in enumerate(rows):
        greedy = max(range(vocab), key=row.__getitem__)
        expected = drawn(row, temperatures[i], filters[i], i, i) if temperatures[i] > 0 else greedy
        assert tokens[i] == expected, f"row {i}: {filters[i]} at {temperatures[i]}"
