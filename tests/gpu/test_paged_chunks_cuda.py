"""Chunks of prompts by the kernel in CUDA C++ on a GPU, against the reference in float32 on the same values."""

import pytest
import torch
from kernel_cases.inputs import HeadShape, attention_inputs, to_device
from overlap_spec_kernels.attention.paged_attention import attend_to_chunks, paged_attention, paged_attention_reference
from overlap_spec_kernels.attention.paged_chunks import CUT, Chunks, Cut, Division, takes
from overlap_spec_kernels.nvrtc import runs_hopper
from support.attention_cases import CLOSE

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and runs_hopper(torch.device("cuda"))),
    reason="the kernel is for Hopper (sm_90a) alone: elsewhere Triton's runs, which other tests cover",
)
LLAMA, SMOL = HeadShape(32, 8, 128), HeadShape(9, 3, 64)
REQUESTS = [[(0, 512)], [(8192, 200)], [(5, 0), (3000, 130), (0, 64), (777, 333)], [(4095, 65)]]
CUTS = [CUT, Cut(1), *(Cut(2, Division(splits)) for splits in (1, 3, 8)), Cut(2, Division(4, 600))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(("heads", "page_size"), [(LLAMA, 16), (LLAMA, 64), (SMOL, 16), (HeadShape(8, 8, 128), 128)])
def test_chunks(heads: HeadShape, page_size: int, cut: Cut, dtype: torch.dtype) -> None:
    """Cache rows of others hold NaN."""
    for requests in REQUESTS:
        inputs = attention_inputs(heads, requests, page_size, dtype)
        given = [to_device(tensor, "cuda") for tensor in inputs[:6]]
        wide = (tensor.float() for tensor in given[:3])
        expected = paged_attention_reference(*wide, *given[3:], inputs.scale)
        actual = attend_to_chunks(Chunks(*given, inputs.max_rows), inputs.scale, cut)
        torch.testing.assert_close(actual.float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_whose_scores_grow_have_their_bits_beside_any_others(dtype: torch.dtype) -> None:
    """Of some rows they grow by more than weights may."""
    inputs = attention_inputs(LLAMA, [(2000, 300)], 16, dtype)
    places = torch.arange(2300)
    rows = inputs.page_table[0, places // 16].long(), places % 16
    inputs.k_cache[rows] = (inputs.k_cache[rows] * 0.2 + (places / 200)[:, None, None]).to(dtype)
    inputs.q[::7] = inputs.q[::7].abs()
    chunks, cut = Chunks(*(to_device(value, "cuda") for value in inputs[:6]), 300), Cut(2, Division(1))
    wide = (tensor.float() for tensor in chunks[:3])
    expected = paged_attention_reference(*wide, *chunks[3:6], inputs.scale)
    actual = attend_to_chunks(chunks, inputs.scale, cut)
    torch.testing.assert_close(actual.float(), expected, **CLOSE[dtype])
    starts = torch.tensor([0, 290], dtype=torch.int32, device="cuda")
    others = chunks._replace(q=chunks.q[10:], row_starts=starts, positions=chunks.positions[10:], max_rows=290)
    assert torch.equal(attend_to_chunks(others, inputs.scale, cut), actual[10:])


def test_a_captured_step_takes_other_requests() -> None:
    """Rows and positions change between replays; empty requests and rows of none are among them."""
    inputs = attention_inputs(LLAMA, [(900, 96), (0, 0), (3, 160)], 16, torch.bfloat16)
    chunks = Chunks(*(to_device(value, "cuda") for value in inputs[:6]), 256)
    assert takes(chunks, 0.1, None)
    arguments = *chunks, 0.1, False
    paged_attention(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*arguments)
    first, last = torch.arange(900, 996), torch.arange(3, 163)
    for starts, positions in (([0, 96, 96, 256], (first, last)), ([0, 0, 0, 160], (last, first))):
        chunks.row_starts.copy_(torch.tensor(starts))
        chunks.positions.copy_(torch.cat(positions))
        graph.replay()
        expected = paged_attention_reference(*(t.float() for t in chunks[:3]), *chunks[3:6], 0.1)
        torch.testing.assert_close(out[: starts[-1]].float(), expected, **CLOSE[torch.bfloat16])
