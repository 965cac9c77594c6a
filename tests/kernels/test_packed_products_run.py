"""Several linears in one launch of packed_products.cu, in the emulator against float64 products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels import Norm, Normed
from overlap_spec_kernels.launch import assuming
from overlap_spec_kernels.linear import packed_products as products
from overlap_spec_kernels.linear.packed_products import PackedProducts
from overlap_spec_kernels.linear.packed_run import QuantizedRun, run_counter
from overlap_spec_kernels.linear.packed_stream import PackedStream
from overlap_spec_kernels.linear.packing import Order, Packing
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from support.cuda_emulator import CudaEmulator, guarded
from support.quantized_cases import Case, matrix_of, weight_of
from torch import Tensor

BFLOAT, HALF = torch.bfloat16, torch.float16
CPU = torch.device("cpu")
MULTIPROCESSORS = 5
FP8, BLOCKS = Case(1, 1, 1, 8), Case(1, 1, 1, 8, 128, 128)
INT4, OF_32 = (Case(1, 1, 1, 4, group, has_zeros=True, scales=HALF) for group in (128, 32))


class Shape(NamedTuple):
    """Of a layer's linears behind attention, and their division."""

    form: Case  # bits, groups and scales of all weights
    rows: int
    heads: int  # columns of the attention's result
    hidden: int
    inner: int
    after: int | None  # rows of the next layer's qkv
    ring: PackedProducts
    parts: tuple[int, ...]  # of K


# More tiles than programs, and fewer, so that some have no work in a linear; tiles past W's end; parts of K; a ring
# that holds whole linears, so that it is filled with two of them ahead.
SHAPES = {
    "fp8": Shape(FP8, 21, 320, 320, 704, 384, PackedProducts(32, 1, 2), (1, 1, 1, 1)),
    "fp8, a short K": Shape(FP8, 128, 128, 192, 128, 96, PackedProducts(128, 1, 3), (1, 1, 1, 1)),
    "fp8, blocks, no qkv": Shape(BLOCKS, 30, 896, 256, 384, None, PackedProducts(32, 1, 2), (2, 1, 3)),
    "int4, qkv of no rows": Shape(INT4, 40, 640, 128, 640, 0, PackedProducts(48, 1, 3), (2, 1, 2, 1)),
    "int4, gates in parts": Shape(OF_32, 17, 384, 128, 256, 128, PackedProducts(32, 1, 2), (3, 2, 2, 2)),
}


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    """In place of a GPU of five multiprocessors. What is not written yet is not a number."""
    products._kernel.cache_clear()
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: MULTIPROCESSORS)
    monkeypatch.setattr(torch.Tensor, "new_empty", nothing_yet)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
    cuda_emulator.multiprocessors = MULTIPROCESSORS
    cuda_emulator.install(monkeypatch, products)
    yield cuda_emulator
    products._kernel.cache_clear()


def nothing_yet(like: Tensor, size: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    return torch.full(size, torch.nan, dtype=dtype or like.dtype)


class Inputs(NamedTuple):
    """Of a run, and its result in float64."""

    run: QuantizedRun
    x: Tensor
    residual: Tensor
    total: Tensor  # [T, H]
    projected: Tensor | None  # [T, O]


def inputs_of(shape: Shape) -> Inputs:
    def weight(size_n: int, size_k: int) -> QuantizedWeight:
        return weight_of(shape.form._replace(size_n=size_n, size_k=size_k))

    hidden = shape.hidden
    plain = [weight(hidden, shape.heads), weight(2 * shape.inner, hidden), weight(hidden, shape.inner)]
    plain += [] if shape.after is None else [weight(shape.after or 128, hidden)]
    output, gate_up, down, *qkv = (matrix_of(each) for each in plain)
    norm, next_norm = (Norm(torch.rand(hidden).to(BFLOAT), eps) for eps in (0.1, 0.2))
    x, residual = (torch.randn(shape.rows, size).to(BFLOAT) for size in (shape.heads, hidden))
    middle = residual.double() + x.double() @ output.t()
    gate, up = (normalised(middle, norm) @ gate_up.t()).chunk(2, dim=1)
    total = middle + (F.silu(gate) * up) @ down.t()
    stored = [each.in_fragments() for each in plain]
    after = stored[3] if shape.after is not None else None
    if shape.after == 0 and after is not None:
        after = replace(after, data=after.data[:0])
    ahead = replace(stored[1], data=guarded(torch.zeros(3 * 2**14 - 2**11, dtype=torch.uint8)))  # not whole pieces
    run = QuantizedRun(stored[0], norm, stored[1], stored[2], next_norm, after, run_counter(CPU), ahead)
    return Inputs(run, x, residual, total, normalised(total, next_norm) @ qkv[0].t() if shape.after else None)


def normalised(x: Tensor, norm: Norm) -> Tensor:
    return F.rms_norm(x, x.shape[1:], norm.weight.double(), norm.eps)


def assert_right(found: Normed, inputs: Inputs) -> None:
    pairs = [(found.values, inputs.total), (found.normalised(), normalised(inputs.total, inputs.run.next_norm))]
    if inputs.projected is None:
        assert found.projected is None
    else:
        assert found.projected is not None
        pairs.append((found.projected, inputs.projected))
    for actual, expected in pairs:
        assert actual.shape == expected.shape
        assert float((actual.double() - expected).norm() / expected.norm()) < 8e-3


@pytest.mark.slow
@pytest.mark.full_but_every(2)
@pytest.mark.parametrize("name", SHAPES)
def test_it_reads_what_was_written_before(emulator: CudaEmulator, name: str) -> None:
    """In any order of events, and from launch to launch; counters are left at zero."""
    shape = SHAPES[name]
    inputs = inputs_of(shape)
    emulator.written_before = [inputs.x, inputs.residual]
    cuts = tuple(shape.ring._replace(splits=count) for count in shape.parts)
    for emulator.seed in range(3):
        assert_right(inputs.run.launch(cuts, inputs.x, inputs.residual), inputs)
        assert not (products.split_counters(CPU) & 0x7FFFFFFF).any()
        assert not products.linear_counters(CPU).any()


@pytest.mark.slow
def test_programs_without_work_do_not_run_ahead(emulator: CudaEmulator) -> None:
    """All but one have none in `output`, so that what scales rows of x may be a linear behind."""
    shape = Shape(FP8, 20, 64, 64, 576, 64, PackedProducts(32, 1, 2), (1, 1, 1, 1))
    inputs = inputs_of(shape)
    emulator.written_before = [inputs.x, inputs.residual]
    for emulator.seed in (60, 78, 115):  # orders of events that reach a deadlock if programs without work do not wait
        assert_right(inputs.run.launch((shape.ring,) * 4, inputs.x, inputs.residual), inputs)


# ---- which kernel, how divided ----

FORMS = {"fp8": (8, 0, torch.float32), "int4": (4, 128, BFLOAT)}


def run_of_8b(kind: str) -> QuantizedRun:
    bits, group, scales = FORMS[kind]
    packing = Packing(torch.empty(2, 2, 8, 2, dtype=scales, device="meta"), None, bits, 128, group, 1, Order.FRAGMENTS)
    output, gate_up, down, qkv = (
        QuantizedWeight(torch.empty(size_n, size_k * bits // 8, dtype=torch.uint8, device="meta"), packing, BFLOAT)
        for size_n, size_k in ((4096, 4096), (28672, 4096), (4096, 14336), (6144, 4096))
    )
    norm = Norm(torch.empty(4096, dtype=BFLOAT, device="meta"), 1e-5)
    return QuantizedRun(output, norm, gate_up, down, norm, qkv, run_counter(CPU))


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("rows", [4, 8, 9, 16, 17, 32, 64, 128, 129])
def test_the_division_of_an_8b_model(monkeypatch: pytest.MonkeyPatch, kind: str, rows: int) -> None:
    """All programs are one per multiprocessor, and nearly all have work."""
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 132)
    run = run_of_8b(kind)
    with assuming((9, 0)):
        cuts = run.cuts(torch.empty(rows, 4096, dtype=BFLOAT, device="meta"))
    if rows > 128:
        assert cuts is None
        return
    assert cuts is not None and all(isinstance(cut, PackedStream if rows <= 8 else PackedProducts) for cut in cuts)
    if rows > 8:
        assert [cut.splits for cut in cuts if isinstance(cut, PackedProducts)] == [4, 1, 4, 2]
        assert len({cut._replace(splits=1) for cut in cuts if isinstance(cut, PackedProducts)}) == 1


def test_weights_of_different_forms_do_not_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: 132)
    x = torch.empty(32, 4096, dtype=BFLOAT, device="meta")
    mixed = replace(run_of_8b("fp8"), down=run_of_8b("int4").down)
    with assuming((9, 0)):
        assert mixed.cuts(x) is None
        assert replace(run_of_8b("fp8"), next_qkv=None).cuts(x) is not None
        assert run_of_8b("fp8").cuts(x.float()) is None


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("kind", "rows"), [("fp8", 32), ("fp8", 128), ("int4", 128)])
def test_it_compiles(kind: str, rows: int) -> None:
    """For a real GPU and an 8B layer."""
    run = run_of_8b(kind)
    forms = [products.form_of(each.packing, gated) for each, gated in zip(run.weights, run.gated(), strict=True)]
    known = [form for form in forms if form is not None]
    ring = PackedProducts(rows, 1, 0).with_stages(*known)
    assert ring is not None
    assert products.code_of(ring, *known).compiled().startswith(b"\x7fELF")
