"""The twins of the ops that change logits, against definitions in plain Python, token by token."""

import pytest
import torch
from overlap_spec_kernels import IN_PROMPT, Penalized, TokenRows, count_tokens, penalize
from support.sampling_oracle import Penalties

VOCAB, PAGE_SIZE = 12, 4
PROMPT, OUTPUT = [3, 5, 3, 7], [5, 1, 5]


def rows_of(tokens: list[int]) -> TokenRows:
    """One request, in pages 2 and 1; what follows its tokens is stale."""
    pool = torch.full((3 * PAGE_SIZE,), 9, dtype=torch.int32)
    for position, token in enumerate(tokens):
        pool[(2, 1)[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE] = token
    return TokenRows(pool, torch.tensor([[2, 1]], dtype=torch.int32), PAGE_SIZE)


def counted() -> torch.Tensor:
    tokens = PROMPT + OUTPUT
    return count_tokens(rows_of(tokens), torch.tensor([len(tokens)]), torch.tensor([len(PROMPT)]), VOCAB)


def test_output_is_counted_and_the_prompt_is_marked() -> None:
    expected = [OUTPUT.count(token) + IN_PROMPT * (token in PROMPT) for token in range(VOCAB)]
    assert counted().tolist() == [expected]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("ids", [list(range(VOCAB)), [7, 1, 11, 5]], ids=["all", "a draft's"])
@pytest.mark.parametrize("penalties", [Penalties(), Penalties(1.3, 0.5, 0.25), Penalties(0.7, -1.0, -0.5)], ids=str)
def test_penalties_and_biases(penalties: Penalties, ids: list[int], has_bias: bool) -> None:
    """Of a row after the root, and of one after two guesses."""
    logits = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    guesses = [[], [1, 8]]
    bias = torch.arange(VOCAB) / 8 - 0.5
    asked = Penalized(
        torch.tensor([[penalties.repetition, penalties.presence, penalties.frequency]], dtype=torch.float64),
        torch.tensor([1]),
        torch.tensor([[0, 0], [int(has_bias), 0]]),
        torch.stack((bias * 100, bias)),
    )
    padded = torch.tensor([[[-1, -1], [1, 8]]])
    found = penalize(logits[:, :, ids].contiguous(), asked, counted(), padded, torch.tensor(ids))
    for row, own in enumerate(guesses):
        new = penalties.applied(logits[0, row].tolist(), PROMPT, OUTPUT + own)
        wanted = [new[token] + (bias[token].item() if has_bias else 0.0) for token in ids]
        assert found[0, row].tolist() == wanted
