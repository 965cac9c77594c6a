"""Maps of few rows on a GPU against float32 products of the same values; maxima against the logits they stand for."""

import pytest
import torch
from overlap_spec_kernels import DenseWeight, Norm, Normed, fused_linear, linear_add, linear_argmax, linear_logits
from overlap_spec_kernels.linear.dense import fused_linear_reference
from torch import Tensor

BFLOAT, FLOAT, HALF = torch.bfloat16, torch.float32, torch.float16
SMOL = [(960, 576), (576, 1536), (3072, 576)]  # [O, I] of weights
LLAMA = (4096, 4096)
AWKWARD = [(72, 64), (130, 192), (1040, 14336), (100, 100)]
# Rows of x: what the kernels pad to 8, 16 and 32, or leave to a BLAS; each is another compilation.
CHAINS = [
    *[(rows, *SMOL[0], dtype) for rows in (1, 4, 16, 17, 32, 33) for dtype in (FLOAT, BFLOAT)],
    *[(rows, *shape, dtype) for rows in (3, 20) for shape in SMOL[1:] for dtype in (FLOAT, BFLOAT)],
    *[(rows, *LLAMA, BFLOAT) for rows in (1, 13, 32)],
    *[(rows, *shape, dtype) for rows in (5, 33) for shape in AWKWARD for dtype in (FLOAT, BFLOAT)],
    (4, *LLAMA, FLOAT),
    (7, *SMOL[1], HALF),
    *[(rows, 2048, 4096, BFLOAT) for rows in (1, 2)],  # whose programs have all of their rows of W, of one row
]
HEADS = [
    *[(rows, 49152, 576, BFLOAT) for rows in (1, 16, 17, 40)],
    *[(rows, *shape, BFLOAT) for rows in (4, 32) for shape in ((32000, 4096), (1000, 64), (77, 128), (128256, 512))],
    *[(rows, 32000, 4096, BFLOAT) for rows in (17, 64, 70, 128, 200)],
    *[(rows, 49152, 576, FLOAT) for rows in (4, 40)],
    (4, 1000, 64, FLOAT),
    (4, 77, 128, HALF),
]
# Weights of which a program takes 64 or 128 rows at once; what is left to a BLAS besides.
LARGE = [
    *[(rows, *shape, BFLOAT) for rows in (17, 32, 100) for shape in (LLAMA, (4100, 1024), (2100, 14336), (9000, 512))],
    *[(rows, 4100, 1024, BFLOAT) for rows in (16, 33, 64, 128, 129)],
    (20, 4100, 1024, HALF),
    (128, 9000, 512, HALF),
]
# gpt-oss's queries, keys and values, its output, Qwen2.5-0.5B's, and one that no kernel for 16 bits takes.
BIASED = [*[(rows, 5120, 2880, BFLOAT) for rows in (1, 4, 13, 32, 70)], (8, 5120, 2880, HALF)]
BIASED += [(rows, *shape, BFLOAT) for rows in (1, 5, 20, 70) for shape in ((2880, 4096), (1152, 896), (100, 100))]
BIASED += [(4, 1152, 896, FLOAT), (100, 1152, 896, FLOAT)]
ERROR = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}  # of a norm over a norm


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def assert_near(actual: Tensor, expected: Tensor, error: float) -> None:
    assert actual.shape == expected.shape and bool(torch.isfinite(actual).all())
    assert float((actual.double() - expected.double()).norm() / expected.double().norm()) < error


def wide(x: Tensor, norm: Norm | None = None) -> Tensor:
    x = x.double()
    if norm is None:
        return x
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + norm.eps) * norm.weight.double()


@pytest.mark.parametrize(("rows", "size_n", "size_k", "dtype"), CHAINS)
def test_a_layers_chain_of_maps(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> None:
    """Addition, then a map, a gated map and a head that read the sum through its norm."""
    x, weight = drawn(rows, size_k, dtype=dtype), drawn(size_n, size_k, dtype=dtype, scale=size_k**-0.5)
    residual, norm = drawn(rows, size_n, dtype=dtype), Norm(drawn(size_n, dtype=dtype, scale=0.1) + 1, 1e-5)
    stream = linear_add(x, DenseWeight(weight), residual, norm)
    assert_near(stream.values, wide(residual) + wide(x) @ wide(weight).t(), ERROR[dtype])
    assert_near(stream.normalised(), wide(stream.values, norm), ERROR[dtype])
    after = drawn(200, size_n, dtype=dtype, scale=size_n**-0.5)
    expected = wide(stream.values, norm) @ wide(after).t()
    assert_near(fused_linear(stream, DenseWeight(after)), expected, 2 * ERROR[dtype])
    assert_near(linear_logits(stream, DenseWeight(after)), expected, 2 * ERROR[dtype])
    gate, up = expected.chunk(2, dim=1)
    assert_near(
        fused_linear(stream, DenseWeight(after), gated=True), torch.nn.functional.silu(gate) * up, 3 * ERROR[dtype]
    )


@pytest.mark.parametrize(("rows", "size_n", "size_k", "dtype"), LARGE)
def test_large_maps(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> None:
    """With K split among programs or not; the sums of squares of a row come in parts."""
    x, weight = drawn(rows, size_k, dtype=dtype), drawn(size_n, size_k, dtype=dtype, scale=size_k**-0.5)
    squares = torch.stack([x.float().square().sum(1) / 3] * 3)
    scaled = Normed(x, x, squares, 1e-5)
    expected = wide(scaled.normalised()) @ wide(weight).t()
    assert_near(fused_linear(scaled, DenseWeight(weight)), expected, 2 * ERROR[dtype])
    gate, up = expected.chunk(2, dim=1)
    assert_near(
        fused_linear(scaled, DenseWeight(weight), gated=True), torch.nn.functional.silu(gate) * up, 3 * ERROR[dtype]
    )
    residual, norm = drawn(rows, size_n, dtype=dtype), Norm(drawn(size_n, dtype=dtype, scale=0.1) + 1, 1e-5)
    for _ in range(3):  # counters are left as they were
        stream = linear_add(x, DenseWeight(weight), residual, norm)
        assert_near(stream.values, wide(residual) + wide(x) @ wide(weight).t(), ERROR[dtype])
        assert_near(stream.normalised(), wide(stream.values, norm), ERROR[dtype])


@pytest.mark.parametrize(("rows", "size_n", "size_k", "dtype"), BIASED)
def test_biases(rows: int, size_n: int, size_k: int, dtype: torch.dtype) -> None:
    """Added to float32 sums: after the scale of a norm, before the residual. A BLAS is no closer."""
    x, matrix = drawn(rows, size_k, dtype=dtype), drawn(size_n, size_k, dtype=dtype, scale=size_k**-0.5)
    weight = DenseWeight(matrix, drawn(size_n, dtype=dtype))
    squares = torch.stack([x.float().square().sum(1) / 3] * 3)
    scaled = Normed(x, x, squares, 1e-5)
    expected = wide(scaled.normalised()) @ wide(matrix).t() + wide(weight.bias)
    assert_near(fused_linear(scaled, weight), expected, 2 * ERROR[dtype])
    assert_near(linear_logits(scaled, weight), expected, 2 * ERROR[dtype])
    exact = wide(x) @ wide(matrix).t() + wide(weight.bias)
    of_blas = torch.nn.functional.linear(x, matrix, weight.bias)
    error = float((of_blas.double() - exact).norm() / exact.norm())
    assert_near(fused_linear(x, weight), exact, max(1.05 * error, 1e-6))
    residual, norm = drawn(rows, size_n, dtype=dtype), Norm(drawn(size_n, dtype=dtype, scale=0.1) + 1, 1e-5)
    stream = linear_add(x, weight, residual, norm)
    assert_near(stream.values, wide(residual) + exact, 1.5 * ERROR[dtype])
    assert_near(stream.normalised(), wide(stream.values, norm), ERROR[dtype])


@pytest.mark.parametrize(("rows", "vocab", "size", "dtype"), HEADS)
def test_argmax_is_that_of_the_logits(rows: int, vocab: int, size: int, dtype: torch.dtype) -> None:
    x, weight = drawn(rows, size, dtype=dtype), drawn(vocab, size, dtype=dtype)
    logits = wide(x) @ wide(weight).t()
    columns = linear_argmax(x, DenseWeight(weight))
    best = logits.max(1).values
    chosen = logits.gather(1, columns[:, None]).squeeze(1)
    assert torch.all(best - chosen <= 1e-4 * best.abs())  # a near-tie may go either way
    ids = torch.randperm(vocab, device="cuda")
    assert torch.equal(linear_argmax(x, DenseWeight(weight), ids), ids[columns])


def test_of_equal_logits_the_first_is_taken() -> None:
    weight = torch.zeros(5000, 64, device="cuda", dtype=torch.bfloat16)
    weight[[7, 8, 4000, 4999], 0] = 1.0
    x = torch.zeros(3, 64, device="cuda", dtype=torch.bfloat16)
    x[1:, 0] = torch.tensor([1.0, -1.0])
    assert linear_argmax(x, DenseWeight(weight)).tolist() == [0, 7, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    x, weight = drawn(8, 576, dtype=dtype), drawn(960, 576, dtype=dtype)
    together = fused_linear(x, DenseWeight(weight))
    for row in range(8):
        mixed = drawn(8, 576, dtype=dtype)
        mixed[row] = x[row]
        assert torch.equal(fused_linear(mixed, DenseWeight(weight))[row], together[row])


@pytest.mark.parametrize(
    ("rows", "size", "inner"), [*[(rows, 576, 1536) for rows in (1, 4, 32, 50)], (4, 2048, 2560), (30, 2048, 2560)]
)
def test_dependent_launches_in_a_graph_follow_their_inputs(rows: int, size: int, inner: int) -> None:
    """Forty maps back to back: each may begin before the one before it has ended, and must not read too early."""
    dtype = torch.bfloat16
    x, norm = drawn(rows, size, dtype=dtype), Norm(torch.ones(size, device="cuda", dtype=dtype), 1e-5)
    gates = [drawn(2 * inner, size, dtype=dtype, scale=0.05) for _ in range(20)]
    downs = [drawn(size, inner, dtype=dtype, scale=0.05) for _ in range(20)]

    def forward() -> Tensor:
        stream = Normed(x, torch.nn.functional.rms_norm(x, (size,), norm.weight, norm.eps))
        for gate, down in zip(gates, downs, strict=True):
            stream = linear_add(
                fused_linear(stream, DenseWeight(gate), gated=True), DenseWeight(down), stream.values, norm
            )
        return stream.values

    def expected() -> Tensor:
        values = x.double()
        for gate, down in zip(gates, downs, strict=True):
            hidden = wide(values.to(dtype), norm)
            inside = fused_linear_reference(hidden.float(), gate.float(), True).double()
            values = (values + inside @ down.double().t()).to(dtype).double()
        return values

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = forward()
    for _ in range(20):
        x.copy_(drawn(rows, size, dtype=dtype))
        graph.replay()
        first = result.clone()
        graph.replay()
        assert torch.equal(result, first)
        assert_near(result, expected(), 3e-2)
