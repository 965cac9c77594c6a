"""`log_prob_rows` against its definition, written out for one token at a time."""

import math

import pytest
import torch
from overlap_spec_kernels import log_prob_rows, top_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_prob_rows(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 50, dtype=dtype) * 4
    tokens, slots, rows = torch.tensor([3, 49, -1, 0]), torch.tensor([2, 0]), torch.tensor([5, 0, 1, 1])
    listed = torch.tensor([[7, -1], [1, 1], [3, 3]])
    top = top_tokens(logits, 20)
    found = log_prob_rows(logits, top, tokens, slots, listed, rows).view(4, 23, 2).tolist()
    for index, pairs in enumerate(found):
        row = logits[rows[index]].tolist()
        total = math.log(math.fsum(map(math.exp, row)))
        best = sorted(range(50), key=lambda token: -row[token])[:20]
        ids = [int(tokens[index]), *best, *listed[slots[index // 2]].tolist()]
        assert [token for _, token in pairs] == ids
        for log_prob, token in pairs:
            assert token == -1 or log_prob == pytest.approx(row[int(token)] - total, abs=1e-5)
        own = dict(zip(ids[1:21], pairs[1:21], strict=True)).get(ids[0])
        assert own is None or own == pairs[0], "the same number, to the bit"


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"tokens": torch.tensor([1])}, "tokens"),
        ({"slots": torch.tensor([0.5])}, "slots"),
        ({"listed": torch.zeros(2)}, "listed"),
    ],
)
def test_a_bad_argument_is_named(change: dict[str, torch.Tensor], argument: str) -> None:
    logits = torch.randn(2, 30)
    good = {"tokens": torch.tensor([1, 2]), "slots": torch.tensor([0]), "listed": torch.zeros(1, 2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=f"^{argument}:"):
        log_prob_rows(logits, top_tokens(logits, 3), **(good | change))
