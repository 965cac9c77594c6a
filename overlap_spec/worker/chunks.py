"""The host's part of a prefill step: chunks flattened into rows. Not here: any tensor work."""

from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate

from overlap_spec.messages import SlotWork


class Chunks:
    """The prompt chunks of one plan, in plan order. A chunk without a next token completes its prompt."""

    def __init__(self, work: list[SlotWork]) -> None:
        self._work = work
        self._tokens = [_int32(w.prompt_chunk) for w in work]
        self.row_starts = [0, *accumulate(len(tokens) for tokens in self._tokens)]
        self.completed = [i for i, w in enumerate(work) if w.next_token < 0]
        self.longest = max(len(tokens) for tokens in self._tokens)

    def tokens(self) -> Iterator[int]:
        """Every row's token."""
        for tokens in self._tokens:
            yield from tokens

    def next_tokens(self) -> Iterator[int]:
        """The token after every row; 0 where it is yet to be drawn."""
        for work, tokens in zip(self._work, self._tokens, strict=True):
            yield from tokens[1:]
            yield max(work.next_token, 0)

    def positions(self) -> Iterator[int]:
        """Every row's absolute position."""
        for work, tokens in zip(self._work, self._tokens, strict=True):
            yield from range(work.start, work.start + len(tokens))

    def owners(self) -> Iterator[int]:
        """Every row's place in the plan."""
        for i, tokens in enumerate(self._tokens):
            yield from [i] * len(tokens)

    def completed_work(self) -> list[SlotWork]:
        """The work of completed prompts, in plan order; the lists below follow it."""
        return [self._work[i] for i in self.completed]

    def last_rows(self) -> Iterable[int]:
        """The last row of each completed prompt."""
        return [self.row_starts[i + 1] - 1 for i in self.completed]

    def lengths(self) -> Iterable[int]:
        """The length of each completed prompt."""
        return [self._work[i].start + len(self._tokens[i]) for i in self.completed]


def _int32(packed: bytes) -> "array[int]":
    values = array("i")
    values.frombytes(packed)
    return values
