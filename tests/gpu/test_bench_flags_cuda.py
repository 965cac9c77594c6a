"""On the device: dummy weights are made there, and compiled or synthetic verdicts can be captured."""

from dataclasses import replace

import pytest
import torch
from support.device_watch import sync_mode_warns, synchronization_is_an_error
from support.given_logits import GivenLogits, commit
from support.no_processors import no_processors
from torch import Tensor

from overlap_spec.features.torch_compile.worker import compiled_draw
from overlap_spec.models.loading.dummy import DummyWeights
from overlap_spec.sampling.context import SAMPLING_WORK, Sampling, SamplingWork
from overlap_spec.sampling.sampler import Draw, draw_columns
from overlap_spec.speculative.interfaces import Drawn, SlotBatch, Verifier, Window
from overlap_spec.speculative.verifiers import ChainVerifier, SimulatedVerifier, SyntheticAcceptance

VOCAB, BATCH, WIDTH = 1000, 4, 4


def batch_on(device: torch.device, work: SamplingWork) -> SlotBatch:
    ints = torch.arange(BATCH, device=device)
    ones = torch.ones(BATCH, dtype=torch.float64, device=device)
    sampling = Sampling(
        temperature=ones * 0.8 if work.sampled else ones * 0,
        top_k=ints + 20, top_p=ones * 0.9, min_p=ones * 0.01, seed=ints, stop_from=ints,
        stop_ids=ints[:, None], output_from=ints, slots=ints, work=work,
        processors=no_processors(VOCAB, place=device),
    )  # fmt: skip
    return SlotBatch(ints, ints + 10, ints[:, None].int(), sampling)


def on_cpu(drawn: Drawn) -> Drawn:
    return Drawn(drawn.tokens.cpu(), None if drawn.accept_len is None else drawn.accept_len.cpu())


def decided(verifier: Verifier, window: Window, logits: Tensor, batch: SlotBatch) -> Drawn:
    return verifier.verify(window, GivenLogits(logits), batch)


def captured(verifier: Verifier, window: Window, logits: Tensor, batch: SlotBatch) -> Drawn:
    """The decision of a replay, on inputs that came after the capture."""
    wanted = logits.clone()
    with torch.inference_mode():
        logits.zero_()
        decided(verifier, window, logits, batch)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            drawn = decided(verifier, window, logits, batch)
        logits.copy_(wanted)
        graph.replay()
    return drawn


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of parts of torch that inductor imports
@pytest.mark.parametrize("work", SAMPLING_WORK, ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("synthetic", [False, True], ids=["real", "synthetic"])
def test_captured_verdicts_are_the_eager_ones(work: SamplingWork, compiled: bool, synthetic: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    random = torch.Generator(device).manual_seed(5)
    batch = batch_on(device, work)
    logits = torch.randn(BATCH, WIDTH, VOCAB, generator=random, device=device)

    def verifier_with(draw: Draw) -> Verifier:
        chain = ChainVerifier(torch.arange(VOCAB, device=device), draw)
        return SimulatedVerifier(chain, SyntheticAcceptance([2.5], batch.sampling.seed)) if synthetic else chain

    positions = batch.lengths[:, None] + torch.arange(WIDTH, device=device)
    window = Window(torch.randint(0, VOCAB, (BATCH, WIDTH), generator=random, device=device), positions)
    eager = verifier_with(draw_columns)
    window.tokens[:, 1] = decided(eager, window, logits, batch).tokens[:, 0]  # let some guesses stand
    expected = decided(eager, window, logits, batch)
    found = captured(verifier_with(compiled_draw(BATCH)) if compiled else eager, window, logits, batch)
    assert torch.equal(found.tokens, expected.tokens)
    accepted = [commit(window.tokens.cpu(), on_cpu(drawn)).accept_len for drawn in (found, expected)]
    assert torch.equal(*accepted) and (accepted[0] >= 1).all()


@sync_mode_warns
def test_synthetic_acceptance_asks_the_device_nothing() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    batch = batch_on(device, SAMPLING_WORK[0])
    acceptance = SyntheticAcceptance([2.5], batch.sampling.seed)
    with synchronization_is_an_error():
        later = acceptance.accept_len(replace(batch, lengths=batch.lengths + 5))
    assert set(later.tolist()) <= {1, 2}


def test_dummy_weights_are_made_on_the_device_without_a_second_copy() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    weights = DummyWeights("memory", torch.bfloat16, device, lambda done, total: None)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weight = weights.take("lm_head.weight", (4096, 4096))
    assert weight.device == device and weight.dtype == torch.bfloat16
    assert torch.cuda.max_memory_allocated() - before == weight.nbytes
    assert weight.float().std().item() == pytest.approx(0.02, rel=0.02)
