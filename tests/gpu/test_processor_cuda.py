"""On the device: a logit processor of one's own in CUDA graphs, and drawing within its share of the memory budget."""

import pytest
import torch
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.given_logits import GivenLogits
from support.no_processors import no_processors
from support.own_processors import OWN_PROCESSORS
from support.random_schedules import run_seeds

from overlap_spec.frontend.codec import TextCodec
from overlap_spec.sampling.context import EVERY_WORK, Sampling
from overlap_spec.sampling.stages import LogitProcessors
from overlap_spec.speculative.interfaces import SlotBatch, Window, level_context
from overlap_spec.speculative.proposers.tree import top_children
from overlap_spec.speculative.verifiers import ChainVerifier, ResidualVerifier, Thresholds
from overlap_spec.worker.startup.memory_budget import LOGIT_BYTES, drawing_bytes

CUDA = torch.device("cuda")
WHOLE = next(iter(OWN_PROCESSORS))
SHAPES = [(48, 4, 128_256), (256, 1, 128_256), (8, 32, 128_256), (1, 64, 200_000)]


def batch_on_gpu(shape: tuple[int, int, int], processors: LogitProcessors) -> SlotBatch:
    size, _, vocab = shape
    ints = torch.zeros(size, dtype=torch.int64, device=CUDA)
    doubles = torch.ones(size, dtype=torch.float64, device=CUDA)
    sampling = Sampling(
        temperature=doubles * 0.8, top_k=ints + vocab // 2, top_p=doubles * 0.9, min_p=doubles * 0.01, seed=ints,
        stop_from=ints + 100, stop_ids=torch.arange(64, device=CUDA).repeat(size, 1), output_from=ints,
        work=EVERY_WORK, slots=ints, processors=processors,
    )  # fmt: skip
    table = torch.zeros(size, 8, dtype=torch.int32, device=CUDA)
    return SlotBatch(torch.arange(size, device=CUDA), ints + 10, table, sampling)


def window_on_gpu(size: int, rows: int) -> Window:
    tokens = torch.zeros(size, rows, dtype=torch.int64, device=CUDA)
    return Window(tokens, 10 + torch.arange(rows, device=CUDA).expand(size, -1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("way", ["match", "thresholds", "children"])
def test_the_allocator_sees_no_more_than_the_budget(way: str, shape: tuple[int, int, int]) -> None:
    size, rows, vocab = shape
    batch = batch_on_gpu(shape, no_processors(vocab, 9, 16, CUDA))
    ids = torch.arange(vocab, device=CUDA)
    window = window_on_gpu(size, rows)
    scores = GivenLogits(torch.randn(size * rows, vocab, device=CUDA))
    verifier = ChainVerifier(ids) if way == "match" else ResidualVerifier(Thresholds(0.5, 0.5), ids)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        if way == "children":
            nodes = torch.full((size, rows), -1, device=CUDA)
            top_children(scores, level_context(batch, None, nodes, 0, ids), 8)
        else:
            verifier.verify(window, scores, batch)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before + size * rows * vocab * LOGIT_BYTES
    assert taken <= drawing_bytes(*shape)


@pytest.mark.parametrize(("method", "topk"), [("EAGLE3", 1), ("EAGLE3", 3), ("STANDALONE", 1), ("NGRAM", 1)])
def test_a_processor_runs_in_graphs(codec: TextCodec, method: str, topk: int) -> None:
    """Prefix hits, preemptions, depth 1 and 2; the oracle decodes plainly, and works the rule out in plain Python."""
    engine = {"dtype": torch.float32, "place": CUDA, "graph_batch_sizes": (1, 2, 4, 6)}
    seen = run_seeds(range(4), codec, {**engine, "method": method, "topk": topk, "processor": WHOLE})
    assert seen["forbidden"] > 0 and seen["accepted"] > 0 and seen["rejected"] > 0, dict(seen)


@sync_mode_warns
def test_nothing_waits_for_the_device() -> None:
    shape = (4, 4, 1000)
    own = (OWN_PROCESSORS[WHOLE].in_tensors,)
    batch = batch_on_gpu(shape, no_processors(1000, 9, 16, CUDA, own))
    window = window_on_gpu(4, 4)
    scores = GivenLogits(torch.randn(16, 1000, device=CUDA))
    verifier = ChainVerifier(torch.arange(1000, device=CUDA))
    with torch.inference_mode():
        verifier.verify(window, scores, batch)
        with synchronization_is_an_error():
            verifier.verify(window, scores, batch)
