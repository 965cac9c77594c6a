"""The kernels of weights in 8 and 4 bits on a GPU: float64 products of the same values, dependent launches."""

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels import Norm, Normed, fused_linear, linear_add, linear_logits
from overlap_spec_kernels.linear.dequantize import dequantize
from overlap_spec_kernels.linear.packing import Packing, dequantised, packed, part_of
from overlap_spec_kernels.linear.quantized import QuantizedWeight, Scratch
from torch import Tensor

BFLOAT = torch.bfloat16
KINDS = {  # bits, columns and rows that share a scale, zero points, type of scales
    "fp8, rows": (8, 0, 1, False, torch.float32),
    "fp8, blocks": (8, 128, 128, False, torch.float32),
    "int4": (4, 128, 1, False, BFLOAT),
    "int4, zero points": (4, 128, 1, True, torch.float16),
    "int4, groups of 64": (4, 64, 1, True, torch.float16),
    "int4, groups of 32": (4, 32, 1, False, torch.float16),
}


def weight_of(kind: str, size_n: int, size_k: int) -> QuantizedWeight:
    bits, group, scale_rows, has_zeros, scale_type = KINDS[kind]
    part = part_of(bits, group, size_k)
    assert part is not None
    groups = size_k // group if group else 1
    scales = (torch.rand(groups, -(-size_n // scale_rows), device="cuda") + 0.5) * size_k**-0.5
    scales = (scales * (0.01 if bits == 8 else 0.2)).to(scale_type)
    data = torch.randint(0, 256, (size_n, size_k), dtype=torch.uint8, device="cuda")
    data = data.where(data & 127 != 127, 8) if bits == 8 else packed(data & 15, part)
    zeros = (torch.randint(0, 16, (groups, size_n), device="cuda") + 128).to(BFLOAT) if has_zeros else None
    scratch = Scratch(torch.empty(size_n * size_k, dtype=BFLOAT, device="cuda"))
    return QuantizedWeight(data, Packing(scales, zeros, bits, part, group, scale_rows), BFLOAT, scratch)


def matrix_of(weight: QuantizedWeight) -> Tensor:
    return dequantised(weight.data, weight.packing, torch.float64)


def assert_near(actual: Tensor, expected: Tensor, error: float = 6e-3) -> None:
    assert actual.shape == expected.shape
    assert float((actual.double() - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize(
    ("kind", "size_n", "size_k"),
    [*((kind, 384, 640) for kind in KINDS), ("fp8, rows", 6144, 4096), ("int4", 4096, 14336)],
)
@pytest.mark.parametrize("rows", [1, 9, 17, 64, 100, 200])
def test_products(kind: str, rows: int, size_n: int, size_k: int) -> None:
    weight, x = weight_of(kind, size_n, size_k), torch.randn(rows, size_k, device="cuda", dtype=BFLOAT)
    expected = x.double() @ matrix_of(weight).t()
    assert_near(fused_linear(x, weight), expected)
    assert_near(linear_logits(x, weight), expected)
    values = torch.randn(rows, size_k, device="cuda", dtype=BFLOAT)
    parts = values.double().square().view(rows, 4, -1).sum(2).t().float().contiguous()
    scaled = values.double() * torch.rsqrt(values.double().square().mean(1, keepdim=True) + 1e-5)
    gate, up = (scaled @ matrix_of(weight).t()).chunk(2, dim=1)
    assert_near(fused_linear(Normed(values, values, parts, 1e-5), weight, gated=True), F.silu(gate) * up)
    residual = torch.randn(rows, size_n, device="cuda", dtype=BFLOAT)
    norm = Norm(torch.rand(size_n, device="cuda").to(BFLOAT), 1e-5)
    total = linear_add(x, weight, residual, norm)
    assert_near(total.values, expected + residual.double())
    wanted = F.rms_norm(total.values.double(), (size_n,), norm.weight.double(), norm.eps)
    assert_near(total.normalised(), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scratch_matrix_has_the_values_rounded(kind: str) -> None:
    weight = weight_of(kind, 384, 640)
    out = torch.empty(384, 640, dtype=BFLOAT, device="cuda")
    dequantize(weight.data, weight.packing, out)
    assert torch.equal(out, dequantised(weight.data, weight.packing, torch.float32).to(BFLOAT))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [8, 32])
def test_a_row_does_not_depend_on_the_others(kind: str, rows: int) -> None:
    x, weight = torch.randn(rows, 640, device="cuda", dtype=BFLOAT), weight_of(kind, 2048, 640)
    together = fused_linear(x, weight)
    for row in (0, 5, rows - 1):
        mixed = torch.randn(rows, 640, device="cuda", dtype=BFLOAT)
        mixed[row] = x[row]
        assert torch.equal(fused_linear(mixed, weight)[row], together[row])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [4, 32])
def test_back_to_back_in_a_graph_it_follows_its_inputs(kind: str, rows: int) -> None:
    """Linears that may each begin before the one before it has ended, and must not read too early."""
    x = torch.randn(rows, 640, device="cuda", dtype=BFLOAT)
    weights = [weight_of(kind, 640, 640) for _ in range(20)]

    def forward(waits: bool) -> Tensor:
        y = x
        for weight in weights:
            y = fused_linear(y, weight)
            if waits:
                torch.cuda.synchronize()
        return y

    forward(waits=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward(waits=False)
    for _ in range(5):
        x.normal_()
        graph.replay()
        assert torch.equal(result, forward(waits=True))
