"""The operations on n-grams under the interpreter: what their references find, and leave in the log, token by token."""

from dataclasses import replace

import pytest
import torch
from overlap_spec_kernels.ngram._ngram_merge_kernel import merge_on_device
from overlap_spec_kernels.ngram.ngram_absorb import _ngram_absorb_triton, ngram_absorb_reference
from overlap_spec_kernels.ngram.ngram_lookahead import _ngram_lookahead_triton, ngram_lookahead_reference
from overlap_spec_kernels.ngram.ngram_match import _ngram_match_triton, ngram_match_reference
from overlap_spec_kernels.ngram.ngram_merge import ngram_merge_reference
from overlap_spec_kernels.window.store_tokens import _store_tokens_triton, store_tokens_reference
from support.ngram_inputs import CASES, NgramOps

REFERENCES = NgramOps(
    store_tokens_reference,
    ngram_absorb_reference,
    ngram_match_reference,
    ngram_merge_reference,
    ngram_lookahead_reference,
)
KERNELS = NgramOps(
    _store_tokens_triton, _ngram_absorb_triton, _ngram_match_triton, merge_on_device, _ngram_lookahead_triton
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernels_play_as_their_references_do(name: str) -> None:
    case = replace(CASES[name], num_steps=4)
    played = zip(case.play(KERNELS), case.play(REFERENCES), strict=True)
    for number, (actual, expected) in enumerate(played):
        assert torch.equal(actual, expected), f"output {number}"
