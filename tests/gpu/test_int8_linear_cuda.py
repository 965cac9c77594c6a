"""The kernel of int8 weights on a GPU: float64 products of the same values, dependent launches, a model served."""

from contextlib import closing
from typing import Any

import pytest
import torch
from overlap_spec_kernels import fused_linear, linear_logits
from support.int8_linears import with_int8_linears
from support.int8_weight import Int8Weight
from support.solo import Solo
from torch import Tensor

from overlap_spec.config import ModelFiles
from overlap_spec.messages import SamplingParams
from overlap_spec.models.loading.loader import load_target
from overlap_spec.worker import build

ERROR = {torch.float32: 8e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # of a norm over a norm


def weight_of(size_n: int, size_k: int, dtype: torch.dtype) -> Int8Weight:
    values = torch.randint(-127, 128, (size_n, size_k), dtype=torch.int8, device="cuda")
    return Int8Weight(values, torch.rand(size_n, device="cuda") / (64 * size_k**0.5), dtype)


def assert_near(actual: Tensor, x: Tensor, weight: Int8Weight, error: float) -> None:
    expected = x.double() @ (weight.values.double() * weight.scales.double()[:, None]).t()
    assert actual.shape == expected.shape
    assert float((actual.double() - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("rows", [1, 4, 16, 17, 64, 65, 700])
@pytest.mark.parametrize(("size_n", "size_k"), [(960, 576), (576, 1536), (130, 100), (4096, 4096)])
def test_products(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, size_k, device="cuda").to(dtype), weight_of(size_n, size_k, dtype)
    assert_near(fused_linear(x, weight), x, weight, ERROR[dtype])
    assert_near(linear_logits(x, weight), x, weight, ERROR[torch.float32])


@pytest.mark.parametrize("dtype", ERROR)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = torch.randn(8, 576, device="cuda").to(dtype), weight_of(960, 576, dtype)
    together = fused_linear(x, weight)
    for row in range(8):
        mixed = torch.randn(8, 576, device="cuda").to(dtype)
        mixed[row] = x[row]
        assert torch.equal(fused_linear(mixed, weight)[row], together[row])


def test_back_to_back_in_a_graph_it_follows_its_inputs() -> None:
    """Forty linears: each may begin before the one before it has ended, and must not read too early."""
    dtype = torch.bfloat16
    x, weights = torch.randn(4, 576, device="cuda").to(dtype), [weight_of(576, 576, dtype) for _ in range(40)]

    def forward() -> Tensor:
        y = x
        for weight in weights:
            y = fused_linear(y, weight)
        return y

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward()
    for _ in range(10):
        x.normal_()
        graph.replay()
        y = x
        for weight in weights:
            y = fused_linear(y, weight)
            torch.cuda.synchronize()
        assert torch.equal(result, y)


def test_it_is_served_in_graphs_and_speculation_changes_nothing(
    files: ModelFiles, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SmolLM2 in float32, whose answers are nearly those of its own weights."""
    monkeypatch.setattr(build, "load_target", lambda *given: with_int8_linears(load_target(*given)))
    chain = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}
    greedy = SamplingParams(max_new_tokens=32, temperature=0.0, seed=0)
    answers = []
    for flags in ({"speculative_algorithm": "NONE"}, {"speculative_algorithm": "EAGLE3", **chain}):
        with closing(Solo(files, device="cuda", dtype="float32", graphs=True, **flags)) as solo:
            answers.append([solo.answer(row["prompt_ids"], greedy).tokens for row in rows[:4]])
    assert answers[0] == answers[1]
    shared = [answer[:4] == row["tokens"][:4] for answer, row in zip(answers[0], rows, strict=False)]
    assert sum(shared) >= 2
