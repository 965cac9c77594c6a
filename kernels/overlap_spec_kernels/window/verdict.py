"""What a verify step decides for each of its slots, and the rows that it publishes.

Published rows lie in one buffer, so that one copy takes them to the host. Each is a struct of named columns; the ops
that write them and the host that reads them take the places from `PublishedColumns`:

    tokens [D] | num_guesses | last_guess, path [D - 1] | levels, strength, next_column
                               of trees alone             of methods that draft for themselves
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.limits import NO_TOKEN


class PublishedColumns(NamedTuple):
    """Where each column of a published row is. D = longest: tokens that a step can commit."""

    longest: int
    is_tree: bool = False
    is_self_drafting: bool = False

    @property
    def row_size(self) -> int:
        return self.longest + 1 + self.is_tree * self.longest + self.is_self_drafting * 3

    @property
    def tokens(self) -> slice:
        """Committed tokens, padded with -1; the last is `NO_TOKEN` where the target could draw none."""
        return slice(0, self.longest)

    @property
    def num_guesses(self) -> int:
        """Guesses that might have been accepted: of a tree, its levels."""
        return self.longest

    @property
    def last_guess(self) -> int:
        """The last window column with a guess; 0 if there is none."""
        return self.longest + 1

    @property
    def path(self) -> slice:
        """The window columns of accepted guesses, from the root down, padded with -1."""
        return slice(self.longest + 2, 2 * self.longest + 1)

    @property
    def guess_report(self) -> slice:
        """The three columns of `ngram_lookahead`: levels, strength, next column."""
        return slice(self.row_size - 3, self.row_size)


def without_marks(tokens: Tensor) -> Tensor:
    """0 in place of `NO_TOKEN`, so that it can be looked up; -1 remains. Shapes: any, i64."""
    return tokens.masked_fill(tokens == NO_TOKEN, 0)


class Published(NamedTuple):
    """The published rows of a step, and views of their columns."""

    rows: Tensor  # [B, n] i64, contiguous
    columns: PublishedColumns
    outputs: tuple[Tensor, ...] = ()  # [B * D, n] of 64 bits each: what leaves beside the rows

    @classmethod
    def allocate(cls, num_slots: int, columns: PublishedColumns, device: torch.device) -> Published:
        """Unwritten rows. Sync: never."""
        return cls(torch.empty(num_slots, columns.row_size, dtype=torch.int64, device=device), columns)

    @property
    def tokens(self) -> Tensor:
        """Shapes: -> [B, D] i64."""
        return self.rows[:, self.columns.tokens]

    @property
    def num_guesses(self) -> Tensor:
        """Shapes: -> [B] i64."""
        return self.rows[:, self.columns.num_guesses]

    @property
    def last_guess(self) -> Tensor:
        """Shapes: -> [B] i64."""
        return self.rows[:, self.columns.last_guess]

    @property
    def path(self) -> Tensor:
        """Shapes: -> [B, D - 1] i64."""
        return self.rows[:, self.columns.path]

    @property
    def guess_report(self) -> Tensor:
        """Shapes: -> [B, 3] i64."""
        return self.rows[:, self.columns.guess_report]


class Verdict(NamedTuple):
    """What a step commits: accepted guesses and one bonus. D: W of a chain; of a tree its levels and the root."""

    tokens: Tensor  # [B, D] i64: committed, left-aligned, padded with -1
    follow: Tensor  # [B * D] i64: the token committed after each row that is kept, for the draft; 0 for padding
    accept_len: Tensor  # [B] i64, 0..D - 1: guesses accepted, the bonus not counted
    next_positions: Tensor  # [D, B] i64: new length + row index; row 0 is the new lengths
    published: Published
    path: Tensor | None  # [B, D] i64, of trees: window columns from the root down; column i in place i > accept_len

    @classmethod
    def allocate(cls, num_slots: int, columns: PublishedColumns, device: torch.device) -> Verdict:
        """Unwritten memory for the verdict on `num_slots` windows. Sync: never."""
        longest, batch_stride = columns.longest, num_slots + num_slots % 2  # rows are aligned: kernels rely on it
        tokens = torch.empty(num_slots, longest, dtype=torch.int64, device=device)
        return cls(
            tokens=tokens,
            follow=tokens.new_empty(num_slots * longest),
            accept_len=tokens.new_empty(num_slots),
            next_positions=tokens.new_empty(longest, batch_stride)[:, :num_slots],
            published=Published.allocate(num_slots, columns, device),
            path=torch.empty_like(tokens) if columns.is_tree else None,
        )

    @property
    def next_lengths(self) -> Tensor:
        """The slots' lengths once the step is committed. Shapes: -> [B] i64."""
        return self.next_positions[0]

    @property
    def last(self) -> Tensor:
        """The window column where each run of accepted guesses ends. Shapes: -> [B] i64."""
        return self.accept_len if self.path is None else self.path.gather(1, self.accept_len[:, None]).squeeze(1)
