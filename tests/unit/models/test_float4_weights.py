"""Stored weights of 4-bit floats: rows in another order, weights below one another, what a GPU keeps."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels import Float4Weight
from overlap_spec_kernels.launch import assuming
from support.float4_weights import meaning_of, random_float4

from overlap_spec.models.quantization.float4 import Mxfp4Weight, Nvfp4Weight, StoredFloat4
from overlap_spec.models.quantization.linear import LinearForms, stacked

F64, META = torch.float64, torch.device("meta")
KINDS: dict[str, tuple[type[StoredFloat4], int]] = {"mxfp4": (Mxfp4Weight, 32), "nvfp4": (Nvfp4Weight, 16)}
Make = Callable[[int, int], StoredFloat4]


@pytest.fixture(params=KINDS)
def weight(request: pytest.FixtureRequest) -> Make:
    """One with so many rows and 64 columns, of a seed."""
    kind, group = KINDS[request.param]

    def make(rows: int, seed: int) -> StoredFloat4:
        values, scales, factors = random_float4(rows, 64, group, seed=seed)
        return kind(values, scales.t(), None, 4, group, 1, factors)

    return make


def meant(stored: StoredFloat4) -> torch.Tensor:
    return meaning_of(stored.values, stored.scales.t(), stored.factors)


def test_the_matrix_is_rounded_once(weight: Make) -> None:
    stored = weight(40, 1)
    assert torch.equal(stored.matrix(F64), meant(stored))
    torch.testing.assert_close(stored.matrix(torch.float32), meant(stored).float(), rtol=2e-7, atol=0)
    assert torch.equal(stored.matrix(torch.bfloat16), stored.matrix(torch.float32).bfloat16())


def test_rows_in_another_order(weight: Make) -> None:
    stored, order = weight(40, 1), torch.randperm(40)
    assert torch.equal(stored.in_order(order).matrix(F64), meant(stored)[order])


def test_weights_below_one_another(weight: Make) -> None:
    parts = [weight(rows, rows) for rows in (40, 8, 33)]
    whole = stacked(parts)
    assert torch.equal(whole.matrix(F64), torch.cat(list(map(meant, parts))))
    operand = whole.operand(F64)
    assert isinstance(operand, Float4Weight)
    assert torch.equal(operand.matrices.matrix(0, F64), whole.matrix(F64))


def test_one_without_values_is_as_large(weight: Make) -> None:
    whole, outlined = weight(70, 1).operand(torch.bfloat16), weight(8, 1)
    factors = None if outlined.factors is None else outlined.factors.to(META)
    outlined = replace(outlined, values=outlined.values.to(META), scales=outlined.scales.to(META), factors=factors)
    assert outlined.outlined(70).operand(torch.bfloat16).num_bytes == whole.num_bytes


def test_a_gpu_of_any_age_keeps_it_but_not_in_float64(weight: Make) -> None:
    for capability, dtype, keeps in (
        ((7, 5), torch.float16, True),
        ((9, 0), torch.bfloat16, True),
        ((9, 0), F64, False),
        (None, torch.bfloat16, False),
    ):
        with assuming(capability):
            assert LinearForms(dtype, META).keeps(weight(8, 1)) is keeps


def test_scales_that_leave_the_range_of_a_kernel_become_a_matrix() -> None:
    values, scales, _ = random_float4(8, 64, 32)
    for largest, keeps in ((128, True), (129, False)):
        scales[3, 1] = largest
        with assuming((9, 0)):
            assert LinearForms(torch.bfloat16, META).keeps(Mxfp4Weight(values, scales.t(), None, 4, 32)) is keeps
