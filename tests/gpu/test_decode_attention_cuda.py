"""Decode attention on a GPU against its reference on the CPU: one launch writes the cache, attends and combines.

The reference rotates and rounds q and k in the dtype; attention to them is then computed in float32. What is left to a
16-bit kernel is the rounding of its weights before they meet V, and of its output. Cache rows that no request owns, and
those to be written, hold NaN.
"""

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, decode_inputs, to_device
from overlap_spec_kernels.attention.decode_attention import DecodeScratch, decode_attention, decode_attention_reference
from support.attention_cases import (
    CLOSE,
    LLAMA,
    LONG,
    LONG_LENGTHS,
    SMOL,
    Case,
    decode_reference,
    every_group,
    name,
    other_widths,
    rare,
)
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.poisoned_memory import NANS, poison_shared_memory
from torch import Tensor

LENGTHS = [300, 0, 15, 1, 17, 16, 700]
SPARE = 2048  # tokens of page tables behind the longest request: short ones have a kernel with tests of its own


def on_gpu(inputs: DecodeInputs) -> DecodeInputs:
    return DecodeInputs(*(to_device(value, "cuda") for value in inputs))


def run(inputs: DecodeInputs, scratch: DecodeScratch) -> Tensor:
    *tensors, scale = inputs
    return decode_attention(*tensors, scratch, scale)


def check(inputs: DecodeInputs, num_programs: int | None = None) -> None:
    """By default as many splits as the op chooses for this GPU."""
    dtype = inputs.qkv.dtype
    out, k_cache, v_cache = decode_reference(inputs)
    device_inputs = on_gpu(inputs)
    scratch = DecodeScratch.allocate(inputs.k_cache.shape[3], torch.device("cuda"), num_programs)
    scratch.outputs.fill_(torch.nan)
    actual = run(device_inputs, scratch)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.cpu().float(), out, **CLOSE[dtype])
    torch.testing.assert_close(device_inputs.k_cache.cpu(), k_cache, equal_nan=True, **CLOSE[dtype])
    torch.testing.assert_close(device_inputs.v_cache.cpu(), v_cache, equal_nan=True, rtol=0, atol=0)
    assert not scratch.counters.any()


@pytest.mark.parametrize("case", [*every_group(), *other_widths(), *rare()], ids=name)
def test_shapes(case: Case) -> None:
    """With the splits that the op chooses, and with as few and as many as there can be."""
    inputs = decode_inputs(case.heads, case.width, LENGTHS, case.page_size, case.dtype, SPARE // case.page_size)
    for num_programs in (None, 1, 1024):
        check(inputs, num_programs)


@pytest.mark.parametrize("num_requests", [1, 2, 5, 16, 64])
def test_shared_memory_full_of_nan(num_requests: int) -> None:
    for width, page_size in ((1, 16), (3, 1), (4, 16), (5, 64)):
        lengths = [300, *torch.randint(400, (num_requests - 1,)).tolist()]
        for heads in (HeadShape(6, 2, 128), HeadShape(3, 1, 64)):
            poison_shared_memory(NANS["of all bits"])
            check(decode_inputs(heads, width, lengths, page_size, torch.bfloat16, SPARE // page_size))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [SMOL, LLAMA])
def test_one_request_and_many(heads: HeadShape, dtype: torch.dtype) -> None:
    check(decode_inputs(heads, 4, [600], 16, dtype, SPARE // 16))
    check(decode_inputs(heads, 4, [torch.randint(2000, ()).item() for _ in range(64)], 16, dtype))


@pytest.mark.parametrize("case", LONG, ids=name)
@pytest.mark.parametrize("lengths", LONG_LENGTHS, ids=str)
def test_long_contexts(lengths: list[int], case: Case) -> None:
    spare_pages = (131072 - max(lengths)) // case.page_size
    inputs = decode_inputs(case.heads, case.width, lengths, case.page_size, case.dtype, spare_pages)
    check(inputs)
    check(inputs, num_programs=1)


def test_float64_is_the_reference() -> None:
    inputs = decode_inputs(SMOL, 3, [40, 7], 16, torch.float64)
    actual = run(on_gpu(inputs), DecodeScratch.allocate(64, torch.device("cuda")))
    torch.testing.assert_close(actual.cpu(), decode_attention_reference(*inputs), rtol=1e-12, atol=1e-13)


def test_float32_products_are_ieee() -> None:
    """With TF32, the error of the scores alone would be about 1e-3."""
    inputs = decode_inputs(HeadShape(2, 2, 128), 4, [300], 16, torch.float32)
    wide = {name: getattr(inputs, name).double() for name in ("qkv", "cos_sin", "k_cache", "v_cache")}
    exact = decode_attention_reference(*inputs._replace(**wide))
    actual = run(on_gpu(inputs), DecodeScratch.allocate(128, torch.device("cuda")))
    assert (actual.cpu() - exact).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "lengths"), [(SMOL, [2500]), (SMOL, [600]), (LLAMA, [3000, 700]), (LLAMA, [2200])])
def test_200_launches_agree_bit_by_bit(heads: HeadShape, lengths: list[int], dtype: torch.dtype) -> None:
    """Whichever split arrives last, and while other launches use the same scratch back to back."""
    inputs = on_gpu(decode_inputs(heads, 4, lengths, 16, dtype, SPARE // 16))
    other = on_gpu(decode_inputs(heads, 4, [900, 30, 1500], 16, dtype, SPARE // 16))
    scratch = DecodeScratch.allocate(heads.head_dim, torch.device("cuda"))
    first, first_other = run(inputs, scratch), run(other, scratch)
    outs, other_outs = zip(*[(run(inputs, scratch), run(other, scratch)) for _ in range(200)], strict=True)
    assert all(torch.equal(out, first) for out in outs)
    assert all(torch.equal(out, first_other) for out in other_outs)
    assert first.isfinite().all() and not scratch.counters.any()


@sync_mode_warns
def test_it_does_not_synchronize() -> None:
    inputs = on_gpu(decode_inputs(SMOL, 4, [70, 600], 16, torch.bfloat16))
    scratch = DecodeScratch.allocate(64, torch.device("cuda"))
    run(inputs, scratch)  # compiles
    with synchronization_is_an_error():
        run(inputs, scratch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_graph_follows_its_inputs(dtype: torch.dtype) -> None:
    """Lengths and pages are data: one capture serves other steps too. Its two launches share the scratch."""
    long = decode_inputs(SMOL, 4, [5, 900], 16, dtype, spare_pages=128)
    short = decode_inputs(SMOL, 4, [70, 3], 16, dtype, spare_pages=180)
    static, scratch = on_gpu(long), DecodeScratch.allocate(64, torch.device("cuda"))
    qkv = torch.empty_like(static.qkv)

    def two_layers() -> tuple[Tensor, Tensor]:
        torch.add(static.qkv, 0, out=qkv)
        first = run(static._replace(qkv=qkv), scratch)
        torch.mul(static.qkv, 0.5, out=qkv)
        return first, run(static._replace(qkv=qkv), scratch)

    two_layers()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = two_layers()
    for inputs in (long, short, long):
        for target, value in zip(static, inputs, strict=True):
            if isinstance(value, Tensor):
                target[tuple(slice(0, n) for n in value.shape)].copy_(value[tuple(slice(0, n) for n in target.shape)])
        for _ in range(3):
            graph.replay()
        for out, factor in zip(outs, (1, 0.5), strict=True):
            expected = decode_reference(inputs._replace(qkv=inputs.qkv * factor))[0]
            torch.testing.assert_close(out.cpu().float(), expected, **CLOSE[dtype])
    assert not scratch.counters.any()
