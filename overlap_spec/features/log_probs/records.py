"""The host's part of log-probs: from the rows that a step has copied out to what each request has asked for."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overlap_spec.messages import MAX_LISTED_LOG_PROBS, LogProbParams, LogProbRows

NO_PAIR = (math.nan, -1.0)  # where a vocabulary has fewer tokens than were asked for


class LogProbBlock:
    """Rows of `log_prob_rows`, as bytes. Many rows are taken as quickly as a few: no object is made for one."""

    def __init__(self, data: memoryview, num_rows: int) -> None:
        self._pairs: npt.NDArray[np.float64] = np.frombuffer(data).reshape(num_rows, -1, 2)  # [R, 1 + k + M, 2]

    def records(self, first: int, count: int, asked: LogProbParams) -> bytes:
        """Rows first, first + 1, ..: the pairs that were asked for."""
        rows = self._pairs[first : first + count]
        listed = rows.shape[1] - MAX_LISTED_LOG_PROBS
        parts = [rows[:, : min(1 + asked.top, listed)], rows[:, listed : listed + len(asked.token_ids)]]
        if (missing := 1 + asked.top - listed) > 0:
            parts.insert(1, np.full((count, missing, 2), NO_PAIR))
        return np.concatenate(parts, 1).tobytes()


@dataclass(frozen=True)
class ScoredStep:
    """Which rows of a step have log-probs that were asked for. `asked`: of each of the plan's slots."""

    asked: list[LogProbParams | None]
    prompt_counts: Sequence[int]  # prompt tokens that each slot's chunk has log-probs of; empty: none has

    def pack(
        self, tokens: list[list[int]], longest: int, of_tokens: memoryview | None, of_prompts: memoryview | None
    ) -> LogProbRows | None:
        prompts = self._of_prompts(LogProbBlock(of_prompts, sum(self.prompt_counts))) if of_prompts is not None else []
        records: list[bytes] = []
        if of_tokens is not None and any(tokens):
            block = LogProbBlock(of_tokens, len(tokens) * longest)
            records = [
                b"" if asked is None else block.records(index * longest, len(run), asked)
                for index, (asked, run) in enumerate(zip(self.asked, tokens, strict=True))
            ]
        return LogProbRows(records, prompts) if records or prompts else None

    def _of_prompts(self, block: LogProbBlock) -> list[bytes]:
        first, packed = 0, []
        for asked, count in zip(self.asked, self.prompt_counts, strict=True):
            packed.append(block.records(first, count, asked) if asked is not None and count else b"")
            first += count
        return packed
