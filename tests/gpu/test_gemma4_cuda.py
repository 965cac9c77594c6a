"""Gemma 4 on a GPU: heads of 256 and 512 in one model, layers with queries alone, its assistant; a CPU's numbers."""

from typing import Any

import pytest
import torch
from kernel_cases.inputs import DecodeInputs, HeadShape, attention_inputs, decode_inputs, to_device, tree_inputs
from overlap_spec_kernels import Norm, add_normed, decode_attention, gelu_mul, norm_all_heads
from overlap_spec_kernels.attention.decode_attention import DecodeScratch
from overlap_spec_kernels.attention.paged_attention import paged_attention, paged_attention_reference
from overlap_spec_kernels.attention.tree_attention import tree_attention, tree_attention_reference
from overlap_spec_kernels.norm.add_rms_norm import add_normed_reference
from overlap_spec_kernels.norm.norm_heads import norm_all_heads_reference
from overlap_spec_kernels.norm.silu_mul import gelu_mul_reference
from support.attention_cases import CLOSE, decode_reference
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.paged_rows import Paged, rows_on
from support.random_schedules import run_schedules, run_seeds
from support.tiny.families import TINY_FAMILIES
from support.tiny.methods import ASSISTANT
from support.tiny.models import VOCAB, load_tiny_target, tiny_target
from torch import Tensor

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.models.interfaces import RowBatch, TargetModel
from overlap_spec.models.kv_cache import KVCache

PLACE, CPU = torch.device("cuda", 0), torch.device("cpu")
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
FULL, SLIDING, ONE = HeadShape(8, 1, 512), HeadShape(4, 2, 256), HeadShape(2, 2, 512)
WIDE = {"head_dim": 256, "global_head_dim": 512}
SHAPES: dict[str, dict[str, Any]] = {
    "31B": TINY_FAMILIES["gemma 4"] | WIDE,
    "E": TINY_FAMILIES["gemma 4 e"] | WIDE,
    "26B": TINY_FAMILIES["gemma 4 moe"] | WIDE,
    "small heads": TINY_FAMILIES["gemma 4 e"],
}


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("heads", [FULL, SLIDING, ONE], ids=str)
@pytest.mark.parametrize("width", [1, 4, 11])
def test_windows(width: int, heads: HeadShape, dtype: torch.dtype, window: int | None) -> None:
    """With K and V of its own rows; then by queries alone, of what the first have written."""
    inputs = decode_inputs(heads, width, [300, 0, 15, 17, 700], 16, dtype, 128)
    expected, k_cache, v_cache = decode_reference(inputs, window=window)
    *tensors, scale = DecodeInputs(*(to_device(value, "cuda") for value in inputs))
    for num_programs in (None, 3):
        scratch = DecodeScratch.allocate(512, PLACE, num_programs)
        scratch.outputs.fill_(torch.nan)
        found = decode_attention(*tensors, scratch, scale, window=window)
        torch.testing.assert_close(found.cpu().float(), expected, **CLOSE[dtype])
        for cache, known in zip(tensors[-2:], (k_cache, v_cache), strict=True):
            torch.testing.assert_close(cache.cpu(), known, equal_nan=True, **CLOSE[dtype])
        queries = tensors[0][:, : heads.num_heads * heads.head_dim]
        again = decode_attention(queries, *tensors[1:], scratch, scale, window=window, writes=False)
        torch.testing.assert_close(again.cpu().float(), expected, **CLOSE[dtype])
        assert not scratch.counters.any()


@pytest.mark.parametrize("width", [1, 4, 8])
def test_one_request(width: int) -> None:
    """Whose heads of 512 have launches of their own: alone, in few keys, in a table for many, and by queries alone."""
    heads, scratch = HeadShape(32, 4, 512), DecodeScratch.allocate(512, PLACE)
    for length, spare in ((0, 2), (33, 2), (700, 600), (5000, 2)):
        inputs = decode_inputs(heads, width, [length], 16, BFLOAT, spare)
        expected, k_cache, v_cache = decode_reference(inputs)
        *tensors, scale = DecodeInputs(*(to_device(value, "cuda") for value in inputs))
        scratch.outputs.fill_(torch.nan)
        found = decode_attention(*tensors, scratch, scale)
        torch.testing.assert_close(found.cpu().float(), expected, **CLOSE[BFLOAT])
        for cache, known in zip(tensors[-2:], (k_cache, v_cache), strict=True):
            torch.testing.assert_close(cache.cpu(), known, equal_nan=True, **CLOSE[BFLOAT])
        queries = tensors[0][:, : heads.num_heads * heads.head_dim]
        again = decode_attention(queries, *tensors[1:], scratch, scale, writes=False)
        torch.testing.assert_close(again.cpu().float(), expected, **CLOSE[BFLOAT])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
@pytest.mark.parametrize("heads", [FULL, ONE], ids=str)
@pytest.mark.parametrize("requests", [[(0, 300), (130, 64)], [(700, 5), (3, 1), (0, 40)]], ids=["long", "short"])
def test_chunks(requests: list[tuple[int, int]], heads: HeadShape, dtype: torch.dtype, window: int | None) -> None:
    *tensors, max_rows, scale, uniform = attention_inputs(heads, requests, 16, dtype)
    wide = (each.float() if each.is_floating_point() else each for each in tensors)
    expected = paged_attention_reference(*wide, scale, window)
    found = paged_attention(*(to_device(each, "cuda") for each in tensors), max_rows, scale, uniform, window)
    torch.testing.assert_close(found.cpu().float(), expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
def test_trees(dtype: torch.dtype) -> None:
    *tensors, scale = tree_inputs(FULL, 5, 8, [300, 3, 40], 16, dtype)
    wide = (each.float() if each.is_floating_point() else each for each in tensors)
    found = tree_attention(*(to_device(each, "cuda") for each in tensors), scale)
    torch.testing.assert_close(found.cpu().float(), tree_attention_reference(*wide, scale), **CLOSE[dtype])


@pytest.mark.parametrize("num_rows", [1, 4, 300])
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
def test_rows(dtype: torch.dtype, num_rows: int) -> None:
    """Norms and gates, against float64 rounded once or as often as the model rounds."""
    draw = torch.Generator(PLACE).manual_seed(num_rows)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device=PLACE)

    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).eps}
    for dim, own in ((256, 2), (512, 1), (24, 2)):
        heads, weights = drawn(num_rows, (8 + own * 2) * dim).to(dtype), (drawn(dim), drawn(dim))
        found = norm_all_heads(heads, *weights, 8, 2, 1e-6)
        exact = norm_all_heads_reference(heads.double(), *(each.double() for each in weights), 8, 2, 1e-6)
        torch.testing.assert_close(found.double(), exact, **close)
    x, residual, factor = (each.to(dtype) for each in (drawn(num_rows, 1000), drawn(num_rows, 1000), drawn(1)))
    norms = [Norm(drawn(1000), 1e-6) for _ in range(2)]
    close["atol"] *= 4
    for by in (None, factor):
        pairs = zip(add_normed(x, residual, *norms, by), add_normed_reference(x, residual, *norms, by), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, **close)
    gate_up = drawn(num_rows, 2 * 300).to(dtype)
    torch.testing.assert_close(gelu_mul(gate_up).double(), gelu_mul_reference(gate_up.double()), **close)


class Driven:
    """A model that is called by hand."""

    def __init__(self, shape: str, dtype: torch.dtype, place: torch.device) -> None:
        target, self.paged = load_tiny_target(tiny_target(1, **SHAPES[shape]), dtype, place), Paged(num_requests=2)
        cache = KVCache.allocate(target.kv_shape, self.paged.num_pages, self.paged.page_size, dtype, place)
        self.model: TargetModel = target.attach(cache, 64)
        self.place = place

    def rows(self, counts: list[int], is_window: bool) -> RowBatch:
        return rows_on(self.place, self.paged.rows(counts), is_window)

    def hidden(self) -> Tensor:
        """Logits of prompts in two chunks, then of windows. Shapes: -> [T, V]."""
        draw, outputs = torch.Generator().manual_seed(3), []
        for counts, is_window in (([9, 5], False), ([2, 3], False), ([4, 4], True), ([1, 1], True), ([3, 3], True)):
            tokens = torch.randint(6, VOCAB, (sum(counts),), generator=draw).to(self.place)
            output = self.model.forward(tokens, self.rows(counts, is_window))
            outputs.append(self.model.logits(output.final).compute())
        return torch.cat(outputs).double().cpu()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_a_cpu(shape: str) -> None:
    expected = Driven(shape, torch.float64, CPU).hidden()
    assert expected.std() > 0.5
    torch.testing.assert_close(Driven(shape, FLOAT, PLACE).hidden(), expected, rtol=2e-4, atol=2e-4)
    found = Driven(shape, BFLOAT, PLACE).hidden()
    assert (found - expected).pow(2).mean().sqrt() < 0.1 * expected.std()


@sync_mode_warns
@pytest.mark.parametrize("shape", SHAPES)
def test_a_window_is_captured_and_asks_nothing_of_the_host(shape: str) -> None:
    driven = Driven(shape, BFLOAT, PLACE)
    tokens = torch.randint(6, VOCAB, (2, 8), device=PLACE)
    driven.model.forward(tokens[0], driven.rows([5, 3], False))
    rows, given = driven.rows([4, 4], True), tokens[0].clone()
    driven.model.forward(given, rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = driven.model.forward(given, rows).hidden
    with synchronization_is_an_error():
        expected = driven.model.forward(tokens[1], rows).hidden.clone()
        given.copy_(tokens[1])
        graph.replay()
    assert torch.equal(out, expected)


BATCH_SIZES = [pytest.param((), id="eager"), pytest.param((1, 2, 4, 6), id="graphs")]


@pytest.mark.parametrize("batch_sizes", BATCH_SIZES)
@pytest.mark.parametrize("family", ["gemma 4", "gemma 4 e", "gemma 4 moe"])
def test_schedules_with_an_assistant(codec: TextCodec, family: str, batch_sizes: tuple[int, ...]) -> None:
    """Every answer is plain decoding's, at depth 1 and 2, with prefix hits and prompts in chunks."""
    engine = {"dtype": FLOAT, "place": PLACE, "family": family, "graph_batch_sizes": batch_sizes}
    seen = run_seeds(range(10), codec, engine | {"method": ASSISTANT})
    for what in ("finished", "accepted", "rejected", "prefix_hit_tokens", "chunk_splits", "device_ahead"):
        assert seen[what] > 0, dict(seen)


@pytest.mark.parametrize("batch_sizes", BATCH_SIZES)
@pytest.mark.parametrize(("family", "method"), [("gemma 4 e", "EAGLE3"), ("gemma 4", "NGRAM")])
def test_random_schedules(codec: TextCodec, family: str, method: str, batch_sizes: tuple[int, ...]) -> None:
    engine = {"family": family, "method": method, "graph_batch_sizes": batch_sizes}
    run_schedules(20, codec, dtype=FLOAT, place=PLACE, **engine)
