"""The lists of requests that take a slot, as integers for the device (`sampling/slot_lists.py`)."""

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from overlap_spec.messages import MAX_BAD_WORDS, MAX_WORD_TOKENS, SamplingParams

WORDS = 2 * MAX_BAD_WORDS, MAX_WORD_TOKENS  # of a slot: each as it is, and after a space


@dataclass(frozen=True)
class PackedLists:
    """Of the requests of one step; empty where none has a list."""

    fills: list[int] = field(default_factory=list)  # slot, float
    biases: list[int] = field(default_factory=list)  # slot, token, float
    words: list[int] = field(default_factory=list)  # slot, place, token
    scored: list[int] = field(default_factory=list)  # slot, column, token whose log-probs are wanted

    def add(self, slot: int, asked: SamplingParams) -> None:
        """A request takes the slot."""
        if not (asked.biases_logits or asked.bad_word_ids or asked.log_probs is not None):
            return  # as of most
        allowed = asked.allowed_token_ids
        if allowed is not None or asked.logit_bias:
            self.fills.extend((slot, _bits(0.0 if allowed is None else -math.inf)))
        entries = asked.logit_bias if allowed is None else {i: asked.logit_bias.get(i, 0.0) for i in allowed}
        for token, bias in entries.items():
            self.biases.extend((slot, token, _bits(bias)))
        for place, token in _places(asked.bad_word_ids):
            self.words.extend((slot, place, token))
        if asked.log_probs is not None:
            for column, token in enumerate(asked.log_probs.token_ids):
                self.scored.extend((slot, column, token))

    @property
    def runs(self) -> tuple[list[int], ...]:
        """All of them; () where none has a list."""
        runs = self.fills, self.biases, self.words, self.scored
        return runs if any(runs) else ()


def _places(words: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int]]:
    """Where each token of each word is in a slot's row, and the token."""
    for i, word in enumerate(words):
        end = (i + 1) * MAX_WORD_TOKENS
        yield from enumerate(word, end - len(word))


def _bits(value: float) -> int:
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits
