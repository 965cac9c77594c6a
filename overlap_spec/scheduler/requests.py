"""One request as the scheduler sees it with its pages, and one step in flight.

Lengths are absolute positions in prompt + output:

    0        cached_len      planned_len        target       len(tokens)     reserved_len
    |--hit-----|---chunks------|-----to plan------|---output---|---in flight---|
                                (until planned_len == target)

`committed_len` (= len(tokens)) <= device length <= `reserved_len`, whatever the steps in flight accept.

**Pages**: a request takes pages with its slot, adds, shares and returns them. Pages of the cached prefix come first in
a request's table and are never written by it: it starts to write at `cached_len`, a multiple of the page size.

    table of a request:   [ shared with the cache | its own .................... ]
                          0                 num_shared                      len(pages)
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from overlap_spec.messages import NO_TOKEN, Admit, Finish, Owner, ResetSlot, Resumed, Rows, Stats, StepPlan, StepResult
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.prefix_cache import Match, Node, PagePool, PrefixCache

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
        "is_reported", "matched_version", "owner", "shares_tokens", "cuts", "kept", "restored", "snapped_at",
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
        # Of a target with recurrent states (`snapshots.py`).
        self.restored = -1  # the snapshot that its first chunk goes on from, until that is planned
        self.cuts: tuple[int, ...] = ()  # where its prompt is cut, ascending
        self.snapped_at = 0  # the last position with a snapshot
        self.kept: list[tuple[int, int]] = []  # position and snapshot, which the prefix cache does not have yet

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


MOST_AHEAD, SHARE_AHEAD = 64, 128  # cached pages evicted before they are needed: one by one costs more than together


class PageBorrower(Protocol):
    """Uses pages for as long as no request needs them."""

    @property
    def num_pages(self) -> int: ...

    def give_back(self) -> None:
        """Return some of them to the pool; called while it has any."""


class States(Protocol):
    """Snapshots of recurrent states, beside the pages of a prefix."""

    def limited(self, match: Match) -> Match:
        """The part of a cached prefix that a request can go on from."""

    def begin(self, request: Request, match: Match) -> None:
        """A request is placed after what `limited` has given; nothing of it is planned."""

    def attach(self, request: Request, num_public: int) -> None:
        """Give the cache what it can take of a request's snapshots. `num_public`: of its first pages."""

    def leave(self, request: Request, num_public: int) -> None:
        """The request gives back its slot: what the cache cannot take is free again."""

    def cut(self, request: Request, end: int) -> int:
        """Where a chunk ends at the latest, which would else end at `end`."""

    def restore(self, request: Request) -> int:
        """The snapshot that its first chunk, which is planned now, goes on from; -1: none."""

    def take(self, request: Request, end: int) -> int:
        """A snapshot for its state at `end`, where a chunk that is planned now ends; -1: none."""

    def report(self, stats: Stats) -> Stats:
        """The report with figures of snapshots."""


class NoStates:
    """No layer recurs, or there is no prefix cache."""

    def limited(self, match: Match) -> Match:
        return match

    def begin(self, request: Request, match: Match) -> None:
        pass

    def attach(self, request: Request, num_public: int) -> None:
        pass

    def leave(self, request: Request, num_public: int) -> None:
        pass

    def cut(self, request: Request, end: int) -> int:
        return end

    def restore(self, request: Request) -> int:
        return -1

    def take(self, request: Request, end: int) -> int:
        return -1

    def report(self, stats: Stats) -> Stats:
        return stats


class NoBorrower:
    """No page is lent."""

    num_pages = 0

    def give_back(self) -> None:
        """Never called."""


class RequestPages:
    """The page pool, and the prefix cache, whose unlocked pages are evicted when pages run out; then those lent."""

    def __init__(self, pool: PagePool, cache: PrefixCache, limits: Limits, states: States) -> None:
        self.pool = pool
        self.cache = cache
        self.states = states
        self.borrower: PageBorrower = NoBorrower()
        self._limits = limits
        self._evicted_ahead = min(MOST_AHEAD, limits.num_pages // SHARE_AHEAD)

    @property
    def num_available(self) -> int:
        """Pages that can be had at once: free, lent, or cached and unlocked."""
        return len(self.pool.free) + self.cache.num_evictable + self.borrower.num_pages

    @property
    def num_used(self) -> int:
        return self.pool.num_total - self.num_available

    def match(self, request: Request) -> Match:
        """Find the cached prefix; at least one token is left to compute the next one from."""
        most = min(len(request.tokens) - max(1, self._limits.key_lookahead), request.cacheable_len)
        if self._limits.drawn_apart:
            most = min(most, request.prompt_len)
        request.matched_version = self.cache.version
        return self.states.limited(self._match(request, max(0, most) // self._limits.page_size))

    def pages_to_start(self, request: Request) -> int:
        """Pages for the whole prompt, the first token drawn after it and the window proposed from there."""
        return self._limits.pages_for(len(request.tokens) + 1 + self._limits.width)

    def place(self, request: Request, match: Match) -> None:
        """Give a waiting request its pages: the cached prefix, then its own up to the end of prefill."""
        num_cached = len(match.pages)
        self.cache.lock(match.node)
        self.pool.hold(match.pages)
        request.node = match.node
        request.num_shared = num_cached
        request.pages = match.pages + self._take(self.pages_to_start(request) - num_cached, request.admit.salt)
        request.cached_len = num_cached * self._limits.page_size
        request.planned_len = request.prefilled_len = request.cached_len
        request.target = len(request.tokens)
        self.states.begin(request, match)

    def match_again(self, request: Request) -> None:
        """Let a request of which nothing is planned yet start from the longer prefix that others have cached."""
        if request.matched_version == self.cache.version:
            return
        match = self.match(request)
        if len(match.pages) <= request.num_shared:
            return
        self.cache.lock(match.node)
        self.pool.hold(match.pages)
        self.cache.unlock(request.node)
        self.pool.drop(reversed(request.pages[: len(match.pages)]))
        request.node = match.node
        request.num_shared = len(match.pages)
        request.pages[: len(match.pages)] = match.pages
        request.cached_len = request.planned_len = request.prefilled_len = len(match.pages) * self._limits.page_size
        self.states.begin(request, match)

    def extend(self, request: Request, count: int) -> list[int]:
        """Append pages to a request's table. Returns them. Raises: OutOfPages."""
        pages = self._take(count, request.admit.salt)
        request.pages += pages
        return pages

    def borrow(self, count: int) -> list[int]:
        """Pages that no request holds, for the borrower; none if there are not so many."""
        if count > len(self.pool.free) + self.cache.num_evictable:
            return []
        return self._take(count)

    def share(self, request: Request) -> None:
        """Put the KV of a request that still runs into the prefix cache.

        If another request has cached the same prefix meanwhile, this one's pages stay private until it leaves: it must
        not lock pages that it does not use, else a request that runs alone might not fit.
        """
        self._share_pages(request)
        self.states.attach(request, self._num_public(request))

    def _share_pages(self, request: Request) -> None:
        num_valid = self._num_valid(request)
        if num_valid <= request.num_shared:
            return
        if len(self._match(request, num_valid).pages) != request.num_shared:
            return
        node = self._insert(request, num_valid)
        if node is self.cache.root:
            return
        self.cache.lock(node)
        self.cache.unlock(request.node)
        request.node = node
        request.num_shared = num_valid

    def release(self, request: Request) -> None:
        """Give back all pages of a request that no step in flight touches; its valid prefix stays cached."""
        assert request.in_flight == 0, "a step in flight may still write these pages"
        num_valid = request.num_shared if request.is_broken else self._num_valid(request)
        self._insert(request, num_valid)
        self.states.leave(request, self._num_public(request))
        self.cache.unlock(request.node)
        self.pool.drop(reversed(request.pages))
        request.vacate(self.cache.root)

    def _match(self, request: Request, most_pages: int) -> Match:
        return self.cache.match(request.tokens, most_pages, request.admit.salt, self._num_public(request))

    def _insert(self, request: Request, num_pages: int) -> Node:
        pages = request.pages[:num_pages]
        return self.cache.insert(request.tokens, pages, request.admit.salt, self._num_public(request))

    def _num_public(self, request: Request) -> int:
        """Pages whose whole key is of tokens that all may share."""
        return max(0, request.admit.public_len - self._limits.key_lookahead) // self._limits.page_size

    def _num_valid(self, request: Request) -> int:
        """Pages whose KV is final, and whose key is known."""
        unknown = max(0, self._limits.key_lookahead - 1)  # rows that depend on more than the token after them
        valid = request.valid_len - unknown
        if self._limits.drawn_apart:  # as every prompt that begins so computes them
            valid = min(valid, request.prompt_len) // self._limits.state_chunk * self._limits.state_chunk
        return max(0, valid) // self._limits.page_size

    def _take(self, count: int, salt: str = "") -> list[int]:
        short = count - len(self.pool.free)
        if short > 0:
            self.cache.evict(short + self._evicted_ahead, salt)
            while count > len(self.pool.free) and self.borrower.num_pages:
                self.borrower.give_back()
        return self.pool.take(count)
