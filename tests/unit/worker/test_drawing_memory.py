"""What drawing tokens takes at most, as its operations allocate it, is what the memory budget sets aside."""

import pytest
import torch
from support.given_logits import GivenLogits
from support.no_processors import no_processors
from support.own_processors import OWN_PROCESSORS
from support.peak_bytes import peak_bytes

from overlap_spec.features.log_probs.worker import SCORED_LOGITS
from overlap_spec.sampling.context import EVERY_WORK, GREEDY_WORK, Sampling, SamplingWork
from overlap_spec.sampling.sampler import GUESS_SLICE, SLICE, slices
from overlap_spec.sampling.stages import LogitProcessors
from overlap_spec.speculative.interfaces import SlotBatch, Window, level_context
from overlap_spec.speculative.proposers import tree
from overlap_spec.speculative.proposers.tree import top_children
from overlap_spec.speculative.verifiers import (
    ChainVerifier,
    DraftProbs,
    Rejection,
    ResidualVerifier,
    Thresholds,
    TreeThresholdVerifier,
)
from overlap_spec.worker.startup.memory_budget import DRAWN_BYTES, LOGIT_BYTES, drawing_bytes

# Slots, rows of each, vocabulary: less than a slice of logits, several slices, and a slot that is more than one.
SHAPES = [(4, 4, 3000), (48, 4, 32000), (4, 32, 32000), (1, 40, 120_000)]
WORK = {"sampled": SamplingWork(True, False, False), "filtered": SamplingWork(True, True, False), "all": EVERY_WORK}
WAYS = ["match", "thresholds", "rejection", "tree thresholds", "children"]
SORT_BYTES = 40  # of a logit: what torch's sort takes while it runs, which the operations' results do not show


def batch_of(size: int, vocab: int, work: SamplingWork, processors: LogitProcessors) -> SlotBatch:
    """Every filter, and 64 stop ids in all slots."""
    ints, doubles = torch.zeros(size, dtype=torch.int64), torch.ones(size, dtype=torch.float64)
    sampling = Sampling(
        temperature=doubles * 0.8, top_k=ints + vocab // 2, top_p=doubles * 0.9, min_p=doubles * 0.01, seed=ints,
        stop_from=ints + 100, stop_ids=torch.arange(64).expand(size, -1), output_from=ints, work=work,
        slots=torch.arange(size), processors=processors,
    )  # fmt: skip
    return SlotBatch(torch.arange(size), ints + 10, torch.zeros(size, 8, dtype=torch.int32), sampling)


def drawn_bytes(way: str, shape: tuple[int, int, int], work: SamplingWork, processors: LogitProcessors) -> int:
    """At the most, the logits included."""
    size, rows, vocab = shape
    batch, ids = batch_of(size, vocab, work, processors), torch.arange(vocab)
    positions = 10 + torch.arange(rows).expand(size, -1)
    tree = way == "tree thresholds"
    window = Window(torch.zeros_like(positions), positions, torch.zeros_like(positions) if tree else None)
    probs = DraftProbs()
    probs.allocate(size, rows - 1, ids[: vocab // 4].clone())
    verifiers = {
        "match": ChainVerifier(ids),
        "thresholds": ResidualVerifier(Thresholds(0.5, 0.5), ids),
        "rejection": ResidualVerifier(Rejection(probs), ids),
        "tree thresholds": TreeThresholdVerifier(Thresholds(0.5, 0.5), ids),
    }
    scores = GivenLogits(torch.randn(size * rows, vocab))
    if way == "children":
        context = level_context(batch, None, torch.full((size, rows), -1), 0, ids)
        taken = peak_bytes(lambda: top_children(scores, context, 8))
    else:
        taken = peak_bytes(lambda: verifiers[way].verify(window, scores, batch))
    return taken + size * rows * vocab * LOGIT_BYTES


@pytest.mark.full_but_every(16)
@pytest.mark.slow_but_every(16)  # small shapes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("way", WAYS)
def test_the_budget_holds_what_is_drawn(way: str, work: str, shape: tuple[int, int, int]) -> None:
    found, budget = drawn_bytes(way, shape, WORK[work], no_processors(shape[2])), drawing_bytes(*shape)
    in_slices = min(budget, max(1 << 22, shape[1] * shape[2]) * SORT_BYTES)
    assert found + in_slices <= budget


@pytest.mark.slow
def test_the_budget_is_not_many_times_what_is_drawn() -> None:
    """It would take KV pages away."""
    shape = SHAPES[1]
    assert drawing_bytes(*shape) < 3 * drawn_bytes("match", shape, EVERY_WORK, no_processors(shape[2]))


def test_prompt_log_probs_take_no_more_than_drawing_does() -> None:
    """Which is over by then: logits in 16 bits and their copy in float32."""
    assert SCORED_LOGITS * (LOGIT_BYTES + 2) < SLICE * DRAWN_BYTES


def test_guesses_of_a_gpu_are_drawn_in_few_launches_from_no_more_memory() -> None:
    """Noise in float64 is all that is as large as their logits; filters have 16 parts of a row."""
    logits = torch.empty(256, 4, 32000, device="meta")
    assert len(slices(logits, GUESS_SLICE)) == 1 and len(slices(logits)) == 8
    assert GUESS_SLICE * (torch.float64.itemsize + 2) < SLICE * DRAWN_BYTES


def test_children_are_those_of_each_slot_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, found = (5, 3, 2000), []
    scores = GivenLogits(torch.randn(15, 2000, generator=torch.Generator().manual_seed(1)))
    batch = batch_of(5, 2000, EVERY_WORK, no_processors(2000))
    context = level_context(batch, None, torch.full((5, 3), -1), 0, torch.arange(2000))
    for slots in (1, 2, 5):
        monkeypatch.setattr(tree, "SLICE", slots * shape[1] * shape[2])
        found.append(top_children(scores, context, 8))
    for logs, columns in found[1:]:
        assert torch.equal(logs, found[0][0]) and torch.equal(columns, found[0][1])


@pytest.mark.slow
def test_stop_ids_take_no_column_for_each_of_them() -> None:
    """A mask by comparison would take 64 bytes for each slot and token of the vocabulary."""
    shape = (64, 1, 20000)
    kinds = EVERY_WORK, WORK["filtered"]
    with_ids, without = (drawn_bytes("match", shape, kind, no_processors(20000)) for kind in kinds)
    assert with_ids - without < 64 * 20000 * 32


@pytest.mark.parametrize("name", OWN_PROCESSORS)
@pytest.mark.parametrize(("shape", "pages"), [((8, 4, 3000), 512), ((64, 1, 3000), 256), ((4, 32, 3000), 256)])
def test_the_budget_holds_a_processor_of_ones_own(shape: tuple[int, int, int], pages: int, name: str) -> None:
    processors = no_processors(shape[2], page_size=16, own=(OWN_PROCESSORS[name].in_tensors,))
    size, rows, vocab = shape
    batch = batch_of(size, vocab, GREEDY_WORK, processors)
    batch = SlotBatch(batch.slots, batch.lengths, torch.zeros(size, pages, dtype=torch.int32), batch.sampling)
    positions = 10 + torch.arange(rows).expand(size, -1)
    scores, window = GivenLogits(torch.randn(size * rows, vocab)), Window(torch.zeros_like(positions), positions)
    taken = peak_bytes(lambda: ChainVerifier(torch.arange(vocab)).verify(window, scores, batch))
    own = drawing_bytes(*shape, history=pages * 16) - drawing_bytes(*shape) + 2 * size * rows * vocab * LOGIT_BYTES
    assert taken + size * rows * vocab * LOGIT_BYTES <= own


def test_a_row_that_is_larger_than_a_slice_is_drawn_from_whole() -> None:
    """Of one slot 64 rows of a large vocabulary."""
    num_logits = 64 << 18
    assert num_logits > SLICE
    assert drawing_bytes(1, 64, 1 << 18) == num_logits * (2 * LOGIT_BYTES + DRAWN_BYTES) + 4 * (1 << 18)
