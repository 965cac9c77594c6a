"""The Triton kernels on a GPU against their references on the CPU, which run in float32 on the same values.

Tolerances: float32 is IEEE, so only the order of sums differs; 16-bit outputs are rounded once more, and attention
rounds its weights before they meet V.
"""

from typing import Any

import pytest
import torch
from kernel_cases.inputs import AttentionInputs, HeadShape, attention_inputs, rope_inputs, to_device
from overlap_spec_kernels import add_rms_norm, paged_attention, rms_norm, rope_kv_write, silu_mul
from overlap_spec_kernels.attention.paged_attention import _paged_attention_triton
from support.attention_cases import CLOSE, LONG, LONG_LENGTHS, SMOL, Case, every_group, name, rare
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 7, 65]
REQUESTS = [[(0, 1)], [(70, 3), (0, 3), (15, 3)], [(50, 9), (3, 9)]]  # decode and verify: alike
CHUNKS = [[(0, 65)], [(5, 7), (0, 333), (19, 1)], [(130, 40)]]


def on_gpu(inputs: Any) -> tuple[Any, ...]:
    return tuple(to_device(value, "cuda") for value in inputs)


def widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.cpu().float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", [60, 576, 4096])
def test_norms(size: int, num_rows: int, dtype: torch.dtype) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((num_rows, size), (num_rows, size), (size,)))
    expected = rms_norm(x.float(), weight.float(), 1e-5)
    check(rms_norm(*on_gpu((x, weight, 1e-5))), expected, dtype)
    y, new_residual = add_rms_norm(*on_gpu((x, residual, weight, 1e-5)))
    assert torch.equal(new_residual.cpu(), x + residual)
    check(y, rms_norm((x + residual).float(), weight.float(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("size", [30, 1536, 14336])
def test_silu_mul(size: int, num_rows: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(num_rows, 2 * size).to(dtype)
    check(silu_mul(gate_up.cuda()), silu_mul(gate_up.float()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("heads", "page_size"), [(SMOL, 16), (HeadShape(8, 1, 96), 64), (HeadShape(0, 2, 8), 1)])
def test_rope_kv_write(heads: HeadShape, page_size: int, num_rows: int, dtype: torch.dtype) -> None:
    inputs = rope_inputs(heads, num_rows, page_size, dtype)
    arguments, expected = on_gpu(inputs), tuple(widened(value) for value in inputs)
    check(rope_kv_write(*arguments), rope_kv_write(*expected), dtype)
    check(arguments[6], expected[6], dtype)
    assert torch.equal(arguments[7].cpu().float(), expected[7])


def check_attention(inputs: AttentionInputs, dtype: torch.dtype, num_splits: int | None = None) -> None:
    expected = paged_attention(*(widened(value) for value in inputs))
    arguments = on_gpu(inputs)
    actual = paged_attention(*arguments) if num_splits is None else _paged_attention_triton(*arguments[:-1], num_splits)
    check(actual, expected, dtype)


@pytest.mark.parametrize("case", [*every_group(), *rare()], ids=name)
def test_decode_and_prefill(case: Case) -> None:
    """Also without splits."""
    for requests in REQUESTS + CHUNKS:
        inputs = attention_inputs(case.heads, requests, case.page_size, case.dtype)
        check_attention(inputs, case.dtype)
        check_attention(inputs, case.dtype, num_splits=1)


def test_a_page_as_long_as_a_prompt() -> None:
    check_attention(attention_inputs(SMOL, CHUNKS[1], 256, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("case", LONG, ids=name)
def test_long_contexts_in_many_splits(case: Case) -> None:
    for lengths in LONG_LENGTHS:
        requests = [(length, case.width) for length in lengths]
        spare_pages = (131072 - max(lengths)) // case.page_size
        inputs = attention_inputs(case.heads, requests, case.page_size, case.dtype, spare_pages)
        check_attention(inputs, case.dtype)
        check_attention(inputs, case.dtype, num_splits=64)


def test_a_chunk_deep_in_a_context() -> None:
    check_attention(attention_inputs(SMOL, [(8300, 70)], 16, torch.bfloat16, spare_pages=1000), torch.bfloat16)


def test_long_chunks_in_large_tiles() -> None:
    """Beside other requests, and with padding after the last row."""
    for requests in [(1900, 700)], [(2000, 384)], [(30, 30), (2100, 490), (600, 1)]:
        check_attention(attention_inputs(HeadShape(32, 8, 128), requests, 16, torch.bfloat16), torch.bfloat16)


def test_float32_products_are_ieee() -> None:
    """With TF32, the error of the scores alone would be about 1e-3."""
    inputs = attention_inputs(HeadShape(2, 2, 128), [(300, 4)], 16, torch.float32)
    wide = {name: getattr(inputs, name).double() for name in ("q", "k_cache", "v_cache")}
    exact = paged_attention(*inputs._replace(**wide))
    assert (paged_attention(*on_gpu(inputs)).cpu() - exact).abs().max() < 2e-6


@sync_mode_warns
def test_no_op_synchronizes() -> None:
    rope = on_gpu(rope_inputs(HeadShape(9, 3, 64), 4, 16, torch.bfloat16))
    attention = on_gpu(attention_inputs(HeadShape(9, 3, 64), [(70, 4), (3, 4)], 16, torch.bfloat16))
    x, weight = torch.randn(4, 576).bfloat16().cuda(), torch.randn(576).bfloat16().cuda()

    def every_op() -> None:
        add_rms_norm(rms_norm(x, weight, 1e-5), x, weight, 1e-5)
        silu_mul(x)
        rope_kv_write(*rope)
        paged_attention(*attention)

    every_op()  # compiles
    with synchronization_is_an_error():
        every_op()


def test_a_captured_graph_follows_its_inputs() -> None:
    """Lengths and pages are data: one capture serves the next step too."""
    heads = HeadShape(9, 3, 64)
    short = attention_inputs(heads, [(70, 4), (3, 4)], 16, torch.float32, spare_pages=60)
    long = attention_inputs(heads, [(5, 4), (900, 4)], 16, torch.float32, spare_pages=8)
    static = list(on_gpu(long))
    paged_attention(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*static)
    for inputs in (long, short):
        for target, value in zip(static, inputs, strict=True):
            if isinstance(value, Tensor):
                target[tuple(slice(0, n) for n in value.shape)].copy_(value[tuple(slice(0, n) for n in target.shape)])
        graph.replay()
        check(out, paged_attention(*inputs), torch.float32)
