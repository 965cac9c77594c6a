"""`log_prob_rows` under the interpreter: the reference's numbers to the bit, as both subtract the same two."""

import pytest
import torch
from overlap_spec_kernels.tree.top_tokens import top_tokens_reference
from overlap_spec_kernels.window.log_prob_rows import _log_prob_rows_triton, log_prob_rows_reference


@pytest.mark.parametrize("given_rows", [False, True])
@pytest.mark.parametrize(("num_slots", "longest", "num_listed"), [(1, 1, 32), (3, 4, 5)])
def test_log_prob_rows(num_slots: int, longest: int, num_listed: int, given_rows: bool) -> None:
    torch.manual_seed(0)
    size, num_rows = 300, num_slots * longest
    logits = torch.randn(num_rows + 2 * given_rows, size + 7)[:, :size] * 5
    top = top_tokens_reference(logits, 20)
    tokens = torch.randint(-1, size, (num_rows,))
    slots = torch.randperm(7)[:num_slots]
    listed = torch.randint(-1, size, (7, num_listed))
    rows = torch.randint(len(logits), (num_rows,)) if given_rows else None
    actual = _log_prob_rows_triton(logits, top, tokens, slots, listed, rows).view(num_rows, -1, 2)
    expected = log_prob_rows_reference(logits, top, tokens, slots, listed, rows).view(num_rows, -1, 2)
    assert torch.equal(actual[..., 1], expected[..., 1])
    is_token = expected[..., 1] >= 0
    assert torch.equal(actual[..., 0][is_token], expected[..., 0][is_token])
