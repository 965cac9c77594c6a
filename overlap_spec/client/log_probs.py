"""Log-probs as a Python user reads them: packed as they came, and an object for a token only while it is looked at.

A long prompt has hundreds of thousands of numbers. As objects they would take twenty times as much memory.
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from overlap_spec.messages import LogProbs

NUMBER_BYTES = 8  # float64
READ_AT_ONCE = 64  # records


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A token that might be at a position. `token`: its bytes, of which some characters take several tokens."""

    token_id: int
    log_prob: float
    token: bytes


class TokenLogProb(msgspec.Struct, frozen=True, gc=False):
    """A token with the log of its probability, given the tokens before it, by the model alone.

    `log_prob`: None for the first prompt token. `top`: the most probable tokens, best first. `listed`: those that were
    asked for by id.
    """

    token_id: int
    log_prob: float | None
    token: bytes
    top: list[Candidate]
    listed: list[Candidate]

    @property
    def text(self) -> str:
        """What is no whole character becomes U+FFFD."""
        return self.token.decode(errors="replace")


class TokenLogProbs(Sequence[TokenLogProb]):
    """The log-probs of a run of tokens: packed records (`LogProbs`), read while they are iterated over.

    `names`: the bytes of every token in them; it may be shared, and hold more. `with_others`: False where the tokens'
    own log-probs alone are read.
    """

    def __init__(
        self, records: bytearray, width: tuple[int, int], names: dict[int, bytes], with_others: bool = True
    ) -> None:
        """`width`: how many are among the most probable ones of each token, and how many were listed."""
        self._records = records
        self._top, self._listed = width
        self._names = names
        self._with_others = with_others

    @property
    def alone(self) -> "TokenLogProbs":
        """The same without the tokens that might have been there: much quicker to read."""
        return TokenLogProbs(self._records, (self._top, self._listed), self._names, with_others=False)

    def own(self, first: int, end: int) -> list[float]:
        """The log-probs of these tokens themselves; NaN for none."""
        size = 2 * self._width
        return self._numbers(first, end)[::size].tolist()

    def extend(self, others: "TokenLogProbs") -> None:
        """Add tokens that follow, of the same request."""
        self._records += others._records

    def copy(self) -> "TokenLogProbs":
        """The same, to be extended."""
        return TokenLogProbs(self._records[:], (self._top, self._listed), self._names, self._with_others)

    @property
    def _width(self) -> int:
        return 1 + self._top + self._listed

    def __len__(self) -> int:
        return len(self._records) // (2 * self._width * NUMBER_BYTES)

    @overload
    def __getitem__(self, index: int) -> TokenLogProb: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenLogProb]: ...
    def __getitem__(self, index: int | slice) -> TokenLogProb | list[TokenLogProb]:
        chosen = range(len(self))[index]
        if isinstance(chosen, int):
            return self._read(chosen, chosen + 1)[0]
        return self._read(chosen.start, chosen.stop) if chosen.step == 1 else [self[each] for each in chosen]

    def __iter__(self) -> Iterator[TokenLogProb]:
        for first in range(0, len(self), READ_AT_ONCE):
            yield from self._read(first, first + READ_AT_ONCE)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _read(self, first: int, end: int) -> list[TokenLogProb]:
        size, numbers = 2 * self._width, self._numbers(first, end)
        if self._with_others:
            return [self._entry(numbers[start : start + size]) for start in range(0, len(numbers), size)]
        names, pairs = self._names, zip(numbers[::size], map(int, numbers[1::size]), strict=True)
        return [TokenLogProb(token, _or_none(log_prob), names[token], [], []) for log_prob, token in pairs]

    def _numbers(self, first: int, end: int) -> "array[float]":
        size = 2 * self._width * NUMBER_BYTES
        return array("d", self._records[first * size : max(end, first) * size])

    def _entry(self, numbers: "array[float]") -> TokenLogProb:
        token, end = int(numbers[1]), 2 + 2 * self._top
        top, listed = self._candidates(numbers[2:end]), self._candidates(numbers[end:])
        return TokenLogProb(token, _or_none(numbers[0]), self._names[token], top, listed)

    def _candidates(self, numbers: "array[float]") -> list[Candidate]:
        names, pairs = self._names, zip(map(int, numbers[1::2]), numbers[::2], strict=True)
        return [Candidate(token, log_prob, names[token]) for token, log_prob in pairs if token >= 0]


def _or_none(log_prob: float) -> float | None:
    return None if math.isnan(log_prob) else log_prob


NONE: Sequence[TokenLogProb] = TokenLogProbs(bytearray(), (0, 0), {})  # nothing is ever added to it


def alone(entries: Sequence[TokenLogProb]) -> Sequence[TokenLogProb]:
    """The same, maybe without the tokens that might have been there."""
    return entries.alone if isinstance(entries, TokenLogProbs) else entries


def own_log_probs(entries: Sequence[TokenLogProb], first: int, end: int) -> list[float]:
    """The log-probs of these tokens themselves; NaN for none."""
    if isinstance(entries, TokenLogProbs):
        return entries.own(first, end)
    return [math.nan if entry.log_prob is None else entry.log_prob for entry in entries[first:end]]


def read_log_probs(packed: LogProbs | None, names: dict[int, bytes] | None = None) -> Sequence[TokenLogProb]:
    """One for each token; none if there are none. `names`: a table of tokens' bytes to be shared, and added to."""
    if packed is None:
        return NONE
    known = packed.names
    if names is not None:
        names.update(packed.names)
        known = names
    return TokenLogProbs(bytearray(packed.records), (packed.top, packed.listed), known)


def extended(found: Sequence[TokenLogProb], others: Sequence[TokenLogProb]) -> Sequence[TokenLogProb]:
    """What an earlier call returned, or NONE, with what follows. The former grows; `others` stay as they are."""
    if not others:
        return found
    if isinstance(others, TokenLogProbs) and not found:
        return others.copy()
    if isinstance(others, TokenLogProbs) and isinstance(found, TokenLogProbs):
        found.extend(others)
        return found
    return [*found, *others]
