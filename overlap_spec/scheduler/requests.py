"""One request as the scheduler sees it, and one step in flight.

Lengths are absolute positions in prompt + output:

    0        cached_len      planned_len        target       len(tokens)     reserved_len
    |--hit-----|---chunks------|-----to plan------|---output---|---in flight---|
                                (until planned_len == target)

`committed_len` (= len(tokens)) <= device length <= `reserved_len`, whatever the steps in flight accept.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from overlap_spec.messages import NO_TOKEN, Admit, Finish, Owner, ResetSlot, Resumed, Rows, StepPlan, StepResult
from overlap_spec.scheduler.prefix_cache import Node

ITEM = "i"  # array code of int32, as on the links


def unpack_tokens(packed: bytes) -> "array[int]":
    """Token ids from their packed form (int32, little-endian)."""
    tokens = array(ITEM)
    tokens.frombytes(packed)
    return tokens


class Request:
    """State of one request. `order`: among those that have ever run, its rank by when it began; 0: it has not yet."""

    __slots__ = (
        "admit", "cached_len", "cached_tokens", "committed_limit", "finish", "most_steps",
        "node", "num_shared", "order", "pages", "passed", "pending_chunks", "pending_max", "pending_min", "planned_len",
        "prefilled_len", "prompt_len", "out_bytes", "running", "out_from", "slot", "stop_from", "stops_at",
        "target", "tokens", "uid", "unabsorbed", "verify_steps", "draw", "is_broken", "is_limited", "is_plain",
        "is_reported", "matched_version", "owner", "shares_tokens",
    )  # fmt: skip

    def __init__(self, admit: Admit, root: Node, shared: "array[int] | None" = None) -> None:
        self.admit = admit
        self.uid = admit.uid
        self.order = 0
        # Prompt, then output: everything known to be committed. `shared`: those of other requests too, until it starts.
        self.tokens = unpack_tokens(admit.prompt) if shared is None else shared
        self.shares_tokens = shared is not None
        self.prompt_len = len(self.tokens)
        self.committed_limit = self.prompt_len + (admit.sampling.max_new_tokens or 0)
        self.stops_at = frozenset((*admit.stop_ids, NO_TOKEN))
        self.stop_from = self.prompt_len + admit.sampling.min_new_tokens
        asked = admit.sampling.speculative
        self.most_steps = asked.num_steps  # guesses in a row; None: as many as the engine has
        self.is_limited = asked.num_steps is not None  # it is to be speculated for less than the engine can
        self.is_plain = asked.num_steps == 0  # nothing is guessed for it
        self.draw = None if self.is_plain else admit.sampling.draw  # None: its steps verify nothing
        self.is_reported = asked.is_reported  # its steps report what they verified
        self.finish: Finish | None = None
        self.verify_steps = 0  # of speculation: 0 without it, as in SGLang
        # Rows of the prompt that are still to leave the device: out_from, .., prompt_len - 2. See `let_out`.
        self.out_from = self.prompt_len - 1
        self.out_bytes = 0  # that one of them brings
        self.owner: Owner | None = None  # a hook's, for what the worker keeps of requests
        self.matched_version = -1  # of the prefix cache, when this request was last looked up in it
        self.passed = 0  # how many later requests of its client went before it from the queue
        self.cached_tokens = -1  # what the first admission found in the cache; -1 before it
        if admit.resumed is not None:
            self._resume(admit.resumed)
        # Steps in flight: chunks that no token follows; and how many tokens the others commit at least, one each, and
        # at most.
        self.pending_chunks = 0
        self.pending_min = 0
        self.pending_max = 0
        self.vacate(root)

    def _resume(self, resumed: Resumed) -> None:
        """Be where the request was in the scheduler before this one: as after a preemption."""
        self.tokens.frombytes(resumed.output)
        self.cached_tokens = resumed.cached_tokens
        self.verify_steps = resumed.verify_steps

    def let_out(self, first: int, num_bytes: int) -> None:
        """Let outputs of the new request's prompt leave the device, from row `first` on: so many bytes for each."""
        self.out_from, self.out_bytes = min(first, self.prompt_len - 1), num_bytes

    def own_tokens(self) -> None:
        """Have tokens that no other request has: it gets a slot, and its output will be added."""
        if self.shares_tokens:
            self.tokens, self.shares_tokens = self.tokens[:], False

    def make_plain(self) -> None:
        """Let nothing be guessed for it any more, from its next slot on. It holds one, or none."""
        sampling = self.admit.sampling
        speculative = replace(sampling.speculative, num_steps=0)
        self.admit = replace(self.admit, sampling=replace(sampling, speculative=speculative))
        self.most_steps, self.is_limited, self.is_plain, self.draw = 0, True, True, None

    def vacate(self, root: Node) -> None:
        """Forget slot and pages: back to the state of a request that waits."""
        self.running = False
        self.is_broken = False  # its logits were not finite: what is in flight is dropped, its KV is nothing for others
        self.slot = -1
        self.pages: list[int] = []  # the slot's page table
        self.num_shared = 0  # leading pages that the prefix cache holds too
        self.node = root  # deepest cache node this request locks
        self.cached_len = 0
        self.planned_len = 0
        self.prefilled_len = 0  # settled, unlike planned_len
        self.target = 0  # tokens to prefill before the next one is drawn
        self.unabsorbed = 0  # draft rows that the last settled step has left unabsorbed, at most

    @property
    def in_flight(self) -> int:
        """Steps that hold its slot and pages."""
        return self.pending_chunks + self.pending_min

    @property
    def reserved_len(self) -> int:
        """Most tokens that can be committed once every step in flight has settled."""
        return len(self.tokens) + self.pending_max

    @property
    def valid_len(self) -> int:
        """Positions whose target and draft KV is final.

        All but the root's, which the next step writes, and those whose draft rows are deferred.
        """
        return len(self.tokens) - 1 - self.unabsorbed if self.prefilled_len == self.target else self.prefilled_len

    @property
    def cacheable_len(self) -> int:
        """Tokens whose KV may come from the prefix cache: rows that leave the device are computed."""
        return self.out_from if self.out_from < self.prompt_len - 1 else len(self.tokens)

    @property
    def before_out(self) -> float:
        """Rows still to be planned that come before those that leave the device; infinity without any."""
        return max(self.out_from - self.planned_len, 0) if self.out_from < self.prompt_len - 1 else math.inf

    def rows_out(self, start: int, end: int) -> tuple[int, int]:
        """The rows of a chunk, start to end - 1, that leave the device; (0, 0) without any."""
        rows = max(start, self.out_from), min(end, self.prompt_len - 1)
        return rows if rows[0] < rows[1] else (0, 0)

    def reset(self) -> ResetSlot:
        admit = self.admit
        bounds = self.target, admit.stop_ids, self.stop_from, self.prompt_len
        return ResetSlot(admit.sampling, *bounds, self.uid, owner=self.owner)


@dataclass(frozen=True, slots=True)
class Step:
    """A plan in flight and the requests whose work it holds, in plan order.

    `windows`: those of its slots. `chunks`: those of its chunks, with the position after each. `expected_s`: how long
    the worker's costs let a step with chunks take. `owner`: the hook that has planned the step, for requests of its
    own; None: the requests are the queues'. `holds_cache`: the prefix cache must not be emptied meanwhile.
    """

    plan: StepPlan
    windows: list[Request]
    chunks: list[tuple[Request, int]]
    expected_s: float = 0.0
    owner: object = None
    holds_cache: bool = True


def rows_of(result: StepResult, rows: Sequence[int]) -> StepResult:
    """The result of some of the slots."""
    tokens, num_proposed = [result.tokens[row] for row in rows], [result.num_proposed[row] for row in rows]
    extensions = tuple([each.take(rows) if isinstance(each, Rows) else each for each in result.extensions])
    return replace(result, tokens=tokens, num_proposed=num_proposed, extensions=extensions)
