"""Kernels over caches of 8 bits under the interpreter, against their references.

The interpreter's own conversion to 8 bits loses a carry from the mantissa into the exponent, and NaN: torch's takes its
place, which rounds as a GPU does.
"""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs, decode_inputs, rope_inputs, tree_inputs
from overlap_spec_kernels.attention.decode_attention import (
    DecodeScratch,
    _decode_attention_triton,
    decode_attention_reference,
)
from overlap_spec_kernels.attention.gather_keys import _gather_keys_triton, gather_keys_reference
from overlap_spec_kernels.attention.kv_format import KVScales
from overlap_spec_kernels.attention.paged_attention import _paged_attention_triton, paged_attention_reference
from overlap_spec_kernels.attention.rope_kv_write import _rope_kv_write_triton, rope_kv_write_reference
from overlap_spec_kernels.attention.rope_latent_write import _rope_latent_write_triton, rope_latent_write_reference
from overlap_spec_kernels.attention.tree_attention import _tree_attention_triton, tree_attention_reference
from support.eight_bits import E4M3, E5M2, assert_close_in_8_bits, in_8_bits
from triton import language as tl
from triton.runtime import interpreter

HEADS = HeadShape(6, 2, 16)
SCALES = KVScales(0.04, 0.3)
CLOSE = {"rtol": 1e-5, "atol": 2e-4}
FORMATS = pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])


IN_TORCH = {tl.float8e4nv: E4M3, tl.float8e5: E5M2, tl.float32: torch.float32}


@pytest.fixture(autouse=True)
def _conversions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if not {source, target} <= set(IN_TORCH):
            return known(values, source, target, rounding)
        octets = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).copy())
        found = octets.view(IN_TORCH[source]).to(IN_TORCH[target]).view(torch.uint8).numpy()
        return found.view(f"uint{target.primitive_bitwidth}").reshape(values.shape)

    known = interpreter._convert_float
    monkeypatch.setattr(interpreter, "_convert_float", converted)


def copies(*caches: torch.Tensor) -> list[torch.Tensor]:
    return [cache.clone() for cache in caches]


@pytest.mark.slow_but_every(3)
@FORMATS
@pytest.mark.parametrize("window", [None, 30])
def test_decode(window: int | None, kv_dtype: torch.dtype) -> None:
    """A small scale clamps a third of the values."""
    for scales in (SCALES, KVScales(torch.finfo(kv_dtype).max ** -1, 0.3)):
        inputs = in_8_bits(decode_inputs(HEADS, 3, [150, 0, 17], 16, torch.float32), kv_dtype, scales)
        expected = copies(inputs.k_cache, inputs.v_cache)
        out = decode_attention_reference(*inputs[:4], *expected, inputs.scale, window, scales)
        scratch = DecodeScratch.allocate(16, torch.device("cpu"), 40)
        *tensors, scale = inputs
        actual = _decode_attention_triton(*tensors, scratch, scale, window=window, scales=scales)
        torch.testing.assert_close(actual, out, **CLOSE)
        assert_close_in_8_bits(inputs.k_cache, expected[0])
        assert_close_in_8_bits(inputs.v_cache, expected[1])


@FORMATS
def test_chunks_of_prompts(kv_dtype: torch.dtype) -> None:
    inputs = in_8_bits(attention_inputs(HEADS, [(0, 9), (130, 3)], 16, torch.float32), kv_dtype, SCALES)
    for window, num_splits in ((None, 1), (None, 3), (20, 1)):
        expected = paged_attention_reference(*inputs[:6], inputs.scale, window, SCALES)
        *tensors, max_rows, scale, _ = inputs
        actual = _paged_attention_triton(*tensors, max_rows, scale, num_splits, window, SCALES)
        torch.testing.assert_close(actual, expected, **CLOSE)


@FORMATS
def test_trees(kv_dtype: torch.dtype) -> None:
    inputs = in_8_bits(tree_inputs(HEADS, 5, 7, [140, 3], 16, torch.float32), kv_dtype, SCALES)
    scratch = DecodeScratch.allocate(32, torch.device("cpu"), 24)
    actual = _tree_attention_triton(*inputs, None, scratch, SCALES)
    torch.testing.assert_close(actual, tree_attention_reference(*inputs, None, SCALES), **CLOSE)


@FORMATS
def test_rows_are_written_and_gathered(kv_dtype: torch.dtype) -> None:
    inputs = in_8_bits(rope_inputs(HEADS, 5, 4, torch.float32), kv_dtype, SCALES)
    *given, k_cache, v_cache = inputs
    expected = copies(k_cache, v_cache)
    q = _rope_kv_write_triton(*inputs, SCALES)
    torch.testing.assert_close(q, rope_kv_write_reference(*given, *expected, SCALES), **CLOSE)
    assert_close_in_8_bits(k_cache, expected[0])
    assert_close_in_8_bits(v_cache, expected[1])
    pages = torch.arange(len(k_cache)).int()
    found = _gather_keys_triton(k_cache, v_cache, pages, 2, 7, 9, torch.float32)
    wanted = gather_keys_reference(k_cache, v_cache, pages, 2, 7, 9, torch.float32)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@FORMATS
@pytest.mark.parametrize("paged", [True, False])
def test_rows_of_latent_attention_are_written(paged: bool, kv_dtype: torch.dtype) -> None:
    heads, cos_sin, positions = torch.randn(6, 4, 34), torch.randn(40, 10), torch.tensor([3, 4, 5, 7, 8, 9])
    places = torch.tensor([17, 3, 0, 40, 5, 22])
    if paged:
        places = torch.tensor([[7, 4, 0], [0, 9, 2]], dtype=torch.int32)
    caches = [torch.zeros(11, 4, 1, 34).to(kv_dtype) for _ in range(2)]
    for write, cache in zip((_rope_latent_write_triton, rope_latent_write_reference), caches, strict=True):
        write(heads.clone(), 24, cos_sin, positions, places, cache, 0.004)
    assert_close_in_8_bits(*caches)
    assert caches[0].float().abs().max() > 300
