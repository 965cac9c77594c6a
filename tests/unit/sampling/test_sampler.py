"""Each token is drawn in the stated order, whatever else is in the batch."""

import math
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import gumbel
from support.given_logits import GivenLogits
from support.no_processors import no_processors
from torch import Tensor

from overlap_spec.sampling.context import DrawContext, History, Sampling, SamplingWork
from overlap_spec.sampling.sampler import draw_after, draw_columns as draw, processed_logits

ALL = 1 << 62


def sampling(
    batch: int,
    temperature: float = 1.0,
    top_k: int = ALL,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop_from: int = 0,
    stop_ids: tuple[int, ...] = (),
    seeds: Tensor | None = None,
) -> Sampling:
    """`batch` rows alike."""
    return Sampling(
        temperature=torch.full((batch,), temperature, dtype=torch.float64),
        top_k=torch.full((batch,), top_k),
        top_p=torch.full((batch,), top_p, dtype=torch.float64),
        min_p=torch.full((batch,), min_p, dtype=torch.float64),
        seed=torch.arange(batch) if seeds is None else seeds,
        stop_from=torch.full((batch,), stop_from),
        stop_ids=torch.tensor([list(stop_ids) or [-1]] * batch),
        output_from=torch.zeros(batch, dtype=torch.int64),
        slots=torch.arange(batch),
        work=SamplingWork(temperature > 0, top_k != ALL or top_p < 1 or min_p > 0, bool(stop_ids)),
        processors=no_processors(40),
    )


def draw_one_position(logits: list[float], draws: int, **params: object) -> Tensor:
    """`draws` independent draws (one seed each) from the same logits. Shapes: -> counts [V]."""
    rows = torch.tensor(logits, dtype=torch.float64).expand(draws, 1, -1)
    positions = torch.full((draws, 1), 17)
    tokens = draw(rows, positions, sampling(draws, **params), torch.arange(len(logits)))
    return torch.bincount(tokens.flatten(), minlength=len(logits))


def expected_kept(p: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """The filters on p itself, not renormalised in between; then what is left, renormalised."""
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    kept, before = set(), 0.0
    for rank, i in enumerate(order):
        if rank < top_k and before < top_p and p[i] >= min_p * p[order[0]]:
            kept.add(i)
        before += p[i]
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 3, "top_p": 0.8, "min_p": 0.2}],
    ids=["none", "top_k", "top_p", "min_p", "joint"],
)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_frequencies_are_those_of_the_filtered_softmax(params: dict[str, float], temperature: float) -> None:
    logits = [2.0, 1.0, 0.5, 1.0, -1.0, 0.0]
    weights = [math.exp(x / temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    want = expected_kept(p, int(params.get("top_k", ALL)), params.get("top_p", 1.0), params.get("min_p", 0.0))
    draws = 40000
    counts = draw_one_position(logits, draws, temperature=temperature, **params).tolist()
    statistic = 2 * sum(c * math.log(c / (draws * q)) for c, q in zip(counts, want, strict=True) if c)
    assert all(c == 0 for c, q in zip(counts, want, strict=True) if q == 0)
    assert statistic < 25.7  # G-test, at most 5 degrees of freedom, 1e-4


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 3, 40, dtype=torch.float64)
    positions = torch.randint(0, 100, (5, 3))
    params = sampling(5, temperature=0.8, top_p=0.9)
    together = draw(logits, positions, params, torch.arange(40))
    for b in range(5):
        alone = sampling(1, temperature=0.8, top_p=0.9, seeds=torch.tensor([b]))
        assert torch.equal(draw(logits[b : b + 1], positions[b : b + 1], alone, torch.arange(40))[0], together[b])


def test_a_smaller_vocabulary_meets_the_same_noise() -> None:
    """Daliri et al. 2024: over the same ids, draft and target draw the same token from the same logits."""
    ids = torch.tensor([3, 8, 11, 30])
    logits = torch.full((1, 1, 40), -torch.inf, dtype=torch.float64)
    logits[0, 0, ids] = torch.tensor([0.3, 0.1, -0.2, 0.5], dtype=torch.float64)
    for seed in range(50):
        params = sampling(1, seeds=torch.tensor([seed]))
        positions = torch.tensor([[9]])
        target = draw(logits, positions, params, torch.arange(40))
        draft = draw(logits[:, :, ids], positions, params, ids)
        assert ids[draft].item() == target.item()


def test_greedy_rows_in_a_sampled_batch_take_the_argmax() -> None:
    logits = torch.randn(2, 1, 30, dtype=torch.float64)
    params = sampling(2)
    params.temperature[0] = 0.0
    tokens = draw(logits, torch.zeros(2, 1, dtype=torch.int64), params, torch.arange(30))
    assert tokens[0, 0] == logits[0, 0].argmax()
    noisy = logits[1, 0] + gumbel(torch.tensor([1]), torch.tensor([0]), torch.arange(30))[0]
    assert tokens[1, 0] == noisy.argmax()


def context_of(params: Sampling, positions: Tensor, ids: Tensor) -> DrawContext:
    """Rows before these positions."""
    table = torch.zeros(len(positions), 1, dtype=torch.int32)
    return DrawContext(History(params, table, positions[:, 0] - 1), ids, positions - 1)


def test_stop_ids_are_forbidden_before_stop_from_only() -> None:
    logits = torch.zeros(1, 4, 5, dtype=torch.float64)
    logits[..., 3] = 9.0
    logits[..., 1] = 5.0
    positions = torch.tensor([[10, 11, 12, 13]])
    params = sampling(1, temperature=0.0, stop_from=12, stop_ids=(3,))
    assert draw_after(GivenLogits(logits), context_of(params, positions, torch.arange(5))).tolist() == [[1, 1, 3, 3]]


@pytest.mark.parametrize("ids", [torch.arange(40), torch.tensor([30, 3, 8, 11])], ids=["all", "a draft's"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_forbidden_stop_ids_are_those_of_a_mask_written_out(dtype: torch.dtype, ids: Tensor) -> None:
    """Ids that are padding, that the draft lacks and that no model has; some twice; some positions early."""
    random = torch.Generator().manual_seed(len(ids))
    logits = torch.randn(5, 3, len(ids), generator=random).to(dtype)
    params = sampling(5, stop_ids=(0,))
    stop_ids = torch.randint(-1, 60, (5, 64), generator=random)
    stop_ids[:, :4] = torch.tensor([3, 3, 39, 1 << 40])
    params = replace(params, stop_ids=stop_ids, stop_from=torch.tensor([0, 10, 11, 12, 99]))
    positions = torch.tensor([[10, 11, 12]] * 5)
    found = processed_logits(GivenLogits(logits), context_of(params, positions, ids))
    for slot in range(5):
        for row in range(3):
            early = positions[slot, row] < params.stop_from[slot]
            for column, token in enumerate(ids.tolist()):
                gone = bool(early) and token in stop_ids[slot].tolist()
                assert found[slot, row, column] == (-torch.inf if gone else logits[slot, row, column])
