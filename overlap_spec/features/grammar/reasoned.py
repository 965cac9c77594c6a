"""A grammar of what follows reasoning that has a budget of tokens.

    <think> t1 t2 .. tB </think> {"a": 1}         the reasoning: any tokens but the model's end tokens | the grammar
                                 ^ after the marker's tokens, drawn by the model or, after B tokens, forced

Where the reasoning ends is decided by token ids, as `logits/reasoning_end.py` decides it on the device: text does not
tell it, because the budget may end inside a character, or the model may spell the marker with other tokens.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

from overlap_spec.messages import Thinking

if TYPE_CHECKING:
    from llguidance import LLMatcher

Matcher: TypeAlias = "LLMatcher | ReasonedMatcher"  # the second has the functions of the first that requests use


class Part(enum.Enum):
    """What the next token belongs to."""

    OPENING = "opening"  # to the opening marker, or to an answer without reasoning
    REASONING = "reasoning"
    ANSWER = "answer"


class ReasonedMatcher:
    """A matcher that gives `answer` the tokens after the reasoning."""

    def __init__(self, answer: LLMatcher, thinking: Thinking, eos_token_ids: Collection[int], vocab_size: int) -> None:
        self._answer = answer
        self._thinking = thinking
        self._reasoning_mask = _mask_without(eos_token_ids, vocab_size)
        self._tokens: list[int] = []
        self._parts = [self._part_after([], Part.OPENING)]  # before each token, and after the last
        self._given: list[int] = []  # by each token, how many the answer's matcher consumed

    @property
    def _part(self) -> Part:
        return self._parts[-1]

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for count, token in enumerate(tokens):
            if not self._consume(token):
                return count
        return len(tokens)

    def rollback(self, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._tokens.pop()
            self._parts.pop()
            self._forget(self._given.pop())

    def reset(self) -> None:
        self._answer.reset()
        self._tokens.clear()
        self._given.clear()
        del self._parts[1:]

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        match self._part:
            case Part.ANSWER:
                self._answer.unsafe_compute_mask_ptr(trg_pointer, trg_byte_size)
            case Part.REASONING:
                ctypes.memmove(trg_pointer, self._reasoning_mask, trg_byte_size)
            case Part.OPENING:
                self._compute_either(trg_pointer, trg_byte_size)

    def compute_ff_tokens(self) -> list[int]:
        return self._answer.compute_ff_tokens() if self._part is Part.ANSWER else []

    def is_stopped(self) -> bool:
        return self._part is Part.ANSWER and self._answer.is_stopped()

    def is_error(self) -> bool:
        return self._answer.is_error()

    def get_error(self) -> str:
        return self._answer.get_error()

    def _consume(self, token: int) -> bool:
        given = 0
        if self._part is Part.REASONING:
            if self._forced() not in (None, token):
                return False
        elif self._part is Part.ANSWER or token != self._thinking.opening[len(self._tokens)]:
            pending = [*(self._tokens if self._part is Part.OPENING else ()), token]
            given = self._answer.try_consume_tokens(pending)
            if given < len(pending):
                self._forget(given)
                return False
        self._tokens.append(token)
        self._given.append(given)
        self._parts.append(self._part_after(self._tokens, self._part))
        return True

    def _forget(self, given: int) -> None:
        if given:
            self._answer.rollback(given)

    def _compute_either(self, trg_pointer: int, trg_byte_size: int) -> None:
        """The mask where the opening marker may go on, or an answer that begins with the same tokens."""
        ctypes.memset(trg_pointer, 0, trg_byte_size)
        given = self._answer.try_consume_tokens(self._tokens)
        if given == len(self._tokens):
            self._answer.unsafe_compute_mask_ptr(trg_pointer, trg_byte_size)
        self._forget(given)
        token = self._thinking.opening[len(self._tokens)]
        ctypes.c_uint8.from_address(trg_pointer + token // 8).value |= 1 << token % 8

    def _begin(self, tokens: Sequence[int]) -> int | None:
        """Where the reasoning begins; None if it has not begun."""
        opening = self._thinking.opening
        if opening and tuple(tokens[: len(opening)]) == opening:
            return len(opening)
        return 0 if self._thinking.is_open else None

    def _forced(self) -> int | None:
        """The token of the marker that is due, if one is."""
        begin = self._begin(self._tokens)
        assert begin is not None
        offset = len(self._tokens) - begin - self._thinking.budget
        return self._thinking.closing[offset] if offset >= 0 else None

    def _part_after(self, tokens: Sequence[int], before: Part) -> Part:
        opening, closing = self._thinking.opening, self._thinking.closing
        if before is Part.ANSWER:
            return Part.ANSWER
        if (begin := self._begin(tokens)) is None:
            going = len(tokens) < len(opening) and tuple(tokens) == opening[: len(tokens)]
            return Part.OPENING if going else Part.ANSWER
        end, count = begin + self._thinking.budget, len(tokens)
        closed = begin + len(closing) <= count <= end and tuple(tokens[-len(closing) :]) == closing
        return Part.ANSWER if closed or count >= end + len(closing) else Part.REASONING


def _mask_without(token_ids: Collection[int], vocab_size: int) -> bytes:
    """A mask of all tokens but these."""
    mask = bytearray(b"\xff" * (4 * -(-vocab_size // 32)))
    for token in token_ids:
        mask[token // 8] &= ~(1 << token % 8)
    return bytes(mask)
