"""Linears of a quantised layer in one kernel, on a GPU: what kernels of one linear each compute, to the bit."""

from dataclasses import fields, replace

import pytest
import torch
from overlap_spec_kernels import (
    Norm,
    Normed,
    QuantizedRun,
    QuantizedWeight,
    compiling_together,
    linear_run,
    run_counter,
)
from overlap_spec_kernels.linear.call import Addition
from overlap_spec_kernels.linear.packing import Packing, packed, part_of
from overlap_spec_kernels.nvrtc import runs_hopper
from support.paged_rows import Paged
from support.quantized_runs import run_by_definition
from support.tiny.models import load_tiny_target, tiny_target
from support.tiny.quantized import quantised
from torch import Tensor

from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers import quantized_layer
from overlap_spec.models.layers.quantized_layer import QuantizedLayer, in_runs
from overlap_spec.models.targets.decoder import DecoderWeights

BFLOAT = torch.bfloat16
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and runs_hopper(torch.device("cuda"))),
        reason="the kernel is for Hopper (sm_90a)",
    ),
]
KINDS = {  # bits, columns and rows that share a scale, zero points, type of scales
    "fp8, rows": (8, 0, 1, False, torch.float32),
    "fp8, blocks": (8, 128, 128, False, torch.float32),
    "int4": (4, 128, 1, False, BFLOAT),
    "int4, zero points": (4, 128, 1, True, torch.float16),
}
LARGE = (4096, 14336, 4096, 6144)  # hidden, inner, columns of the attention's result, rows of qkv: an 8B layer
SMALL = (512, 1536, 384, 640)  # fewer programs than multiprocessors


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
    return QuantizedWeight(data, Packing(scales, zeros, bits, part, group, scale_rows), BFLOAT).in_fragments()


def run_of(kind: str, sizes: tuple[int, int, int, int], reaches_qkv: bool = True) -> QuantizedRun:
    hidden, inner, heads, qkv = sizes
    norms = [Norm((torch.rand(hidden, device="cuda") + 0.5).to(BFLOAT), eps) for eps in (1e-5, 1e-2)]
    weights = [weight_of(kind, *shape) for shape in ((hidden, heads), (2 * inner, hidden), (hidden, inner))]
    after = weight_of(kind, qkv, hidden) if reaches_qkv else None
    output, gate_up, down = weights
    return QuantizedRun(output, norms[0], gate_up, down, norms[1], after, run_counter(torch.device("cuda")))


def inputs(run: QuantizedRun, rows: int) -> tuple[Tensor, Tensor]:
    sizes = run.output.shape[1], run.output.shape[0]
    x, residual = (torch.randn(rows, size, device="cuda", dtype=BFLOAT) for size in sizes)
    return x, residual


def one_by_one(run: QuantizedRun, x: Tensor, residual: Tensor) -> Normed:
    """The same divisions, each linear in its own kernel."""
    cuts = run.cuts(x)
    assert cuts is not None
    middle = run.output.launch(cuts[0], x, False, Addition(residual, run.norm), BFLOAT)
    gates = run.gate_up.launch(cuts[1], middle, True, None, BFLOAT).values
    after = run.down.launch(cuts[2], gates, False, Addition(middle.values, run.next_norm), BFLOAT)
    if run.next_qkv is None or not run.reaches_qkv:
        return after
    return after._replace(projected=run.next_qkv.launch(cuts[3], after, False, None, BFLOAT).values)


def tensors(x: Normed) -> list[Tensor]:
    return [each for each in x if isinstance(each, Tensor)]


def assert_equal(found: Normed, wanted: Normed) -> None:
    assert len(tensors(found)) == len(tensors(wanted))
    assert all(map(torch.equal, tensors(found), tensors(wanted)))


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert float((actual.double() - expected).norm() / expected.norm()) < 8e-3


Runs = dict[tuple[str, str], QuantizedRun]
ROWS = {"large": (1, 4, 8), "small": (1, 8, 11, 16), "small, to down": (3, 16)}


@pytest.fixture(scope="module")
def runs() -> Runs:
    """By kind and size; their kernels are compiled together."""
    torch.manual_seed(0)
    made = {}
    for kind in KINDS:
        made[kind, "large"], made[kind, "small"] = run_of(kind, LARGE), run_of(kind, SMALL)
        made[kind, "small, to down"] = run_of(kind, SMALL, reaches_qkv=False)
    with compiling_together(8):
        for (_, size), run in made.items():
            for rows in {min(ROWS[size]), max(ROWS[size])}:
                linear_run(*inputs(run, rows), run)
                one_by_one(run, *inputs(run, rows))
    return made


@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_kernels_of_one_linear_compute(kind: str, size: str, runs: Runs) -> None:
    run = runs[kind, size]
    for rows in ROWS[size]:
        x, residual = inputs(run, rows)
        found = linear_run(x, residual, run)
        assert_equal(found, one_by_one(run, x, residual))
        computed = [found.values, found.normalised(), *([] if found.projected is None else [found.projected])]
        for each, expected in zip(computed, run_by_definition(run, x, residual), strict=True):
            assert_near(each, expected)


@pytest.mark.parametrize("size", ["large", "small"])
def test_a_row_does_not_depend_on_others(size: str, runs: Runs) -> None:
    run = runs["fp8, rows", size]
    x, residual = inputs(run, 8)
    found = linear_run(x, residual, run)
    assert found.projected is not None
    for count in (1, 3):
        alone = linear_run(x[:count], residual[:count], run)
        assert alone.projected is not None
        assert torch.equal(alone.values, found.values[:count])
        assert torch.equal(alone.projected, found.projected[:count])


@pytest.mark.parametrize("size", ["large", "small"])
@pytest.mark.parametrize("looks_ahead", [False, True])
def test_graphs_with_dependent_launches(size: str, looks_ahead: bool, runs: Runs) -> None:
    """Runs one after another, with kernels of one linear between them, replayed often: the same each time."""
    run = runs["int4, zero points", size]
    assert run.next_qkv is not None
    last = replace(run, next_qkv=replace(run.next_qkv, data=run.next_qkv.data[:0]))
    run = replace(run, ahead=run.output if looks_ahead else None)
    x, residual = inputs(run, 4)

    def layers() -> list[Tensor]:
        first = linear_run(x, residual, run)
        second = linear_run(x, first.values, run)
        third = one_by_one(run, x, second.values)
        return [*tensors(first), *tensors(second), *tensors(third), *tensors(linear_run(x, third.values, last))]

    expected = [each.clone() for each in layers()]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers()
    for _ in range(50):
        for _ in range(20):
            graph.replay()
        assert all(map(torch.equal, found, expected))


def test_the_counter(runs: Runs) -> None:
    """Its highest bit turns with each meeting; what is below is zero between launches."""
    run = replace(runs["int4", "small"], counter=run_counter(torch.device("cuda")))
    for number in range(1, 6):
        linear_run(*inputs(run, 2), run)
        assert int(run.counter.item()) % 2**32 == number * 3 % 2 * 2**31


@pytest.mark.parametrize("kind", ["fp8 by row", "int4"])
def test_a_model(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers of a target, with a run for each and without runs."""
    checkpoint = quantised(tiny_target(3, hidden=256, intermediate_size=512, head_dim=64), kind)[0]
    weights = load_tiny_target(checkpoint, BFLOAT, torch.device("cuda"))
    layer = in_runs(weights.layers, weights.norm)[0]
    assert isinstance(layer, QuantizedLayer) and layer.run.reaches_qkv
    assert layer.run.cuts(torch.empty(5, layer.run.output.shape[1], device="cuda", dtype=BFLOAT))
    found = output_of(weights)
    monkeypatch.setattr(quantized_layer, "RUNS", False)
    assert all(map(torch.equal, found, output_of(weights)))


def output_of(weights: DecoderWeights) -> list[Tensor]:
    """Of the layers, for rows of two requests, twice."""
    paged = Paged(2, page_size=16, pages_each=4)
    cache = KVCache.allocate(weights.kv_shape, paged.num_pages, paged.page_size, BFLOAT, torch.device("cuda"))
    target = weights.attach(cache, 64, (0,))
    found = []
    for counts in ([3, 2], [1, 1]):
        rows = paged.rows(counts)
        moved = {field.name: getattr(rows, field.name) for field in fields(rows)}
        on_device = {name: each.cuda() for name, each in moved.items() if isinstance(each, Tensor)}
        output = target.forward(torch.arange(3, 3 + sum(counts), device="cuda"), replace(rows, **on_device))
        assert isinstance(output.final, Normed)
        found += [output.final.normalised(), output.aux]
    return found
