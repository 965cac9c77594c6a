"""Which decode steps short_decode.cu takes, how they are divided, and that it compiles; no GPU is needed."""

from __future__ import annotations

import warnings

import pytest
import torch
from kernel_cases.inputs import HeadShape
from overlap_spec_kernels.attention import short_decode as module, tree_windows as tree_windows_module
from overlap_spec_kernels.attention.short_decode import Step, attend, cluster_size, parts_of, takes
from overlap_spec_kernels.attention.tree_windows import takes_trees, tree_windows
from overlap_spec_kernels.nvrtc import CudaCode
from support.attention_cases import CLOSE, tree_window, tree_window_reference
from torch import Tensor

BFLOAT = torch.bfloat16
LLAMA, LLAMA_3B, SMOL = HeadShape(32, 8, 128), HeadShape(24, 8, 128), HeadShape(9, 3, 64)
NEXT = HeadShape(16, 2, 256)


def step(
    heads: HeadShape = LLAMA,
    requests: int = 1,
    width: int = 1,
    capacity: int = 2048,
    page_size: int = 16,
    dtype: torch.dtype = BFLOAT,
    kv_dtype: torch.dtype | None = None,
) -> Step:
    """As in a captured step."""
    num_heads, kv_heads, dim = heads
    cache = torch.empty(4, page_size, kv_heads, dim, dtype=kv_dtype or dtype, device="meta")
    return Step(
        torch.empty(requests * width, (num_heads + 2 * kv_heads) * dim, dtype=dtype, device="meta"),
        torch.empty(8192, dim, device="meta"),
        torch.empty(requests * width, dtype=torch.int64, device="meta"),
        torch.empty(requests, capacity // page_size, dtype=torch.int32, device="meta"),
        cache,
        cache,
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "runs_hopper", lambda device: True)


@pytest.mark.usefixtures("hopper")
def test_what_the_kernel_takes() -> None:
    assert takes(step(), None) and takes(step(width=4), None) and takes(step(LLAMA_3B, width=5), None)
    assert takes(step(SMOL, requests=8, width=4, page_size=64), None)
    assert takes(step(), 4096), "a window that holds every key is none"
    assert takes(step(capacity=32768), 1024) and not takes(step(capacity=32768), 4096)
    assert not takes(step(width=4, capacity=64), 3), "new rows that some do not see"
    assert not takes(step(), None, torch.zeros(32)), "sinks"
    assert not takes(step(capacity=2064), None)
    assert not takes(step(width=5), None), "20 pairs of a row and a head"
    assert not takes(step(page_size=8), None)
    assert not takes(step(HeadShape(8, 2, 96)), None)
    assert not takes(step(dtype=torch.float32), None) and not takes(step(dtype=torch.float16), None)
    assert not takes(step(kv_dtype=torch.float8_e4m3fn), None)
    assert not takes(step(SMOL, requests=9, width=4), None), "36 rows"


@pytest.mark.usefixtures("hopper")
def test_a_window_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one request alone, if two are enough. The second does not read before the first has written."""
    qwen = HeadShape(32, 4, 128)
    whole = step(qwen, width=3)
    assert not takes(whole, None)
    first, second = parts_of(whole)
    assert (first.width, second.width) == (2, 1) and takes(first, None) and takes(second, None)
    launched: list[tuple[int, int, bool]] = []

    def launch(
        part: Step, out: Tensor, _: float, early: bool, norms: object, window: int | None, tree: object, first: int
    ) -> None:
        launched.append((part.width, len(out), early))

    monkeypatch.setattr(module, "_attend", launch)
    assert attend((first, second), 1.0, True).shape == (3, 32 * 128) and launched == [(2, 2, True), (1, 1, False)]
    assert second.qkv.storage_offset() == 2 * whole.qkv.stride(0) and second.positions.storage_offset() == 2
    for other in (step(qwen, width=5), step(qwen, requests=2, width=4), step(qwen, width=2)):
        assert parts_of(other) == (other,)


@pytest.mark.usefixtures("hopper")
def test_rows_that_16_bytes_do_not_reach() -> None:
    given = step()
    rows = torch.empty(1, given.qkv.shape[1] + 4, dtype=BFLOAT, device="meta")[:, : given.qkv.shape[1]]
    assert not takes(given._replace(qkv=rows), None)


@pytest.mark.usefixtures("hopper")
def test_trees_that_the_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not takes_trees(step(width=4), None), "on a CPU"
    monkeypatch.setattr(tree_windows_module, "runs_triton", lambda x: True)
    assert takes_trees(step(width=4), None) and takes_trees(step(width=8), None), "in two parts"
    assert takes_trees(step(width=4), 2048) and not takes_trees(step(width=4), 1024)
    assert not takes_trees(step(requests=2, width=8), None) and not takes_trees(step(capacity=2064), None)
    assert not takes_trees(step(), None, torch.zeros(32)), "sinks"


def test_windows_of_trees_have_a_reference() -> None:
    window = tree_window(SMOL, 5, [40, 3], 16)
    out, k_cache, v_cache = tree_window_reference(window)
    given = Step(*window.inputs[:6])
    actual = tree_windows(given, window.prefix, window.mask, window.inputs.scale)
    torch.testing.assert_close(actual.float(), out, **CLOSE[BFLOAT])
    torch.testing.assert_close(given.k_cache, k_cache, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(given.v_cache, v_cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("argument", ["prefix", "mask"])
def test_refused_arguments_of_trees_are_named(argument: str) -> None:
    window = tree_window(SMOL, 3, [5], 16)
    tensors = {"prefix": window.prefix, "mask": window.mask}
    tensors[argument] = tensors[argument].int()
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        tree_windows(Step(*window.inputs[:6]), scale=1.0, **tensors)


def test_nothing_without_a_hopper_gpu() -> None:
    assert not takes(step(), None)


@pytest.mark.usefixtures("hopper")
def test_clusters_fill_the_gpu() -> None:
    """Half as many programs share the keys of a head where there are twice as many requests."""
    batches = 1, 2, 4, 8, 9
    assert [cluster_size(step(LLAMA, size)) for size in batches] == [8, 4, 2, 2, None]
    assert [cluster_size(step(SMOL, size)) for size in (*batches, 16, 22)] == [8, 8, 8, 4, 4, 2, None]
    assert [cluster_size(step(NEXT, size)) for size in batches] == [8, 8, 8, 4, 2]
    assert takes(step(LLAMA, 8), None) and not takes(step(LLAMA, 9), None) and takes(step(NEXT, 8, 2), None)


@pytest.mark.usefixtures("hopper")
def test_a_request_has_the_same_cluster_at_any_width() -> None:
    """So the keys of a row are added up in the same groups in verify steps as in plain ones, in batches of a size."""
    for heads in (LLAMA, LLAMA_3B, SMOL, NEXT):
        for size in (1, 2, 8):
            assert len({cluster_size(step(heads, size, width)) for width in (1, 2, 4)}) == 1


@pytest.mark.usefixtures("hopper")
def test_a_warp_has_a_lane_for_each_of_its_chunks() -> None:
    """Where clusters are smallest, too: the lanes look up all pages at once."""
    assert 32 * module._WARPS * min(module._CLUSTERS) >= module._MOST_KEYS // module._CHUNK


@pytest.mark.full_but_every(4)
@pytest.mark.slow
@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("heads", "width", "page_size", "cluster", "normed", "window", "first"),
    [
        (LLAMA, 4, 16, 8, 0, 0, None),
        (LLAMA, 4, 16, 8, 0, 0, 0),
        (LLAMA_3B, 5, 64, 4, 16, 512, None),
        (SMOL, 1, 16, 2, 32, 0, None),
        (NEXT, 2, 16, 8, 16, 1024, None),
        (NEXT, 2, 16, 8, 16, 0, 2),
    ],
)
def test_it_compiles(
    heads: HeadShape, width: int, page_size: int, cluster: int, normed: int, window: int, first: int | None
) -> None:
    """`first`: of a tree's columns; None: of chains."""
    num_heads, kv_heads, dim = heads
    shapes = f"WIDTH={width}", f"GROUP={num_heads // kv_heads}", f"KV_HEADS={kv_heads}", f"HEAD={dim}"
    division = f"PAGE_SIZE={page_size}", f"WARPS={module._WARPS}", f"STAGES={module._STAGES[dim]}", f"CLUSTER={cluster}"
    division += (f"WINDOW={window}", f"TREE={int(first is not None)}", f"FIRST={first or 0}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert CudaCode(module.SOURCE, (*shapes, *division, "READ_BEFORE_WAIT=1", f"NORMED={normed}"))._compile()
