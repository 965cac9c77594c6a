"""Verification that takes the argmax whatever the temperature."""

import torch
from support.given_logits import GivenLogits, window_of

from overlap_spec.speculative.verifiers import ChainVerifier, GreedyVerifier


def test_hot_requests_are_judged_as_if_they_were_greedy(make_batch) -> None:
    logits = torch.randn(2, 4, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    lazy_logits, window = GivenLogits(logits), window_of(torch.zeros(2, 4, dtype=torch.int64), 20)
    matching = ChainVerifier(torch.arange(30))
    hot = make_batch([20, 20], temperature=5.0)
    assert torch.equal(GreedyVerifier(matching).verify(window, lazy_logits, hot).tokens, logits.argmax(-1))
    assert not torch.equal(matching.verify(window, lazy_logits, hot).tokens, logits.argmax(-1))
