"""Long chunks on a GPU: dense attention in parts against the reference in float32."""

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs, to_device
from overlap_spec_kernels.attention import chunk_attention as ops
from overlap_spec_kernels.attention.chunk_attention import ChunkCuts, chunk_attention, takes_long_chunks
from overlap_spec_kernels.attention.gather_keys import gather_keys, gather_keys_reference
from overlap_spec_kernels.attention.paged_attention import paged_attention_reference
from support.attention_cases import CLOSE
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from torch import Tensor

CASES = [
    (HeadShape(32, 8, 128), 16, [(0, 1024), (0, 700), (1500, 1300), (5000, 513)]),
    (HeadShape(9, 3, 64), 1, [(0, 1024), (2100, 1111)]),
    (HeadShape(8, 4, 256), 64, [(3000, 1030)]),
    (HeadShape(8, 1, 96), 4, [(2048, 1024)]),
]
TWO_BLOCKS = ChunkCuts(most_keys=2048)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_parts_are_one_attention(case: tuple[HeadShape, int, list[tuple[int, int]]], dtype: torch.dtype) -> None:
    """Cache rows of others hold NaN. With `most_keys` of 2,048 three parts and more are merged."""
    heads, page_size, places = case
    for place in places:
        inputs = attention_inputs(heads, [place], page_size, dtype)
        q, k_cache, v_cache, table, starts, positions = (to_device(value, "cuda") for value in inputs[:6])
        wide = (value.float() for value in (q, k_cache, v_cache))
        expected = paged_attention_reference(*wide, table, starts, positions, inputs.scale)
        assert takes_long_chunks(heads.num_heads, k_cache.dtype, k_cache.nan_to_num(), v_cache.nan_to_num())
        for cuts in (ops.CUTS, TWO_BLOCKS):
            out = chunk_attention(q, k_cache, v_cache, table[0], place[0], inputs.scale, cuts)
            assert out.dtype == dtype and out.is_contiguous()
            torch.testing.assert_close(out.float(), expected, **CLOSE[torch.bfloat16])


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_gathered_keys_are_the_references(page_size: int) -> None:
    inputs = attention_inputs(HeadShape(2, 1, 96), [(300, 7)], page_size, torch.bfloat16)
    k_cache, v_cache, table = (to_device(value, "cuda") for value in inputs[1:4])
    for first, end, num_keys in ((0, 307, 400), (33, 34, 34), (64, 128, 64)):
        arguments = k_cache, v_cache, table[0], first, end, num_keys
        for out, expected in zip(gather_keys(*arguments), gather_keys_reference(*arguments), strict=True):
            assert torch.equal(out, expected)


def test_heads_and_types_without_a_dense_kernel_are_left_to_the_paged_one() -> None:
    def cache(dim: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(40, 16, 1, dim, dtype=dtype, device="cuda")

    for dim, dtype in ((64, torch.float32), (512, torch.bfloat16), (20, torch.bfloat16)):
        assert not takes_long_chunks(2, dtype, cache(dim, dtype), cache(dim, dtype))


@sync_mode_warns
def test_a_chunk_never_synchronizes() -> None:
    inputs = attention_inputs(HeadShape(8, 2, 64), [(1500, 700)], 16, torch.bfloat16)
    q, k_cache, v_cache, table = (to_device(value, "cuda") for value in inputs[:4])
    chunk_attention(q, k_cache, v_cache, table[0], 1500, inputs.scale)
    with synchronization_is_an_error():
        chunk_attention(q, k_cache, v_cache, table[0], 1500, inputs.scale)
