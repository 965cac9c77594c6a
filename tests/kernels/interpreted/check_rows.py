"""The kernels of one row each, under the interpreter: norms, gate, rope. Float32, tolerance of a few roundings."""

import pytest
import torch
from kernel_cases.inputs import HeadShape, rope_inputs
from overlap_spec_kernels.attention.rope_kv_write import _rope_kv_write_triton, rope_kv_write_reference
from overlap_spec_kernels.norm.add_rms_norm import (
    _add_normed_triton,
    _add_rms_norm_triton,
    add_normed_reference,
    add_rms_norm_reference,
)
from overlap_spec_kernels.norm.norm_heads import (
    _norm_all_heads_triton,
    _norm_heads_triton,
    norm_all_heads_reference,
    norm_heads_reference,
)
from overlap_spec_kernels.norm.normed import Norm
from overlap_spec_kernels.norm.rms_norm import _rms_norm_triton, rms_norm_reference
from overlap_spec_kernels.norm.silu_mul import (
    _mul_by_gates_triton,
    _mul_by_share_triton,
    _silu_mul_triton,
    gelu_mul_reference,
    mul_by_gates_reference,
    mul_by_share_reference,
    silu_mul_reference,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
ROWS = [1, 3, 7, 65]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", [60, 576])
def test_rms_norm(num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_rows, 2 * size)[:, :size], torch.randn(size)
    torch.testing.assert_close(_rms_norm_triton(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), **CLOSE)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", [60, 576])
def test_add_rms_norm(num_rows: int, size: int) -> None:
    arguments = torch.randn(num_rows, size), torch.randn(num_rows, size), torch.randn(size), 1e-5
    y, new_residual = _add_rms_norm_triton(*arguments)
    expected, expected_residual = add_rms_norm_reference(*arguments)
    assert torch.equal(new_residual, expected_residual)
    torch.testing.assert_close(y, expected, **CLOSE)


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("heads", [HeadShape(3, 3, 8), HeadShape(9, 3, 64), HeadShape(8, 1, 96)])
def test_norm_heads(heads: HeadShape, num_rows: int) -> None:
    num_heads, num_kv_heads, dim = heads
    whole = torch.randn(num_rows, 8 + (num_heads + 2 * num_kv_heads) * dim)
    qkv, before = whole[:, 8:], whole[:, :8].clone()
    weights = torch.randn(dim), torch.randn(dim), num_kv_heads, 1e-5
    expected = norm_heads_reference(qkv.clone(), *weights)
    torch.testing.assert_close(_norm_heads_triton(qkv, *weights), expected, **CLOSE)
    assert torch.equal(whole[:, :8], before)


@pytest.mark.slow_but_every(3)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", [30, 1536])
def test_silu_mul(num_rows: int, size: int) -> None:
    gate_up = torch.randn(num_rows, 2 * size)
    torch.testing.assert_close(_silu_mul_triton(gate_up), silu_mul_reference(gate_up), **CLOSE)
    torch.testing.assert_close(_silu_mul_triton(gate_up, gelu=True), gelu_mul_reference(gate_up), **CLOSE)


@pytest.mark.parametrize(("num_rows", "dim"), [(1, 512), (7, 24)])
def test_norms_of_all_heads(num_rows: int, dim: int) -> None:
    """Values are keys, or have rows of their own."""
    for own in (1, 2):
        heads, weights = torch.randn(num_rows, (6 + own * 3) * dim), (torch.randn(dim), torch.randn(dim))
        expected = norm_all_heads_reference(heads, *weights, 6, 3, 1e-5)
        torch.testing.assert_close(_norm_all_heads_triton(heads, *weights, 6, 3, 1e-5), expected, **CLOSE)


@pytest.mark.parametrize("factor", [None, torch.tensor([0.7])])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_the_norm_of_a_norm_that_is_added(num_rows: int, factor: torch.Tensor | None) -> None:
    norms = Norm(torch.randn(60), 1e-5), Norm(torch.randn(60), 1e-3)
    arguments = torch.randn(num_rows, 60), torch.randn(num_rows, 60), *norms, factor
    for one, other in zip(_add_normed_triton(*arguments), add_normed_reference(*arguments), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.full_but_every(3)
@pytest.mark.slow_but_every(12)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [HeadShape(3, 3, 8), HeadShape(9, 3, 64), HeadShape(8, 1, 96), HeadShape(0, 6, 128)])
def test_rope_kv_write(heads: HeadShape, page_size: int, num_rows: int) -> None:
    inputs = rope_inputs(heads, num_rows, page_size, torch.float32)
    expected = inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    q = _rope_kv_write_triton(*inputs)
    torch.testing.assert_close(q, rope_kv_write_reference(*expected), **CLOSE)
    torch.testing.assert_close(inputs.k_cache, expected.k_cache, **CLOSE)
    assert torch.equal(inputs.v_cache, expected.v_cache)


@pytest.mark.parametrize("writes", [True, False])
def test_rope_finds_rows_by_the_pages_of_a_request(writes: bool) -> None:
    """Which are as many as its rows need, and one more; without keys and values it rotates queries alone."""
    inputs = rope_inputs(HeadShape(9, 3, 64), 7, 4, torch.float32)
    pages = torch.full((int(inputs.positions[-1]) // 4 + 2,), -1, dtype=torch.int32)
    pages[inputs.positions // 4] = (inputs.cache_rows // 4).int()
    expected = inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    if not writes:
        inputs = inputs._replace(k=inputs.k[:, :0], v=inputs.v[:, :0])
    q = _rope_kv_write_triton(*inputs._replace(cache_rows=pages))
    torch.testing.assert_close(q, rope_kv_write_reference(*expected), **CLOSE)
    if writes:
        torch.testing.assert_close(inputs.k_cache, expected.k_cache, **CLOSE)
    assert torch.equal(inputs.v_cache, expected.v_cache) == writes and bool(inputs.v_cache.any()) == writes


def test_16_bit_rows_accumulate_in_float32() -> None:
    x, weight = torch.randn(3, 4096).half(), torch.randn(4096).half()
    expected = rms_norm_reference(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(_rms_norm_triton(x, weight, 1e-5).float(), expected, rtol=2**-11, atol=1e-7)


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("num_rows", ROWS)
def test_mul_by_share(num_rows: int) -> None:
    values, x, weight = torch.randn(num_rows, 2 * 30)[:, :30], torch.randn(num_rows, 100), torch.randn(1, 100) / 10
    expected = mul_by_share_reference(values, x, weight)
    torch.testing.assert_close(_mul_by_share_triton(values, x, weight), expected, **CLOSE)


@pytest.mark.parametrize(("size", "gates"), [(1300, 1), (48, 12), (1300, 1300)])
def test_mul_by_gates(size: int, gates: int) -> None:
    """Of rows, of parts of them, of columns; in rows of a larger tensor."""
    values, of_rows = torch.randn(3, size), torch.randn(3, gates + 5)[:, 5:]
    torch.testing.assert_close(_mul_by_gates_triton(values, of_rows), mul_by_gates_reference(values, of_rows), **CLOSE)
