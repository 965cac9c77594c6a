"""The kernels around dense attention, under the interpreter: keys out of their pages, and parts merged."""

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs
from overlap_spec_kernels.attention.gather_keys import _gather_keys_triton, gather_keys_reference
from overlap_spec_kernels.attention.merge_parts import AttentionPart, _merge_parts_triton, merge_parts_reference

HEADS = [HeadShape(6, 2, 8), HeadShape(9, 3, 96)]


@pytest.mark.slow_but_every(5)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_gathered_keys(heads: HeadShape, page_size: int) -> None:
    inputs = attention_inputs(heads, [(30, 7)], page_size, torch.float32)
    for first, end, num_keys in ((0, 37, 40), (5, 6, 6), (16, 32, 16)):
        arguments = inputs.k_cache, inputs.v_cache, inputs.page_table[0], first, end, num_keys
        for out, expected in zip(_gather_keys_triton(*arguments), gather_keys_reference(*arguments), strict=True):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merged_parts(heads: HeadShape, dtype: torch.dtype) -> None:
    """Of rows in the middle of the first part, whose exponents are far apart."""
    size = (heads.num_heads, heads.head_dim)
    one = AttentionPart(torch.randn(40, *size), 30 * torch.randn(heads.num_heads, 40)).of_rows(3, 13)
    other = AttentionPart(torch.randn(13, *size).half(), 30 * torch.randn(heads.num_heads, 13))
    out, lse = _merge_parts_triton(one, other, dtype)
    expected, expected_lse = merge_parts_reference(one, other, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse)
