"""The sizes that the scheduler plans with: what the worker reported, narrowed by the settings.

One object, made once when the worker is ready, never changed.
"""

import math
from typing import NamedTuple

from overlap_spec.config import SchedulerSettings
from overlap_spec.errors import ConfigError
from overlap_spec.messages import EngineLimits, PrefillCosts, WorkerReady

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
        self.max_deferred = ready.max_deferred
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

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold positions 0..num_tokens-1."""
        return -(-num_tokens // self.page_size)

    def unabsorbed_after(self, unabsorbed: int, width: int, caught_up: bool) -> int:
        """Draft rows that a decode step leaves unabsorbed, at most, of a slot that had so many before it."""
        return 0 if width > 1 else 1 if caught_up else unabsorbed + 1

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
        """What the tokenizer checks a request against."""
        sizes = self.max_len, self.max_request_tokens, self.num_slots, self.vocab_size
        return EngineLimits(*sizes, self.method, self.num_steps, self.ahead_tokens, self.extensions)

    def _out_share(self, costs: PrefillCosts) -> float:
        """What a row out takes of a step that time does not bound: as much as tokens that take as long."""
        return costs.out_s / costs.token_s / self.chunk_tokens if costs.token_s else 0.0

    def _chunk_tokens(self, ready: WorkerReady, settings: SchedulerSettings) -> int:
        """The worker's buffers bound a step; unbounded means that no prompt needs a second chunk."""
        if settings.chunk_tokens == -1:
            return max(ready.chunk_tokens, ready.max_len)
        return min(settings.chunk_tokens or ready.chunk_tokens, ready.chunk_tokens)


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
