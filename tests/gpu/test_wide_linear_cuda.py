"""Maps of many rows in CUDA C++ against float32 products of the same values, at sizes that do not fill their tiles."""

import pytest
import torch
from overlap_spec_kernels import DenseWeight, fused_linear, linear_argmax, silu_mul
from overlap_spec_kernels.linear import wide_linear as wide
from overlap_spec_kernels.linear.call import Call
from overlap_spec_kernels.nvrtc import runs_hopper
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and runs_hopper(torch.device("cuda"))),
    reason="the kernel is for Hopper (sm_90a) alone: on any other GPU a BLAS runs, which other tests cover",
)

BFLOAT, HALF = torch.bfloat16, torch.float16
# (rows of x, rows of W, K): full tiles, one that is hardly begun, fewer chunks than stages, several rounds of tiles
SIZES = [(256, 28672, 4096), (129, 1008, 512), (777, 2000, 1024), (1, 224, 64), (300, 4096, 14336), (1024, 28672, 512)]
ERROR = {BFLOAT: 4e-3, HALF: 6e-4}


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def gated(x: Tensor, weight: Tensor, cut: wide.Wide = wide.GATED) -> Tensor:
    """By the kernel, whether it is the fastest or not."""
    out = x.new_empty((x.shape[0], weight.shape[0] // 2))
    cut.run(Call(x, weight, None, 0.0, True, out), cut.num_programs(weight, True))
    return out


def argmax(x: Tensor, weight: Tensor) -> Tensor:
    """By the kernel, whether it is the fastest or not."""
    cut = wide.ARGMAX[0]
    programs = cut.num_programs(weight, False)
    best = torch.full((x.shape[0], programs), torch.nan, device="cuda").t()
    best_at = torch.full_like(best, -1, dtype=torch.int32)
    cut.run(Call(x, weight, None, 0.0, False, best=best, best_at=best_at), programs)
    return best_at.gather(0, best.max(0).indices[None])[0].long()


@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
@pytest.mark.parametrize(("rows", "size_n", "size_k"), SIZES)
def test_gates(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> None:
    x, weight = drawn(rows, size_k, dtype=dtype), drawn(size_n, size_k, dtype=dtype, scale=size_k**-0.5)
    expected = silu_mul(torch.mm(x, weight.t(), out_dtype=torch.float32)).double()
    actual = gated(x, weight)
    assert float((actual.double() - expected).norm() / expected.norm()) < ERROR[dtype]
    for cut in wide.GATES:
        assert torch.equal(actual, gated(x, weight, cut))


@pytest.mark.parametrize(("rows", "size_n", "size_k"), SIZES)
def test_products(rows: int, size_n: int, size_k: int) -> None:
    """All tiles give the same bits."""
    x, weight = drawn(rows, size_k, dtype=BFLOAT), drawn(size_n, size_k, dtype=BFLOAT, scale=size_k**-0.5)
    expected = torch.mm(x, weight.t(), out_dtype=torch.float32)
    found = []
    for cut in wide.PLAIN:
        found.append(torch.full_like(expected, torch.nan))
        cut.run(Call(x, weight, None, 0.0, False, found[-1]), cut.num_programs(weight, False))
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("dtype", [BFLOAT, HALF])
@pytest.mark.parametrize(("rows", "size_n", "size_k"), SIZES)
def test_argmax(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> None:
    x, weight = drawn(rows, size_k, dtype=dtype), drawn(size_n, size_k, dtype=dtype)
    logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    best = logits.max(1).values
    chosen = logits.gather(1, argmax(x, weight)[:, None])[:, 0]
    assert torch.all(best - chosen <= 1e-4 * best.abs())  # a near-tie may go either way


def test_of_equal_logits_the_first_is_taken() -> None:
    weight = torch.zeros(5000, 64, device="cuda", dtype=BFLOAT)
    weight[[7, 8, 230, 4999], 0] = 1.0
    x = torch.zeros(260, 64, device="cuda", dtype=BFLOAT)
    x[1:, 0] = 1.0
    assert argmax(x, weight).tolist() == [0] + [7] * 259


def test_extreme_gates() -> None:
    """A gate far below zero is zero, far above it is itself; nothing is nan."""
    x = torch.ones(256, 64, device="cuda", dtype=BFLOAT)
    weight = torch.ones(224, 64, device="cuda", dtype=BFLOAT)
    weight[:112] *= torch.linspace(-40, 40, 112, device="cuda", dtype=BFLOAT)[:, None]
    expected = silu_mul(torch.mm(x, weight.t(), out_dtype=torch.float32))
    assert torch.allclose(gated(x, weight).float(), expected, rtol=1e-2, atol=1e-30)


def test_the_ops_take_it_where_tiles_are_full() -> None:
    """The maps of an 8B model at 256 rows, in a graph, whose input is written by the kernel before."""
    source, weight = drawn(256, 4096, dtype=BFLOAT), drawn(28672, 4096, dtype=BFLOAT, scale=4096**-0.5)
    head = drawn(32000 // 224 * 224 * 4, 14336, dtype=BFLOAT)
    x = torch.empty_like(source)
    assert wide.wide_for(source, weight, True) == wide.GATED and wide.GATED.is_full(source, weight, True)

    def forward() -> Tensor:
        x.copy_(source)
        return linear_argmax(fused_linear(x, DenseWeight(weight), gated=True), DenseWeight(head))

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        columns = forward()
    for _ in range(3):
        source.normal_()
        graph.replay()
        hidden = silu_mul(torch.mm(source, weight.t(), out_dtype=torch.float32)).to(BFLOAT)
        logits = torch.mm(hidden, head.t(), out_dtype=torch.float32)
        best = logits.max(1).values
        chosen = logits.gather(1, columns[:, None])[:, 0]
        assert torch.all(best - chosen <= 2e-2 * best.abs())  # of hidden rows rounded in another order
        assert float((columns == logits.argmax(1)).float().mean()) > 0.95


def test_a_row_does_not_depend_on_the_others() -> None:
    x, weight = drawn(256, 1024, dtype=BFLOAT), drawn(2240, 1024, dtype=BFLOAT)
    together = gated(x, weight)
    mixed = drawn(256, 1024, dtype=BFLOAT)
    mixed[100] = x[100]
    for cut in wide.GATES:
        assert torch.equal(gated(mixed, weight, cut)[100], together[100])
