"""The kernels that write a quantised weight as a matrix, under Triton's interpreter, in both orders."""

from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels.linear import dequantize
from overlap_spec_kernels.linear.packing import in_fragments
from support.quantized_cases import Case, matrix_of, weight_of

CASES = {
    "fp8, rows": Case(1, 48, 192, 8),
    "fp8, blocks": Case(1, 160, 384, 8, 128, 128),
    "int4": Case(1, 32, 128, 4, 128),
    "int4, groups of 32, zero points": Case(1, 32, 576, 4, 32, has_zeros=True, scales=torch.float16),
}


@pytest.fixture(autouse=True)
def _on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantize, "runs_triton", lambda tensor: True)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_matrix(name: str, in_tiles: bool) -> None:
    weight = weight_of(CASES[name])
    data, packing = in_fragments(weight.data, weight.packing) if in_tiles else (weight.data, weight.packing)
    out = torch.full(weight.shape, torch.nan)
    dequantize.dequantize(data, packing, out)
    torch.testing.assert_close(out.double(), matrix_of(weight), rtol=1e-6, atol=1e-6)
    dequantize.dequantize(data, packing, out, scaled=False)
    plain = replace(weight.packing, scales=torch.ones_like(weight.packing.scales))
    assert torch.equal(out.double(), matrix_of(replace(weight, packing=plain)))
