"""Int8 linears: what rounding costs, and what a model keeps when its linears become such."""

import pytest
import torch
from support.int8_linears import Int8Linear, quantize, with_int8_linears
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.models import load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.gemma4 import CappedHead
from overlap_spec.models.layers.linear import DividedLogits, Linear, make_linear

F64 = torch.float64
TOKENS = torch.arange(3, 20)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    weight = torch.randn(48, 64, dtype=dtype)
    weight[5] = 0
    operand = quantize(Linear(weight)).operand
    assert operand.dtype == dtype and operand.scales.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    error = (operand.values * operand.scales[:, None] - weight).abs()
    assert torch.all(error <= operand.scales[:, None] * 0.5001)
    largest = operand.values.abs().amax(1)
    assert largest[5] == 0 and set(largest.tolist()) == {0, 127}


@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product_of_the_rounded_weight(biased: bool) -> None:
    dense = make_linear(torch.randn(48, 64), torch.randn(48) if biased else None)
    linear, x, ids = quantize(dense), torch.randn(5, 64), torch.tensor([7, 0, 47])
    rounded = linear.operand.values * linear.operand.scales[:, None]
    same = Linear(rounded, linear.bias)
    torch.testing.assert_close(linear(x), same(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.logits(x), same.logits(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(linear.argmax(x), same.argmax(x))
    for chosen in (ids, slice(5)):
        torch.testing.assert_close(linear.rows(chosen)(x), same.rows(chosen)(x), rtol=1e-5, atol=1e-5)
    assert (linear.out_features, linear.in_features, linear.compute_dtype) == (48, 64, torch.float32)
    assert linear.num_bytes == 48 * (64 + 4 + (4 if biased else 0))
    assert linear.work.weight_bytes == linear.num_bytes and linear.work.row_flop == 2 * 48 * 64


def logits_of(weights: LoadedTarget) -> Tensor:
    paged = Paged(num_requests=1)
    cache = paged.cache(weights.kv_shape, F64)
    target = weights.attach(cache, 64)
    return target.logits(target.forward(TOKENS, paged.rows([len(TOKENS)])).hidden).compute()


@pytest.mark.slow_but_every(7)
@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_model_computes_nearly_the_same_in_less_memory(family: str) -> None:
    dense = load_tiny_target(tiny_target(3, **TINY_FAMILIES[family]))
    int8 = with_int8_linears(dense)
    head = int8.head.head if isinstance(int8.head, CappedHead | DividedLogits) else int8.head
    assert isinstance(head, Int8Linear) and int8.embedding is dense.embedding
    assert int8.num_bytes < dense.num_bytes
    exact, found = logits_of(dense), logits_of(int8)
    error = float((found - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.05, "rounded, and no more than that"


def test_what_is_shared_stays_shared() -> None:
    shared = make_linear(torch.randn(48, 32))
    first, second = with_int8_linears((shared, shared))
    assert first is second
