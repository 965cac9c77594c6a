"""The linears' Gluon kernels, launched by their ops and interpreted, against float64 products of the same values.

A weight of 64 KB counts as large here, so that all ways to cut one up are met with small ones. Shared memory holds NaN
before a copy arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels import (
    DenseWeight,
    Norm,
    Normed,
    OrderedWeight,
    Routing,
    fused_linear,
    linear_add,
    linear_argmax,
    linear_logits,
)
from overlap_spec_kernels.experts import sum_of_experts
from overlap_spec_kernels.experts.sum_of_experts import multiply_and_add
from overlap_spec_kernels.linear import ordered, streamed_linear, warpgroup_linear
from overlap_spec_kernels.linear.call import Call
from torch import Tensor

if TYPE_CHECKING:
    from emulators.gluon.launch import Hopper

BFLOAT, HALF = torch.bfloat16, torch.float16
CLOSE = {BFLOAT: {"rtol": 2**-6, "atol": 2**-6}, HALF: {"rtol": 2**-9, "atol": 2**-9}}
STREAMED, TILED = "_streamed_linear_kernel", "_warpgroup_linear_kernel"
LARGE = 64 << 10


class Case(NamedTuple):
    """Rows of x, a weight [O, I], and how it is cut up: what the kernel is told, if not gated and if gated."""

    rows: int
    size_n: int
    size_k: int
    dtype: torch.dtype
    plain: dict[str, Any]
    gated: dict[str, Any]


SMALL_K = {"BLOCK_N": 16, "BLOCK_K": 64, "WARPS_K": 2, "STAGES": 10}
CASES = {
    "small": Case(3, 124, 256, BFLOAT, {"BLOCK_K": 256, "STAGES": 6}, {"BLOCK_K": 256, "STAGES": 6}),
    "few columns": Case(3, 60, 512, BFLOAT, {"BLOCK_K": 512, "WARPS_K": 8}, {"BLOCK_K": 256, "STAGES": 6}),
    "small, K of 64s": Case(9, 70, 192, HALF, SMALL_K, SMALL_K),
    "small, K of 64s, 33 rows": Case(33, 70, 192, BFLOAT, {"BLOCK_N": 32, "ROWS": 32}, {"BLOCK_N": 32, "ROWS": 32}),
    "large, few rows": Case(5, 280, 768, BFLOAT, {"STAGES": 12}, {"STAGES": 8}),
    "large, few rows, a part of a stage": Case(5, 280, 832, BFLOAT, {"BLOCK_K": 512}, {"BLOCK_N": 64, "STAGES": 8}),
    "large, K of 64s": Case(20, 520, 320, HALF, {"BLOCK_N": 64, "STAGES": 8}, {"BLOCK_N": 64, "STAGES": 8}),
    "tiles, K of 64s": Case(20, 520, 832, HALF, {"BLOCK_K": 64, "STAGES": 12}, {"WARPS_N": 4, "STAGES": 8}),
    "tiles, split K": Case(17, 300, 2560, BFLOAT, {"BLOCK_N": 64, "SPLITS": 2}, {"BLOCK_N": 64, "STAGES": 5}),
    "tiles, whole K": Case(32, 4300, 256, BFLOAT, {"STAGES": 8, "SPLITS": 1}, {"BLOCK_N": 64, "STAGES": 5}),
    "tiles, 64 rows": Case(50, 600, 1024, HALF, {"STAGES": 6, "ROWS": 64}, {"BLOCK_N": 128, "STAGES": 4}),
}
TILES = [name for name in CASES if name.startswith("tiles")]
BIASED = [
    "small, K of 64s",
    "large, few rows",
    "large, few rows, a part of a stage",
    "tiles, split K",
    "tiles, 64 rows",
]


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (ordered, streamed_linear, warpgroup_linear):
        monkeypatch.setattr(module, "_LARGE", LARGE)
        monkeypatch.setattr(module, "_LEAST_PADDED", 640)
    warpgroup_linear.tile_counters.cache_clear()


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def weight_of(case: Case) -> Tensor:
    return drawn(case.size_n, case.size_k, dtype=case.dtype, scale=case.size_k**-0.5)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().t()


def normalised(x: Tensor, norm: Norm) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + norm.eps) * norm.weight.double()


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, **CLOSE[dtype])


def assert_last(gpu: Hopper, name: str, told: dict[str, Any]) -> None:
    """Check the kernel of the last launch and some of its constants."""
    launch = gpu.launches[-1]
    assert launch.kernel == (TILED if name in TILES and "WARPS_N" not in told else STREAMED)
    assert {key: launch.constants[key] for key in told} == told


@pytest.mark.slow_but_every(10)
@pytest.mark.parametrize("name", CASES)
def test_scaled_and_gated(gpu: Hopper, name: str) -> None:
    """Rows on their way into a norm, whose sums of squares come in 40 parts."""
    case = CASES[name]
    weight, rows = weight_of(case), drawn(case.rows, case.size_k, dtype=case.dtype)
    parts = rows.double().square().sum(1) * torch.randn(40, 1).softmax(0)
    x = Normed(rows, rows, parts.float(), 0.1)
    expected = product(normalised(rows, Norm(torch.ones(case.size_k), 0.1)), weight)
    assert_close(fused_linear(x, DenseWeight(weight)), expected, case.dtype)
    assert_last(gpu, name, case.plain)
    logits = linear_logits(x, DenseWeight(weight))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
    gate, up = expected.chunk(2, dim=1)
    assert_close(fused_linear(x, DenseWeight(weight), gated=True), F.silu(gate) * up, case.dtype)
    assert_last(gpu, name, case.gated)


@pytest.mark.slow_but_every(10)
@pytest.mark.parametrize("name", CASES)
def test_addition(gpu: Hopper, name: str) -> None:
    """The residual is a view; a second call finds the counters of split tiles as the first did."""
    case = CASES[name]
    weight, x = weight_of(case), drawn(case.rows, case.size_k, dtype=case.dtype)
    residual = drawn(case.rows, 2 * case.size_n, dtype=case.dtype)[:, : case.size_n]
    norm = Norm(drawn(case.size_n, dtype=case.dtype, scale=0.1) + 1, 0.1)
    for _ in range(2):
        stream = linear_add(x, DenseWeight(weight), residual, norm)
        assert_last(gpu, name, case.plain | {"ADD": True})
        assert_close(stream.values, residual.double() + product(x, weight), case.dtype)
        assert_close(stream.normalised(), normalised(stream.values, norm), case.dtype)


@pytest.mark.parametrize("name", BIASED)
def test_biases(gpu: Hopper, name: str) -> None:
    """Added after the scale of a norm and before the residual, by the kernels of linears without one."""
    case = CASES[name]
    gpu.read_before_wait |= {"bias_ptr"}
    rows, bias = drawn(case.rows, case.size_k, dtype=case.dtype), drawn(case.size_n, dtype=case.dtype)
    weight = DenseWeight(weight_of(case), bias)
    x = Normed(rows, rows, rows.float().square().sum(1)[None], 0.1)
    scaled = product(normalised(rows, Norm(torch.ones(case.size_k), 0.1)), weight.matrix) + bias.double()
    assert_close(fused_linear(x, weight), scaled, case.dtype)
    assert_last(gpu, name, case.plain | {"BIASED": True})
    torch.testing.assert_close(linear_logits(x, weight).double(), scaled, rtol=1e-5, atol=1e-5)
    gate, up = scaled.chunk(2, dim=1)
    assert_close(fused_linear(x, weight, gated=True), F.silu(gate) * up, case.dtype)
    residual, norm = drawn(case.rows, case.size_n, dtype=case.dtype), Norm(torch.ones(case.size_n).to(case.dtype), 0.1)
    stream = linear_add(rows, weight, residual, norm)
    told = case.plain | {"ADD": True, "BIASED": True}
    assert_last(gpu, name, told if case.rows <= 32 else {"ADD": False})  # more rows are left to a BLAS
    assert_close(stream.values, residual.double() + product(rows, weight.matrix) + bias.double(), case.dtype)
    assert_close(stream.normalised(), normalised(stream.values, norm), case.dtype)
    assert torch.equal(linear_argmax(x, weight), scaled.argmax(1))


@pytest.mark.slow_but_every(12)
@pytest.mark.parametrize("name", CASES)
def test_argmax(gpu: Hopper, name: str) -> None:
    """Equal logits among the largest: the first wins, in a block and between programs."""
    case = CASES[name]
    weight, x = weight_of(case), drawn(case.rows, case.size_k, dtype=case.dtype)
    best = product(x, weight).argmax(1)
    weight[-1] = weight[best[0]]
    weight[(best[1] + 1) % (case.size_n - 1)] = weight[best[1]]
    ids = torch.randperm(case.size_n)
    columns = linear_argmax(x, DenseWeight(weight), ids)
    assert gpu.launches[-2].constants["ARGMAX"]
    assert torch.equal(columns, ids[product(x, weight).argmax(1)])


def test_argmax_of_many_rows(gpu: Hopper) -> None:
    """More tiles than programs. Of equal logits in two tiles the first wins."""
    weight, x = drawn(1300, 256, dtype=BFLOAT, scale=0.1), drawn(100, 256, dtype=BFLOAT)
    best = product(x, weight).argmax(1)
    weight[-1] = weight[best[0]]
    ids = torch.randperm(1300)
    assert torch.equal(linear_argmax(x, DenseWeight(weight), ids), ids[product(x, weight).argmax(1)])
    told = {"BLOCK_N": 256, "ROWS": 128, "ARGMAX": True}
    assert gpu.launches[-2].constants | told == gpu.launches[-2].constants


def test_no_logit_is_larger_than_negative_ones(gpu: Hopper) -> None:
    """Rows that the last block of a weight lacks do not count as zeros."""
    weight = -torch.ones(70, 192, dtype=BFLOAT)
    weight[41] = -0.5
    assert linear_argmax(torch.ones(4, 192, dtype=BFLOAT), DenseWeight(weight)).tolist() == [41] * 4


@pytest.mark.slow_but_every(2)
@pytest.mark.parametrize(
    ("rows", "size_k", "told"),
    [
        (1, 768, {"BLOCK_K": 256, "STAGES": 5, "LATE": False}),
        (16, 192, {"BLOCK_K": 64, "STAGES": 10, "LATE": True}),
        (9, 256, {"BLOCK_K": 128, "STAGES": 12, "LATE": True}),
        (33, 256, {"BLOCK_K": 128, "STAGES": 6, "LATE": True, "ROWS": 16, "BLOCK_N": 32, "WARPS_N": 2}),
        (9, 768, {"SPLITS": 1, "ADD": False}),
        (33, 512, {"SPLITS": 1, "STAGES": 6}),
    ],
)
def test_in_one_order(gpu: Hopper, rows: int, size_k: int, told: dict[str, Any]) -> None:
    """Of a weight whose rows have the same bits in any company small ones have two sums of K and norms, large none."""
    size_n = 70 if told.get("LATE") else 280
    weight, x = drawn(size_n, size_k, dtype=BFLOAT, scale=size_k**-0.5), drawn(rows, size_k, dtype=BFLOAT)
    expected = product(x, weight)
    assert_close(fused_linear(x, OrderedWeight(weight)), expected, BFLOAT)
    sums = 2 if told.get("LATE") else 1
    small = {"WARPS_K": 2, "WARPS_N": 1, "BLOCK_N": 16} if sums == 2 else {"WARPS_K": 1, "WARPS_N": 2, "BLOCK_N": 32}
    streamed = {} if "SPLITS" in told else small | {"ADD": False, "SCALED": False}
    assert_last(gpu, "tiles, whole K" if "SPLITS" in told else "ordered", streamed | told)
    torch.testing.assert_close(linear_logits(x, OrderedWeight(weight)).double(), expected, rtol=1e-5, atol=1e-5)
    gate, up = expected.chunk(2, dim=1)
    assert_close(fused_linear(x, OrderedWeight(weight), gated=True), F.silu(gate) * up, BFLOAT)
    constants = gpu.launches[-1].constants
    assert constants.get("WARPS_K", 1) == sums and constants.get("SPLITS", 1) == 1
    assert torch.equal(linear_argmax(x, OrderedWeight(weight)), expected.argmax(1))
    assert gpu.launches[-2].constants["ARGMAX"], "the logits of a greedy step are not written"
    residual, norm = drawn(rows, size_n, dtype=BFLOAT), Norm(drawn(size_n, dtype=BFLOAT, scale=0.1) + 1, 0.1)
    added = linear_add(x, OrderedWeight(weight), residual, norm)
    assert (added.squares is not None) == (sums == 2)
    assert_close(added.normalised(), normalised(added.values, norm), BFLOAT)
    of_x = Normed(x, x, x.float().square().unflatten(1, (-1, 16)).sum(2).t().contiguous(), 0.1)
    ones = Norm(torch.ones(size_k, dtype=BFLOAT), 0.1)
    assert_close(fused_linear(of_x, OrderedWeight(weight)), product(normalised(x, ones), weight), BFLOAT)
    assert gpu.launches[-1].constants.get("IN_ORDER", False) == gpu.launches[-1].constants["SCALED"] == (sums == 2)
    assert gpu.launches[-1].options.get("enable_fp_fusion", True) == (sums == 1), "tiles round a mean before eps"


def test_few_tiles_begin_in_pairs(gpu: Hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five programs of ten multiprocessors: the other five take nothing, and write nothing."""
    monkeypatch.setattr(warpgroup_linear, "num_multiprocessors", lambda device: 10)
    weight, x = drawn(300, 512, dtype=BFLOAT, scale=512**-0.5), drawn(50, 512, dtype=BFLOAT)
    expected = product(x, weight)
    assert_close(fused_linear(x, DenseWeight(weight)), expected, BFLOAT)
    assert gpu.launches[-1].grid == (10,) and gpu.launches[-1].constants["IN_PAIRS"]
    best = torch.full((6, 50), torch.nan)
    call = Call(x, weight, None, 0.0, False, best=best, best_at=torch.zeros(6, 50, dtype=torch.int32))
    warpgroup_linear.Tiles(64, 128, 6).run(call, 5)
    assert torch.equal(call.best_at[best[:5].argmax(0), torch.arange(50)].long(), expected.argmax(1))
    assert torch.all(best[5].isnan()), "what is behind the programs' results"


# (experts of the row, inner columns, stages of the ring): it holds all columns, or is filled again
@pytest.mark.parametrize(("top_k", "inner", "stages"), [(8, 384, 3), (5, 1024, 4), (1, 384, 3), (3, 768, 2)])
def test_experts_of_one_row(gpu: Hopper, monkeypatch: pytest.MonkeyPatch, top_k: int, inner: int, stages: int) -> None:
    """The second product, the sum, what is added to it, and what the norm after it needs. The choice comes earlier."""
    warps = 1 << (top_k - 1).bit_length()
    monkeypatch.setattr(sum_of_experts, "_SHARED", 16 * inner + stages * 32 * warps * 128)
    gpu.read_before_wait |= {"experts_ptr", "weights_ptr", "shared_ptr", "residual_ptr", "norm_ptr"}
    x, weight = drawn(top_k, inner, dtype=BFLOAT), drawn(9, 48, inner, dtype=BFLOAT, scale=inner**-0.5)
    routing = Routing(torch.randperm(9)[None, :top_k].contiguous(), torch.rand(1, top_k))
    residual, norm = drawn(1, 48, dtype=BFLOAT), Norm(drawn(48, dtype=BFLOAT, scale=0.1) + 1, 0.1)
    products = torch.einsum("ki,koi->ko", x.double(), weight[routing.experts[0]].double())
    expected = residual.double() + routing.weights.double() @ products
    for shared in (None, drawn(1, 48, dtype=BFLOAT)):
        found = multiply_and_add(x, weight, routing, residual, norm, shared)
        assert gpu.launches[-1].constants["STAGES"] == stages
        assert_close(found.values, expected if shared is None else expected + shared.double(), BFLOAT)
        assert_close(found.normalised(), normalised(found.values, norm), BFLOAT)
