"""Routers that choose by groups, corrections and scores of other kinds, and the expert that every row has."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import Grouping, Normed
from overlap_spec_kernels.experts.best_of_groups import sigmoid_scores as sigmoid, softmax_scores as softmax
from overlap_spec_kernels.experts.sum_of_experts import TILE
from torch import Tensor

from overlap_spec.models.layers.experts import (
    BestOfGroups,
    MixtureMLP,
    Router,
    SeparateExperts,
)
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.layers.mlp import GatedMLP

F64 = torch.float64
ROWS, EXPERTS, HIDDEN, INNER = 40, 12, 16, 8
Score = Callable[[Tensor], Tensor]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def written_out(
    logits: list[float], choice: BestOfGroups, correction: list[float], scored: Callable[[list[float]], list[float]]
) -> tuple[list[int], list[float]]:
    """The experts of one row and their weights, in plain Python."""
    grouping, scores = choice.grouping, scored(logits)
    rated = [score + more for score, more in zip(scores, correction, strict=True)]
    size = len(rated) // grouping.num_groups
    groups = [range(size * group, size * (group + 1)) for group in range(grouping.num_groups)]
    ratings = [sum(sorted((rated[e] for e in group), reverse=True)[: grouping.rated_by]) for group in groups]
    order = sorted(range(len(groups)), key=lambda group: -ratings[group])
    open_ = sorted(expert for group in order[: grouping.kept_groups] for expert in groups[group])
    best = sorted(open_, key=lambda expert: -rated[expert])[: choice.top_k]
    total = sum(scores[expert] for expert in best) if choice.normalised else 1.0
    return best, [scores[expert] / total * grouping.scale for expert in best]


def sigmoids(logits: list[float]) -> list[float]:
    return [1 / (1 + pow(2.718281828459045, -logit)) for logit in logits]


def softmaxes(logits: list[float]) -> list[float]:
    powers = [pow(2.718281828459045, logit) for logit in logits]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(("groups", "kept", "rated_by"), [(1, 1, 1), (4, 2, 2), (6, 3, 1), (3, 1, 2)])
@pytest.mark.parametrize(("score", "scored"), [(sigmoid, sigmoids), (softmax, softmaxes)])
def test_choices_written_out(
    score: Score, scored: Callable[[list[float]], list[float]], groups: int, kept: int, rated_by: int, normalised: bool
) -> None:
    weight, x, correction = drawn(1, EXPERTS, HIDDEN), drawn(2, ROWS, HIDDEN), 0.2 * drawn(3, EXPERTS)
    choice = BestOfGroups(3, normalised, Grouping(score, groups, kept, rated_by, 2.5), correction)
    routing = Router(weight, choice)(x)
    for row, logits in enumerate((x @ weight.T).tolist()):
        experts, weights = written_out(logits, choice, correction.tolist(), scored)
        assert routing.experts[row].tolist() == experts
        torch.testing.assert_close(routing.weights[row], torch.tensor(weights, dtype=F64))


def test_a_correction_moves_the_choice_and_not_the_weights() -> None:
    weight, x = drawn(1, EXPERTS, HIDDEN), drawn(2, ROWS, HIDDEN)
    choice = BestOfGroups(EXPERTS, False, Grouping(sigmoid))
    plain = Router(weight, choice)(x)
    moved = Router(weight, replace(choice, correction=drawn(3, EXPERTS)))(x)
    assert not torch.equal(plain.experts, moved.experts)
    by_expert = [each.weights.gather(1, each.experts.argsort(1)) for each in (plain, moved)]
    assert torch.equal(*by_expert)


def test_of_equal_experts_and_groups_the_lower_ones_are_chosen() -> None:
    weight, x = drawn(1, 1, HIDDEN).expand(EXPERTS, -1).contiguous(), drawn(2, ROWS, HIDDEN)
    choice = BestOfGroups(4, True, Grouping(sigmoid, 4, 2, 2))
    assert Router(weight, choice)(x).experts.tolist() == [[0, 1, 2, 3]] * ROWS


def test_scores_and_corrections_are_not_rounded() -> None:
    weight, x = drawn(1, EXPERTS, HIDDEN).bfloat16(), drawn(2, ROWS, HIDDEN).bfloat16()
    choice = BestOfGroups(EXPERTS, False, Grouping(sigmoid), 1e-4 * drawn(3, EXPERTS).float())
    routing = Router(weight, choice)(x)
    assert routing.weights.dtype == torch.float32
    assert torch.equal(routing.experts, Router(weight.float(), choice)(x.float()).experts)


def test_weights_of_scores_that_are_all_zero_are_zero() -> None:
    choice = BestOfGroups(3, True, Grouping(sigmoid))
    weight, x = torch.full((EXPERTS, HIDDEN), -1e3, dtype=F64), torch.ones(2, HIDDEN, dtype=F64)
    assert not Router(weight, choice)(x).weights.any()


def mlp_of(seed: int, dtype: torch.dtype) -> GatedMLP:
    gate_up, down = drawn(seed, 2 * INNER, HIDDEN), drawn(seed + 1, HIDDEN, INNER)
    return GatedMLP(Linear(gate_up.to(dtype)), Linear(down.to(dtype)))


def mixture_of(dtype: torch.dtype) -> MixtureMLP:
    choice = BestOfGroups(3, True, Grouping(sigmoid, 4, 2, 2), 0.2 * drawn(3, EXPERTS).to(dtype))
    experts = SeparateExperts(tuple(mlp_of(10 + 2 * index, dtype) for index in range(EXPERTS)))
    return MixtureMLP(Router(drawn(1, EXPERTS, HIDDEN).to(dtype), choice), experts, shared=mlp_of(4, dtype))


def test_the_shared_expert_is_added() -> None:
    mixture, x = mixture_of(F64), drawn(2, ROWS, HIDDEN)
    assert mixture.shared is not None
    routed = replace(mixture, shared=None)(Normed(x, x))
    torch.testing.assert_close(mixture(Normed(x, x)), routed + mixture.shared(Normed(x, x)))
    assert mixture.work == replace(mixture, shared=None).work + mixture.shared.work


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(F64, marks=pytest.mark.slow), torch.bfloat16], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    mixture, x = mixture_of(dtype), drawn(2, 256, HIDDEN).to(dtype)
    alone = torch.cat([mixture(Normed(row[None], row[None])) for row in x])
    for num_rows in (1, 2, 3, 5, 31, 64, 255, 256):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(num_rows))[:num_rows]
        assert torch.equal(mixture(Normed(x[order], x[order])), alone[order]), num_rows


def test_every_mlp_has_tiles_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether other numbers of rows are rounded otherwise depends on the processor."""
    mixture, compute, sizes = mixture_of(F64), GatedMLP.__call__, list[int]()

    def noted(mlp: GatedMLP, x: Normed) -> Tensor:
        sizes.append(len(x.weighted))
        return compute(mlp, x)

    monkeypatch.setattr(GatedMLP, "__call__", noted)
    for num_rows in (1, 5):
        mixture(Normed(*[drawn(2, num_rows, HIDDEN)] * 2))
    assert len(sizes) > 2 and set(sizes) == {TILE}
