"""Snapshots: the states of recurrent layers where a cached prefix ends, beside its pages.

Pages hold a prefix of any length. A state holds one, so a request goes on where the longest cached prefix with a
snapshot ends, and computes what is cached after that again. The worker has room for a number of snapshots; the
scheduler decides what is in which, and plans carry the copies: from a slot after a chunk of its prompt, into a slot
before the first one. Both run in the order of plans, so a snapshot can be overwritten as soon as the plan that reads it
has left.

    tokens     0            512          1,024        1,100   the prompt ends
    chunks     [------------|------------|------------|----]
    snapshots               A            B            C       at 1,088, the last multiple of 64 before the prompt's end
    branch     another prompt leaves the cached one at 700: it is cut at 640, for a third one that begins alike

**Exact.** Snapshots are made of prompts alone, where a chunk ends at a multiple of what layers compute together. So a
request that goes on from one has the states that its own prompt would have given it, and no guess was ever in them.
What a request has said is part of the next prompt, and is computed as a prompt then.

**Evicted** is the snapshot that was used longest ago and that no request waits to go on from. One goes with its last
page, too. Those of a request that the cache has no pages of yet belong to the request.
"""

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from itertools import chain
from math import lcm

from msgspec.structs import replace

from overlap_spec.messages import Stats
from overlap_spec.scheduler.limits import Limits
from overlap_spec.scheduler.prefix_cache import Match, Node, PagePool, PrefixCache
from overlap_spec.scheduler.requests import Request

NONE = -1


class SnapshotCache(PrefixCache):
    """A prefix cache with snapshots where some of its edges end."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        key_lookahead: int,
        clock: Callable[[], float] = time.monotonic,
        num_snapshots: int = 0,
    ) -> None:
        super().__init__(pool, page_size, key_lookahead, clock)
        self.free = list(range(num_snapshots - 1, -1, -1))
        self.places: OrderedDict[int, Node] = OrderedDict()  # by snapshot; the one used longest ago comes first
        self.readers: Counter[int] = Counter()  # requests that wait to go on from a snapshot

    def limited(self, match: Match) -> Match:
        """The part of the match that ends at a snapshot, the longest. It may be cut where others branch off."""
        path = list(self._path(match.node))
        cut_at = len(match.pages) if match.node.children else 0
        for depth, node in enumerate(path):
            if node.snapshot != NONE:
                above = path[depth:]
                pages = list(chain.from_iterable(each.pages for each in reversed(above)))
                return Match(node, pages, sum(len(each.pages) for each in above if each.locks == 0), cut_at)
        return Match(self.root, [], 0, cut_at)

    def take(self) -> int:
        """A snapshot to write; another one may be evicted for it. `NONE` if all are in use."""
        if self.free:
            return self.free.pop()
        for snapshot, node in self.places.items():
            if not self.readers[snapshot]:
                self._forget(node)
                return self.free.pop()
        return NONE

    def attach(self, tokens: "array[int]", num_pages: int, salt: str, num_public: int, snapshot: int) -> bool:
        """Put a snapshot where the first pages of `tokens` end. False if the cache does not have all of them."""
        node, known = self._walk(tokens, num_pages, salt, num_public)
        if known < num_pages:
            return False
        if node.salt and node.parent is not None:  # its pages are public, and those of the salt begin where they end
            node = node.parent
        if node.snapshot != NONE:  # another request was faster
            self.free.append(snapshot)
            return True
        self.version += 1
        node.snapshot, self.places[snapshot] = snapshot, node
        return True

    def hold(self, snapshot: int) -> None:
        """A request waits to go on from it: it is used, and stays."""
        self.places.move_to_end(snapshot)
        self.readers[snapshot] += 1

    def drop(self, snapshot: int) -> None:
        """Undo one `hold`: the plan that reads it has left, or never will."""
        assert self.readers[snapshot] > 0, f"no request waits for snapshot {snapshot}"
        self.readers[snapshot] -= 1

    def _forget(self, node: Node) -> None:
        """A snapshot is free again."""
        self.free.append(node.snapshot)
        del self.places[node.snapshot]
        node.snapshot = NONE

    def _trim(self, node: Node, count: int) -> int:
        """See `PrefixCache`. The edge ends elsewhere then."""
        if node.snapshot != NONE:
            assert not self.readers[node.snapshot], "the path to a snapshot that is waited for is locked"
            self._forget(node)
        return super()._trim(node, count)


class SnapshotStates:
    """`States` with snapshots: where prompts begin, and where they are cut."""

    def __init__(self, cache: SnapshotCache, limits: Limits, interval: int) -> None:
        """`interval`: positions between two snapshots of a prompt, at least, unless it is cut for one."""
        self.cache = cache
        self.num_begun = 0  # requests, each time that one got a slot
        self.num_restored = 0  # of these, those that went on from a snapshot
        self._limits = limits
        self._interval = interval
        self._unit = lcm(limits.page_size, limits.state_chunk)

    def limited(self, match: Match) -> Match:
        return self.cache.limited(match)

    def begin(self, request: Request, match: Match) -> None:
        self._let_go(request)
        if match.pages:
            request.restored = match.node.snapshot
            self.cache.hold(request.restored)
        request.snapped_at = request.cached_len
        last = self._prompt_end(request) - max(1, self._limits.key_lookahead)
        cuts = {self._whole(match.cut_at * self._limits.page_size), self._whole(last)}
        request.cuts = tuple(sorted(cut for cut in cuts if cut > request.cached_len))

    def attach(self, request: Request, num_public: int) -> None:
        kept = []
        for position, snapshot in request.kept:
            place = position // self._limits.page_size, request.admit.salt, num_public
            if position > request.prefilled_len or not self.cache.attach(request.tokens, *place, snapshot):
                kept.append((position, snapshot))
        request.kept = kept

    def leave(self, request: Request, num_public: int) -> None:
        self._let_go(request)
        if not request.is_broken:
            self.attach(request, num_public)
        self.cache.free += [snapshot for _, snapshot in request.kept]
        request.kept = []

    def cut(self, request: Request, end: int) -> int:
        return next((cut for cut in request.cuts if request.planned_len < cut < end), end)

    def restore(self, request: Request) -> int:
        snapshot = request.restored
        self.num_begun += 1
        self.num_restored += snapshot != NONE
        self._let_go(request)
        return snapshot

    def take(self, request: Request, end: int) -> int:
        if end != self._whole(end) or end >= request.target or end > self._prompt_end(request):
            return NONE
        if end not in request.cuts and end - request.snapped_at < self._interval:
            return NONE
        snapshot = self.cache.take()
        if snapshot != NONE:
            request.kept.append((end, snapshot))
            request.snapped_at = end
        return snapshot

    def report(self, stats: Stats) -> Stats:
        each, most = self._limits.snapshot_bytes, self._limits.num_snapshots
        return replace(
            stats,
            snapshot_bytes=each * (most - len(self.cache.free)),
            max_snapshot_bytes=each * most,
            snapshot_lookups_total=self.num_begun,
            snapshot_hits_total=self.num_restored,
        )

    def _prompt_end(self, request: Request) -> int:
        return min(request.target, request.prompt_len) if self._limits.drawn_apart else request.target

    def _let_go(self, request: Request) -> None:
        if request.restored != NONE:
            self.cache.drop(request.restored)
            request.restored = NONE

    def _whole(self, position: int) -> int:
        """The last position up to here where a chunk, and a page, may end."""
        return position - position % self._unit
