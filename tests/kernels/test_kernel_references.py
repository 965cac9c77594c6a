"""The plain-torch references against definitions written out one row and one head at a time, in float64.

Tolerances: float64 sums in another order.
"""

import subprocess
import sys

import pytest
import torch
from kernel_cases.inputs import AttentionInputs, HeadShape, attention_inputs, rope_inputs
from overlap_spec_kernels import (
    Norm,
    add_normed,
    add_rms_norm,
    gelu_mul,
    norm_all_heads,
    norm_heads,
    paged_attention,
    rms_norm,
    rope_kv_write,
    silu_mul,
)
from torch import Tensor

CLOSE = {"rtol": 1e-12, "atol": 1e-13}


@pytest.mark.parametrize("num_rows", [1, 3, 65])
@pytest.mark.parametrize("size", [60, 576])
def test_rms_norm(num_rows: int, size: int) -> None:
    x, weight = torch.randn(num_rows, size).double(), torch.randn(size).double()
    expected = torch.stack([row / (row.square().sum() / size + 1e-3) ** 0.5 * weight for row in x])
    torch.testing.assert_close(rms_norm(x, weight, 1e-3), expected, **CLOSE)


def test_rms_norm_accumulates_wider_than_16_bits() -> None:
    x = torch.randn(3, 4096).bfloat16()
    expected = rms_norm(x.double(), torch.ones(4096).double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, torch.ones(4096).bfloat16(), 1e-5).double(), expected, rtol=2**-8, atol=0)


def test_add_rms_norm_normalises_the_sum_it_returns() -> None:
    x, residual, weight = torch.randn(7, 60).bfloat16(), torch.randn(7, 60).bfloat16(), torch.randn(60).bfloat16()
    y, new_residual = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(y, rms_norm(new_residual, weight, 1e-5))


def test_silu_mul_takes_the_gate_first() -> None:
    gate, up = torch.randn(3, 60).double(), torch.randn(3, 60).double()
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), dim=1)), expected, **CLOSE)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(gelu_mul(torch.cat((gate, up), dim=1)), gate * (1 + inner.tanh()) / 2 * up, **CLOSE)


def test_the_norm_of_what_is_added_is_before_the_sum() -> None:
    x, residual, factor = torch.randn(7, 60).bfloat16(), torch.randn(7, 60).bfloat16(), torch.randn(1).bfloat16()
    inner, outer = (Norm(torch.randn(60).bfloat16(), eps) for eps in (1e-5, 1e-3))
    y, total = add_normed(x, residual, inner, outer, factor)
    assert torch.equal(total, (residual + rms_norm(x, *inner)) * factor)
    assert torch.equal(y, rms_norm(total, *outer))


@pytest.mark.parametrize("own", [1, 2], ids=["values are keys", "values of their own"])
def test_norms_of_all_heads(own: int) -> None:
    heads = torch.randn(5, 4 + own * 2, 8).double()
    query, key, ones = torch.randn(8).double(), torch.randn(8).double(), torch.ones(8).double()
    found = norm_all_heads(heads.flatten(1), query, key, 4, 2, 1e-3).view(5, 8, 8)
    for head, (source, weight) in enumerate([*((i, query) for i in range(4)), (4, key), (5, key)]):
        torch.testing.assert_close(found[:, head], rms_norm(heads[:, source].contiguous(), weight, 1e-3), **CLOSE)
    for head in range(2):
        source = heads[:, 2 + 2 * own + head].contiguous()
        torch.testing.assert_close(found[:, 6 + head], rms_norm(source, ones, 1e-3), **CLOSE)


@pytest.mark.parametrize("heads", [HeadShape(3, 1, 8), HeadShape(8, 8, 96)])
def test_norm_heads(heads: HeadShape) -> None:
    num_heads, num_kv_heads, dim = heads
    qkv = torch.randn(5, (num_heads + 2 * num_kv_heads) * dim).double()
    query, key = torch.randn(dim).double(), torch.randn(dim).double()
    expected = qkv.clone().unflatten(1, (-1, dim))
    for head in range(num_heads + num_kv_heads):
        for row in expected[:, head]:
            row *= (query if head < num_heads else key) / (row.square().sum() / dim + 1e-3) ** 0.5
    out = norm_heads(qkv, query, key, num_kv_heads, 1e-3)
    assert out is qkv, "in place"
    torch.testing.assert_close(out, expected.flatten(1), **CLOSE)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [HeadShape(3, 1, 8), HeadShape(8, 8, 96)])
def test_rope_kv_write_rotates_pairs_of_the_two_halves(heads: HeadShape, page_size: int) -> None:
    inputs = rope_inputs(heads, 7, page_size, torch.float64)
    q = rope_kv_write(*inputs)
    turn = torch.complex(*inputs.cos_sin.chunk(2, dim=1))[inputs.positions].unsqueeze(1)
    keys = inputs.k_cache.flatten(0, 1)[inputs.cache_rows]
    for rotated, plain in ((q, inputs.q), (keys, inputs.k)):
        expected = torch.complex(*plain.chunk(2, dim=2)) * turn
        torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=2), **CLOSE)
    assert torch.equal(inputs.v_cache.flatten(0, 1)[inputs.cache_rows], inputs.v)


def test_rope_kv_write_leaves_other_cache_rows_alone() -> None:
    inputs = rope_inputs(HeadShape(3, 1, 8), 5, 4, torch.float64)
    rope_kv_write(*inputs)
    for cache in (inputs.k_cache, inputs.v_cache):
        written = cache.flatten(0, 1).ne(0).any(dim=(1, 2) if cache.dim() == 3 else -1).reshape(cache[..., 0].numel())
        assert written.nonzero().flatten().tolist() == sorted(inputs.cache_rows.tolist())


def dense_attention(inputs: AttentionInputs, window: int | None = None, sinks: Tensor | None = None) -> Tensor:
    """One row and one head at a time, keys gathered one by one."""
    page_size, num_kv_heads = inputs.k_cache.shape[1:3]
    group = inputs.q.shape[1] // num_kv_heads
    out = torch.empty_like(inputs.q)
    request_of = torch.repeat_interleave(inputs.row_starts.diff().long()).tolist()
    for row, (request, position) in enumerate(zip(request_of, inputs.positions.tolist(), strict=True)):
        places = [(int(inputs.page_table[request, key // page_size]), key % page_size) for key in range(position + 1)]
        places = places if window is None else places[-window:]
        k = torch.stack([inputs.k_cache[place] for place in places])
        v = torch.stack([inputs.v_cache[place] for place in places])
        for head in range(inputs.q.shape[1]):
            scores = k[:, head // group] @ inputs.q[row, head] * inputs.scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[head, None]))
            out[row, head] = torch.softmax(scores, dim=0)[: len(v)] @ v[:, head // group]
    return out


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("heads", [HeadShape(2, 2, 8), HeadShape(6, 2, 64), HeadShape(8, 1, 96)])
@pytest.mark.parametrize("requests", [[(0, 1)], [(37, 4), (0, 4), (14, 4)], [(5, 7), (0, 33), (19, 1)]])
def test_paged_attention(requests: list[tuple[int, int]], heads: HeadShape, page_size: int) -> None:
    inputs = attention_inputs(heads, requests, page_size, torch.float64)
    torch.testing.assert_close(paged_attention(*inputs), dense_attention(inputs), **CLOSE)


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("requests", [[(0, 1)], [(37, 4), (0, 4), (14, 4)], [(5, 7), (0, 33), (19, 1)]])
@pytest.mark.parametrize("window", [1, 3, 8, 30])
def test_paged_attention_in_a_window(window: int, requests: list[tuple[int, int]], page_size: int) -> None:
    """Pages before the first row's window may belong to others: their keys are not read."""
    inputs = attention_inputs(HeadShape(6, 2, 16), requests, page_size, torch.float64)
    expected = dense_attention(inputs, window)
    for request, (first, _) in enumerate(requests):
        inputs.page_table[request, : max(first - window + 1, 0) // page_size] = 0  # a page of NaN
    torch.testing.assert_close(paged_attention(*inputs, window=window), expected, **CLOSE)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("requests", [[(0, 1)], [(37, 4), (0, 4), (14, 1)]])
def test_paged_attention_with_sinks(requests: list[tuple[int, int]], window: int | None) -> None:
    inputs = attention_inputs(HeadShape(6, 2, 16), requests, 4, torch.float64)
    sinks = torch.linspace(-2, 3, 6, dtype=torch.float64)
    found = paged_attention(*inputs, window=window, sinks=sinks)
    torch.testing.assert_close(found, dense_attention(inputs, window, sinks), **CLOSE)
    none = torch.full((6,), -torch.inf, dtype=torch.float64)
    torch.testing.assert_close(paged_attention(*inputs, sinks=none), dense_attention(inputs), **CLOSE)


def test_paged_attention_over_consecutive_pages() -> None:
    inputs = attention_inputs(HeadShape(6, 2, 8), [(37, 4)], 4, torch.float64, spare_pages=0)
    pages, count = inputs.page_table[0], inputs.page_table.shape[1]
    sorted_inputs = inputs._replace(
        k_cache=inputs.k_cache[pages], v_cache=inputs.v_cache[pages], page_table=torch.arange(count).int()[None]
    )
    assert torch.equal(paged_attention(*sorted_inputs), paged_attention(*inputs))


def test_paged_attention_skips_requests_without_rows() -> None:
    inputs = attention_inputs(HeadShape(3, 1, 8), [(9, 2), (4, 2)], 4, torch.float64)
    starts = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    table = torch.stack((inputs.page_table[0], torch.zeros_like(inputs.page_table[0]), inputs.page_table[1]))
    padded = inputs._replace(row_starts=starts, page_table=table, uniform=False)
    assert torch.equal(paged_attention(*padded), paged_attention(*inputs))


ROPE = rope_inputs(HeadShape(3, 1, 8), 5, 4, torch.float32)
ATTENTION = attention_inputs(HeadShape(3, 1, 8), [(9, 2)], 4, torch.float32)
X, WEIGHT = torch.randn(3, 60), torch.randn(60)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("x", lambda: rms_norm(X.t(), WEIGHT, 1e-5)),
        ("weight", lambda: rms_norm(X, WEIGHT[:59], 1e-5)),
        ("weight", lambda: rms_norm(X, WEIGHT.double(), 1e-5)),
        ("residual", lambda: add_rms_norm(X, X[:2], WEIGHT, 1e-5)),
        ("qkv", lambda: norm_heads(X.t(), WEIGHT[:12], WEIGHT[:12], 1, 1e-5)),
        ("qkv", lambda: norm_heads(X, WEIGHT[:12], WEIGHT[:12], 3, 1e-5)),
        ("query_weight", lambda: norm_heads(X, WEIGHT[:12].double(), WEIGHT[:12], 1, 1e-5)),
        ("key_weight", lambda: norm_heads(X, WEIGHT[:12], WEIGHT[:11], 1, 1e-5)),
        ("window", lambda: paged_attention(*ATTENTION, window=0)),
        ("sinks", lambda: paged_attention(*ATTENTION, sinks=torch.zeros(1))),
        ("sinks", lambda: paged_attention(*ATTENTION, sinks=torch.zeros(3, dtype=torch.int64))),
        ("gate_up", lambda: silu_mul(X[:, :59])),
        ("q", lambda: rope_kv_write(*ROPE._replace(q=ROPE.q[..., :7]))),
        ("v", lambda: rope_kv_write(*ROPE._replace(v=ROPE.v[:4]))),
        ("cos_sin", lambda: rope_kv_write(*ROPE._replace(cos_sin=ROPE.cos_sin[:, :4]))),
        ("positions", lambda: rope_kv_write(*ROPE._replace(positions=ROPE.positions.int()))),
        ("cache_rows", lambda: rope_kv_write(*ROPE._replace(cache_rows=ROPE.cache_rows[:4]))),
        ("v_cache", lambda: rope_kv_write(*ROPE._replace(v_cache=ROPE.v_cache[1:]))),
        ("k_cache", lambda: paged_attention(*ATTENTION._replace(k_cache=ATTENTION.k_cache.double()))),
        ("page_table", lambda: paged_attention(*ATTENTION._replace(page_table=ATTENTION.page_table.long()))),
        ("row_starts", lambda: paged_attention(*ATTENTION._replace(row_starts=ATTENTION.row_starts[:1]))),
        ("positions", lambda: paged_attention(*ATTENTION._replace(positions=ATTENTION.positions[:1]))),
        ("max_rows", lambda: paged_attention(*ATTENTION._replace(max_rows=1))),
    ],
)
def test_a_bad_argument_is_named(argument: str, call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=f"^{argument}: "):
        call()


@pytest.mark.slow
def test_the_package_works_where_triton_is_not_installed() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, overlap_spec_kernels as ops\n"
        "assert ops.silu_mul(torch.zeros(1, 4)).shape == (1, 2)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
