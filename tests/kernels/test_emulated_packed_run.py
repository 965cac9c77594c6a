"""Several linears in one launch of packed_stream.cu, in the emulator: float64 products, launches of one linear each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
import torch
from overlap_spec_kernels import Norm, Normed
from overlap_spec_kernels.launch import assuming, compiling_only
from overlap_spec_kernels.linear import packed_run
from overlap_spec_kernels.linear import packed_stream as packed
from overlap_spec_kernels.linear.call import Addition
from overlap_spec_kernels.linear.packed_run import Cuts, QuantizedRun, linear_run, run_counter
from overlap_spec_kernels.linear.packed_stream import PackedStream, padded, with_common_stages
from overlap_spec_kernels.linear.packing import Packing
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from overlap_spec_kernels.nvrtc import compiling_with
from support.cuda_emulator import CudaEmulator, guarded
from support.quantized_cases import Case, weight_of
from support.quantized_runs import run_by_definition
from torch import Tensor

BFLOAT, HALF = torch.bfloat16, torch.float16
CPU = torch.device("cpu")


class Shape(NamedTuple):
    """Of a layer's linears behind attention, and their division."""

    form: Case  # bits, groups and scales of all weights
    rows: int
    hidden: int
    inner: int
    heads: int  # columns of the attention's result
    after: int | None  # rows of the next layer's qkv
    stages: int = 3
    warps: int = 8
    tiles: int = 2
    clusters: tuple[int, ...] = (1, 1, 2, 1)


INT4, FP8 = Case(1, 1, 1, 4, 128, has_zeros=True, scales=HALF), Case(1, 1, 1, 8)
SHAPES = {
    "fp8, qkv of no rows, a ring longer than a linear": Shape(FP8, 1, 256, 512, 128, 0, stages=16, tiles=1),
    "fp8, cluster for down": Shape(FP8, 3, 192, 1408, 256, 320),
    "fp8, no qkv": Shape(FP8, 11, 128, 512, 320, None, stages=2, clusters=(1, 1, 1)),
    "int4, all in clusters": Shape(INT4, 8, 256, 1536, 512, 144, clusters=(2, 2, 2, 2)),
    "int4, 16 rows": Shape(INT4, 16, 128, 768, 256, 64, warps=16, tiles=1),
}


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    """In place of a GPU of 4 multiprocessors."""
    packed._kernel.cache_clear()
    cuda_emulator.install(monkeypatch, packed)
    yield cuda_emulator
    packed._kernel.cache_clear()


def run_of(shape: Shape) -> QuantizedRun:
    """Random weights and norms."""

    def weight(size_n: int, size_k: int) -> QuantizedWeight:
        whole = weight_of(shape.form._replace(size_n=max(size_n, 16), size_k=size_k)).in_fragments()
        return replace(whole, data=guarded(whole.data)[:size_n])

    def norm(eps: float) -> Norm:
        return Norm(guarded((torch.rand(shape.hidden) + 0.5).to(BFLOAT)), eps)

    output, down = weight(shape.hidden, shape.heads), weight(shape.hidden, shape.inner)
    gate_up = weight(2 * shape.inner, shape.hidden)
    after = None if shape.after is None else weight(shape.after, shape.hidden)
    return QuantizedRun(output, norm(0.1), gate_up, down, norm(0.2), after, run_counter(CPU), output)


def cuts_of(shape: Shape, run: QuantizedRun) -> tuple[PackedStream, ...]:
    cuts = []
    for weight, cluster in zip(run.weights, shape.clusters, strict=True):
        most = -(-weight.shape[1] // 64 // cluster // shape.warps)
        cuts.append(PackedStream(2, min(shape.tiles, most), padded(shape.rows), cluster, shape.warps))
    fits = with_common_stages(cuts, run.gated(), [each.packing for each in run.weights])
    assert fits is not None
    return tuple(cut._replace(stages=min(shape.stages, cut.stages)) for cut in fits)


def one_by_one(shape: Shape, run: QuantizedRun, x: Tensor, residual: Tensor) -> Normed:
    """The same divisions, in a launch for each linear."""

    def alone(cut: PackedStream, gated: bool, packing: Packing) -> PackedStream:
        fits = packed.with_stages(cut, gated, packing)
        assert fits is not None
        return fits._replace(stages=2)

    cuts = [
        alone(cut, gated, weight.packing)
        for cut, gated, weight in zip(cuts_of(shape, run), run.gated(), run.weights, strict=True)
    ]
    middle = run.output.launch(cuts[0], x, False, Addition(residual, run.norm), BFLOAT)
    gates = run.gate_up.launch(cuts[1], middle, True, None, BFLOAT).values
    after = run.down.launch(cuts[2], gates, False, Addition(middle.values, run.next_norm), BFLOAT)
    if not shape.after:
        return after
    assert run.next_qkv is not None
    return after._replace(projected=run.next_qkv.launch(cuts[3], after, False, None, BFLOAT).values)


def random_shape(seed: int) -> Shape:
    """Any shape, in any division that fits."""
    draw = Random(seed)
    form = draw.choice((INT4, FP8, Case(1, 1, 1, 8, 128, 128), Case(1, 1, 1, 4, 32, scales=BFLOAT)))
    clusters = draw.choice(((1, 1, 1, 1), (1, 1, 2, 1), (2, 2, 2, 2), (4, 1, 4, 1)))
    unit = 512 if form.group == 128 else 256  # columns: whole groups for each program of a cluster
    hidden, inner, heads = (unit * draw.randint(1, most) for most in (2, 4, 2))
    after = draw.choice((None, 0, 16 * draw.randint(1, 20)))
    division = draw.choice((2, 3, 16)), draw.choice((8, 16)), draw.choice((1, 2, 4))
    return Shape(form, draw.randint(1, 16), hidden, inner, heads, after, *division, clusters[: 3 + (after is not None)])


def launched(emulator: CudaEmulator, shape: Shape, run: QuantizedRun, x: Tensor, residual: Tensor) -> Normed:
    """The same whatever the order of events and the number of multiprocessors."""
    emulator.written_before = [x, residual]
    results = []
    for seed in range(3):
        emulator.seed, emulator.multiprocessors = seed, (4, 2, 6)[seed]
        results.append(run.launch(cuts_of(shape, run), x, residual))
    meetings = 3 * (3 if shape.after else 2)
    assert run.counter.item() % 2**32 == meetings % 2 * 2**31, "each meeting turns the highest bit"
    for each in results[1:]:
        assert_equal(each, results[0])
    return results[0]


def assert_equal(found: Normed, wanted: Normed) -> None:
    for each, other in zip(found, wanted, strict=True):
        assert torch.equal(each, other) if isinstance(each, Tensor) else each == other


def inputs(shape: Shape) -> tuple[Tensor, Tensor]:
    """x and the residual."""
    sizes = shape.heads, shape.hidden
    x, residual = (guarded(torch.randn(shape.rows, size).to(BFLOAT)) for size in sizes)
    return x, residual


@pytest.mark.slow
@pytest.mark.full_but_every(3)
@pytest.mark.parametrize("name", SHAPES)
def test_it_is_what_the_linears_compute(emulator: CudaEmulator, name: str) -> None:
    shape = SHAPES[name]
    run, (x, residual) = run_of(shape), inputs(shape)
    found = launched(emulator, shape, run, x, residual)
    computed = [found.values, found.normalised(), *([] if found.projected is None else [found.projected])]
    for each, expected in zip(computed, run_by_definition(run, x, residual), strict=True):
        assert float((each.double() - expected).norm() / expected.norm()) < 8e-3


@pytest.mark.full
@pytest.mark.parametrize("seed", range(24))
def test_it_is_what_single_launches_compute(emulator: CudaEmulator, seed: int) -> None:
    """To the bit, for any shape in any division."""
    torch.manual_seed(seed)
    shape = random_shape(seed)
    run, (x, residual) = run_of(shape), inputs(shape)
    assert_equal(launched(emulator, shape, run, x, residual), one_by_one(shape, run, x, residual))


def run_like(form: Case, hidden: int, inner: int, qkv: int) -> QuantizedRun:
    """Weights without values, in fragment order."""
    packing = weight_of(form._replace(size_n=32, size_k=512)).in_fragments().packing

    def weight(size_n: int, size_k: int) -> QuantizedWeight:
        data = torch.empty(size_n, size_k * packing.bits // 8, dtype=torch.uint8, device="meta")
        return QuantizedWeight(data, packing, BFLOAT)

    norm, meta = Norm(torch.empty(hidden, dtype=BFLOAT, device="meta"), 1e-5), torch.device("meta")
    weights = weight(hidden, hidden), norm, weight(2 * inner, hidden), weight(hidden, inner), norm, weight(qkv, hidden)
    return QuantizedRun(*weights, run_counter(meta))


def division(run: QuantizedRun, rows: int) -> Cuts | None:
    with assuming((9, 0)):
        return run.cuts(torch.empty(rows, run.output.shape[1], dtype=BFLOAT, device="meta"))


def test_the_division_of_an_8b_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster divides K of the longest linear alone."""
    fp8, int4 = (run_like(form, 4096, 14336, 6144) for form in (FP8, INT4))
    alone, together = PackedStream(6, 2, 8), PackedStream(6, 2, 8, cluster=2)
    assert division(fp8, 1) == division(fp8, 8) == (alone, alone, together, alone)
    alone, together = PackedStream(5, 4, 8), PackedStream(5, 4, 8, cluster=2)
    assert division(int4, 4) == (alone, alone, together, alone)
    assert division(run_like(FP8, 1024, 3072, 2048), 16) is not None
    assert fp8.cuts(torch.empty(1, 4096, dtype=BFLOAT)) is None, "no GPU"
    monkeypatch.setattr(packed_run, "shares_gpu", lambda device: True)
    assert division(fp8, 1) is None, "programs of two processes would wait for each other"


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize("form", [FP8, INT4], ids=["fp8", "int4"])
def test_it_compiles(form: Case) -> None:
    """For a real GPU and an 8B layer."""
    run, compiled = run_like(form, 4096, 14336, 6144), []
    x = torch.empty(4, 4096, dtype=BFLOAT, device="meta")
    with assuming((9, 0)), compiling_only(), compiling_with(lambda code: compiled.append(code.compiled())):
        linear_run(x, x, run)
    assert len(compiled) == 1 and compiled[0].startswith(b"\x7fELF")
