"""How much of its prompts a prefill step holds: what the worker's buffers hold, and what fits its time.

While requests decode, they wait for every prefill step, so it may take `max_gap_s`. Without them it may take
`ALONE_GAPS` times that, which bounds what a prompt waits for that comes later.

How long a step takes is what the worker has measured at its start, times a correction: how much longer the last steps
took than was expected of them.

That is the device's time. Outputs of rows take time on their way, too: four processes pass them on, and what else a
step has given waits behind them, as does the next one. So a step has `MOST_OUT_BYTES` of them at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from overlap_spec.messages import PrefillCosts, TwoPartSizes
from overlap_spec.scheduler.limits import ChunkCost, Limits, longest_chunk

ALONE_GAPS = 10
LEAST_TOKENS = 64  # of a step, however long they take: fewer hardly take less
LEAST_OUT = 16  # of these, those that leave the device: each of them takes its time
MOST_OUT_BYTES = 1 << 20  # of outputs of prompts in a step: a millisecond or two in each process on their way
KEPT = 0.9  # of what was observed, after every step
PRIOR_S = 0.1  # of steps as expected, before any was observed
MOST_BESIDE = 2  # windows that are made narrow for each prompt that waits
LEAST_FULL = 0.5  # of a shared step, at least, with as many of these prompts as it may have
OUTLIER = 4.0  # times the expected: more is not the step's own


@dataclass(frozen=True)
class Beside:
    """The windows that prompts share a step with, and what those leave to them."""

    num_rows: int  # of the windows, padded
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
        self._out_bytes = MOST_OUT_BYTES  # left

    @property
    def expected_s(self) -> float:
        """How long the step takes, with what it is padded to."""
        padded = next((size for size in self._sizes if size >= self._rows), self._rows)
        return self._spent_s + (padded - self._rows) * self._costs.token_s

    def fitting(self, start: int, wanted: int, before_out: float = math.inf, out_bytes: int = 0) -> int:
        """The longest chunk from position `start`, of `wanted` tokens at most. 0: the step is full.

        `before_out`: how many rows come before those that leave the device. `out_bytes`: that one of these brings.
        """
        if self._chunks >= self._most_chunks:
            return 0
        most = int(min(self._limits.affordable(self._share, start, before_out), self._most_rows - self._rows))
        if self._seconds < math.inf:
            most = min(most, self._in_time(start, before_out))
        if out_bytes and most > before_out:
            most = min(most, int(before_out) + self._out_bytes // out_bytes)
        return wanted if most >= wanted else self._unpadded(most)

    def take(self, start: int, num_tokens: int, num_out: int = 0, out_bytes: int = 0) -> None:
        """Note that a chunk is in the step. The arguments as of `fitting`."""
        self._share = max(self._share - self._limits.chunk_cost(start, num_tokens, num_out), 0.0)
        self._rows += num_tokens
        self._chunks += 1
        self._out_bytes -= num_out * out_bytes
        costs = self._costs
        self._spent_s += num_tokens * (costs.token_s + (start + num_tokens / 2) * costs.pair_s_of(num_tokens))
        self._spent_s += num_out * costs.out_s

    def _in_time(self, start: int, before_out: float) -> int:
        left, costs = max(self._seconds - self._spent_s, 0.0), self._costs
        most = longest_chunk(left, self._cost(start, costs.pair_s), before_out)
        if costs.long_chunk:
            long = longest_chunk(left, self._cost(start, costs.long_pair_s), before_out)
            most = long if long >= costs.long_chunk else min(most, costs.long_chunk - 1)
        return most if self._rows else max(most, int(min(LEAST_TOKENS, before_out + LEAST_OUT)))

    def _cost(self, start: int, pair_s: float) -> ChunkCost:
        return ChunkCost(self._costs.token_s + start * pair_s, pair_s, self._costs.out_s)

    def _unpadded(self, num_tokens: int) -> int:
        """No more tokens than leave the step without padding."""
        sizes, rows = self._sizes, self._rows + num_tokens
        if not sizes or rows >= sizes[-1]:
            return num_tokens
        return max(max((size for size in sizes if size <= rows), default=rows) - self._rows, 0)


class ChunkSizes:
    """Makes the room of every prefill step, and learns how long steps take.

    `max_gap_s` None: time bounds none. `with_windows`: prompts and windows share steps. `sizes`: what these are padded
    to; None: they may have any size.
    """

    def __init__(
        self,
        limits: Limits,
        costs: PrefillCosts,
        max_gap_s: float | None,
        with_windows: bool = False,
        sizes: TwoPartSizes | None = None,
    ) -> None:
        self._limits = limits
        self._costs = costs
        self._max_gap_s = max_gap_s if max_gap_s is not None and costs.token_s > 0 else math.inf
        self._with_windows = with_windows and (sizes is None or bool(sizes.batches))
        self._sizes = sizes
        self._expected_s = self._taken_s = PRIOR_S

    @property
    def correction(self) -> float:
        """How many times as long as expected steps take."""
        return self._taken_s / self._expected_s

    def with_windows(self) -> bool:
        """Whether the next prompts are to share their step with windows."""
        return self._with_windows

    def beside(self, batch_size: int, width: int) -> Beside | None:
        """What so many windows leave to the prompts of their step. None: no step holds both."""
        sizes = self._sizes
        if sizes is None:
            return Beside(batch_size * width)
        index = sizes.batch_for(batch_size, width)
        return None if index is None else Beside(sizes.batches[index] * width, sizes.rows[index], sizes.chunks)

    def narrowing(self, num_windows: int, lengths: Sequence[int]) -> int:
        """The width that so many windows are to have for prompts to share their step; 0: any, they may take turns.

        `lengths`: what is left of each prompt. Where only narrow windows share steps, their tokens are few, but come
        almost for nothing. That pays while many wait: prompts that fill more than one such step, of one request for
        two that decode at least. Of fewer, streams would pay for what they gain.
        """
        sizes, left = self._sizes, sum(lengths)
        if sizes is None or num_windows > MOST_BESIDE * len(lengths):
            return 0
        index = sizes.batch_for(num_windows, sizes.width)
        if index is None:
            return 0
        most = sizes.rows[index][-1]
        is_full = sizes.chunks * left >= most * LEAST_FULL * len(lengths)
        return sizes.width if left > most and is_full else 0

    def room(self, decoding: bool, beside: Beside | None = None) -> ChunkRoom:
        """A whole step. `decoding`: requests wait for it that decode; `beside`: the windows in it."""
        seconds = self._max_gap_s if decoding else ALONE_GAPS * self._max_gap_s
        return ChunkRoom(self._limits, self._costs, seconds / self.correction, beside)

    def observe(self, expected_s: float, taken_s: float) -> None:
        """Learn from a settled step with prompts. Longer ones count for more."""
        if self._max_gap_s == math.inf:
            return
        self._expected_s = KEPT * self._expected_s + expected_s
        self._taken_s = KEPT * self._taken_s + min(taken_s, OUTLIER * expected_s)
