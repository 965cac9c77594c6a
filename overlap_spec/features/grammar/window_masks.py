"""Which tokens may follow each column of a window: masks, computed by llguidance for many windows at once.

A window is cut into runs. A run goes from a column down to a leaf, first children first; of a chain there is one:

    window   0 a b c d    a and b follow the root, c follows a, d follows b        runs   0 a c | b d

The masks along a run are one call, which consumes the run's guesses one after another and rolls them back. Calls for
several windows run in the library's threads, without Python's lock. A call ends at a guess that its grammar forbids:
nothing below such a guess can be accepted, so nothing below it gets a mask.

**On the device** (`TokenMasks`) they are bits of each column of each slot's window. The host writes those of a step
before its tokens are drawn (`step.py`). They are masks of the target's rows;
guesses are drawn without, and what a grammar does not allow is never drawn after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

import torch
from overlap_spec_kernels import mask_logits
from torch import Tensor

from overlap_spec.features.grammar.reasoned import Matcher, ReasonedMatcher
from overlap_spec.messages import SamplingParams
from overlap_spec.sampling.context import DrawContext

if TYPE_CHECKING:
    from llguidance import LLExecutor

Work: TypeAlias = "tuple[Matcher, int, list[int]]"  # at the first column of a run, the row of that, the guesses below

WORD_BYTES = 4  # of a mask's words
MAX_ALONE = 1  # runs that the calling thread follows: to wake another takes longer than one run's masks


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

    def memory(self, num_rows: int) -> Tensor:
        """Where so many masks can be written. Everything is allowed. Shapes: -> [R, n] i32."""
        with torch.inference_mode(False):  # threads write it too
            return torch.full((num_rows, self.words), -1, dtype=torch.int32)

    def compute(
        self, matchers: Sequence[Matcher], windows: Sequence[HostWindow], memory: Tensor, places: Sequence[int]
    ) -> None:
        """Write the masks of windows of w columns, those of window i from row places[i] of the memory on.

        A column that is reached only through an end of the answer allows everything: what is drawn there is no one's,
        but the log of n-grams keeps it, so it must be the same on every rank of a model. Other columns that no draw can
        reach keep what is there, or get any mask that allows something.
        Shapes: memory [R, n] i32, contiguous, on the host.
        """
        for window, place in zip(windows, places, strict=True):
            for column in behind_ends(window, self._ends):
                memory[place + column] = -1
        if windows[0].parents is None:
            chains = [_chain(window.tokens, self._ends) for window in windows]
            self._compute(list(zip(matchers, places, chains, strict=True)), memory)
        else:
            self._compute_trees(matchers, windows, memory, places)

    def _compute_trees(
        self, matchers: Sequence[Matcher], windows: Sequence[HostWindow], memory: Tensor, places: Sequence[int]
    ) -> None:
        """Masks of all runs, in their order; then each is put where its column has its place."""
        width = len(windows[0].tokens)
        runs = [runs_of(window, self._ends) for window in windows]
        in_runs = self.memory(len(windows) * width)
        found: list[int] = []  # rows in the order of runs
        wanted: list[int] = []  # where they belong
        free = list(range(0, len(windows) * width, width))  # the next row of each window
        for turn in zip_longest(*runs):
            work: list[Work] = []
            entered: list[tuple[Matcher, int]] = []
            for index, run in enumerate(turn):
                if run is None:
                    continue
                row, matcher = free[index], matchers[index]
                free[index] += len(run.columns)
                found += range(row, free[index])
                wanted += [places[index] + column for column in run.columns]
                if run.path and not _enter(matcher, run.path):
                    continue
                entered.append((matcher, len(run.path)))
                work.append((matcher, row, run.guesses))
            self._compute(work, in_runs)
            for matcher, depth in entered:
                if depth:
                    matcher.rollback(depth)
        memory[torch.tensor(wanted)] = in_runs[torch.tensor(found)]

    def _compute(self, work: list[Work], memory: Tensor) -> None:
        """Masks along runs."""
        address, num_bytes = memory.data_ptr(), WORD_BYTES * self.words
        plain = [(matcher, row, guesses) for matcher, row, guesses in work if not isinstance(matcher, ReasonedMatcher)]
        if len(work) <= MAX_ALONE or len(plain) < len(work):
            for matcher, row, guesses in work:
                _masks_along(matcher, guesses, address + row * num_bytes, num_bytes)
            return
        if guessed := [each for each in plain if each[2]]:
            place = address, num_bytes, len(memory)
            self._executor.unsafe_compute_mask_ptr_with_draft_token(guessed, *place)
        if single := [(matcher, row) for matcher, row, guesses in plain if not guesses]:
            self._executor.unsafe_compute_mask_ptr(single, address, num_bytes, len(memory))

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor(self.num_threads)


def _masks_along(matcher: Matcher, guesses: list[int], address: int, num_bytes: int) -> None:
    """Write the masks of one run, from an address on."""
    if guesses and not isinstance(matcher, ReasonedMatcher):
        # LLMatcher has this function, its stub does not name it:
        matcher.unsafe_compute_mask_ptr_with_draft_token(address, num_bytes, guesses)  # type: ignore[attr-defined]
        return
    depth = 0
    matcher.unsafe_compute_mask_ptr(address, num_bytes)
    while depth < len(guesses) and matcher.try_consume_tokens([guesses[depth]]) == 1:
        depth += 1
        matcher.unsafe_compute_mask_ptr(address + depth * num_bytes, num_bytes)
    if depth:
        matcher.rollback(depth)


def behind_ends(window: HostWindow, ends: frozenset[int]) -> list[int]:
    """Columns whose guess ends the answer, and those below them."""
    if ends.isdisjoint(window.tokens[1:]):
        return []
    found: list[int] = []
    for column, token in enumerate(window.tokens[1:], 1):
        before = column - 1 if window.parents is None else window.parents[column]
        if token in ends or before in found:
            found.append(column)
    return found


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


@dataclass(frozen=True)
class TokenMasks:
    """A row of bits for each slot and column of a window, at fixed addresses: steps are captured.

    The bits are on the host. A GPU reads pinned memory in place, so that a step's masks need no copy; they may change
    once the tokens of the last step that reads them have come.
    """

    name = "masks"
    target_only = True

    bits: Tensor  # [S, W, n] i32, on the host: bit t of a row allows token t
    active: Tensor  # [S] i32: 0 where the slot's request has no grammar

    @staticmethod
    def allocate(num_rows: int, width: int, num_words: int, device: torch.device) -> TokenMasks:
        """No slot has a grammar, and every mask allows everything."""
        shape, is_cuda = (num_rows, width, num_words), device.type == "cuda"
        bits = torch.full(shape, -1, dtype=torch.int32, pin_memory=is_cuda)
        return TokenMasks(bits, torch.zeros(num_rows, dtype=torch.int32, device=device))

    @property
    def rows(self) -> Tensor:
        """The masks of all slots' columns, one after another. Shapes: [S * W, n] i32."""
        return self.bits.view(-1, self.bits.shape[2])

    def asked(self, sampling: SamplingParams) -> bool:
        return sampling.grammar is not None

    def activate(self, slots: Tensor) -> None:
        """These slots have requests with a grammar now. Sync: never. Shapes: slots [G] i64."""
        self.active.index_fill_(0, slots, 1)

    def clear(self, slots: Tensor) -> None:
        """These slots have requests without a grammar now. Sync: never. Shapes: slots [G] i64."""
        self.active.index_fill_(0, slots, 0)

    def apply(self, logits: Tensor, context: DrawContext) -> Tensor:
        """Forbid in place what the slots' grammars do not allow. Sync: never. Shapes: logits [B, R, V]."""
        mask_logits(logits, self.bits, self.active, context.sampling.slots)
        return logits
