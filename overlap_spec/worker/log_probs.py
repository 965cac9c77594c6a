"""The host's part of log-probs: from the rows that a step has copied out to what each request has asked for."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

from overlap_spec.messages import MAX_LISTED_LOG_PROBS, LogProbParams, SlotWork

PAIR_BYTES = 16  # a log-prob and a token id, float64
NO_PAIR = struct.pack("<2d", float("nan"), -1.0)  # where a vocabulary has fewer tokens than were asked for


class LogProbColumns(TypedDict, total=False):
    """The columns of a `StepResult` that carry log-probs."""

    log_probs: list[bytes]
    prompt_log_probs: list[bytes]


@dataclass(frozen=True)
class LogProbBlock:
    """Rows of `log_prob_rows`, as bytes."""

    data: memoryview
    num_rows: int

    def records(self, first: int, count: int, asked: LogProbParams) -> bytes:
        """Rows first, first + 1, ..: the pairs that were asked for."""
        return b"".join(self._pieces(first, count, asked))

    def _pieces(self, first: int, count: int, asked: LogProbParams) -> Iterator[memoryview | bytes]:
        row_bytes = len(self.data) // self.num_rows
        listed = row_bytes - MAX_LISTED_LOG_PROBS * PAIR_BYTES
        num_top = min(asked.top, listed // PAIR_BYTES - 1)
        for start in range(first * row_bytes, (first + count) * row_bytes, row_bytes):
            yield self.data[start : start + (1 + num_top) * PAIR_BYTES]
            yield NO_PAIR * (asked.top - num_top)
            yield self.data[start + listed : start + listed + len(asked.token_ids) * PAIR_BYTES]


@dataclass(frozen=True)
class ScoredStep:
    """Which rows of a step have log-probs that were asked for. `asked`: of each of the plan's slots; empty: none."""

    asked: list[LogProbParams | None]
    prompt_counts: list[int]  # prompt tokens that each slot's chunk has log-probs of; empty: none has

    @staticmethod
    def of_prompts(asked: list[LogProbParams | None], work: list[SlotWork]) -> "ScoredStep":
        """Of a prefill step."""
        counts = [max(item.scored[1] - item.scored[0], 0) for item in work]
        return ScoredStep(asked, counts if any(counts) else [])

    def columns(self, blocks: list[memoryview], tokens: list[list[int]], longest: int) -> LogProbColumns:
        """Pack what was copied out: output tokens' rows, `longest` for each slot, then prompt tokens', where scored."""
        columns, rest = LogProbColumns(), list(blocks)
        if self.prompt_counts:
            columns["prompt_log_probs"] = self._of_prompts(LogProbBlock(rest.pop(), sum(self.prompt_counts)))
        if rest and any(tokens):
            block = LogProbBlock(rest.pop(), len(tokens) * longest)
            columns["log_probs"] = [
                b"" if asked is None else block.records(index * longest, len(run), asked)
                for index, (asked, run) in enumerate(zip(self.asked, tokens, strict=True))
            ]
        return columns

    def _of_prompts(self, block: LogProbBlock) -> list[bytes]:
        first, packed = 0, []
        for asked, count in zip(self.asked, self.prompt_counts, strict=True):
            packed.append(block.records(first, count, asked) if asked is not None and count else b"")
            first += count
        return packed


NOT_SCORED = ScoredStep([], [])
