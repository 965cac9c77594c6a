"""Synthetic acceptance of trees: the mean that was asked for, along a path of the tree."""

import math
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import Verdict, judge_tree
from support.given_logits import GivenLogits
from test_spec_simulated import DRAWN, ConstantVerifier

from overlap_spec.speculative.interfaces import SlotBatch, Window
from overlap_spec.speculative.verifiers import SimulatedVerifier, SyntheticAcceptance, certainty

PARENTS = torch.tensor([0, 0, 0, 1, 2, 3, 5])
TOKENS = torch.tensor([9, 1, 2, 3, 4, 5, 6])
LONGEST = 5


def judge(mean: float, batch: SlotBatch) -> Verdict:
    verifier = SimulatedVerifier(ConstantVerifier(), SyntheticAcceptance([mean], batch.sampling.seed))
    size = len(batch.slots)
    tokens, parents = (row.repeat(size, 1) for row in (TOKENS, PARENTS))
    window = Window(tokens, batch.lengths[:, None].expand_as(tokens), parents)
    drawn = verifier.verify(window, GivenLogits(torch.empty(0, 1)), batch)
    length, rows = torch.zeros(size + 1, dtype=torch.int64), torch.zeros(size + 1, len(TOKENS), dtype=torch.int64)
    return judge_tree(
        drawn.tokens, tokens, parents, batch.slots, batch.lengths, length, rows, size, LONGEST, drawn.accept_len
    )


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("mean", [1.0, 2.5, 3.9, 5.0])
def test_the_mean_is_the_one_asked_for(make_batch, mean: float) -> None:
    """16 requests of 200 steps, each from where the step before left it, as decoding walks."""
    batch = make_batch([100] * 16)
    seeds = torch.randint(0, 1 << 62, (16,), generator=torch.Generator().manual_seed(5))
    batch = replace(batch, sampling=replace(batch.sampling, seed=seeds))
    committed = 0
    for _ in range(200):
        advance = judge(mean, batch).accept_len + 1
        committed += int(advance.sum())
        batch = replace(batch, lengths=batch.lengths + advance)
    assert committed / (16 * 200) == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(("mean", "num_levels"), [(1.3, 5), (2.5, 5), (3.5, 5), (3.5, 3)])
def test_a_draft_is_as_sure_as_its_guesses_are_right(mean: float, num_levels: int) -> None:
    logs = certainty(mean, num_levels, 4)
    rate = math.exp(logs[0])
    assert 1 + sum(rate**level for level in range(1, num_levels + 1)) == pytest.approx(mean, abs=1e-3)
    assert logs == pytest.approx([math.log(rate * (1 - rate) ** rank) for rank in range(4)])


def test_a_draft_is_neither_sure_nor_without_hope() -> None:
    """Where all logs were equal, or -inf, a tree would grow anyhow."""
    assert certainty(1.0, 5, 2) == pytest.approx([math.log(0.02), math.log(0.02) + math.log(0.98)], abs=1e-6)
    assert certainty(6.0, 5, 2) == pytest.approx([math.log(0.98), math.log(0.98) + math.log(0.02)], abs=1e-6)


def test_first_children_stand_then_a_drawn_token(make_batch) -> None:
    judged = judge(4.0, make_batch([10, 11]))
    assert judged.accept_len.tolist() == [3, 3]
    assert judged.tokens.tolist() == [[1, 3, 5, DRAWN, -1]] * 2
    assert judged.path[:, :4].tolist() == [[0, 1, 3, 5]] * 2
