"""On the device: dummy weights are made there, and compiled or synthetic verdicts can be captured."""

from dataclasses import replace

import pytest
import torch

from overlap_spec.models.dummy import DummyWeights
from overlap_spec.spec.compiled import CompiledVerifier
from overlap_spec.spec.interfaces import Verifier
from overlap_spec.spec.simulated import SimulatedVerifier, SyntheticAcceptance
from overlap_spec.spec.types import SAMPLING_WORK, Sampling, SamplingWork, SlotBatch, Verdict, Window
from overlap_spec.spec.verifier import ChainVerifier

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
VOCAB, BATCH, WIDTH = 1000, 4, 4


def batch_on(device: torch.device, work: SamplingWork) -> SlotBatch:
    ints = torch.arange(BATCH, device=device)
    ones = torch.ones(BATCH, dtype=torch.float64, device=device)
    sampling = Sampling(
        temperature=ones * 0.8 if work.sampled else ones * 0,
        top_k=ints + 20, top_p=ones * 0.9, min_p=ones * 0.01, seed=ints, stop_from=ints,
        stop_ids=ints[:, None], work=work,
    )  # fmt: skip
    return SlotBatch(ints, ints + 10, ints[:, None].int(), sampling)


def captured(verifier: Verifier, window: Window, logits: torch.Tensor, batch: SlotBatch) -> Verdict:
    """The verdict of a replay, on inputs that came after the capture."""
    wanted = logits.clone()
    with torch.inference_mode():
        logits.zero_()
        verifier.verify(window, logits, batch)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            verdict = verifier.verify(window, logits, batch)
        logits.copy_(wanted)
        graph.replay()
    return verdict


@pytest.mark.parametrize("work", SAMPLING_WORK, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("synthetic", [False, True], ids=["real", "synthetic"])
def test_captured_verdicts_are_the_eager_ones(work: SamplingWork, compiled: bool, synthetic: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    random = torch.Generator(device).manual_seed(5)
    batch = batch_on(device, work)
    logits = torch.randn(BATCH, WIDTH, VOCAB, generator=random, device=device)
    verifier: Verifier = ChainVerifier(torch.arange(VOCAB, device=device))
    if synthetic:
        verifier = SimulatedVerifier(verifier, SyntheticAcceptance(2.5, device))
    window = Window(torch.randint(0, VOCAB, (BATCH, WIDTH), generator=random, device=device))
    expected = verifier.verify(window, logits, batch)
    if not synthetic:  # let some guesses stand
        window.tokens[:, 1] = expected.tokens[:, 0]
        expected = verifier.verify(window, logits, batch)
    found = captured(CompiledVerifier(verifier, BATCH) if compiled else verifier, window, logits, batch)
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.accept_len, expected.accept_len)
    assert (found.accept_len >= 1).all()


def test_synthetic_acceptance_asks_the_device_nothing() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    batch = batch_on(device, SAMPLING_WORK[0])
    acceptance = SyntheticAcceptance(2.5, device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        later = acceptance.accept_len(replace(batch, lengths=batch.lengths + 5))
    finally:
        torch.cuda.set_sync_debug_mode("default")
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
