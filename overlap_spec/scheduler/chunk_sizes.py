"""How much of its prompts a prefill step holds: what the worker's buffers hold, and what fits its time.

While requests decode, they wait for every prefill step, so it may take `max_gap_s`. Without them it may take
`ALONE_GAPS` times that, which bounds what a prompt waits for that comes later.

How long a step takes is what the worker has measured at its start, times a correction: how much longer the last steps
took than was expected of them.

That is the device's time. Log-probs take time on their way, too: four processes pass them on, and what else a step has
given waits behind them, as does the next one. So a step has `MOST_RECORD_BYTES` of them at most.
"""

import math
from dataclasses import dataclass

from overlap_spec.messages import JoinedSizes, PrefillCosts
from overlap_spec.scheduler.limits import ChunkCost, Limits, longest_chunk

ALONE_GAPS = 10
LEAST_TOKENS = 64  # of a step, however long they take: fewer hardly take less
LEAST_SCORED = 16  # of these, those with log-probs: each of them takes its time
MOST_RECORD_BYTES = 1 << 20  # of log-probs of prompts in a step: a millisecond or two in each process on their way
KEPT = 0.9  # of what was observed, after every step
PRIOR_S = 0.1  # of steps as expected, before any was observed
OUTLIER = 4.0  # times the expected: more is not the step's own


@dataclass(frozen=True)
class Beside:
    """The decode step that a prefill step is joined with, and what that leaves to prompts."""

    num_rows: int  # of its windows, padded
    prompt_rows: tuple[int, ...] = ()  # what the rows of prompts are padded to, ascending; (): any number
    chunks: float = math.inf  # requests, at most


class ChunkRoom:
    """What is left of one prefill step that is being planned. `seconds`: of its time, uncorrected."""

    def __init__(self, limits: Limits, costs: PrefillCosts, seconds: float, beside: Beside | None = None) -> None:
        self._spent_s = costs.step_s + (0 if beside is None else beside.num_rows * costs.token_s)
        self._most_rows, self._most_chunks = math.inf, math.inf
        self._sizes = costs.padded_rows
        if beside is not None:
            self._sizes, self._most_chunks = beside.prompt_rows, beside.chunks
            self._most_rows = max(beside.prompt_rows, default=math.inf)
        self._limits = limits
        self._costs = costs
        self._seconds = seconds
        self._share = 1.0  # of what a step holds, whatever its time
        self._rows = self._chunks = 0
        self._record_bytes = MOST_RECORD_BYTES  # left

    @property
    def expected_s(self) -> float:
        """How long the step takes, with what it is padded to."""
        padded = next((size for size in self._sizes if size >= self._rows), self._rows)
        return self._spent_s + (padded - self._rows) * self._costs.token_s

    def fitting(self, start: int, wanted: int, unscored: float = math.inf, record_bytes: int = 0) -> int:
        """The longest chunk from position `start`, of `wanted` tokens at most. 0: the step is full.

        `unscored`: how many rows come before those with log-probs. `record_bytes`: of the log-probs of one of these.
        """
        if self._chunks >= self._most_chunks:
            return 0
        most = int(min(self._limits.affordable(self._share, start, unscored), self._most_rows - self._rows))
        if self._seconds < math.inf:
            most = min(most, self._in_time(start, unscored))
        if record_bytes and most > unscored:
            most = min(most, int(unscored) + self._record_bytes // record_bytes)
        return wanted if most >= wanted else self._unpadded(most)

    def take(self, start: int, num_tokens: int, num_scored: int = 0, record_bytes: int = 0) -> None:
        """Note that a chunk is in the step. The arguments as of `fitting`."""
        self._share = max(self._share - self._limits.chunk_cost(start, num_tokens, num_scored), 0.0)
        self._rows += num_tokens
        self._chunks += 1
        self._record_bytes -= num_scored * record_bytes
        costs = self._costs
        self._spent_s += num_tokens * (costs.token_s + (start + num_tokens / 2) * costs.pair_s_of(num_tokens))
        self._spent_s += num_scored * costs.scored_s

    def _in_time(self, start: int, unscored: float) -> int:
        left, costs = max(self._seconds - self._spent_s, 0.0), self._costs
        most = longest_chunk(left, self._cost(start, costs.pair_s), unscored)
        if costs.long_chunk:
            long = longest_chunk(left, self._cost(start, costs.long_pair_s), unscored)
            most = long if long >= costs.long_chunk else min(most, costs.long_chunk - 1)
        return most if self._rows else max(most, int(min(LEAST_TOKENS, unscored + LEAST_SCORED)))

    def _cost(self, start: int, pair_s: float) -> ChunkCost:
        return ChunkCost(self._costs.token_s + start * pair_s, pair_s, self._costs.scored_s)

    def _unpadded(self, num_tokens: int) -> int:
        """No more tokens than leave the step without padding."""
        sizes, rows = self._sizes, self._rows + num_tokens
        if not sizes or rows >= sizes[-1]:
            return num_tokens
        return max(max((size for size in sizes if size <= rows), default=rows) - self._rows, 0)


class ChunkSizes:
    """Makes the room of every prefill step, and learns how long steps take.

    `max_gap_s` None: time bounds none. `joins`: they take decode steps along. `joined`: what those are padded to.
    """

    def __init__(
        self,
        limits: Limits,
        costs: PrefillCosts,
        max_gap_s: float | None,
        joins: bool = False,
        joined: JoinedSizes | None = None,
    ) -> None:
        self._limits = limits
        self._costs = costs
        self._max_gap_s = max_gap_s if max_gap_s is not None and costs.token_s > 0 else math.inf
        self._joins = joins and (joined is None or bool(joined.batches))
        self._joined = joined
        self._expected_s = self._taken_s = PRIOR_S

    @property
    def correction(self) -> float:
        """How many times as long as expected steps take."""
        return self._taken_s / self._expected_s

    def joins(self) -> bool:
        """Whether the next prefill step is to take a decode step along."""
        return self._joins

    def beside(self, batch_size: int, width: int) -> Beside | None:
        """What a decode step leaves to the prompts that it is joined with. None: it cannot be."""
        if self._joined is None:
            return Beside(batch_size * width)
        index = self._joined.batch_for(batch_size, width)
        if index is None:
            return None
        return Beside(self._joined.batches[index] * width, self._joined.rows[index], self._joined.chunks)

    def room(self, decoding: bool, beside: Beside | None = None) -> ChunkRoom:
        """A whole step. `decoding`: requests wait for it that decode; `beside`: what it is joined with."""
        seconds = self._max_gap_s if decoding else ALONE_GAPS * self._max_gap_s
        return ChunkRoom(self._limits, self._costs, seconds / self.correction, beside)

    def observe(self, expected_s: float, taken_s: float) -> None:
        """Learn from a settled prefill step. Longer ones count for more."""
        if self._max_gap_s == math.inf:
            return
        self._expected_s = KEPT * self._expected_s + expected_s
        self._taken_s = KEPT * self._taken_s + min(taken_s, OUTLIER * expected_s)
