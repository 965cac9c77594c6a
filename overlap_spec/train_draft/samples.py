"""Answered prompts: where they fall into loops, which tokens a draft should guess among, and batches of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_ANSWER = 8  # tokens of an answer that is learnt from
LONGEST_PERIOD = 64
LEAST_REPEATED = 12  # tokens, beside the first occurrence, of what is repeated back to back
GRAM, MOST_SEEN = 6, 3  # a run of so many tokens may occur so often in an answer
TOGETHER = 256  # answers that are looked at together
ROUNDED = 32  # lengths of batches


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's answer."""

    tokens: Tensor  # [T] i32, on the host
    start: int  # of the answer

    @property
    def answer(self) -> Tensor:
        return self.tokens[self.start :]


def without_loop(samples: Sequence[Sample], device: torch.device) -> list[Sample]:
    """Cut each answer where it begins to repeat itself; leave out those that are too short then.

    A head that learns from loops learns to repeat. A loop is what occurs three times back to back, with at least
    LEAST_REPEATED tokens behind its first occurrence, which is kept; or a run of GRAM tokens that has occurred
    MOST_SEEN times before. Sync: waits for the device.
    """
    answers = [sample.answer for sample in samples]
    parts = [answers[begin : begin + TOGETHER] for begin in range(0, len(answers), TOGETHER)]
    ends = [end for part in parts for end in loop_starts(part, device)]
    cut = [Sample(each.tokens[: each.start + end], each.start) for each, end in zip(samples, ends, strict=True)]
    return [sample for sample in cut if len(sample.answer) >= LEAST_ANSWER]


def loop_starts(answers: Sequence[Tensor], device: torch.device) -> list[int]:
    """Tokens of each answer before its loop; all of them without one."""
    length = max(map(len, answers), default=0)
    lengths = torch.tensor(list(map(len, answers)), device=device)
    if length <= LEAST_REPEATED:
        return lengths.tolist()
    padding = -1 - torch.arange(length)  # equal to nothing
    tokens = torch.stack([torch.cat((answer.long(), padding[len(answer) :])) for answer in answers]).to(device)
    return torch.minimum(lengths, torch.minimum(_back_to_back(tokens), _seen_often(tokens))).tolist()


def _back_to_back(tokens: Tensor) -> Tensor:
    """Shapes: [N, T] i64 -> [N] i64: tokens up to the end of the first occurrence, T without a loop."""
    count, length = tokens.shape
    ends = torch.full((count,), length, device=tokens.device)
    for period in range(1, min(LONGEST_PERIOD, length - 1) + 1):
        least = max(2 * period, LEAST_REPEATED)
        if length - period < least:
            break
        same = F.pad((tokens[:, period:] == tokens[:, :-period]).int().cumsum(1), (1, 0))
        whole = same[:, least:] - same[:, :-least] == least
        first = whole.int().argmax(1) + period
        ends = torch.where(whole.any(1), torch.minimum(ends, first), ends)
    return ends


def _seen_often(tokens: Tensor) -> Tensor:
    """Shapes: [N, T] i64 -> [N] i64: where the first run begins that has occurred often enough, T without one."""
    length = tokens.shape[1]
    grams = torch.zeros_like(tokens[:, : length - GRAM + 1])
    for place in range(GRAM):
        grams = grams * 1_000_003 + tokens[:, place : length - GRAM + 1 + place]
    before = torch.ones(grams.shape[1], grams.shape[1], dtype=torch.bool, device=tokens.device).tril(-1)
    often = ((grams[:, :, None] == grams[:, None]) & before).sum(2) >= MOST_SEEN
    return torch.where(often.any(1), often.int().argmax(1), length)


def draft_vocabulary(samples: Sequence[Sample], size: int, vocab_size: int, always: Sequence[int]) -> Tensor:
    """The `size` most frequent tokens of the answers, and `always` among them. Shapes: -> [size] i64, ascending."""
    counts = _counts((sample.answer for sample in samples), vocab_size)
    counts[list(always)] = counts.max() + 1
    return counts.argsort(descending=True, stable=True)[: min(size, vocab_size)].sort().values


def unused_token(samples: Sequence[Sample], vocab_size: int) -> int:
    """The last token that no sample has; else the one that the fewest have: what a mask is."""
    counts = _counts((sample.tokens for sample in samples), vocab_size)
    return vocab_size - 1 - int(counts.flip(0).argmin())


def _counts(tokens: Iterable[Tensor], vocab_size: int) -> Tensor:
    """How often each token of the vocabulary occurs. Shapes: -> [V] i64."""
    return torch.bincount(torch.cat(list(tokens)).long(), minlength=vocab_size)


def endless_batches(samples: Sequence[Sample], num_rows: int, random: Random) -> Iterator[list[Sample]]:
    """Batches of at most `num_rows` rows of samples as long as each other, in random order and again and again."""
    while True:
        near = sorted(random.sample(samples, len(samples)), key=lambda sample: len(sample.tokens))
        batches = list(batches_of(near, num_rows))
        yield from random.sample(batches, len(batches))


def batches_of(samples: Sequence[Sample], num_rows: int) -> Iterator[list[Sample]]:
    """Samples in their order, as many in each batch as fit."""
    batch, longest = list[Sample](), 0
    for sample in samples:
        longest = max(longest, len(sample.tokens))
        if batch and (len(batch) + 1) * _rounded(longest) > num_rows:
            yield batch
            batch, longest = [], len(sample.tokens)
        batch.append(sample)
    if batch:
        yield batch


def padded_length(batch: Sequence[Sample]) -> int:
    """Rows of each sample in a batch."""
    return _rounded(max(len(sample.tokens) for sample in batch))


def _rounded(length: int) -> int:
    return -(-length // ROUNDED) * ROUNDED
