"""What Qwen3 and Mistral need beside Llama, on a GPU, against references: attention in a window, and norms of heads.

Pages before the first row's window hold NaN, as those of other requests would hold their keys.
"""

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, attention_inputs, decode_inputs, to_device
from overlap_spec_kernels import norm_heads, paged_attention
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference
from overlap_spec_kernels.norm.norm_heads import norm_heads_reference
from support.attention_cases import CLOSE, LLAMA, SMOL
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]
PAGE_SIZE = 16


def widened(value: object) -> object:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def forget_pages(page_table: Tensor, firsts: list[int], window: int) -> None:
    """Page 0 is nobody's."""
    for pages, first in zip(page_table, firsts, strict=True):
        pages[: max(first - window + 1, 0) // PAGE_SIZE] = 0


def decoded(inputs: DecodeInputs, heads: HeadShape, window: int) -> Tensor:
    """In float32, from q and k that are rotated and rounded in the dtype. Shapes: -> [T, nq d]."""
    num_requests, k_cache, v_cache = len(inputs.page_table), inputs.k_cache.clone(), inputs.v_cache.clone()
    rows = inputs.qkv.unflatten(1, (-1, heads.head_dim))
    q, k, v = rows.split((heads.num_heads, heads.num_kv_heads, heads.num_kv_heads), dim=1)
    places = inputs.positions.view(num_requests, -1)
    cache_rows = (inputs.page_table.gather(1, places // PAGE_SIZE) * PAGE_SIZE + places % PAGE_SIZE).flatten().long()
    q = rope_kv_write_reference(q, k, v, inputs.cos_sin, inputs.positions, cache_rows, k_cache, v_cache)
    starts = torch.arange(num_requests + 1, dtype=torch.int32) * places.shape[1]
    wide = (tensor.float() for tensor in (q, k_cache, v_cache))
    out = paged_attention_reference(*wide, inputs.page_table, starts, inputs.positions, inputs.scale, window)
    return out.flatten(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [SMOL, LLAMA, HeadShape(8, 1, 96)])
@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 3, 100, 4096])
def test_decode(window: int, width: int, heads: HeadShape, dtype: torch.dtype) -> None:
    lengths = [300, 0, 15, 700, 9000]
    inputs = decode_inputs(heads, width, lengths, PAGE_SIZE, dtype)
    forget_pages(inputs.page_table, lengths, window)
    out = decoded(inputs, heads, window)
    *tensors, scale = (to_device(value, "cuda") for value in inputs)
    for num_programs in (None, 1, 1024):
        scratch = DecodeScratch.allocate(heads.head_dim, torch.device("cuda"), num_programs)
        scratch.outputs.fill_(torch.nan)
        actual = decode_attention(*tensors, scratch, scale, window=window)
        torch.testing.assert_close(actual.cpu().float(), out, **CLOSE[dtype])
        assert not scratch.counters.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [SMOL, LLAMA])
@pytest.mark.parametrize("requests", [[(0, 300)], [(900, 77), (0, 33), (64, 1)]])
@pytest.mark.parametrize("window", [1, 50, 512])
def test_prefill(window: int, requests: list[tuple[int, int]], heads: HeadShape, dtype: torch.dtype) -> None:
    inputs = attention_inputs(heads, requests, PAGE_SIZE, dtype)
    forget_pages(inputs.page_table, [first for first, _ in requests], window)
    expected = paged_attention(*(widened(value) for value in inputs), window=window)
    actual = paged_attention(*(to_device(value, "cuda") for value in inputs), window=window)
    torch.testing.assert_close(actual.cpu().float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [HeadShape(16, 8, 128), HeadShape(9, 3, 64), HeadShape(5, 1, 80)])
@pytest.mark.parametrize("num_rows", [1, 4, 64, 300])
def test_norm_heads(num_rows: int, heads: HeadShape, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, dim = heads
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * dim).to(dtype)
    weights = [torch.randn(dim).to(dtype) for _ in range(2)]
    wide = norm_heads_reference(qkv.float().clone(), *(weight.float() for weight in weights), num_kv_heads, 1e-6)
    actual = norm_heads(qkv.cuda(), *(weight.cuda() for weight in weights), num_kv_heads, 1e-6)
    torch.testing.assert_close(actual.cpu().float(), wide, **CLOSE[dtype])


@sync_mode_warns
def test_they_do_not_synchronize() -> None:
    inputs = decode_inputs(SMOL, 4, [70, 600], PAGE_SIZE, torch.bfloat16)
    *tensors, scale = (to_device(value, "cuda") for value in inputs)
    weight, scratch = torch.ones(64, device="cuda").bfloat16(), DecodeScratch.allocate(64, torch.device("cuda"))

    def run() -> Tensor:
        norm_heads(tensors[0], weight, weight, SMOL.num_kv_heads, 1e-6)
        return decode_attention(*tensors, scratch, scale, window=100)

    run()  # compiles
    with synchronization_is_an_error():
        run()
