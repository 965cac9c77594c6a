"""On a CPU: a row of an op has the same bits whatever rows are beside it, on any number of threads.

Linears of float32 and float64 by torch are not among them, nor is its attention: docs/correctness.md says so.
"""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from overlap_spec_kernels import (
    Clamp,
    Filters,
    GroupedKernel,
    GroupedPart,
    GroupedWeight,
    Norm,
    add_normed,
    add_rms_norm,
    clamped_mul,
    filter_cutoff,
    fused_linear,
    gelu_mul,
    linear_add,
    linear_argmax,
    norm_all_heads,
    norm_heads,
    rms_norm,
    silu_mul,
    top_tokens,
)
from overlap_spec_kernels.norm.silu_mul import gelu_tanh, sigmoid, silu, softplus
from support.invariance import COUNTS, Op, differences
from support.tiny.grouped import grouped_kernel, grouped_kernel_of_avx2
from torch import Tensor

FEW = (1, 3)  # rows, where they are long
HEAD = 16
WEIGHT, QUERY, KEY = (1 + 0.1 * torch.randn(size, generator=torch.Generator().manual_seed(1)) for size in (576, 16, 16))

OPS: dict[str, tuple[Op, int]] = {
    "log-softmax and the most probable tokens": (lambda x: tuple(top_tokens(x, 5)), 40_003),
    "of few columns": (lambda x: tuple(top_tokens(x, 5)), 128),
    "in float64": (lambda x: tuple(top_tokens(x.double(), 5)), 33_000),
    "silu": (silu, 1001),
    "silu, bounded": (lambda x: clamped_mul(x, Clamp(1.702, 7.0)), 2002),
    "silu, gated": (silu_mul, 2002),
    "gelu": (gelu_tanh, 1001),
    "sigmoid": (sigmoid, 63),
    "softplus": (softplus, 63),
    "norm": (lambda x: rms_norm(x, WEIGHT, 1e-5), 576),
    "norm of a sum": (lambda x: add_rms_norm(x, 0.5 * x, WEIGHT, 1e-5), 576),
    "gelu, gated": (gelu_mul, 2002),
    "norm of a norm that is added": (
        lambda x: add_normed(x, 0.5 * x, Norm(WEIGHT, 1e-5), Norm(WEIGHT, 1e-5), WEIGHT[:1]),
        576,
    ),
    "norms of all heads": (lambda x: norm_all_heads(x, QUERY, KEY, 2, 1, 1e-5), 4 * HEAD),
    "norms of heads": (lambda x: norm_heads(x.clone(), QUERY, KEY, 1, 1e-5), 4 * HEAD),
}


@pytest.mark.parametrize("name", OPS)
def test_ops(name: str) -> None:
    op, size = OPS[name]
    rows = torch.randn(12 if size > 10_000 else 40, size, generator=torch.Generator().manual_seed(size))
    for first in range(1 if size > 100 else 8):  # of short rows few elements fill no vector, and few of those differ
        assert not differences(op, rows.roll(first, 0), counts=FEW if size > 10_000 else COUNTS)


@pytest.fixture(autouse=True)
def three_threads() -> Iterator[None]:
    """Work is divided, and between threads a tensor is cut where no vector ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_totals_are_those_of_single_rows(dtype: torch.dtype) -> None:
    """Few sums have other bits in another order: of many rows, alone and together, each must be equal."""
    torch.set_num_threads(2)
    for size in (40_003, 1500, 101, 7):
        rows = torch.randn(48, size, generator=torch.Generator().manual_seed(5)).to(dtype)
        together = top_tokens(rows, 1).log_totals
        assert [float(top_tokens(row[None], 1).log_totals) for row in rows] == together.tolist()


def test_what_threads_share_has_ends_anywhere() -> None:
    rows = 4 * torch.randn(40, 2 * 1500, generator=torch.Generator().manual_seed(1))
    for op in (silu_mul, gelu_tanh, lambda x: clamped_mul(x, Clamp(1.702, 7.0))):
        assert not differences(op, rows, counts=(11, 31, 64))


def test_filters_end_where_they_do_alone() -> None:
    """The mass that top_p is a share of is rounded in one way: a share is chosen that one rounding more would move."""
    random = torch.Generator().manual_seed(3)
    for row in 3 * torch.randn(4, 1, 40_000, generator=random):
        ordered = row.double().sort(descending=True).values
        weights = (ordered - ordered[:, :1]).exp()
        share = float(weights.cumsum(1)[0, 499] / weights.sum())
        for steps in range(-1, 2):
            top_p = share + steps * math.ulp(share)
            alone, among = (cutoff(torch.stack((row,) * count), top_p) for count in (1, 3))
            assert torch.equal(alone[0], among[1])


def cutoff(logits: Tensor, top_p: float) -> Tensor:
    """The last column that is kept. Shapes: [B, 1, N] -> [B, 1]."""
    wide = torch.full((len(logits),), 1.0, dtype=torch.float64)
    filters = Filters(torch.full((len(logits),), 1 << 30), top_p * wide, 0 * wide)
    return filter_cutoff(logits, wide, filters).least


def weight_of(bits: int, kernel: GroupedKernel) -> GroupedWeight:
    """Shapes: [192, 96]."""
    random = torch.Generator().manual_seed(bits)
    if bits >= 16:
        values = torch.randn(192, 96, generator=random)
        values = values.bfloat16() if bits == 16 else values
        return GroupedWeight((GroupedPart.packed(values, None, None, bits, 0, False),), 96, kernel)
    values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (192, 96), generator=random, dtype=torch.int8)
    scales, offsets = torch.randn(2, 192, 3, generator=random)
    part = GroupedPart.packed(values, scales, offsets, bits, -8 if bits == 4 else 0, False)
    return GroupedWeight((part,), 96, kernel)


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("made", [grouped_kernel, grouped_kernel_of_avx2], ids=("this processor", "AVX2"))
def test_linears_of_few_bits(bits: int, made: Callable[[], GroupedKernel]) -> None:
    weight = weight_of(bits, made())
    rows = torch.randn(40, 96, generator=torch.Generator().manual_seed(7))
    residual = torch.randn(1, 192)
    norm = Norm(1 + 0.1 * torch.randn(192), 1e-5)

    def added(x: Tensor) -> tuple[Tensor, ...]:
        found = linear_add(x, weight, residual.expand(len(x), -1).contiguous(), norm)
        return found.values, found.normalised()

    ops: dict[str, Op] = {
        "product": lambda x: fused_linear(x, weight),
        "gate": lambda x: fused_linear(x, weight, gated=True),
        "sum": added,
        "argmax": lambda x: linear_argmax(x, weight),
    }
    for name, op in ops.items():
        assert not differences(op, rows), name
