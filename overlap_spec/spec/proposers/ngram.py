"""Guesses that what followed the last tokens before will follow them again: no draft model (prompt lookup, n-grams).

Two memories:

    own       a pool with a token for each row of the KV cache, addressed by the page table: a prompt whose KV is
              cached, or comes in chunks, is there as whole as its KV is. Searched in full, in time
    shared    a bounded log of what all requests said, with an index of n-grams. Prompts enter it whole, when they are
              complete; what a step commits enters it before that step's guesses are made

Guesses cost next to nothing, so a whole window is filled after every step, and its lookahead goes out with the next
step's tokens: whoever chooses widths sees how good guesses are that were never verified.
"""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import (
    NgramLimits,
    NgramLog,
    clear_log,
    ngram_absorb,
    ngram_lookahead,
    ngram_match,
    ngram_merge,
    ngram_store,
)
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch, TargetOutput
from overlap_spec.spec.interfaces import Prompts
from overlap_spec.spec.proposers.ngram_corpus import enter_corpus
from overlap_spec.spec.types import Guesses, SlotBatch, Verdict


@dataclass(frozen=True)
class NgramWindows:
    """The guesses of each slot's window, K for S slots, to tell what became of them."""

    tokens: Tensor  # [S, K] i64, -1: none
    parents: Tensor  # [S, K] i64, window columns
    levels: Tensor  # [S] i64: of the deepest guess
    strength: Tensor  # [S] i64: tokens of the longest match

    @staticmethod
    def allocate(num_rows: int, num_guesses: int, device: torch.device) -> "NgramWindows":
        """For slot rows 0..num_rows - 1."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        return NgramWindows(
            zeros(num_rows, num_guesses), zeros(num_rows, num_guesses), zeros(num_rows), zeros(num_rows)
        )


@dataclass(frozen=True)
class NgramMemory:
    """What is remembered of tokens."""

    limits: NgramLimits
    pool: Tensor  # [R] i32: the token of each row of the KV cache
    log: NgramLog  # with a row of `open_page` for each slot row, the dummy last
    page_size: int
    corpus: Tensor  # [n] i32: what is in the log from the start, and again after it was forgotten

    @property
    def dummy(self) -> int:
        """The slot row that is nobody's."""
        return len(self.log.open_page) - 1

    def forget(self) -> None:
        """Keep the corpus alone, and requests' own tokens."""
        clear_log(self.log)
        self.enter_corpus()

    def enter_corpus(self) -> None:
        """Put what is known from the start into the log."""
        if len(self.corpus):
            enter_corpus(self.log, self.limits, self.corpus)

    def read(self, page_table: Tensor, slots: Tensor, starts: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Take in tokens at positions starts.. of each slot. Shapes: tokens [B, n], the rest [B] i64."""
        self.store(page_table, starts, tokens, counts)
        self.share(page_table, slots, starts, starts + counts - 1, tokens.shape[1])

    def store(self, page_table: Tensor, starts: Tensor, tokens: Tensor, counts: Tensor) -> None:
        """Into the pool alone."""
        ngram_store(self.pool, page_table, self.page_size, starts, tokens, counts)

    def share(self, page_table: Tensor, slots: Tensor, starts: Tensor, ends: Tensor, most: int) -> None:
        """Into the log, from the pool: at most `most` tokens of a slot, at positions starts..ends."""
        ngram_absorb(
            self.log, self.limits, self.pool, page_table, self.page_size, slots, starts, ends, self.dummy, most
        )


class NgramProposer:
    """A `SelfDrafting` and a `Proposer[None]`: all that it knows is in its memory."""

    def __init__(self, memory: NgramMemory, windows: NgramWindows) -> None:
        self.memory = memory
        self._windows = windows
        self._chains = memory.limits.max_breadth == 1

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> None:
        """Absorb prompt chunks, and share the prompts that are complete."""
        memory, page_table = self.memory, rows.page_table
        assert rows.cache_rows is not None, "chunks say where their rows are"
        memory.pool[rows.cache_rows] = prompts.tokens.int()
        ends = rows.positions[prompts.last_rows] + 1
        roots = prompts.next_tokens[prompts.last_rows]  # of a prompt that goes on: its next token, which is right too
        memory.store(page_table, ends, roots[:, None], torch.ones_like(ends))
        most = page_table.shape[1] * memory.page_size
        memory.share(page_table, prompts.slots, torch.zeros_like(ends), ends, most)

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Absorb what was committed."""
        starts, counts = batch.lengths + 1, verdict.accept_len + 1
        self.memory.read(batch.page_table, batch.slots, starts, verdict.tokens, counts)

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Nothing ever waits."""

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Nothing was missed."""

    def propose(self, batch: SlotBatch, learnt: None, num_guesses: int) -> Guesses:
        """What followed the best matches, own and others'."""
        memory, windows = self.memory, self._windows
        known = memory.pool, batch.page_table, memory.page_size
        matches = ngram_match(*known, batch.lengths, memory.limits)
        merged = ngram_merge(matches, memory.log, memory.limits, *known, batch.lengths, num_guesses)
        windows.tokens[batch.slots] = merged.tokens.t()
        windows.parents[batch.slots] = merged.parents.t()
        windows.levels[batch.slots] = merged.levels
        windows.strength[batch.slots] = merged.strength
        return Guesses(merged.tokens, None if self._chains else merged.parents)

    def lookahead(self, batch: SlotBatch, verdict: Verdict, out: Tensor) -> None:
        """See `SelfDrafting`."""
        windows = self._windows
        whole = windows.tokens, windows.parents, windows.levels, windows.strength
        ngram_lookahead(*whole, batch.slots, verdict.tokens, verdict.last, out)

    def forget(self) -> None:
        """See `SelfDrafting`."""
        self.memory.forget()
