"""Attention of heads of 512 columns in three launches, of which two are interpreted, against the reference in float32.

The first one, which rotates and writes, is Triton's (`interpreted/check_rows.py`): its reference takes its place. Cache
rows that no request owns, and those to be written, hold NaN, and so does shared memory before a copy arrives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs
from overlap_spec_kernels import decode_attention as op
from overlap_spec_kernels.attention import large_heads
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference
from support.attention_cases import BFLOAT, CLOSE, HALF, decode_reference
from torch import Tensor

if TYPE_CHECKING:
    from emulators.gluon.launch import Hopper

KERNELS = ["large_heads_kernel", "sum_parts_kernel"]


@pytest.fixture(autouse=True)
def _first_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def rope(
        q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, pages: Tensor, *caches: Any
    ) -> Tensor:
        page_size = caches[0].shape[1]
        rows = pages[positions // page_size].long() * page_size + positions % page_size
        written = caches if k.shape[1] else (cache[:, :, :0] for cache in caches)
        return rope_kv_write_reference(q, k, v, cos_sin, positions, rows, *written).contiguous()

    monkeypatch.setattr(large_heads, "_rope_kv_write_triton", rope)


def check(gpu: Hopper, inputs: DecodeInputs, num_programs: int) -> None:
    out, k_cache, v_cache = decode_reference(inputs)
    scratch = DecodeScratch.allocate(512, torch.device("cpu"), 2 * num_programs)
    scratch.outputs.fill_(torch.nan)
    *tensors, scale = inputs
    actual = op(*tensors, scratch, scale)
    assert gpu.kernels == KERNELS
    dtype = inputs.qkv.dtype
    torch.testing.assert_close(actual.float(), out, **CLOSE[dtype])
    torch.testing.assert_close(inputs.k_cache, k_cache, equal_nan=True, **CLOSE[dtype])


@pytest.mark.slow_but_every(4)
@pytest.mark.parametrize("length", [31, 0, 1, 64, 65, 63, 390, 127])
def test_lengths(gpu: Hopper, length: int) -> None:
    """Around blocks of 64 keys, which 3 parts take in turn."""
    check(gpu, decode_inputs(HeadShape(16, 2, 512), 4, [length], 16, BFLOAT), num_programs=6)


@pytest.mark.parametrize(
    ("heads", "width", "page_size", "num_programs"),
    [
        (HeadShape(8, 1, 512), 8, 1, 1),
        (HeadShape(16, 2, 512), 1, 64, 16),
        (HeadShape(3, 1, 512), 5, 16, 40),
    ],
)
def test_shapes(gpu: Hopper, heads: HeadShape, width: int, page_size: int, num_programs: int) -> None:
    check(gpu, decode_inputs(heads, width, [540], page_size, HALF), num_programs)


@pytest.mark.usefixtures("gpu")
def test_what_it_takes() -> None:
    """Eight heads of a KV head."""

    def takes(width: int, keys: int, requests: int = 1, dim: int = 512, **others: Any) -> bool:
        cache, qkv = torch.empty(1, 16, 1, dim, dtype=BFLOAT), torch.empty(width, 10 * dim, dtype=BFLOAT)
        given = {"window": None, "sinks": None} | others
        return large_heads.takes(qkv, torch.empty(requests, keys // 16), cache, cache, 8, **given)

    assert takes(1, 32768) and takes(8, 1024) and not takes(9, 1024)
    assert not takes(3, 1024, window=4096) and not takes(3, 1024, sinks=torch.zeros(8))
    assert not takes(3, 1024, dim=256) and not takes(4, 1024, requests=2)
