"""The ops that change logits, under the interpreter: counts and guesses exactly, logits up to a few roundings."""

import pytest
import torch
from overlap_spec_kernels.logits.count_tokens import _count_tokens_triton, count_tokens_reference
from overlap_spec_kernels.logits.guesses_before import _guesses_before_triton, guesses_before_reference
from overlap_spec_kernels.logits.process_logits import _process_logits_triton, process_logits_reference
from support.logit_inputs import VOCAB, logit_inputs

SHAPES = [(2, 2, 3, VOCAB), (1, 1, 0, 700), (4, 3, 2, 900)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logit_ops(shape: tuple[int, int, int, int]) -> None:
    given = logit_inputs(*shape)
    rows = given.history.store, given.history.roots, given.rules.output_from
    counts = count_tokens_reference(*rows, VOCAB)
    assert torch.equal(_count_tokens_triton(*rows, VOCAB), counts)
    rest = given.rules, given.history._replace(counts=counts), given.token_ids
    expected = process_logits_reference(given.logits, *rest)
    torch.testing.assert_close(_process_logits_triton(given.logits, *rest), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("num_rows", "root"), [(7, 0), (3, -1)])
def test_guesses_before(num_rows: int, root: int) -> None:
    """Of chains, and of trees whose unwritten parents are any numbers."""
    tokens, nodes = torch.randint(0, 99, (3, 7)), torch.randint(root, 7, (3, num_rows))
    parents = torch.randint(-1, 1 << 40, (3, 7)) % torch.arange(1, 8)
    parents[:, 6] = 1 << 40
    for given in (parents, nodes), (parents, None), (None, nodes), (None, None):
        arguments = tokens, *given, num_rows, 4, root
        assert torch.equal(_guesses_before_triton(*arguments), guesses_before_reference(*arguments))
