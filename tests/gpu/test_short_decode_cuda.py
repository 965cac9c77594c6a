"""Decode attention in short page tables on a GPU, by the kernel in CUDA C++, against its reference on the CPU.

Attention is computed in float32 to q and k that are rounded in bfloat16. Cache rows that no request owns, and those to
be written, hold NaN.
"""

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs, to_device
from overlap_spec_kernels.attention import decode_attention as op
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention
from overlap_spec_kernels.attention.short_decode import Step, parts_of, takes
from overlap_spec_kernels.attention.tree_windows import takes_trees, tree_windows
from overlap_spec_kernels.norm.norm_heads import HeadNorms, norm_heads_reference
from overlap_spec_kernels.nvrtc import runs_hopper
from support.attention_cases import BFLOAT, CLOSE, LLAMA, SMOL, decode_reference, tree_window, tree_window_reference
from support.poisoned_memory import NANS, poison_shared_memory
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and runs_hopper(torch.device("cuda"))),
    reason="the kernel is for Hopper (sm_90a) alone: elsewhere Triton's runs, which other tests cover",
)
CAPACITY = 2048
LENGTHS = [
    [0],
    [1],
    [300],
    [CAPACITY - 8],
    [511, 512],
    [15, 0, 17],
    [700, 0, 33, CAPACITY - 8],
    [16, 31, 32, 5, 0, 0, 9, 1],
]
MOST_ROWS, PAIRS = 32, 16
SHAPES = [
    (LLAMA, 1, 16),
    (LLAMA, 4, 16),
    (LLAMA, 3, 64),
    (HeadShape(24, 8, 128), 5, 16),
    (SMOL, 1, 16),
    (SMOL, 4, 64),
    (HeadShape(8, 8, 64), 2, 16),
    (HeadShape(8, 1, 64), 2, 32),
    (HeadShape(2, 2, 128), 8, 128),
    (HeadShape(32, 4, 128), 4, 16),  # of one request in two parts
    (HeadShape(16, 2, 64), 3, 64),
    (HeadShape(16, 2, 256), 1, 16),
    (HeadShape(16, 2, 256), 2, 64),
]


def on_gpu(inputs: DecodeInputs) -> DecodeInputs:
    return DecodeInputs(*(to_device(value, "cuda") for value in inputs))


def drawn(heads: HeadShape, width: int, lengths: list[int], page_size: int) -> DecodeInputs:
    """With a page table for 2,048 keys."""
    spare = CAPACITY // page_size - -(-(max(lengths) + width) // page_size)
    return decode_inputs(heads, width, lengths, page_size, BFLOAT, spare)


def attended(inputs: DecodeInputs, read_before_wait: bool = False, norms: HeadNorms | None = None) -> Tensor:
    *tensors, scale = inputs
    assert all(takes(part, None) for part in parts_of(Step(*tensors)))
    scratch = DecodeScratch.allocate(inputs.k_cache.shape[3], torch.device("cuda"), 1)
    return decode_attention(*tensors, scratch, scale, read_before_wait, norms=norms)


@pytest.mark.parametrize("dtype", [BFLOAT, torch.float32])
@pytest.mark.parametrize(("heads", "width", "page_size"), SHAPES)
def test_heads_get_their_norms(heads: HeadShape, width: int, page_size: int, dtype: torch.dtype) -> None:
    """Of queries and keys, before all else."""
    poison_shared_memory(NANS["of all bits"])
    inputs = drawn(heads, width, [300], page_size)
    query, key = (torch.rand(heads.head_dim).to(dtype) + 0.5 for _ in range(2))
    given, norms = on_gpu(inputs), HeadNorms(query.cuda(), key.cuda(), 0.01)
    norm_heads_reference(inputs.qkv, query, key, heads.num_kv_heads, norms.eps)
    out, k_cache, _ = decode_reference(inputs)
    actual = attended(given, read_before_wait=True, norms=norms)
    torch.testing.assert_close(actual.cpu().float(), out, **CLOSE[BFLOAT])
    torch.testing.assert_close(given.k_cache.cpu(), k_cache, equal_nan=True, **CLOSE[BFLOAT])


@pytest.mark.parametrize("read_before_wait", [False, True])
@pytest.mark.parametrize(("heads", "width", "page_size"), SHAPES)
def test_shapes(heads: HeadShape, width: int, page_size: int, read_before_wait: bool) -> None:
    poison_shared_memory(NANS["of all bits"])
    whole = width * heads.num_heads // heads.num_kv_heads <= PAIRS
    for lengths in (each for each in LENGTHS if len(each) * width <= MOST_ROWS and (whole or len(each) == 1)):
        inputs = drawn(heads, width, lengths, page_size)
        out, k_cache, v_cache = decode_reference(inputs)
        given = on_gpu(inputs)
        actual = attended(given, read_before_wait)
        torch.testing.assert_close(actual.cpu().float(), out, **CLOSE[BFLOAT])
        torch.testing.assert_close(given.k_cache.cpu(), k_cache, equal_nan=True, **CLOSE[BFLOAT])
        torch.testing.assert_close(given.v_cache.cpu(), v_cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("read_before_wait", [False, True])
@pytest.mark.parametrize(
    ("heads", "width", "lengths"),
    [(LLAMA, 2, [300]), (LLAMA, 4, [700, 0, 33]), (LLAMA, 8, [511]), (SMOL, 5, [0, 260, 33, 1]), (SMOL, 8, [1500])],
)
def test_trees(heads: HeadShape, width: int, lengths: list[int], read_before_wait: bool) -> None:
    poison_shared_memory(NANS["of all bits"])
    window = tree_window(heads, width, lengths, 16, CAPACITY // 16 - -(-(max(lengths) + width) // 16))
    out, k_cache, v_cache = tree_window_reference(window)
    given = on_gpu(window.inputs)
    step = Step(*given[:6])
    assert takes_trees(step, None)
    actual = tree_windows(step, window.prefix.cuda(), window.mask.cuda(), given.scale, read_before_wait)
    torch.testing.assert_close(actual.cpu().float(), out, **CLOSE[BFLOAT])
    torch.testing.assert_close(given.k_cache.cpu(), k_cache, equal_nan=True, **CLOSE[BFLOAT])
    torch.testing.assert_close(given.v_cache.cpu(), v_cache, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("heads", [LLAMA, SMOL])
def test_the_other_kernels_agree(heads: HeadShape, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = on_gpu(drawn(heads, 4, [900, 0, 2040], 16))
    scratch = DecodeScratch.allocate(heads.head_dim, torch.device("cuda"))
    actual = attended(inputs).float()
    monkeypatch.setattr(op, "takes", lambda step, window, sinks: False)
    *tensors, scale = inputs
    expected = decode_attention(*tensors, scratch, scale).float()
    assert float((actual - expected).norm() / expected.norm()) < 4e-3


def test_captured_layers_follow_their_inputs() -> None:
    """Four layers back to back, each after a kernel that writes its qkv; results are the same bit by bit every time."""
    long, short = drawn(SMOL, 4, [5, 900], 16), drawn(SMOL, 4, [2040, 0], 16)
    static = on_gpu(long)._replace(cos_sin=torch.zeros(CAPACITY, 64, device="cuda"))
    pages = max(len(long.k_cache), len(short.k_cache))
    caches = [torch.zeros(pages, 16, 3, 64, dtype=BFLOAT, device="cuda") for _ in range(2)]
    static = static._replace(k_cache=caches[0], v_cache=caches[1])
    qkv = torch.empty_like(static.qkv)

    def layers() -> list[Tensor]:
        outs = []
        for factor in (1.0, 0.5, -1.0, 0.25):
            torch.mul(static.qkv, factor, out=qkv)
            outs.append(attended(static._replace(qkv=qkv), read_before_wait=True))
        return outs

    layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = layers()
    for inputs in (long, short, long):
        for target, value in zip(static[:-1], inputs[:-1], strict=True):
            target[tuple(slice(0, size) for size in value.shape)].copy_(value)
        graph.replay()
        first = [out.clone() for out in outs]
        for out, factor in zip(outs, (1.0, 0.5, -1.0, 0.25), strict=True):
            expected = decode_reference(inputs._replace(qkv=inputs.qkv * factor))[0]
            torch.testing.assert_close(out.cpu().float(), expected, **CLOSE[BFLOAT])
        for _ in range(50):
            graph.replay()
            assert all(torch.equal(out, other) for out, other in zip(outs, first, strict=True))
