"""Linears in every form that they take, against a plain product."""

import math

import pytest
import torch
import torch.nn.functional as F

from overlap_spec.models.layers.linear import DividedLogits, Linear, PackedLinear, make_linear
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.quantization.grouped import Groups, in_16_bits
from overlap_spec.models.quantization.linear import QuantizedLinear, StoredWeight
from overlap_spec.models.work import count_bytes


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 33])
@pytest.mark.parametrize("width", [64, 1536, 1031])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-3)])
def test_a_linear_is_a_product(rows: int, width: int, biased: bool, dtype: torch.dtype, tolerance: float) -> None:
    random = torch.Generator().manual_seed(rows * width)
    weight = torch.randn(48, width, generator=random, dtype=dtype)
    bias = torch.randn(48, generator=random, dtype=dtype) if biased else None
    x = torch.randn(rows, width, generator=random, dtype=dtype)
    y = make_linear(weight, bias)(x)
    torch.testing.assert_close(y, F.linear(x, weight, bias), atol=tolerance, rtol=0)
    assert y.is_contiguous()


def test_weights_are_packed_in_float32_on_a_cpu_only() -> None:
    packed = make_linear(torch.zeros(8, 1536))
    assert isinstance(packed, PackedLinear)
    assert count_bytes((packed, packed)) == 8 * 1536 * 4, "shared memory counts once"
    assert isinstance(make_linear(torch.zeros(8, 1536, dtype=torch.float64)), Linear)
    assert isinstance(make_linear(torch.zeros(8, 1536, dtype=torch.bfloat16)), Linear)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_linear_leaves_its_input_alone(rows: int) -> None:
    x = torch.randn(rows, 2048)
    before = x.clone()
    make_linear(torch.randn(8, 2048))(x)
    assert torch.equal(x, before)


def test_a_row_does_not_depend_on_its_company() -> None:
    x = torch.randn(7, 576)
    for form in (make_linear(torch.randn(96, 576)), Linear(torch.randn(96, 576))):
        together = form(x)
        for row in range(7):
            torch.testing.assert_close(form(x[row : row + 1])[0], together[row], atol=1e-4, rtol=0)


@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_tells_its_size_and_gathers_rows(biased: bool) -> None:
    weight, bias = torch.randn(48, 64), torch.randn(48) if biased else None
    x, ids = torch.randn(5, 64), torch.tensor([7, 0, 47])
    for linear in (Linear(weight, bias), make_linear(weight, bias)):
        assert (linear.out_features, linear.in_features) == (48, 64)
        assert linear.num_bytes == 4 * 48 * (65 if biased else 64)
        assert (linear.device, linear.compute_dtype) == (torch.device("cpu"), torch.float32)
        for chosen in (ids, slice(5)):
            rows = linear.rows(chosen)
            torch.testing.assert_close(rows(x), F.linear(x, weight, bias)[:, chosen])
            assert rows.out_features == (5 if isinstance(chosen, slice) else 3)


def test_a_head_keeps_float32_logits_and_looks_up_the_largest() -> None:
    head, x = Linear(torch.randn(9, 8, dtype=torch.bfloat16)), torch.randn(4, 8, dtype=torch.bfloat16)
    logits, ids = head.logits(x), torch.randperm(9)
    assert logits.dtype == torch.float32
    assert torch.equal(head.argmax(x), logits.argmax(1))
    assert torch.equal(head.argmax(x, ids), ids[logits.argmax(1)])


def test_between_slow_and_fast_frequencies_are_blended() -> None:
    """One pair, which turns once in 2 pi positions: twice in the trained length, where 1 is slow and 4 is fast."""
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope = RopeConfig("llama3", 10000.0, 2, 64, {**scaling, "original_max_position_embeddings": 4 * math.pi})
    (inverse,), factor = rope.frequencies()
    assert float(inverse) == pytest.approx(2 / 3 / 8 + 1 / 3) and factor == 1.0


def test_a_rope_factor_of_1_asks_for_nothing() -> None:
    plain = {"rope_theta": 10000.0}
    scaled = {**plain, "rope_scaling": {"rope_type": "default", "factor": 1.0}}
    found, expected = (RopeConfig.from_hf(config, 8, "config.json").frequencies() for config in (scaled, plain))
    assert found[1] == expected[1] and found[0][0].equal(expected[0][0])


def test_a_quantised_head_adds_its_bias() -> None:
    stored, bias, x = StoredWeight.rounded(torch.randn(64, 128)), torch.randn(64), torch.randn(3, 128)
    linear = QuantizedLinear(stored.operand(torch.float32), bias)
    torch.testing.assert_close(linear.logits(x), x @ stored.matrix(torch.float32).t() + bias, rtol=1e-4, atol=1e-4)


def test_a_linear_of_any_format_tells_its_weight() -> None:
    """Without its bias; of a head whose logits become others, before they do."""
    stored, bias = StoredWeight.rounded(torch.randn(64, 128)), torch.randn(64)
    weight = stored.matrix(torch.float32)
    quantised, packed = QuantizedLinear(stored.operand(torch.float32), bias), make_linear(weight, bias)
    for linear in (quantised, packed, Linear(weight, bias), DividedLogits(Linear(weight), 8.0)):
        torch.testing.assert_close(linear.matrix(), weight, rtol=1e-5, atol=1e-5)
    assert Linear(weight, bias).matrix().data_ptr() == weight.data_ptr()


def test_rows_that_change_places_take_their_scales_and_zeros_with_them() -> None:
    order, scales = torch.arange(64).flip(0), torch.arange(1.0, 129.0).reshape(2, 64)
    eight, four = StoredWeight.rounded(torch.randn(64, 128)), torch.randint(0, 16, (64, 128), dtype=torch.uint8)
    of_two_rows = StoredWeight(eight.values, scales[:1, :32], None, 8, 0, scale_rows=2)
    for stored in (eight, of_two_rows, StoredWeight(four, scales, scales % 16, 4, 64)):
        assert torch.equal(stored.in_order(order).matrix(torch.float64), stored.matrix(torch.float64)[order])


def test_matrices_of_integers_that_begin_elsewhere_are_not_stacked() -> None:
    one, other = (Groups(torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 1), None, 4, least) for least in (0, -8))
    assert one.like(one) and not one.like(other) and not other.like(one)


def test_weights_that_16_bits_cannot_hold_stay() -> None:
    linear = Linear(torch.randn(8, 32) / 3)
    assert in_16_bits((linear,), None) == (linear,)
