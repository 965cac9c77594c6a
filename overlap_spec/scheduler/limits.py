"""The sizes that the scheduler plans with, and how much of its prompts a prefill step holds.

`Limits` is what the worker reported, narrowed by the settings. One object, made once when the worker is ready, never
changed.

**Sizes of chunks**: a step holds what the worker's buffers hold, and what fits its time. While requests decode, they
wait for every prefill step, so it may take `max_gap_s`. Without them it may take `ALONE_GAPS` times that, which bounds
what a prompt waits for that comes later. How long a step takes is what the worker has measured at its start, times a
correction: how much longer the last steps took than was expected of them.

That is the device's time. Outputs of rows take time on their way, too: four processes pass them on, and what else a
step has given waits behind them, as does the next one. So a step has `MOST_OUT_BYTES` of them at most.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from overlap_spec.config import SchedulerSettings
from overlap_spec.errors import ConfigError
from overlap_spec.messages import EngineLimits, PrefillCosts, StepResult, TwoPartSizes, WorkerReady

AHEAD_TOKENS = 1024  # the shortest step that is timed at start
AHEAD_S = 0.005  # that it takes at least: what the host does for the other prompts meanwhile is hidden
AHEAD_OVER_STEP = 16  # times what a step takes whatever it holds: else two steps take noticeably longer than one


class ChunkCost(NamedTuple):
    """What a token of a chunk costs at its start, a pair within the chunk, and a row out beside its token."""

    token: float
    pair: float
    out: float


class Limits:
    """Sizes in tokens unless the name has pages, slots or steps."""

    def __init__(self, ready: WorkerReady, settings: SchedulerSettings) -> None:
        self.width = ready.width
        self.draft_lags = ready.max_deferred > 0  # steps of width 1 leave draft rows unabsorbed
        self.is_self_drafting = ready.is_self_drafting
        self.keeps_salts_apart = not ready.is_self_drafting  # a feature may keep apart what such a method remembers
        self.method = ready.method
        self.num_steps = ready.num_steps
        self.step_widths = ready.step_widths or (ready.width,)
        self.step_costs = ready.step_costs
        self.page_size = ready.page_size
        self.num_pages = ready.num_pages
        self.key_lookahead = ready.key_lookahead
        self.max_len = ready.max_len
        self.vocab_size = ready.vocab_size
        self.num_slots = min(ready.num_slots, settings.max_running_requests)
        self.depth = min(settings.depth, ready.max_depth)
        self.pool_tokens = (ready.num_pages - 1) * ready.page_size  # page 0 is the dummy
        self.extensions = ready.extensions
        self.state_chunk = ready.state_chunk  # prompts are cut at its multiples; 0: anywhere, no layer recurs
        # Output is computed again as windows compute it, and prompts are cut nowhere else.
        self.drawn_apart = settings.deterministic and self.state_chunk > 0
        self.num_snapshots, self.snapshot_bytes = ready.num_snapshots, ready.snapshot_bytes
        self.synthetic_acceptance = settings.synthetic_acceptance
        self.roofline = ready.roofline
        self.chunk_tokens = self._chunk_tokens(ready, settings)
        self.ahead_tokens = ahead_tokens(ready.prefill_costs) if self.depth > 1 else 0
        self._pair_cost = 1 / ready.chunk_pairs if ready.chunk_pairs else 0.0  # a whole step is 1
        bounded = settings.max_gap_s is not None or settings.chunk_tokens == -1
        self._out_cost = 0.0 if bounded else self._out_share(ready.prefill_costs)
        self.max_table_pages = self.pages_for(ready.max_len + (self.depth + 1) * ready.width)
        # Alone and with nothing in flight, a request needs its own length, one window to commit into and one to
        # propose into; the spare page covers rounding. A request within this bound can always finish.
        self.max_request_tokens = self.pool_tokens - 2 * ready.width - ready.page_size
        if self.max_request_tokens < 2:
            raise ConfigError("max_total_tokens", f"{self.pool_tokens} KV positions cannot hold even one request")

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prompt can go on from another's: pages hold all of it, or there are snapshots beside them."""
        return not self.state_chunk or self.num_snapshots > 0

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold positions 0..num_tokens-1."""
        return -(-num_tokens // self.page_size)

    def unabsorbed_after(self, unabsorbed: int, width: int, result: StepResult) -> int:
        """Draft rows that a decode step leaves unabsorbed, at most, of a slot that had so many before it."""
        return 0 if width > 1 else 1 if result.caught_up else unabsorbed + 1

    def chunk_cost(self, start: int, num_tokens: int, num_out: int = 0) -> float:
        """The share of a prefill step that a chunk takes: its tokens, the keys that they attend to, its rows out."""
        pairs = num_tokens * (start + num_tokens / 2)
        return num_tokens / self.chunk_tokens + pairs * self._pair_cost + num_out * self._out_cost

    def affordable(self, budget: float, start: int, before_out: float = math.inf) -> int:
        """The longest chunk from position `start` that costs at most `budget`; rows after `before_out` go out."""
        per_token = 1 / self.chunk_tokens + start * self._pair_cost
        budget += 1e-9  # so that rounding does not take a token off a whole chunk
        return longest_chunk(budget, ChunkCost(per_token, self._pair_cost, self._out_cost), before_out)

    def engine_limits(self) -> EngineLimits:
        """What the frontend checks a request against."""
        sizes = self.max_len, self.max_request_tokens, self.num_slots, self.vocab_size
        return EngineLimits(*sizes, self.method, self.num_steps, self.ahead_tokens, self.extensions)

    def _out_share(self, costs: PrefillCosts) -> float:
        """What a row out takes of a step that time does not bound: as much as tokens that take as long."""
        return costs.out_s / costs.token_s / self.chunk_tokens if costs.token_s else 0.0

    def _chunk_tokens(self, ready: WorkerReady, settings: SchedulerSettings) -> int:
        """The worker's buffers bound a step; unbounded means that no prompt needs a second chunk."""
        if settings.chunk_tokens == -1:
            return max(ready.chunk_tokens, ready.max_len)
        most = min(settings.chunk_tokens or ready.chunk_tokens, ready.chunk_tokens)
        if self.drawn_apart and most < min(self.state_chunk, self.max_len):
            raise ConfigError(
                "chunked_prefill_size",
                f"{most}: with --enable-deterministic-inference prompts of this model are cut at multiples of"
                f" {self.state_chunk}",
            )
        return most


def ahead_tokens(costs: PrefillCosts) -> int:
    """Prompt tokens of a step that goes ahead of others (`EngineLimits`): where tokens, not steps, are what takes time.

    A large model's products of so many rows take their time for each row; a small model's are through before the host
    has prepared the next step.
    """
    ahead_s = AHEAD_TOKENS * costs.token_s
    return AHEAD_TOKENS if ahead_s >= max(AHEAD_S, AHEAD_OVER_STEP * costs.step_s) else 0


def longest_chunk(budget: float, cost: ChunkCost, before_out: float) -> int:
    """The most tokens that cost at most `budget`; rows after `before_out` of them leave the device."""
    most = _longest(budget, cost.token, cost.pair)
    if most <= before_out or not cost.out:
        return most
    return max(_longest(budget + before_out * cost.out, cost.token + cost.out, cost.pair), int(before_out))


def _longest(budget: float, per_token: float, per_pair: float) -> int:
    """The most tokens n for which n * per_token + n**2 / 2 * per_pair is at most `budget`."""
    return int(2 * budget / (per_token + math.sqrt(per_token**2 + 2 * per_pair * budget)))


ALONE_GAPS = 10
LEAST_TOKENS = 64  # of a step, however long they take: fewer hardly take less
LEAST_OUT = 16  # of these, those that leave the device: each of them takes its time
MOST_OUT_BYTES = 1 << 20  # of outputs of prompts in a step: a millisecond or two in each process on their way
KEPT = 0.9  # of what was observed, after every step
PRIOR_S = 0.1  # of steps as expected, before any was observed
MOST_BESIDE = 3  # windows that are made narrow for each prompt that waits
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
        return wanted if most >= wanted else self._at_edge(start, self._unpadded(most))

    def _at_edge(self, start: int, num_tokens: int) -> int:
        """No more tokens than end where layers that recur end a chunk; all of them if that is farther."""
        over = (start + num_tokens) % (self._limits.state_chunk or 1)
        return num_tokens - over if over < num_tokens else num_tokens

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
        self._narrowed = False  # windows of the last step, for prompts that fill more than that step

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
        three that decode at least. Of fewer, streams would pay for what they gain. What is left after such steps shares
        one more: windows have no guesses yet.
        """
        sizes, follows, self._narrowed = self._sizes, self._narrowed, False
        index = None if sizes is None else sizes.batch_for(num_windows, sizes.width)
        if sizes is None or index is None:
            return 0
        most, left = sizes.rows[index][-1], sum(lengths)
        is_full = sizes.chunks * left >= most * LEAST_FULL * len(lengths)
        fill_more = left > most or len(lengths) > sizes.chunks
        self._narrowed = fill_more and is_full and num_windows <= MOST_BESIDE * len(lengths)
        return sizes.width if self._narrowed or follows else 0

    def narrows_again(self, num_windows: int) -> bool:
        """Whether the step after the one that narrowed windows does that again, which then are so many.

        If they were made narrow for prompts that fill more than a step, some of these are left for it.
        """
        sizes = self._sizes
        return self._narrowed and sizes is not None and self.beside(num_windows, sizes.width) is not None

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
