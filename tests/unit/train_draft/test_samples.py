"""Loops are cut out of answers, vocabularies go by counts, and batches hold every sample once."""

from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from overlap_spec.train_draft.loop import Order
from overlap_spec.train_draft.samples import (
    GRAM,
    LEAST_ANSWER,
    ROUNDED,
    Sample,
    draft_vocabulary,
    endless_batches,
    loop_starts,
    padded_length,
    unused_token,
    without_loop,
)

CPU = torch.device("cpu")


def written_out(answer: list[int]) -> int:
    """The rule, one place and one period after another."""
    ends = [len(answer)]
    for period in range(1, 65):
        least = max(2 * period, 12)
        for first in range(len(answer) - period - least + 1):
            if answer[first : first + least] == answer[first + period : first + period + least]:
                ends.append(first + period)
                break
    seen: dict[tuple[int, ...], int] = {}
    for first in range(len(answer) - GRAM + 1):
        run = tuple(answer[first : first + GRAM])
        if seen.get(run, 0) >= 3:
            ends.append(first)
            break
        seen[run] = seen.get(run, 0) + 1
    return min(ends)


ANSWERS = {
    "no loop": [*range(100)],
    "one token": [*range(20), *[7] * 30],
    "a period that is repeated three times": [*range(10), *[*range(20, 26)] * 3, *range(30, 60)],
    "a period that is repeated twice": [*range(10), *[*range(20, 50)] * 2, *range(50, 60)],
    "an end within a repetition": [*range(9), *[1, 2, 3, 4] * 4],
    "the same run between others": [token for n in range(9) for token in (*range(6), 10 + n, 20 + n)],
    "short": [1, 1, 1],
    "twelve": [3] * 12,
}


def test_an_answer_ends_where_its_loop_begins() -> None:
    random = Random(3)
    drawn = [[random.randrange(3) for _ in range(random.randrange(1, 90))] for _ in range(40)]
    answers = [*ANSWERS.values(), *drawn]
    found = loop_starts([torch.tensor(answer, dtype=torch.int32) for answer in answers], CPU)
    assert found == [written_out(answer) for answer in answers]
    by_name = dict(zip(ANSWERS, found, strict=False))
    assert by_name["one token"] == 21 and by_name["a period that is repeated three times"] == 16
    assert by_name["no loop"] == 100 and by_name["the same run between others"] == 24


def sample(prompt: list[int], answer: list[int]) -> Sample:
    return Sample(torch.tensor(prompt + answer, dtype=torch.int32), len(prompt))


def test_answers_that_teach_nothing_are_left_out() -> None:
    """A prompt may repeat itself, an answer may not."""
    kept = without_loop([sample([5] * 40, [*range(9)]), sample([1], [2] * 30), sample([1], [*range(7)])], CPU)
    assert [(each.start, len(each.tokens)) for each in kept] == [(40, 49)]
    assert min(len(each.answer) for each in kept) >= LEAST_ANSWER


def test_the_vocabulary_is_what_answers_have_most_often() -> None:
    samples = [sample([9, 9, 9, 9], [3, 3, 3, 8]), sample([9], [8, 8, 1, 4])]
    assert draft_vocabulary(samples, 3, 12, [11]).tolist() == [3, 8, 11], "ascending, with EOS, without prompts"
    assert draft_vocabulary(samples, 99, 12, [2]).tolist() == [*range(12)]
    assert unused_token(samples, 12) == 11 and unused_token([sample([2], [0])], 3) == 1


@pytest.mark.parametrize("num_rows", [64, 200])
def test_batches_hold_every_sample_once_in_an_epoch(num_rows: int) -> None:
    random = Random(1)
    samples = [sample([1], [*range(random.randrange(2, 60))]) for _ in range(50)]
    batches = endless_batches(samples, num_rows, random)
    orders: list[list[int]] = []
    for _ in range(2):
        order: list[Tensor] = []
        while len(order) < len(samples):
            batch = next(batches)
            assert len(batch) * padded_length(batch) <= num_rows and padded_length(batch) % ROUNDED == 0
            order += [each.tokens for each in batch]
        orders.append([next(i for i, each in enumerate(samples) if each.tokens is tokens) for tokens in order])
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(50)] and orders[0] != orders[1]


def test_an_answer_ends_where_a_sample_or_the_engine_has_no_more_room() -> None:
    order = Order("EAGLE3", Path("draft"), 0.0, 60.0, most_tokens=100, max_new_tokens=50)
    assert [order.longest_answer(length, 400) for length in (10, 60, 95, 99, 300)] == [50, 39, 4, 1, 1]
    assert order.longest_answer(10, 40) == 29
