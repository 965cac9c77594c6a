"""The lists of requests that take a slot, as integers for the device (`sampling/slot_lists.py`).

Requests of a group share their allowed tokens, which may be the whole vocabulary: they are packed for the first slot,
and its row is copied to the others.
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from overlap_spec.messages import MAX_BAD_WORDS, MAX_WORD_TOKENS, SamplingParams

WORDS = 2 * MAX_BAD_WORDS, MAX_WORD_TOKENS  # of a slot: each as it is, and after a space

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PackedLists:
    """Of the requests of one step; empty where none has a list."""

    fills: list[int] = field(default_factory=list)  # slot, float
    allowed: list[Ints] = field(default_factory=list)  # slot, token
    copies: list[int] = field(default_factory=list)  # slot, slot that allows the same
    biases: list[int] = field(default_factory=list)  # slot, token, float
    words: list[int] = field(default_factory=list)  # slot, place, token
    first: dict[bytes, int] = field(default_factory=dict)  # by allowed tokens, the slot that they are packed for

    def add(self, slot: int, asked: SamplingParams) -> None:
        """A request takes the slot."""
        if not (asked.biases_logits or asked.bad_word_ids):
            return  # as of most
        if asked.biases_logits:
            self._add_bias(slot, asked)
        for place, token in _places(asked.bad_word_ids):
            self.words.extend((slot, place, token))

    def _add_bias(self, slot: int, asked: SamplingParams) -> None:
        allowed = asked.packed_allowed
        first = self.first.setdefault(allowed, slot) if allowed else slot
        if first != slot:
            self.copies.extend((slot, first))
        else:
            self.fills.extend((slot, _bits(-math.inf if allowed else 0.0)))
        if allowed and first == slot:
            tokens = np.frombuffer(allowed, "<i4")
            self.allowed.append(np.stack((np.full(len(tokens), slot), tokens), 1).ravel())
        for token, bias in asked.logit_bias.items():
            self.biases.extend((slot, token, _bits(bias)))

    @property
    def runs(self) -> "tuple[list[int] | Ints, ...]":
        """All of them; () where none has a list."""
        allowed: Ints | list[int] = np.concatenate(self.allowed) if self.allowed else []
        runs = self.fills, allowed, self.copies, self.biases, self.words
        return runs if any(map(len, runs)) else ()


def _places(words: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int]]:
    """Where each token of each word is in a slot's row, and the token."""
    for i, word in enumerate(words):
        end = (i + 1) * MAX_WORD_TOKENS
        yield from enumerate(word, end - len(word))


def _bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
