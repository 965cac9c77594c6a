"""The ops that change logits, under the interpreter: counts exactly, logits up to a few roundings."""

import pytest
import torch
from overlap_spec_kernels.logits.count_tokens import _count_tokens_triton, count_tokens_reference
from overlap_spec_kernels.logits.penalize import _penalize_triton, penalize_reference
from support.logit_inputs import VOCAB, logit_inputs

SHAPES = [(2, 2, 3, VOCAB), (1, 1, 0, 700), (2, 5, 2, 900)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logit_ops(shape: tuple[int, int, int, int]) -> None:
    given = logit_inputs(*shape)
    counts = count_tokens_reference(given.rows, given.ends, given.output_from, VOCAB)
    assert torch.equal(_count_tokens_triton(given.rows, given.ends, given.output_from, VOCAB), counts)
    rest = given.asked, counts, given.guesses, given.token_ids
    torch.testing.assert_close(
        _penalize_triton(given.logits, *rest), penalize_reference(given.logits, *rest), rtol=1e-6, atol=1e-6
    )
