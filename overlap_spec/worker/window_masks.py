"""Which tokens may follow each column of a window: masks, computed by llguidance for many windows at once.

A window is cut into runs. A run goes from a column down to a leaf, first children first; of a chain there is one:

    window   0 a b c d    a and b follow the root, c follows a, d follows b        runs   0 a c | b d

The masks along a run are one call, which consumes the run's guesses one after another and rolls them back. Calls for
several windows run in the library's threads, without Python's lock. A call ends at a guess that its grammar forbids:
nothing below such a guess can be accepted, so nothing below it gets a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overlap_spec.grammar.reasoned import Matcher, ReasonedMatcher

if TYPE_CHECKING:
    from llguidance import LLExecutor


@dataclass(frozen=True)
class HostWindow:
    """A slot's window as the host has read it. `parents`: of trees, columns."""

    tokens: list[int]  # [w], -1 where there is no guess
    parents: list[int] | None = None


@dataclass(frozen=True)
class Run:
    """Columns of a window, each the parent of the next."""

    path: list[int]  # the guesses that lead to the first column, its own included
    columns: list[int]
    guesses: list[int]  # of the columns after the first


class WindowMasks:
    """Computes masks over a vocabulary. Any thread may use it, and each matcher only one at a time."""

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int], num_threads: int) -> None:
        self.words = mask_words(vocab_size)
        self.num_threads = num_threads
        self._ends = eos_token_ids

    def memory(self, num_columns: int) -> Tensor:
        """Where masks of so many columns are written. Everything is allowed. Shapes: -> [N] i32, N even."""
        return torch.full((self._num_ints(num_columns),), -1, dtype=torch.int32)

    def compute(self, matchers: Sequence[Matcher], windows: Sequence[HostWindow], memory: Tensor) -> Tensor:
        """Write masks of windows of w columns. Columns that no draw can reach have any mask that allows something.

        Shapes: memory [N] i32, on the host -> [G * w * n] i32, or one more, so that it is even: packed masks.
        """
        width = len(windows[0].tokens)
        if windows[0].parents is None:
            chains = [_chain(window.tokens, self._ends) for window in windows]
            self._compute([(matcher, i * width, chains[i]) for i, matcher in enumerate(matchers)], memory)
            return memory[: self._num_ints(len(windows) * width)]
        runs = [runs_of(window, self._ends) for window in windows]
        order = [first for first in range(0, len(windows) * width, width) for _ in range(width)]  # rows, by column
        free = list(range(0, len(windows) * width, width))  # the next row of each window
        for turn in zip_longest(*runs):
            work: list[tuple[Matcher, int, list[int]]] = []
            entered: list[tuple[Matcher, int]] = []
            for index, run in enumerate(turn):
                if run is None:
                    continue
                row, matcher = free[index], matchers[index]
                free[index] += len(run.columns)
                for column, place in zip(run.columns, range(row, free[index]), strict=True):
                    order[index * width + column] = place
                if run.path and not _enter(matcher, run.path):
                    continue
                entered.append((matcher, len(run.path)))
                work.append((matcher, row, run.guesses))
            self._compute(work, memory)
            for matcher, depth in entered:
                if depth:
                    matcher.rollback(depth)
        ordered = self.memory(len(order))
        rows = memory[: len(order) * self.words].view(-1, self.words)
        ordered[: rows.numel()] = rows[torch.tensor(order)].view(-1)
        return ordered

    def _num_ints(self, num_columns: int) -> int:
        return 2 * -(-num_columns * self.words // 2)

    def _compute(self, work: list[tuple[Matcher, int, list[int]]], memory: Tensor) -> None:
        """Masks along runs. Of each: a matcher at its first column, the row of that, and the guesses below."""
        place = memory.data_ptr(), 4 * self.words, len(memory) // self.words
        library = [each for each in work if not isinstance(each[0], ReasonedMatcher)]
        if guessed := [each for each in library if each[2]]:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *place)  # type: ignore[arg-type]
        if single := [(matcher, row) for matcher, row, guesses in library if not guesses]:
            self._executor.unsafe_compute_mask_ptr(single, *place)  # type: ignore[arg-type]
        for matcher, row, guesses in work:
            if isinstance(matcher, ReasonedMatcher):
                self._walk(matcher, guesses, memory[row * self.words :])

    def _walk(self, matcher: ReasonedMatcher, guesses: list[int], memory: Tensor) -> None:
        """The same, one after another."""
        depth, num_bytes = 0, 4 * self.words
        matcher.unsafe_compute_mask_ptr(memory.data_ptr(), num_bytes)
        while depth < len(guesses) and matcher.try_consume_tokens([guesses[depth]]) == 1:
            depth += 1
            matcher.unsafe_compute_mask_ptr(memory.data_ptr() + depth * num_bytes, num_bytes)
        matcher.rollback(depth)

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self.num_threads)


def runs_of(window: HostWindow, ends: frozenset[int]) -> list[Run]:
    """Cut a window into runs, parents first. A guess of `ends` has no column: nothing after the end counts."""
    tokens = window.tokens
    if window.parents is None:
        guesses = _chain(tokens, ends)
        return [Run([], list(range(len(guesses) + 1)), guesses)]
    children: list[list[int]] = [[] for _ in tokens]
    for column in range(1, len(tokens)):
        if tokens[column] >= 0 and tokens[column] not in ends:
            children[window.parents[column]].append(column)
    runs: list[Run] = []
    pending: list[tuple[int, list[int]]] = [(0, [])]
    while pending:
        column, path = pending.pop()
        columns, guesses = [column], []
        while children[column]:
            column, *others = children[column]
            pending += [(other, [*path, *guesses, tokens[other]]) for other in others]
            columns.append(column)
            guesses.append(tokens[column])
        runs.append(Run(path, columns, guesses))
    return runs


def _chain(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """The guesses of a chain, up to the first column without one."""
    for column in range(1, len(tokens)):
        if tokens[column] < 0 or tokens[column] in ends:
            return tokens[1:column]
    return tokens[1:]


def mask_words(vocab_size: int) -> int:
    """32-bit words of a mask over a vocabulary."""
    return -(-vocab_size // 32)


def _enter(matcher: Matcher, path: list[int]) -> bool:
    """Consume a path, or nothing if the grammar forbids it."""
    count = matcher.try_consume_tokens(path)
    if 0 < count < len(path):
        matcher.rollback(count)
    return count == len(path)
