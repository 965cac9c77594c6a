"""The kernel of quantised weights in fragment order, packed_stream.cu, in the emulator against float64 products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from emulators.cuda import CudaEmulator, guarded
from overlap_spec_kernels import Norm, Normed
from overlap_spec_kernels.linear import packed_stream as packed
from overlap_spec_kernels.linear.call import Addition, call_of
from overlap_spec_kernels.linear.packed_stream import Beside, PackedStream
from overlap_spec_kernels.linear.packing import Packing
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from overlap_spec_kernels.nvrtc import CudaCode
from support.quantized_cases import Case, matrix_of, weight_of
from torch import Tensor

BFLOAT, HALF = torch.bfloat16, torch.float16


class Run(NamedTuple):
    """What is computed, and a division other than the one for the shape."""

    case: Case
    gated: bool = False
    adds: bool = False
    scaled: bool = False  # by a norm, of whose squares there are so many parts
    parts: int = 5
    dtype: torch.dtype = BFLOAT
    stages: int = 2
    tiles: int = 1
    cluster: int = 1
    warps: int = 8
    early: int = 2
    wide_norm: bool = False  # of a float32 weight


RUNS = {
    "int4, a gate": Run(Case(5, 384, 768, 4, 128, scales=BFLOAT), gated=True, scaled=True, parts=300),
    "fp8, an addition, 11 rows, idle warps": Run(Case(11, 304, 704, 8), adds=True, stages=3),
    "int4, groups of 32, cluster": Run(Case(3, 208, 1024, 4, 32, has_zeros=True, scales=HALF), cluster=2),
    "fp8, blocks, logits": Run(Case(16, 256, 1280, 8, 128, 128), dtype=torch.float32, tiles=2),
    "int4, groups of 64, an addition, cluster": Run(
        Case(9, 160, 3328, 4, 64, has_zeros=True), adds=True, cluster=4, tiles=2, warps=16
    ),
    "fp8, groups, a gate, cluster": Run(Case(1, 352, 1536, 8, 128), gated=True, cluster=2, stages=4),
    "int4, all stages of a small weight": Run(Case(8, 16, 1024, 4, 128, scales=BFLOAT), stages=16, warps=16, early=1),
    "fp8, blocks, 27 rows, an addition, cluster": Run(
        Case(27, 112, 1024, 8, 128, 128), adds=True, cluster=2, stages=3, wide_norm=True
    ),
    "fp8, K of three steps": Run(Case(2, 96, 2240, 8), scaled=True, tiles=2, warps=16, dtype=torch.float32),
}


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    """In place of a GPU of 4 multiprocessors, or of one cluster."""
    clear_caches()
    cuda_emulator.install(monkeypatch, packed)
    yield cuda_emulator
    clear_caches()


def clear_caches() -> None:
    packed._kernel.cache_clear()


def cut_of(run: Run, packing: Packing) -> PackedStream:
    cut = PackedStream(2, run.tiles, packed.padded(run.case.rows), run.cluster, run.warps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_MOST_STAGES", 16)  # more than pay
        fits = packed.with_stages(cut, run.gated, packing)
    assert fits is not None
    return cut._replace(stages=min(run.stages, fits.stages), early=run.early)


def inputs(run: Run) -> tuple[Tensor | Normed, Addition | None, list[Tensor]]:
    """x, the residual, and the tensors that the kernel before writes."""
    x = guarded(torch.randn(run.case.rows, run.case.size_k).to(BFLOAT))
    residual = guarded(torch.randn(run.case.rows, 2 * run.case.size_n).to(BFLOAT))
    squares = guarded(torch.rand(run.parts, run.case.rows) * run.case.size_k / run.parts + 1)
    norm = Norm(guarded((torch.rand(run.case.size_n) + 0.5).to(torch.float32 if run.wide_norm else BFLOAT)), 0.1)
    add = Addition(residual[:, : run.case.size_n], norm) if run.adds else None
    return Normed(x, x, squares, 1e-5) if run.scaled else x, add, [x, residual, squares]


def in_guarded_memory(weight: QuantizedWeight) -> QuantizedWeight:
    packing = weight.packing
    zeros = None if packing.zeros is None else guarded(packing.zeros)
    return replace(
        weight, data=guarded(weight.data), packing=replace(packing, scales=guarded(packing.scales), zeros=zeros)
    )


def expected(run: Run, x: Tensor | Normed, matrix: Tensor, add: Addition | None) -> Tensor:
    wide = x.weighted.double() if isinstance(x, Normed) else x.double()
    if isinstance(x, Normed) and x.squares is not None:
        wide = wide * torch.rsqrt(x.squares.double().sum(0) / run.case.size_k + x.eps)[:, None]
    y = wide @ matrix.t()
    if run.gated:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return y if add is None else y + add.residual.double()


def launched(run: Run, weight: QuantizedWeight, x: Tensor | Normed, add: Addition | None) -> Normed:
    """As `QuantizedWeight.launch`."""
    cut = cut_of(run, weight.packing)
    call = call_of(x, weight.data, run.gated, add, run.dtype, cut.block_n)
    names = ("out", "weighted", "sums") if run.adds else ("out",)
    results = {name: guarded(getattr(call, name)) for name in names}
    call = call._replace(**results)
    cut.run(call, cut.num_programs(weight.data, run.gated), weight.packing)
    assert call.out is not None
    return Normed(call.out, call.out if call.weighted is None else call.weighted, call.sums, add.norm.eps if add else 0)


FORMATS = (
    Case(1, 1, 1, 8),
    Case(1, 1, 1, 8, 128, 128),
    Case(1, 1, 1, 8, 128),
    Case(1, 1, 1, 4, 128, scales=BFLOAT),
    Case(1, 1, 1, 4, 128, has_zeros=True, scales=HALF),
    Case(1, 1, 1, 4, 64, has_zeros=True, scales=BFLOAT),
    Case(1, 1, 1, 4, 64),
    Case(1, 1, 1, 4, 32, has_zeros=True, scales=HALF),
    Case(1, 1, 1, 4, 32, scales=BFLOAT),
)


def random_run(seed: int) -> tuple[Run, int]:
    """Any shape that any division of 8 or 16 warps can multiply, and a number of multiprocessors."""
    draw = Random(seed)
    form, rows, warps, cluster = (
        draw.choice(FORMATS),
        draw.randint(1, 32),
        draw.choice((8, 16)),
        draw.choice((1, 1, 2, 4)),
    )
    whole = cluster * max(1, {64: 128, 0: 64}.get(form.group, form.group) // 64)  # tiles
    most = packed._X_REGISTERS // packed.padded(rows) * cluster  # tiles whose columns of x registers hold
    size_k = 64 * whole * draw.randint(1, max(1, min(most, 64) // whole))
    gated, adds = draw.choice(((False, False), (True, False), (False, True)))
    case = form._replace(rows=rows, size_n=16 * draw.randint(1, 9) * (2 if gated else 1), size_k=size_k)
    tiles = min(draw.choice((1, 2, 4)), -(-size_k // 64 // cluster // warps))
    dtype = BFLOAT if gated or adds else draw.choice((BFLOAT, torch.float32))
    scaled, stages = not adds and draw.random() < 0.5, draw.choice((2, 2, 3, 5, 16))
    parts = draw.choice((1, 5, 256, 300))
    run = Run(case, gated, adds, scaled, parts, dtype, stages, tiles, cluster, warps)
    return run._replace(early=draw.choice((1, 2, 3, 16))), draw.choice((1, 2, 4, 8))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(40))
def test_any_shape_in_any_division(emulator: CudaEmulator, seed: int) -> None:
    run, emulator.multiprocessors = random_run(seed)
    torch.manual_seed(seed)
    assert_product(emulator, run)


def test_a_norm_in_float32(emulator: CudaEmulator) -> None:
    run = Run(Case(3, 32, 512, 8, 128, 128), adds=True, wide_norm=True)
    assert_product(emulator, run)


@pytest.mark.parametrize(("rows", "parts", "warps"), [(13, 64, 8), (27, 300, 8), (6, 70, 16)])
def test_warps_add_up_squares_of_all_rows(emulator: CudaEmulator, rows: int, parts: int, warps: int) -> None:
    assert_product(emulator, Run(Case(rows, 32, 1024, 8, 128, 128), scaled=True, parts=parts, warps=warps))


@pytest.mark.slow
@pytest.mark.full_but_every(4)
@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_product(emulator: CudaEmulator, name: str) -> None:
    assert_product(emulator, RUNS[name])


@pytest.mark.slow
def test_every_lane_may_arrive(emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for racecheck: tests/gpu/test_sanitizer_cases_cuda.py."""
    defines = PackedStream.defines
    monkeypatch.setattr(PackedStream, "defines", lambda *given: (*defines(*given), "ARRIVING=32"))
    assert_product(emulator, RUNS["fp8, groups, a gate, cluster"])


def assert_product(emulator: CudaEmulator, run: Run) -> None:
    rows = weight_of(run.case)
    weight, (x, add, written) = in_guarded_memory(rows.in_fragments()), inputs(run)
    wanted = expected(run, x, matrix_of(rows), add)
    close = 1e-4 if run.dtype == torch.float32 else 2**-6
    results = []
    for seed in range(2):
        emulator.seed, emulator.written_before = seed, written
        found = launched(run, weight, x, add)
        torch.testing.assert_close(found.values.double(), wanted, rtol=close, atol=close)
        if add is not None:
            norm = F.rms_norm(found.values.double(), (run.case.size_n,), add.norm.weight.double(), add.norm.eps)
            torch.testing.assert_close(found.normalised().double(), norm, rtol=close, atol=close)
        results.append(found.weighted)
    assert all(torch.equal(each, results[0]) for each in results), "the order of events changes nothing"


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(("rows", "of_beside", "scaled"), [(1, 6, True), (5, 3, True), (11, 9, False), (23, 5, True)])
def test_another_matrix_beside(emulator: CudaEmulator, rows: int, of_beside: int, scaled: bool) -> None:
    """More rows than programs, or fewer; more rows of x than warps multiply at once."""
    run = Run(Case(rows, 256, 512, 8, 128, 128), scaled=scaled, parts=70)
    weight, (x, _, written) = in_guarded_memory(weight_of(run.case).in_fragments()), inputs(run)
    matrix = guarded(torch.randn(of_beside, 512).to(BFLOAT))
    cut = cut_of(run, weight.packing)
    assert cut.takes_beside(matrix) and not cut._replace(cluster=2).takes_beside(matrix)
    assert not cut._replace(leaves_room=True).takes_beside(matrix) and not cut.takes_beside(matrix.float())
    assert not cut._replace(rows=32).takes_beside(matrix), "too few registers"
    call, results = call_of(x, weight.data, False, None, BFLOAT, cut.block_n), []
    for seed, beside in enumerate((Beside(matrix, guarded(torch.empty(rows, of_beside, dtype=BFLOAT))), None)):
        emulator.seed, emulator.written_before = seed, written
        call = call._replace(out=guarded(torch.empty(rows, 256, dtype=BFLOAT)))
        cut.run(call, cut.num_programs(weight.data, False), weight.packing, beside)
        results.append(call.out)
        if beside is not None:
            found, wanted = beside.out.double(), expected(run, x, matrix.double(), None)
            torch.testing.assert_close(found, wanted, rtol=2**-6, atol=2**-6)
    assert torch.equal(*results), "what is beside changes no bit"


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("name", RUNS)
def test_it_compiles(name: str) -> None:
    """For a real GPU, as the emulator runs it."""
    run = RUNS[name]
    weight, (x, add, _) = weight_of(run.case).in_fragments(), inputs(run)
    cut = cut_of(run, weight.packing)
    call = call_of(x, weight.data, run.gated, add, run.dtype, cut.block_n)
    code = CudaCode(packed.SOURCE, cut.defines(call, weight.packing))
    assert code.compiled().startswith(b"\x7fELF")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "runs_hopper", lambda device: True)


def chosen(rows: int, size_n: int, size_k: int, weight: QuantizedWeight, gated: bool = False) -> PackedStream | None:
    """For a weight like this one, of another shape."""
    x = torch.empty(rows, size_k, dtype=BFLOAT, device="meta")
    data = torch.empty(size_n, size_k * weight.packing.bits // 8, dtype=torch.uint8, device="meta")
    return packed.packed_stream_for(x, data, gated, weight.packing)


FP8, INT4 = weight_of(Case(1, 32, 128, 8)).in_fragments(), weight_of(Case(1, 32, 128, 4, 128)).in_fragments()


@pytest.mark.usefixtures("hopper")
def test_the_division_of_an_8b_model() -> None:
    """The fastest of benchmarks/results/choosing/quantized_layer_first_h200.json, packed_stream_h200.json."""
    assert chosen(4, 6144, 4096, FP8) == chosen(1, 4096, 4096, FP8) == PackedStream(4, 2, 8)
    assert chosen(4, 28672, 4096, FP8, gated=True) == PackedStream(4, 2, 8)
    assert chosen(1, 4096, 14336, FP8) == PackedStream(4, 2, 8, cluster=2)
    assert chosen(16, 6144, 4096, FP8) == PackedStream(4, 2, 16)
    assert chosen(9, 28672, 4096, FP8, gated=True) == PackedStream(4, 2, 16)
    assert chosen(8, 6144, 4096, INT4) == chosen(1, 4096, 4096, INT4) == PackedStream(4, 4, 8)
    assert chosen(4, 28672, 4096, INT4, gated=True) == PackedStream(4, 4, 8)
    assert chosen(4, 4096, 14336, INT4) == PackedStream(4, 8, 8, cluster=2, warps=8)
    assert chosen(16, 6144, 4096, INT4) == PackedStream(4, 8, 16, warps=8)
    assert chosen(9, 28672, 4096, INT4, gated=True) == PackedStream(4, 8, 16, warps=8)
    for weight in (FP8, INT4):
        assert chosen(8, 4096, 14336, weight) is not None
        assert chosen(9, 4096, 14336, weight) is None, "packed_products is faster"


@pytest.mark.usefixtures("hopper")
def test_the_division_of_short_rows_and_of_more_rows_of_x() -> None:
    """The linears around attention of Qwen3-Next-80B-A3B: benchmarks/results/choosing/packed_stream_rows_h200.txt."""
    for rows in (1, 8, 9, 16, 17, 24, 25, 32):
        assert chosen(rows, 12288, 2048, FP8) == PackedStream(4, 4, packed.padded(rows), warps=8)
        assert chosen(rows, 2048, 4096, FP8) == PackedStream(4, 4, packed.padded(rows), 1 if rows <= 16 else 2, warps=8)
    assert chosen(16, 12288, 2048, FP8, gated=True) == PackedStream(4, 2, 16)
    for shape in ((12288 + 16, 2048), (2048 + 16, 4096), (1024, 8192)):
        assert chosen(16, *shape, FP8) is not None
        assert chosen(17, *shape, FP8) is None, "packed_products is faster"
    assert chosen(17, 1024, 2048, FP8, gated=True) is None and chosen(17, 1024, 2048, INT4) is None
    assert chosen(33, 1024, 2048, FP8) is None


@pytest.mark.usefixtures("hopper")
def test_one_row_has_all_of_a_small_weight_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The linears around attention of Qwen3-30B-A3B in 4 bits; with another row, or gated, they are as others."""
    monkeypatch.setattr(packed, "num_multiprocessors", lambda device: 132)
    assert chosen(1, 5120, 2048, INT4) == PackedStream(3, 2, 8, early=3, leaves_room=True)
    assert chosen(1, 2048, 4096, INT4) == PackedStream(2, 4, 8, early=2, leaves_room=True)
    assert chosen(2, 2048, 4096, INT4) == PackedStream(4, 4, 8)
    assert chosen(1, 2048, 2048, INT4, gated=True) == PackedStream(4, 2, 8)
    of_32 = weight_of(Case(1, 32, 128, 4, 32)).in_fragments()
    assert chosen(1, 2048, 2048, of_32) == PackedStream(4, 2, 8)


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_cannot_do() -> None:
    assert chosen(17, 4096, 4096, FP8) is None
    assert chosen(1, 4096 + 16, 4096, FP8, gated=True) is None
    assert chosen(1, 4096, 64 * 521, FP8) is None  # too long for the registers of one program, and not divisible
    rows = weight_of(Case(1, 32, 128, 8))
    assert chosen(1, 4096, 4096, rows) is None


def test_nothing_without_a_hopper_gpu() -> None:
    assert chosen(1, 4096, 4096, FP8) is None
