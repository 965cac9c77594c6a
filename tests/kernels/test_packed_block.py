"""A layer's linears after attention in one launch of packed_products.cu, in the emulator against float64 products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from overlap_spec_kernels import Norm, Normed
from overlap_spec_kernels.launch import assuming
from overlap_spec_kernels.linear import packed_products as products
from overlap_spec_kernels.linear.packed_block import BlockWeights, PackedBlock, packed_block_for
from overlap_spec_kernels.linear.packed_products import PackedProducts
from overlap_spec_kernels.linear.packing import Packing
from overlap_spec_kernels.linear.quantized import QuantizedWeight
from support.cuda_emulator import CudaEmulator
from torch import Tensor

from test_packed_products import BFLOAT, COMPILER, assert_near, packing_of, weight_of

MULTIPROCESSORS = 5


@pytest.fixture
def emulator(cuda_emulator: CudaEmulator, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaEmulator]:
    """In place of a GPU of five multiprocessors."""
    products._kernel.cache_clear()
    monkeypatch.setattr(products, "num_multiprocessors", lambda device: MULTIPROCESSORS)
    cuda_emulator.multiprocessors = MULTIPROCESSORS
    cuda_emulator.install(monkeypatch, products)
    yield cuda_emulator
    products._kernel.cache_clear()


class Case(NamedTuple):
    kind: str
    rows: int
    attended: int  # columns of x
    hidden: int
    inner: int
    ring: PackedProducts
    parts: tuple[int, int, int]  # of K


# More tiles than programs, and fewer, so that some have no work in a linear; parts of K; fewer stages than the ring has,
# so that it is filled with two linears ahead; a gate in parts.
CASES = [
    Case("fp8, rows", 21, 320, 320, 704, PackedProducts(32, 1, 2), (1, 1, 1)),
    Case("int4, zero points", 40, 640, 128, 640, PackedProducts(48, 1, 3), (2, 1, 2)),
    Case("fp8, rows", 128, 128, 192, 128, PackedProducts(128, 1, 3), (1, 1, 1)),
    Case("fp8, blocks", 30, 896, 256, 384, PackedProducts(32, 1, 2), (2, 1, 3)),
    Case("int4, groups of 32", 17, 384, 128, 256, PackedProducts(32, 1, 2), (3, 2, 2)),
]


class Block(NamedTuple):
    """Inputs and the result that is right."""

    weights: BlockWeights
    x: Tensor
    residual: Tensor
    norms: tuple[Norm, Norm]
    total: Tensor  # [T, H] f64

    @property
    def normalised(self) -> Tensor:
        return F.rms_norm(self.total, self.total.shape[1:], self.norms[1].weight.double(), self.norms[1].eps)


def block_of(case: Case) -> Block:
    hidden, made = case.hidden, []
    for shape in ((hidden, case.attended), (2 * case.inner, hidden), (hidden, case.inner)):
        made.append(weight_of(case.kind, *shape))
    weights = BlockWeights(*(QuantizedWeight(each.data, each.packing, BFLOAT) for each in made))
    x, residual = (torch.randn(case.rows, size).to(BFLOAT) for size in (case.attended, hidden))
    norms = tuple(Norm(torch.rand(hidden).to(BFLOAT), 1e-5) for _ in range(2))
    output, gate_up, down = (each.matrix for each in made)
    middle = residual.double() + x.double() @ output.t()
    normed = F.rms_norm(middle, (hidden,), norms[0].weight.double(), 1e-5)
    gate, up = (normed @ gate_up.t()).chunk(2, dim=1)
    return Block(weights, x, residual, norms, middle + (F.silu(gate) * up) @ down.t())


def run(case: Case, block: Block) -> Normed:
    cuts = tuple(case.ring._replace(splits=count) for count in case.parts)
    return PackedBlock(cuts).run(block.x, block.weights, block.residual, *block.norms)


@pytest.mark.slow_but_every(len(CASES))
@pytest.mark.parametrize("case", CASES, ids=[f"{case.kind}, {case.rows} rows" for case in CASES])
def test_blocks(emulator: CudaEmulator, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a linear reads is there when it reads it, in any order of events; counters are left at zero."""
    block = block_of(case)
    monkeypatch.setattr(torch.Tensor, "new_empty", nothing_yet)
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, torch.nan))
    for seed in range(3):
        emulator.seed, emulator.written_before = seed, [block.x, block.residual]
        total = run(case, block)
        assert_near(total.values, block.total, 8e-3)
        assert_near(total.normalised(), block.normalised, 8e-3)
        assert not products.split_counters(block.x.device).any()
        assert not products.linear_counters(block.x.device).any()


def nothing_yet(like: Tensor, *size: int, **options: object) -> Tensor:
    """In place of `new_empty`: what nothing has written spoils results."""
    return torch.full(*size, torch.nan, dtype=options.get("dtype", like.dtype))  # type: ignore[call-overload]
