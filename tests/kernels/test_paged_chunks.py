"""Which chunks go to the kernel in CUDA C++, how they are divided, and that it compiles; no GPU is needed."""

from __future__ import annotations

import warnings

import pytest
import torch
from overlap_spec_kernels.attention import paged_chunks as module
from overlap_spec_kernels.attention.paged_chunks import CUT, Chunks, Cut, Division, products_header, takes
from overlap_spec_kernels.nvrtc import CudaCode

BFLOAT = torch.bfloat16


def chunks(
    rows: int,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    page_size: int = 16,
    requests: int = 9,
    dtype: torch.dtype = BFLOAT,
) -> Chunks:
    """As in a captured step: of one request, or of several."""
    cache = torch.empty(4, page_size, kv_heads, dim, dtype=dtype, device="meta")
    table = torch.empty(requests, 65536 // page_size, dtype=torch.int32, device="meta")
    starts = torch.empty(requests + 1, dtype=torch.int32, device="meta")
    q = torch.empty(rows, heads, dim, dtype=dtype, device="meta")
    return Chunks(q, cache, cache, table, starts, torch.empty(rows, dtype=torch.int64, device="meta"), rows)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200, which has 132 multiprocessors."""
    monkeypatch.setattr(module, "runs_hopper", lambda device: True)
    monkeypatch.setattr(module, "_num_multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_takes() -> None:
    assert takes(chunks(64), 0.1, None)
    assert takes(chunks(64, heads=9, kv_heads=3, dim=64, page_size=64), 0.1, None)
    assert not takes(chunks(63), 0.1, None)
    assert not takes(chunks(512), 0.1, 4096)  # a window
    assert not takes(chunks(512), 0.1, None, torch.zeros(32)), "sinks"
    assert not takes(chunks(512), -0.1, None)  # the highest score would be the lowest
    assert not takes(chunks(512, dim=96), 0.1, None)
    assert not takes(chunks(512, page_size=8), 0.1, None)
    assert not takes(chunks(512, dtype=torch.float32), 0.1, None)
    assert not takes(chunks(128, requests=32), 0.1, None) and takes(chunks(256, requests=32), 0.1, None)


def test_nothing_without_a_hopper_gpu() -> None:
    assert not takes(chunks(512), 0.1, None)


@pytest.mark.usefixtures("hopper")
def test_splits_fill_the_gpu() -> None:
    """The fastest of those in choosing/chunks_first_h200.json; 16 rows times 8 heads fill 128 of 132."""
    found = {rows: CUT.divided(chunks(rows)).num_splits for rows in (64, 128, 200, 256, 384, 512, 640, 1024)}
    assert found == {64: 8, 128: 4, 200: 2, 256: 2, 384: 4, 512: 1, 640: 4, 1024: 1}


@pytest.mark.usefixtures("hopper")
def test_few_keys_are_not_divided() -> None:
    """By the same file, 384 rows take as long in 4 splits as in one at 8,192 keys, and 200 in 2 at 1,024."""
    assert 6000 < CUT.divided(chunks(384)).least_keys < 8192
    assert 512 < CUT.divided(chunks(200)).least_keys < 1200
    assert CUT.divided(chunks(512)).least_keys == 0


@pytest.mark.usefixtures("hopper")
def test_heads_follow_one_another_where_one_fills_the_gpu() -> None:
    """8,192 rows of one request are 128 tiles of two programs."""
    found = {rows: CUT.goes_by_head(chunks(rows, requests=1), Division(1)) for rows in (1024, 4096, 4224, 8192)}
    assert found == {1024: False, 4096: False, 4224: True, 8192: True}
    assert not CUT.goes_by_head(chunks(8192, requests=2), Division(1))


def test_tiles_for_any_division_of_the_rows() -> None:
    """Of 9 requests of 512 rows together, each may begin a tile of 64 rows that it does not fill."""
    assert Cut(2).num_tiles(chunks(512)) == (512 + 9 * 63) // 64
    assert Cut(2).num_tiles(chunks(512, requests=1)) == 8


@pytest.mark.full_but_every(3)
@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("dim", "dtype"), [(64, BFLOAT), (128, BFLOAT), (128, torch.float16)])
def test_it_compiles(dim: int, dtype: torch.dtype) -> None:
    """Without waits for products that the source does not have."""
    defines = f"HEAD_DIM={dim}", "GROUP=4", "KV_HEADS=8", "PAGE_SIZE=16", "BOX=16", "STAGES=6", "CLUSTER=2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CudaCode(module.SOURCE, defines, (("attention_products.h", products_header(dim, dtype)),))._compile()
