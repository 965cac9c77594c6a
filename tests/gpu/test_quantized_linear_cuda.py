"""The kernels of weights in 8 and 4 bits on a GPU: float64 products of the same values, dependent launches."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels import (
    DenseWeight,
    Norm,
    Normed,
    OrderedQuantizedWeight,
    compiling_together,
    fused_linear,
    linear_add,
    linear_beside,
    linear_logits,
)
from overlap_spec_kernels.linear.dequantize import dequantize
from overlap_spec_kernels.linear.packed_products import PackedProducts, form_of, in_parts, split_counters
from overlap_spec_kernels.linear.packed_stream import PackedStream
from overlap_spec_kernels.linear.packing import Order, Packing, dequantised, packed, part_of
from overlap_spec_kernels.linear.quantized import QuantizedWeight, Scratch
from overlap_spec_kernels.nvrtc import CudaCode, runs_hopper
from torch import Tensor

BFLOAT = torch.bfloat16
ON_HOPPER = pytest.mark.skipif(
    not (torch.cuda.is_available() and runs_hopper(torch.device("cuda"))),
    reason="only kernels for Hopper (sm_90a) multiply by weights in fragment order",
)
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


def in_order(weight: QuantizedWeight, order: Order) -> QuantizedWeight:
    return weight.in_fragments() if order is Order.FRAGMENTS else weight


def matrix_of(weight: QuantizedWeight) -> Tensor:
    return dequantised(weight.data, weight.packing, torch.float64)


def assert_near(actual: Tensor, expected: Tensor, error: float = 6e-3) -> None:
    assert actual.shape == expected.shape
    assert float((actual.double() - expected).norm() / expected.norm()) < error


SMALL = (384, 640)
LARGE = {"fp8, rows": (6144, 4096), "int4": (4096, 14336)}
PRODUCTS = [  # numbers of rows for each kernel, and for each padding of `packed_products`
    *((kind, rows, Order.FRAGMENTS, SMALL) for kind in KINDS for rows in (1, 9, 40, 90)),
    *((kind, rows, Order.FRAGMENTS, SMALL) for kind in ("fp8, rows", "fp8, blocks") for rows in (24, 27)),
    *(("fp8, blocks", rows, Order.FRAGMENTS, (2048, 4096)) for rows in (16, 32)),
    *((kind, rows, Order.FRAGMENTS, LARGE[kind]) for kind in LARGE for rows in (4, 12, 32, 128)),
    *((kind, rows, Order.ROWS, SMALL) for kind in KINDS for rows in (1, 9, 64)),
    *(("fp8, rows", rows, Order.ROWS, SMALL) for rows in (17, 100)),
    *(("fp8, rows", rows, Order.ROWS, LARGE["fp8, rows"]) for rows in (4, 64)),
    *((kind, 200, order, SMALL) for kind in LARGE for order in Order),
    *(("fp8, rows", rows, Order.FRAGMENTS, LARGE["fp8, rows"]) for rows in (300, 1000)),
    ("fp8, blocks", 330, Order.FRAGMENTS, SMALL),
    ("int4, zero points", 60, Order.FRAGMENTS, SMALL),
]


@pytest.mark.parametrize(("kind", "rows", "order", "shape"), PRODUCTS)
def test_products(kind: str, rows: int, order: Order, shape: tuple[int, int]) -> None:
    size_n, size_k = shape
    weight = in_order(weight_of(kind, size_n, size_k), order)
    x = torch.randn(rows, size_k, device="cuda", dtype=BFLOAT)
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


@ON_HOPPER
@pytest.mark.parametrize("rows", [1, 8, 16, 23, 32])
def test_another_matrix_beside(rows: int) -> None:
    """In one launch with up to 24 rows of x."""
    weight = weight_of("fp8, blocks", 1536, 2048).in_fragments()
    matrix, values = (torch.randn(count, 2048, device="cuda", dtype=BFLOAT) for count in (64, rows))
    parts = values.float().square().view(rows, 128, -1).sum(2).t().contiguous()
    x, wide = Normed(values, values, parts, 1e-5), values.double()
    found, beside = linear_beside(x, weight, DenseWeight(matrix))
    assert torch.equal(found, fused_linear(x, weight))
    assert_near(beside, wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-5) @ matrix.double().t())


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("kind", KINDS)
def test_a_scratch_matrix_has_the_values_rounded(kind: str, order: Order) -> None:
    weight = in_order(weight_of(kind, 384, 640), order)
    out = torch.empty(384, 640, dtype=BFLOAT, device="cuda")
    dequantize(weight.data, weight.packing, out)
    assert torch.equal(out, dequantised(weight.data, weight.packing, torch.float32).to(BFLOAT))


OF_ORDERS = [*((kind, Order.FRAGMENTS) for kind in KINDS), *((kind, Order.ROWS) for kind in LARGE)]


@pytest.mark.parametrize(("kind", "order"), OF_ORDERS)
@pytest.mark.parametrize("rows", [8, 32])
def test_a_row_does_not_depend_on_the_others(kind: str, rows: int, order: Order) -> None:
    x, weight = torch.randn(rows, 640, device="cuda", dtype=BFLOAT), in_order(weight_of(kind, 2048, 640), order)
    together = fused_linear(x, weight)
    for row in (0, 5, rows - 1):
        mixed = torch.randn(rows, 640, device="cuda", dtype=BFLOAT)
        mixed[row] = x[row]
        assert torch.equal(fused_linear(mixed, weight)[row], together[row])


@pytest.mark.parametrize(
    ("kind", "order", "rows"),
    [
        *((kind, order, rows) for kind, order in OF_ORDERS for rows in (4, 32)),
        *((kind, Order.FRAGMENTS, 16) for kind in LARGE),
    ],
)
def test_back_to_back_in_a_graph_it_follows_its_inputs(kind: str, rows: int, order: Order) -> None:
    """Linears that may each begin before the one before it has ended, and must not read too early."""
    x = torch.randn(rows, 640, device="cuda", dtype=BFLOAT)
    weights = [in_order(weight_of(kind, 640, 640), order) for _ in range(20)]

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


# The two that are chosen, and each number of programs and of blocks once.
WAYS = [(1, 2, 1, 1, False), (1, 2, 1, 1, True), (1, 3, 2, 1, False), (2, 2, 2, 2, False), (1, 2, 2, 2, True)]


@ON_HOPPER
@pytest.mark.parametrize(("kind", "rows"), [("fp8, rows", 100), ("int4, zero points", 32)])
@pytest.mark.parametrize(("blocks", "warpgroups", "cluster", "per_sm", "gated"), WAYS)
def test_every_division_of_many_rows(
    kind: str, rows: int, blocks: int, warpgroups: int, cluster: int, per_sm: int, gated: bool
) -> None:
    """Without parts of K and with as many as there can be; the same result each time, and counters left at zero."""
    weight, x = weight_of(kind, 2048, 4096).in_fragments(), torch.randn(rows, 4096, device="cuda", dtype=BFLOAT)
    form = form_of(weight.packing, gated)
    assert form is not None
    cut = PackedProducts(32 if rows == 32 else 128, blocks, 0, 1, warpgroups, cluster, per_sm).with_stages(form)
    if cut is None or (per_sm == 2 and rows > 64):
        return  # it has no room
    expected = x.double() @ matrix_of(weight).t()
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    for each in {cut, in_parts(cut, expected.shape[1], 4096, 132)}:
        first = weight.launch(each, x, gated, None, torch.float32).values
        assert_near(first, expected, 1e-4)
        for _ in range(10):
            assert torch.equal(weight.launch(each, x, gated, None, torch.float32).values, first)
        assert not split_counters(x.device).any()


@ON_HOPPER
@pytest.mark.parametrize(("size_n", "order", "kernel"), [(384, Order.FRAGMENTS, PackedStream), (328, Order.ROWS, None)])
def test_the_order_of_a_loaded_weight(size_n: int, order: Order, kernel: type | None) -> None:
    weight = weight_of("int4", size_n, 640).in_order_of_device()
    assert weight.packing.order is order
    x = torch.randn(5, 640, device="cuda", dtype=BFLOAT)
    assert isinstance(weight.cut(x, False), kernel or type(None))
    assert_near(fused_linear(x, weight), x.double() @ matrix_of(weight).t())


@ON_HOPPER
@pytest.mark.parametrize("shape", [(4096, 2048), (6144, 2048)], ids=["K in parts", "K whole"])
def test_with_the_flag_blocks_of_rows_have_the_bits_of_a_matrix(shape: tuple[int, int]) -> None:
    weight = OrderedQuantizedWeight.of(weight_of("fp8, rows", *shape).in_fragments())
    x, residual = (torch.randn(2100, size, device="cuda", dtype=BFLOAT) for size in reversed(shape))
    norm = Norm(torch.rand(shape[0], device="cuda").to(BFLOAT), 1e-5)
    many = weight.product(x), weight.gated(x), *weight.add(x, residual, norm)[:2]
    for count in (100, 150, 300, 500, 900):
        found = weight.add(x[:count], residual[:count], norm)
        for some, all_ in zip((weight.product(x[:count]), weight.gated(x[:count]), *found[:2]), many, strict=True):
            assert torch.equal(some, all_[:count]), count


@ON_HOPPER
@pytest.mark.parametrize("rows", [2, 20])
def test_it_is_compiled_in_another_process_and_kept(rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    weight, x = weight_of("int4", 128, 640).in_fragments(), torch.randn(rows, 640, device="cuda", dtype=BFLOAT)
    with compiling_together(1) as compilations, compilations.finding():
        assert not fused_linear(x, weight).any()
    assert list(tmp_path.rglob("*.cubin"))
    monkeypatch.delattr(CudaCode, "_compile")
    assert_near(fused_linear(x, weight), x.double() @ matrix_of(weight).t())
