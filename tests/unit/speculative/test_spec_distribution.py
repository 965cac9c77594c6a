"""Every exact verifier keeps the target's distribution: joint samples of three tokens against the product of its p.

A target and a draft of four tokens are tables over prefixes; windows of three columns are proposed, judged and
committed until three tokens stand, vectorised over samples: each is a slot with a seed of its own. G-test of 64 cells,
or of those that filters leave: what they drop must never come. Deliberately wrong samplers show that the test would
notice.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from overlap_spec_kernels.window.judge_chain import judge_chain
from support.given_logits import GivenLogits
from support.no_processors import no_processors
from support.sampling_oracle import Filters, filtered, softmax, strictest
from torch import Tensor

from overlap_spec.sampling.context import Sampling, SamplingWork
from overlap_spec.speculative import verifiers as coins
from overlap_spec.speculative.interfaces import Drawn, SlotBatch, Verifier, Window
from overlap_spec.speculative.verifiers import (
    ChainVerifier,
    DraftProbs,
    Rejection,
    ResidualVerifier,
    Thresholds,
    draw_guess,
)

VOCAB, LENGTH, WIDTH = 4, 3, 3
TOKENS = torch.arange(VOCAB)
DRAFT_IDS = torch.tensor([0, 2, 3])  # token 1 cannot be guessed
SIGNIFICANCE = 1e-3
CHUNK = 100_000
FEWEST = 5.0  # expected samples of a cell
NO_FILTERS, ALL_FILTERS = Filters(), Filters(top_k=3, top_p=0.85, min_p=0.15)
# Temperatures and filters, beside temperature 1 and none.
WAYS = {
    "hot": (1.7, NO_FILTERS),
    "cold": (0.5, NO_FILTERS),
    "filtered": (1.3, ALL_FILTERS),
    "cold, filtered": (0.6, ALL_FILTERS),
}
FULL = [pytest.mark.full, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Tables:
    """Logits after every prefix of up to LENGTH + WIDTH tokens, by the prefix read as a number in base VOCAB.

    And how tokens are drawn from the target's.
    """

    target: Tensor  # [prefixes, V]
    draft: Tensor  # [prefixes, Vd]
    temperature: float = 1.0
    filters: Filters = NO_FILTERS

    @staticmethod
    def drawn(seed: int) -> "Tables":
        random = torch.Generator().manual_seed(seed)
        size = VOCAB ** (LENGTH + 1) * 2
        return Tables(
            1.5 * torch.randn(size, VOCAB, generator=random, dtype=torch.float64),
            1.5 * torch.randn(size, len(DRAFT_IDS), generator=random, dtype=torch.float64),
        )

    def expected(self) -> Tensor:
        """Probabilities of the three tokens, worked out in plain Python row by row. Shapes: -> [V ** 3]."""
        rows = [filtered(row, self.temperature, self.filters) for row in self.target.tolist()]
        p = torch.tensor(rows, dtype=torch.float64)
        joint = torch.ones(1, dtype=torch.float64)
        prefixes = torch.ones(1, dtype=torch.int64)
        for _ in range(LENGTH):
            joint = (joint[:, None] * p[self.key(prefixes)]).reshape(-1)
            prefixes = (prefixes[:, None] * VOCAB + TOKENS).reshape(-1)
        return joint

    def key(self, prefix: Tensor) -> Tensor:
        """Beyond the third token it does not matter what the tables say."""
        return prefix % len(self.target)


def batch_of(seeds: Tensor, lengths: Tensor, temperature: float = 1.0, filters: Filters = NO_FILTERS) -> SlotBatch:
    size, ones = len(seeds), torch.ones(len(seeds), dtype=torch.float64)
    none = torch.zeros(size, dtype=torch.int64)
    work = SamplingWork(sampled=True, filtered=bool(filters.names), processed=False)
    top_k = VOCAB if filters.top_k == -1 else filters.top_k
    params = (ones * temperature, none + top_k, ones * filters.top_p, ones * filters.min_p)
    sampling = Sampling(*params, seeds, none, none[:, None] - 1, none, none, work, no_processors(VOCAB))
    return SlotBatch(torch.arange(size), lengths, none[:, None].int(), sampling)


def outcomes(tables: Tables, verifier: Verifier, guess: Callable[..., Tensor], seeds: Tensor) -> Tensor:
    """The first three tokens of each sample, as one number. Shapes: seeds [n] i64 -> [n] i64."""
    size = len(seeds)
    prefix, lengths = torch.ones(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    tokens = torch.zeros(size, LENGTH + 2 * WIDTH, dtype=torch.int64)
    for _ in range(LENGTH):
        batch = batch_of(seeds, lengths, tables.temperature, tables.filters)
        paths, window = [prefix], torch.full((size, WIDTH), -1)
        for i in range(WIDTH - 1):
            guesses = window[:, 1 : i + 1].unbind(1)
            window[:, i + 1] = guess(GivenLogits(tables.draft[tables.key(paths[-1])]), batch, guesses)
            paths.append(paths[-1] * VOCAB + window[:, i + 1])
        positions = lengths[:, None] + torch.arange(WIDTH)
        logits = tables.target[tables.key(torch.stack(paths, 1))]
        drawn = verifier.verify(Window(window, positions), GivenLogits(logits), batch)
        judged = judge_chain(
            drawn.tokens, window, batch.slots, lengths, lengths.clone(), window.clone(), size, drawn.accept_len
        )
        for column in range(WIDTH):
            token = judged.tokens[:, column]
            stands = token >= 0
            tokens[torch.arange(size), lengths + column] = torch.where(stands, token, 0)
            prefix = torch.where(stands, prefix * VOCAB + token, prefix)
        lengths = judged.next_positions[0]
    return (tokens[:, :LENGTH] * VOCAB ** torch.arange(LENGTH).flip(0)).sum(1)


def p_value(
    tables: Tables,
    verifier: Verifier,
    guess: Callable[..., Any],
    num_samples: int,
    seed: int,
    outcomes: Callable[..., Tensor] = outcomes,
) -> float:
    """Of a G-test of so many samples; 0 if a token came that filters drop. Cells that hardly come count together."""
    counts = torch.zeros(VOCAB**LENGTH, dtype=torch.float64)
    for begin in range(0, num_samples, CHUNK):
        seeds = (seed << 40) + begin + torch.arange(min(CHUNK, num_samples - begin))
        counts += outcomes(tables, verifier, guess, seeds).bincount(minlength=VOCAB**LENGTH)
    cells = torch.stack((counts, tables.expected() * num_samples), 1)
    possible, common = cells[:, 1] > 0, cells[:, 1] >= FEWEST
    if cells[~possible, 0].any():
        return 0.0
    cells = torch.cat((cells[common], cells[possible & ~common].sum(0, keepdim=True)))
    counts, expected = cells[cells[:, 1] > 0].unbind(1)
    g = 2 * torch.xlogy(counts, counts / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), g / 2))


def shared(lazy_logits: GivenLogits, batch: SlotBatch, guesses: Sequence[Tensor]) -> Tensor:
    """Guesses with the target's noise."""
    return draw_guess(lazy_logits, batch, guesses, DRAFT_IDS, None)


def rejection(size: int, rule: type[Rejection] = Rejection) -> tuple[Verifier, Callable[..., Tensor]]:
    probs = DraftProbs()
    probs.allocate(size, WIDTH - 1, DRAFT_IDS)
    return ResidualVerifier(rule(probs), TOKENS), probs.draw


EXACT: dict[str, Callable[[], tuple[Verifier, Callable[..., Tensor]]]] = {
    "match": lambda: (ChainVerifier(TOKENS), shared),
    "thresholds at 1": lambda: (ResidualVerifier(Thresholds(1.0, 1.0), TOKENS), shared),
    "rejection": lambda: rejection(CHUNK),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_samples", [30_000, pytest.param(2_000_000, marks=FULL)])
def test_the_distribution_is_the_targets(name: str, num_samples: int) -> None:
    verifier, guess = EXACT[name]()
    assert p_value(Tables.drawn(5), verifier, guess, num_samples, seed=1) > SIGNIFICANCE / len(EXACT)


def tables_for(way: str) -> Tables:
    """The same p at every temperature, of which the filters find something to drop, each where the others do not."""
    (temperature, filters), tables = WAYS[way], Tables.drawn(18)
    return replace(tables, target=tables.target * (temperature / 1.3), temperature=temperature, filters=filters)


@pytest.mark.parametrize("way", ["filtered", "cold, filtered"])
def test_each_filter_is_the_strictest_in_a_quarter_of_the_samples(way: str) -> None:
    """After prefixes that samples come to; by their numbers, from the empty one, 1, to two tokens."""
    tables, times = tables_for(way), Counter[str]()
    reached = {1: 1.0}
    for _ in range(LENGTH):
        longer: dict[int, float] = {}
        for prefix, share in reached.items():
            row = tables.target[prefix].tolist()
            for name in strictest(softmax(row, tables.temperature), tables.filters):
                times[name] += share
            p = filtered(row, tables.temperature, tables.filters)
            longer |= {prefix * VOCAB + token: share * p[token] for token in range(VOCAB) if p[token] > 0}
        reached = longer
    assert set(times) == set(tables.filters.names)
    assert min(times.values()) > 0.25


@pytest.mark.full_but_every(4)
@pytest.mark.slow_but_every(20)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("num_samples", [50_000, pytest.param(2_000_000, marks=FULL)])
def test_the_distribution_is_the_targets_at_temperatures_and_through_filters(
    name: str, way: str, num_samples: int
) -> None:
    verifier, guess = EXACT[name]()
    assert p_value(tables_for(way), verifier, guess, num_samples, seed=2) > SIGNIFICANCE / len(EXACT) / len(WAYS)


class Altered:
    """Wrong: judges as if requests had asked for something else."""

    def __init__(self, inner: Verifier, **changes: float) -> None:
        self._inner = inner
        self._changes = changes

    def verify(self, window: Window, lazy_logits: GivenLogits, batch: SlotBatch) -> Drawn:
        sampling = batch.sampling
        changes = {name: torch.full_like(getattr(sampling, name), value) for name, value in self._changes.items()}
        return self._inner.verify(window, lazy_logits, replace(batch, sampling=replace(sampling, **changes)))


@pytest.mark.full_but_every(5)
@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"top_k": VOCAB}, {"top_p": 1.0}, {"min_p": 0.0}, {"temperature": 1.2}], ids=str)
@pytest.mark.parametrize("name", EXACT)
def test_other_filters_or_temperatures_are_noticed(name: str, changes: dict[str, float]) -> None:
    verifier, guess = EXACT[name]()
    assert p_value(tables_for("filtered"), Altered(verifier, **changes), guess, 50_000, seed=2) < SIGNIFICANCE


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_rejection_draws_guesses_at_the_requests_temperature(temperature: float) -> None:
    """Any q is exact, but no other is accepted as often."""
    probs, size = DraftProbs(), 20_000
    probs.allocate(size, 1, DRAFT_IDS)
    row = [0.9, -1.3, 0.4]
    seeds = torch.arange(size)
    batch = batch_of(seeds, torch.zeros_like(seeds), temperature)
    guesses = probs.draw(GivenLogits(torch.tensor([row], dtype=torch.float64).expand(size, -1)), batch, ())
    q = torch.tensor(softmax(row, temperature), dtype=torch.float64)
    counts = (guesses[:, None] == DRAFT_IDS).sum(0)
    g = 2 * torch.xlogy(counts, counts / (q * size)).sum()
    assert torch.special.gammaincc(torch.tensor(1.0, dtype=torch.float64), g / 2) > SIGNIFICANCE
    assert torch.allclose(probs.over(seeds[:1], 1, VOCAB)[0, 0, DRAFT_IDS], q, atol=1e-7)


class KeepsGuess(Rejection):
    """Wrong: draws from p where a guess fell, as if q had taken nothing of it."""

    def residual(self, p: Tensor, guesses: Tensor, slots: Tensor) -> Tensor:
        return p


class ForgetsQ(Rejection):
    """Wrong: accepts with probability p."""

    def accepts(self, guesses: Tensor, p_guess: Tensor, coins: Tensor, slots: Tensor) -> Tensor:
        return coins < p_guess


class WrongRow:
    """Wrong: the bonus is drawn one row too early."""

    def __init__(self, inner: Verifier) -> None:
        self._inner = inner

    def verify(self, window: Window, lazy_logits: GivenLogits, batch: SlotBatch) -> Drawn:
        shifted = torch.cat((lazy_logits.given[:, :1], lazy_logits.given[:, :-1]), 1)
        right = self._inner.verify(window, lazy_logits, batch)
        return replace(self._inner.verify(window, GivenLogits(shifted), batch), accept_len=right.accept_len)


def reused_noise(size: int) -> tuple[Verifier, Callable[..., Tensor]]:
    """Wrong: residuals are drawn with the noise that drew the guesses."""
    verifier, guess = rejection(size)

    class Reusing:
        def verify(self, window: Window, lazy_logits: GivenLogits, batch: SlotBatch) -> Drawn:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(coins, "RESIDUAL", coins.GUESS)
                return verifier.verify(window, lazy_logits, batch)

    return Reusing(), guess


def wrong_row(size: int) -> tuple[Verifier, Callable[..., Tensor]]:
    verifier, guess = rejection(size)
    return WrongRow(verifier), guess


WRONG: dict[str, Callable[[int], tuple[Verifier, Callable[..., Tensor]]]] = {
    "residual keeps the guess": functools.partial(rejection, rule=KeepsGuess),
    "q is forgotten": functools.partial(rejection, rule=ForgetsQ),
    "the bonus of another row": wrong_row,
    "noise used twice": reused_noise,
}


@pytest.mark.full_but_every(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("num_seeds", [2, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(900)])])
def test_a_wrong_sampler_is_noticed(name: str, num_seeds: int) -> None:
    size = 50_000
    found = [
        p_value(Tables.drawn(100 + seed), *WRONG[name](size), size, seed) < SIGNIFICANCE for seed in range(num_seeds)
    ]
    assert sum(found) >= 0.99 * num_seeds


@pytest.mark.slow
def test_thresholds_below_one_let_more_guesses_stand() -> None:
    """And change the distribution, which is why they are called lossy."""
    tables = Tables.drawn(5)
    lossy = ResidualVerifier(Thresholds(0.3, 0.5), TOKENS)
    assert p_value(tables, lossy, shared, 50_000, seed=1) < SIGNIFICANCE
    batch = batch_of(torch.arange(1000), torch.zeros(1000, dtype=torch.int64))
    window = Window(torch.randint(0, VOCAB, (1000, WIDTH)), torch.arange(WIDTH).expand(1000, WIDTH))
    lazy_logits = GivenLogits(tables.target[:1].expand(WIDTH * 1000, VOCAB).view(1000, WIDTH, VOCAB))
    exact = ResidualVerifier(Thresholds(1.0, 1.0), TOKENS).verify(window, lazy_logits, batch).accept_len
    more = lossy.verify(window, lazy_logits, batch).accept_len
    assert exact is not None and more is not None and (more >= exact).all() and (more > exact).any()


def test_greedy_slots_are_matched_under_any_rule() -> None:
    tables = Tables.drawn(6)
    batch = batch_of(torch.arange(6), torch.zeros(6, dtype=torch.int64))
    temperature = torch.tensor([0.0, 1.0] * 3, dtype=torch.float64)
    batch = replace(batch, sampling=replace(batch.sampling, temperature=temperature))
    logits = tables.target[torch.arange(6 * WIDTH)].view(6, WIDTH, VOCAB)
    largest = logits.argmax(2)
    window = Window(
        torch.cat((torch.zeros(6, 1, dtype=torch.int64), largest[:, :-1]), 1), torch.arange(WIDTH).expand(6, WIDTH)
    )
    for verifier in (rejection(6)[0], ResidualVerifier(Thresholds(0.5, 0.5), TOKENS)):
        drawn = verifier.verify(window, GivenLogits(logits), batch)
        assert drawn.accept_len is not None
        assert drawn.accept_len[::2].tolist() == [WIDTH - 1] * 3
        assert torch.equal(drawn.tokens[::2], largest[::2])
