"""The references of the ops that change logits, against definitions in plain Python, token by token."""

import random
from math import inf

import pytest
import torch
from overlap_spec_kernels import IN_PROMPT, LogitRules, RowHistory, TokenRows, count_tokens, process_logits
from support.logit_inputs import no_rules
from support.reasoning_rows import RandomRows, by_hand
from support.sampling_oracle import Penalties

VOCAB, PAGE_SIZE = 12, 4
PROMPT, OUTPUT = [3, 5, 3, 7], [5, 1, 5]
ALL, HOT = list(range(VOCAB)), [7, 1, 11, 5]  # a draft's columns
GUESSES = [[], [1, 8]]  # before a row after the root, and before one after two guesses
LOGITS = torch.randn(1, 2, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rows_of(tokens: list[int]) -> TokenRows:
    """One request, in pages 2 and 1; what follows its tokens is stale."""
    pool = torch.full((3 * PAGE_SIZE,), 9, dtype=torch.int32)
    for position, token in enumerate(tokens):
        pool[(2, 1)[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE] = token
    return TokenRows(pool, torch.tensor([[2, 1]], dtype=torch.int32), PAGE_SIZE)


def counted() -> torch.Tensor:
    tokens = PROMPT + OUTPUT
    return count_tokens(rows_of(tokens), torch.tensor([len(tokens) - 1]), torch.tensor([len(PROMPT)]), VOCAB)


def processed(rules: LogitRules, ids: list[int] = ALL) -> list[list[float]]:
    """The rows of a request in slot 1."""
    length = len(PROMPT + OUTPUT)
    history = RowHistory(
        rows_of(PROMPT + OUTPUT),
        torch.tensor([length - 1]),
        torch.tensor([[length + len(own) for own in GUESSES]]),
        torch.tensor([[[-1, -1], [1, 8]]]),
        counted(),
    )
    one = {"stop_from": rules.stop_from[:1], "stop_ids": rules.stop_ids[:1]}
    of_slot = rules._replace(slots=torch.tensor([1]), output_from=torch.tensor([len(PROMPT)]), **one)
    return process_logits(LOGITS[:, :, ids].contiguous(), of_slot, history, torch.tensor(ids))[0].tolist()


def in_slot_1(row: torch.Tensor) -> torch.Tensor:
    """A table of two slots."""
    return torch.stack((torch.zeros_like(row), row))


def test_output_is_counted_and_the_prompt_is_marked() -> None:
    expected = [OUTPUT.count(token) + IN_PROMPT * (token in PROMPT) for token in range(VOCAB)]
    assert counted().tolist() == [expected]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("ids", [ALL, HOT], ids=["all", "a draft's"])
@pytest.mark.parametrize("penalties", [Penalties(), Penalties(1.3, 0.5, 0.25), Penalties(0.7, -1.0, -0.5)], ids=str)
def test_penalties_and_biases(penalties: Penalties, ids: list[int], has_bias: bool) -> None:
    bias = torch.arange(VOCAB) / 8 - 0.5
    asked = [penalties.repetition, penalties.presence, penalties.frequency]
    rules = no_rules(2, VOCAB)._replace(
        penalties=in_slot_1(torch.tensor(asked, dtype=torch.float64)),
        has=in_slot_1(torch.tensor([int(has_bias), 0])),
        bias=torch.stack((bias * 100, bias)),
    )
    for found, logits, own in zip(processed(rules, ids), LOGITS[0].tolist(), GUESSES, strict=True):
        new = penalties.applied(logits, PROMPT, OUTPUT + own)
        assert found == [new[token] + (bias[token].item() if has_bias else 0.0) for token in ids]


@pytest.mark.parametrize("ids", [ALL, HOT], ids=["all", "a draft's"])
def test_stop_ids_and_bad_words(ids: list[int]) -> None:
    """A stop id may be drawn after the two guesses; `7 5 1 5 6` begins in the prompt, where no bad word does."""
    words = [[2], [5, 1], [1, 5, 4], [1, 8, 7], [5, 1, 5, 11], [7, 5, 1, 5, 6], [0]]
    rules = no_rules(2, VOCAB)._replace(
        stop_from=torch.tensor([len(PROMPT + OUTPUT) + 2]),
        stop_ids=torch.tensor([[-1, 5, VOCAB + 3, 10]]),
        has=in_slot_1(torch.tensor([0, len(words) - 1])),  # the last one is what another request has left
        words=in_slot_1(torch.tensor([[-1] * (8 - len(word)) + word for word in words]).int()),
    )
    forbidden = {2, 1, 4, 11, 5, 10}, {2, 7}
    for found, logits, not_here in zip(processed(rules, ids), LOGITS[0].tolist(), forbidden, strict=True):
        assert found == [-inf if token in not_here else logits[token] for token in ids]


def test_closing_markers() -> None:
    forced = 0
    for seed in range(300):
        rows = RandomRows(random.Random(seed))
        want = by_hand(rows)
        assert rows.forced(process_logits) == want, seed
        forced += sum(token >= 0 for each in want for token in each)
    assert forced > 100


def test_a_marker_without_a_column_is_not_forced() -> None:
    seed = next(seed for seed in range(300) if max(map(max, by_hand(RandomRows(random.Random(seed))))) >= 3)
    rows = RandomRows(random.Random(seed))
    assert rows.processed(process_logits, torch.tensor([0, 1, 2, 9])).isfinite().all()


def test_arguments_are_checked() -> None:
    rules, history = RandomRows(random.Random(1)).arguments()
    logits = torch.zeros(*history.positions.shape, 4)
    for name, wrong in {"budgets": rules.budgets[:, :-1], "words": rules.words[0], "stop_ids": rules.slots}.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            process_logits(logits, rules._replace(**{name: wrong}), history, torch.arange(4))
    for name, wrong in {"guesses": history.guesses[0], "counts": history.counts.long()}.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            process_logits(logits, rules, history._replace(**{name: wrong}), torch.arange(4))
