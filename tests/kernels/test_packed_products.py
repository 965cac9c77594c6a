"""The kernel of packed weights for 9 to 128 rows, packed_products.cu, in the emulator against float64 products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from emulators.cuda import CudaEmulator
from overlap_spec_kernels import Norm, Normed, OrderedQuantizedWeight
from overlap_spec_kernels.launch import assuming
from overlap_spec_kernels.linear import (
    ordered_quantized,
    packed_products as products,
    wide_linear as wide,
)
from overlap_spec_kernels.linear.call import Addition, Call, call_of
from overlap_spec_kernels.linear.packed_products import PackedProducts
from overlap_spec_kernels.linear.packing import Order, Packing, dequantised, in_fragments, in_rows, packed
from torch import Tensor

BFLOAT = torch.bfloat16
COMPILER = (
    "needs NVRTC and its bindings, 100 MB that come with PyTorch for CUDA and not for a CPU: where the kernel can run, "
    "this runs by itself; elsewhere, pip install cuda-bindings nvidia-cuda-nvrtc"
)
KINDS = {  # bits, columns and rows that share a scale, zero points, type of scales
    "fp8, rows": (8, 0, 1, False, torch.float32),
    "fp8, blocks": (8, 128, 128, False, torch.float32),
    "int4": (4, 128, 1, False, BFLOAT),
    "int4, zero points": (4, 128, 1, True, torch.float16),
    "int4, groups of 64": (4, 64, 1, True, torch.float32),
    "int4, groups of 32": (4, 32, 1, True, torch.float16),
}


class Weight(NamedTuple):
    data: Tensor  # in fragment order
    packing: Packing
    matrix: Tensor  # [O, I] f64


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    """In place of a GPU of six multiprocessors."""
    products._kernel.cache_clear()
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 6)
    monkeypatch.setattr(products, "ways_of_blocks", lambda form: ())
    cuda_emulator.multiprocessors = 6
    cuda_emulator.install(monkeypatch, products)
    yield cuda_emulator
    products._kernel.cache_clear()


def weight_of(kind: str, size_n: int, size_k: int) -> Weight:
    bits, group, scale_rows, has_zeros, scale_type = KINDS[kind]
    groups = size_k // group if group else 1
    scales = (torch.rand(groups, -(-size_n // scale_rows)) + 0.5) * size_k**-0.5 * (0.01 if bits == 8 else 0.2)
    values = torch.randint(0, 256 if bits == 8 else 16, (size_n, size_k), dtype=torch.uint8)
    values = values.where(values & 127 != 127, 8)
    zeros = (torch.randint(0, 16, (groups, size_n)) + 128).to(BFLOAT) if has_zeros else None
    part = 64 if group in (32, 64) else 128
    plain = Packing(scales.to(scale_type), zeros, bits, part, group, scale_rows)
    data = values if bits == 8 else packed(values, part)
    return Weight(*in_fragments(data, plain), dequantised(data, plain, torch.float64))


def product(
    cut: PackedProducts, x: Tensor | Normed, weight: Weight, gated: bool = False, add: Addition | None = None,
    dtype: torch.dtype = BFLOAT,
) -> Normed:  # fmt: skip
    call = call_of(x, weight.data, gated, add, dtype, cut.block_n)
    for tensor in (call.out, call.weighted, call.sums):
        if tensor is not None:
            tensor.fill_(torch.nan)
    cut.run(call, cut.num_programs(weight.data, gated), weight.packing)
    assert call.out is not None
    return Normed(call.out, call.out if call.weighted is None else call.weighted, call.sums, add.norm.eps if add else 0)


def assert_near(actual: Tensor, expected: Tensor, error: float = 4e-3) -> None:
    assert actual.shape == expected.shape
    assert float((actual.double() - expected).norm() / expected.norm()) < error


class Case(NamedTuple):
    kind: str
    rows: int
    size_n: int
    size_k: int
    cut: PackedProducts


# Rows that do not fill their tiles; tiles of W past its end; K of fewer stages than the ring has, and of half a stage
# more; parts of K of different lengths; more tiles than multiprocessors; two programs that share x; blocks of rows, of
# which the last one's results are in parts.
CASES = [
    Case("fp8, rows", 117, 480, 320, PackedProducts(32, 1, 2, splits=2, cluster=2, row_blocks=4, whole=2)),
    Case("fp8, rows", 21, 480, 320, PackedProducts(32, 1, 2, splits=2, cluster=2)),
    Case("int4, zero points", 17, 352, 640, PackedProducts(32, 2, 3, cluster=2)),
    Case("int4, groups of 64", 50, 2080, 448, PackedProducts(64, 1, 2, splits=3)),
    Case("fp8, blocks", 33, 544, 640, PackedProducts(48, 2, 2, splits=5)),
    Case("int4, groups of 32", 9, 1216, 320, PackedProducts(16, 1, 4, splits=2, warpgroups=3)),
    Case("int4", 128, 480, 384, PackedProducts(128, 1, 3, splits=3, cluster=2, early=1)),
    Case("fp8, rows", 100, 1056, 704, PackedProducts(112, 1, 2)),
    Case("int4, groups of 32", 64, 416, 448, PackedProducts(64, 2, 2, splits=4)),
    Case("fp8, rows", 5, 480, 704, PackedProducts(16, 1, 3, warpgroups=1, by_warps=True)),
    Case("fp8, rows", 31, 416, 320, PackedProducts(32, 1, 2, by_warps=True)),
    Case("fp8, blocks", 70, 288, 640, PackedProducts(32, 1, 2, splits=2, row_blocks=3, whole=2)),
    Case("int4", 89, 416, 384, PackedProducts(48, 1, 2, splits=3, cluster=2, row_blocks=2)),
]


NAMES = [f"{case.kind}, {case.rows} rows" for case in CASES]


@pytest.mark.slow
@pytest.mark.full_but_every(4)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_products(emulator: CudaEmulator, case: Case) -> None:
    """Results in 16 and 32 bits; sums with a residual, and what the norm after them needs."""
    weight, x = weight_of(case.kind, case.size_n, case.size_k), torch.randn(case.rows, case.size_k).to(BFLOAT)
    wide, norm = torch.randn(case.rows, case.size_n + 8).to(BFLOAT), torch.rand(case.size_n).to(BFLOAT)
    residual = wide[:, :-8]
    expected = x.double() @ weight.matrix.t()
    emulator.seed, emulator.written_before = CASES.index(case), [x, wide]
    assert_near(product(case.cut, x, weight).values, expected)
    assert_near(product(case.cut, x, weight, dtype=torch.float32).values, expected, 1e-5)
    total = product(case.cut, x, weight, add=Addition(residual, Norm(norm, 1e-5)))
    assert_near(total.values, expected + residual.double())
    assert_near(total.normalised(), F.rms_norm(total.values.double(), (case.size_n,), norm.double(), 1e-5))
    assert not products.split_counters(x.device).any()


@pytest.mark.slow_but_every(len(CASES))
@pytest.mark.full_but_every(7)
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_gates(emulator: CudaEmulator, case: Case) -> None:
    """Rows of x are scaled by a norm."""
    weight, values = weight_of(case.kind, case.size_n, case.size_k), torch.randn(case.rows, case.size_k).to(BFLOAT)
    squares = values.double().square().view(case.rows, 16, -1).sum(2).t().float().contiguous()
    scaled = values.double() * torch.rsqrt(values.double().square().mean(1, keepdim=True) + 1e-5)
    gate, up = (scaled @ weight.matrix.t()).chunk(2, dim=1)
    emulator.seed, emulator.written_before = CASES.index(case), [values, squares]
    actual = product(case.cut, Normed(values, values, squares, 1e-5), weight, gated=True)
    assert_near(actual.values, F.silu(gate) * up)
    assert not products.split_counters(values.device).any()


ONE_ORDER = [
    PackedProducts(16, 1, 3, warpgroups=1, row_blocks=3, by_warps=True),
    PackedProducts(16, 1, 2, by_warps=True),
    PackedProducts(16, 1, 2, by_warps=True, few=True),
    PackedProducts(32, 1, 4, warpgroups=1),
    PackedProducts(48, 1, 2),
]


@pytest.mark.slow_but_every(2 * len(ONE_ORDER))
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("cut", ONE_ORDER)
def test_a_row_has_one_class_of_bits(emulator: CudaEmulator, cut: PackedProducts, gated: bool) -> None:
    """Whatever multiplies, whatever rows are beside it, and in whatever block of rows; a gate is Triton's."""
    weight, x = weight_of("fp8, rows", 224, 320), torch.randn(45, 320).to(BFLOAT)
    whole = PackedProducts(48, 1, 3, warpgroups=1)
    expected = product(whole, x, weight, gated).values
    count = 7 if cut.few else min(cut.rows * cut.row_blocks, len(x))
    emulator.seed, emulator.written_before = 3, [x]
    assert torch.equal(product(cut, x[:count], weight, gated).values, expected[:count])


IN_PARTS = [
    PackedProducts(16, 1, 2, splits=3, by_warps=True),
    PackedProducts(32, 1, 2, splits=3),
    PackedProducts(48, 1, 2, cluster=2, row_blocks=3, splits=3),
]


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize("cut", IN_PARTS)
def test_parts_of_k_are_those_of_many_rows(
    emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch, cut: PackedProducts
) -> None:
    """A row has the bits that `wide_linear` gives it, which adds up as many parts of the same values."""
    wide._kernel.cache_clear()
    monkeypatch.setattr(wide, "num_multiprocessors", lambda device: 4)
    emulator.install(monkeypatch, wide)
    (data, packing, _), x = weight_of("fp8, rows", 208, 512), torch.randn(140, 512).to(BFLOAT)
    values = dequantised(*in_rows(data, packing), torch.float32, scaled=False).to(BFLOAT)
    out, many = torch.full((140, 208), torch.nan), wide.IN_PARTS._replace(parts=3)
    emulator.written_before = [x]
    many.run(Call(x, values, None, 0.0, False, out), many.num_programs(values, False), packing.scales[0])
    weight = Weight(data, packing, values)
    count = min(cut.rows * cut.row_blocks, len(x))
    found, whole = (
        product(each, x[:count], weight, dtype=torch.float32).values for each in (cut, cut._replace(splits=1))
    )
    assert torch.equal(found, out[:count]) and not torch.equal(whole, found)
    wide._kernel.cache_clear()


@pytest.fixture
def as_on_a_gpu(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of what a large weight runs in one order, but for kernels in Triton, whose references run."""
    wide._kernel.cache_clear()
    emulator.install(monkeypatch, wide)
    emulator.multiprocessors = 132
    monkeypatch.setattr(wide, "num_multiprocessors", lambda device: 4)
    monkeypatch.setattr(wide, "runs_hopper", lambda device: True)
    for module in (ordered_quantized, products, wide):
        monkeypatch.setattr(module, "_LARGE", 1 << 15)
    for name in ("add_in_parts", "scales_of_rows"):
        monkeypatch.setattr(ordered_quantized, name, getattr(ordered_quantized, f"{name}_reference"))
    monkeypatch.setattr(ordered_quantized, "runs_triton", lambda x: True)
    yield
    wide._kernel.cache_clear()


def in_blocks_of_96(form: products.Form) -> tuple[PackedProducts, ...]:
    return (PackedProducts(96, 1, 2, warpgroups=3),)


@pytest.mark.slow_but_every(2)
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("counts", [(7, 40), (12, 131)], ids=str)
def test_a_norm_between_linears_has_the_bits_of_many_rows(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    """The sum of a linear whose K has parts, and products and gates of its norm; scales are not those of one part.

    131 rows are in blocks.
    """
    output, plain, gate = (
        OrderedQuantizedWeight(*weight_of("fp8, rows", *shape)[:2], BFLOAT)
        for shape in ((192, 512), (96, 192), (224, 192))
    )
    x, residual = torch.randn(140, 512).to(BFLOAT), 8 * torch.randn(140, 192).to(BFLOAT)
    norm = Norm((torch.rand(192) + 0.5).to(BFLOAT), 1e-5)

    def results(count: int) -> list[Tensor]:
        added = output.add(x[:count], residual[:count], norm)
        assert added.squares is not None and added.squares.shape == (3, count)
        found = [added.values, added.weighted, added.squares.t(), plain.product(added), gate.gated(added)]
        return [*found, plain.logits(added)]

    expected = results(140)
    scaled = F.rms_norm(expected[0].double(), (192,), norm.weight.double(), 1e-5)
    assert_near(expected[5], scaled @ dequantised(*in_rows(plain.data, plain.packing), torch.float64).t())
    monkeypatch.setattr(products, "ways_of_blocks", in_blocks_of_96)
    for count in counts:
        for found, whole in zip(results(count), expected, strict=True):
            assert torch.equal(found, whole[:count]), count


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_orders_of_events(emulator: CudaEmulator, seed: int) -> None:
    """K so short that what scales rows of x may come last."""
    weight, x = weight_of("fp8, rows", 64, 64), torch.randn(30, 64).to(BFLOAT)
    emulator.seed, emulator.written_before = seed, [x]
    for _ in range(8):
        actual = product(PackedProducts(32, 1, 2), x, weight)
        assert_near(actual.values, x.double() @ weight.matrix.t())
        emulator.seed += 1000


LLAMA_8B = {"qkv": (6144, 4096), "output": (4096, 4096), "gate, up": (28672, 4096), "down": (4096, 14336)}


def chosen(monkeypatch: pytest.MonkeyPatch, name: str, rows: int, packing: Packing) -> PackedProducts | None:
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 132)  # as on an H200
    (size_n, size_k), gated = LLAMA_8B[name], name == "gate, up"
    x = torch.empty(rows, size_k, dtype=BFLOAT, device="meta")
    weight = torch.empty(size_n, size_k * packing.bits // 8, dtype=torch.uint8, device="meta")
    with assuming((9, 0)):
        return products.packed_products_for(x, weight, gated, packing)


def packing_of(kind: str, order: Order = Order.FRAGMENTS) -> Packing:
    bits, group, scale_rows, has_zeros, scale_type = KINDS[kind]
    scales = torch.empty(2, 2, 8, 2, dtype=scale_type, device="meta")
    zeros = scales.to(BFLOAT) if has_zeros else None
    return Packing(scales, zeros, bits, 128, group, scale_rows, order)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [9, 17, 32, 33, 64, 96, 128])
def test_most_multiprocessors_have_work_and_stages_have_room(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: int
) -> None:
    for name, (size_n, _) in LLAMA_8B.items():
        cut = chosen(monkeypatch, name, rows, packing := packing_of(kind))
        assert cut is not None
        form = products.form_of(packing, name == "gate, up")
        assert form is not None
        programs = cut.num_items(size_n // form.matrices) * cut.cluster
        assert cut.rows >= rows and 0.72 * 132 <= programs <= 132, name
        assert cut.stages >= 3 and cut.shared_bytes(form) + (5 << 10) <= 228 << 10
        assert cut.scale_bytes(form) % 128 == 0, "packed_products.cu does not compile"


def test_the_division_of_an_8b_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest of benchmarks/results/choosing/packed_products_h200.json."""
    ways = {  # warpgroups, programs of a cluster, parts of K
        ("fp8, rows", 32): {"qkv": (3, 2, 3), "output": (2, 1, 3), "gate, up": (2, 1, 1), "down": (2, 1, 4)},
        ("int4", 32): {"qkv": (3, 2, 4), "output": (2, 1, 4), "gate, up": (2, 1, 1), "down": (2, 1, 4)},
        ("fp8, rows", 128): {"qkv": (3, 2, 4), "output": (2, 1, 4), "gate, up": (2, 1, 1), "down": (2, 1, 4)},
        ("int4", 128): {"qkv": (3, 2, 4), "output": (2, 1, 4), "gate, up": (2, 1, 1), "down": (2, 1, 4)},
    }
    for (kind, rows), expected in ways.items():
        cuts = {name: chosen(monkeypatch, name, rows, packing_of(kind)) for name in LLAMA_8B}
        found = {name: (cut.warpgroups, cut.cluster, cut.splits) for name, cut in cuts.items() if cut is not None}
        assert found == expected, (kind, rows)


@pytest.mark.parametrize("kind", ["fp8, rows", "fp8, blocks"])
@pytest.mark.parametrize("rows", [160, 192, 256, 512, 768, 1024, 2048])
def test_blocks_of_rows_leave_few_multiprocessors_without_work(
    monkeypatch: pytest.MonkeyPatch, kind: str, rows: int
) -> None:
    for name, (size_n, _) in LLAMA_8B.items():
        cut = chosen(monkeypatch, name, rows, packing := packing_of(kind))
        assert cut is not None and (form := products.form_of(packing, name == "gate, up")) is not None
        assert cut.rows * (cut.row_blocks - 1) < rows <= cut.rows * cut.row_blocks
        results, clusters = cut.num_results(size_n // form.matrices), 132 // cut.cluster
        last = (results - cut.whole) * cut.splits
        assert cut.splits == 1 or last <= clusters, "the last round's results wait for others"
        rounds = cut.whole / clusters + (-(-last // clusters) / cut.splits)
        assert rows * size_n / form.matrices / (rounds * 132 * cut.rows * cut.columns) > 0.6, (name, cut)


def test_what_the_kernel_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    packing = packing_of("int4")
    assert chosen(monkeypatch, "qkv", 8, packing) is None and chosen(monkeypatch, "qkv", 1 << 15, packing) is None
    assert chosen(monkeypatch, "qkv", 32, packing_of("int4", Order.ROWS)) is None
    assert chosen(monkeypatch, "qkv", 32, replace(packing, group=256)) is None
    assert chosen(monkeypatch, "qkv", 32, replace(packing, scales=packing.scales.double())) is None
    assert products.packed_products_for(torch.empty(32, 4096, dtype=BFLOAT), packing.scales, False, packing) is None


@pytest.mark.full_but_every(2)
@pytest.mark.slow_but_every(2 * len(KINDS))
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", [*reversed(KINDS)])  # those of one order have 8 bits
def test_it_compiles(kind: str, gated: bool) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason=COMPILER)
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError:  # bindings without a library
        pytest.skip(COMPILER)
    form = products.form_of(packing_of(kind), gated)
    assert form is not None
    cut = PackedProducts(32, 1, 3, per_sm=2) if gated else PackedProducts(128, 2, 3, cluster=2)
    assert products.code_of(cut, form).compiled().startswith(b"\x7fELF")


OF_WEIGHTS = ((28672, 4096), (4096, 14336), (8192, 2048), (128, 64))


@pytest.mark.parametrize(
    ("gated", "count", "shapes"),
    [
        (True, 97, OF_WEIGHTS[:1]),  # most sums in registers, and two warpgroups
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((True, 97, OF_WEIGHTS[1:]), (True, 1, OF_WEIGHTS))),
        pytest.param(False, 97, OF_WEIGHTS, marks=pytest.mark.slow),
        *(pytest.param(True, count, OF_WEIGHTS, marks=pytest.mark.full) for count in (9, 17, 33, 49, 65)),
        *(pytest.param(False, count, OF_WEIGHTS, marks=pytest.mark.full) for count in (1, 9, 17, 33, 49, 65)),
    ],
)
def test_no_product_of_one_order_waits_for_registers(
    gated: bool, count: int, shapes: tuple[tuple[int, int], ...]
) -> None:
    """All divisions of small and large weights compile without a warning, which is an error here."""
    pytest.importorskip("cuda.bindings.nvrtc", reason=COMPILER)
    codes = set()
    for size_n, size_k in shapes:
        weight = torch.empty(size_n, size_k, dtype=torch.uint8, device="meta")
        for rows in (1, 9, 17, 33, 49, 65, 97):
            x = torch.empty(rows, size_k, dtype=BFLOAT, device="meta")
            cut = products.products_in_one_order(x, weight, gated, packing := packing_of("fp8, rows"))
            assert cut is not None and (form := products.form_of(packing, gated)) is not None
            assert cut.few == (rows <= 8)
            if rows == count:
                codes.add(products.code_of(cut, form))
    for code in codes:
        code._compile()  # what is kept would not warn again


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
def test_no_block_of_rows_waits_for_registers(gated: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason=COMPILER)
    form = products.form_of(packing_of("fp8, rows"), gated)
    assert form is not None and len(ways := products.ways_of_blocks(form)) > 2
    for way in ways:
        products.code_of(way, form)._compile()
