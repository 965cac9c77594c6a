"""What requests may list, a row for each slot: biases of tokens, tokens that are allowed, bad words, thinking budgets.

Written when a request that has a list takes a slot. The rows of other slots are stale, and `has` is 0 there; every
request writes its budget, which may be none.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from overlap_spec_kernels import BUDGET_WIDTH
from torch import Tensor

BIAS_BYTES, WORD_BYTES, BUDGET_BYTES = torch.float32.itemsize, torch.int32.itemsize, torch.int64.itemsize
MARKER = (BUDGET_WIDTH - 4) // 2  # tokens of a marker, at most
ROWS_AT_ONCE = 16  # that are copied: each takes the bytes of a row of logits meanwhile
NO_BUDGET = (-1, *[0] * (BUDGET_WIDTH - 1))


@dataclass(frozen=True)
class SlotLists:
    """S rows. Sync: never."""

    has: Tensor  # [S, 2] i64: 1 where the slot has biases, and how many bad words it has
    bias: Tensor  # [S, V] f32, added to logits; -inf: not allowed
    words: Tensor  # [S, words, M] i32: a word's last token is the last of its row, -1 is before its first
    budgets: Tensor  # [S, 4 + 2 * 8] i64, as `packed_budget` makes them

    @staticmethod
    def allocate(num_rows: int, vocab_size: int, words: tuple[int, int], device: torch.device) -> "SlotLists":
        """`words`: how many a slot may have, of how many tokens."""
        return SlotLists(
            torch.zeros(num_rows, 2, dtype=torch.int64, device=device),
            torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device),
            torch.full((num_rows, *words), -1, dtype=torch.int32, device=device),
            torch.tensor(NO_BUDGET, device=device).repeat(num_rows, 1),
        )

    @staticmethod
    def num_bytes(num_rows: int, vocab_size: int, words: tuple[int, int]) -> int:
        """What they take."""
        lists = vocab_size * BIAS_BYTES + words[0] * words[1] * WORD_BYTES + BUDGET_WIDTH * BUDGET_BYTES
        return num_rows * lists

    def write_bias(self, fills: Tensor, allowed: Tensor, copies: Tensor, entries: Tensor) -> None:
        """Fill rows, allow tokens in them, copy rows, and then add biases: to a token that is not allowed, in vain.

        Shapes: fills [n, 2] i64 (slot, the float of all tokens), allowed [m, 2] i64 (slot, token), copies [k, 2] i64
        (slot, source), entries [e, 3] i64 (slot, token, its float).
        """
        slots, values = fills.unbind(1)
        self.bias[slots] = _floats(values)[:, None]
        slots, tokens = allowed.unbind(1)
        zeros = torch.zeros(len(tokens), device=tokens.device)  # a Python number would be copied there: a wait
        self.bias[slots, tokens] = zeros
        for start in range(0, len(copies), ROWS_AT_ONCE):
            slots, sources = copies[start : start + ROWS_AT_ONCE].unbind(1)
            self.bias[slots] = self.bias[sources]
        slots, tokens, values = entries.unbind(1)
        self.bias[slots, tokens] = self.bias[slots, tokens] + _floats(values)

    def write_words(self, entries: Tensor) -> None:
        """Shapes: entries [n, 3] i64 (slot, place in the slot's words, token)."""
        slots, places, tokens = entries.unbind(1)
        self.words.index_fill_(0, slots, -1)
        self.words.flatten(1)[slots, places] = tokens.int()


def packed_budget(tokens: int, is_open: bool, opening: Iterable[int], closing: Iterable[int]) -> list[int]:
    """The row of a slot whose reasoning may take so many tokens. `is_open`: the output begins inside of it."""
    begins, ends = list(opening), list(closing)
    markers = [*begins, *[-1] * (MARKER - len(begins)), *ends, *[-1] * (MARKER - len(ends))]
    return [tokens, int(is_open), len(begins), len(ends), *markers]


def _floats(bits: Tensor) -> Tensor:
    """32-bit floats from their bits. Shapes: i64 -> f32."""
    return bits.int().view(torch.float32)
