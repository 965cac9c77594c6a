"""The prefix cache: a radix tree from token prefixes to their KV pages, whose edges are runs of whole pages.

The key of a page is the tokens at its positions, and, when a position's draft KV depends on the next token (a
`key_lookahead` of 1), the token after them too: then the key of position i is the bigram (t_i, t_i+1), and n tokens
make n - 1 cacheable positions. A larger one adds as many tokens.

The keys of a request with a salt begin with it: below the root, the salt has a node without pages, and all that was
cached with it is below that node. Requests of different salts find nothing of each other's. A prompt may begin with
pages that are public: those are cached as without a salt, whose node is then where they end.

    tokens   t0 t1 t2 t3 t4 t5 t6 t7 t8        page_size 4, key_lookahead 1
    page 0   [t0 t1 t2 t3 t4]
    page 1               [t4 t5 t6 t7 t8]      neighbours share a token: an edge of m pages is 4m + 1 tokens

A lock holds the whole path to the root, so an unlocked node has only unlocked nodes below it: every
unlocked page can be evicted, leaves first, least recently used first.

Pages are evicted of the share that has most of them, locked ones too, so a client that floods the cache evicts what it
has cached itself. The server names the client in the salt, before a NUL, which no client can send: all salts of one
name are one share. Salts without a NUL are made up by clients, as many as they like. They are one share with no salt at
all, and without names there is no other: then pages are evicted in one order.

**The pool of KV pages** knows which are free, and how many holders each of the others has. A page is free exactly
when it has no holder. Page 0 is the worker's dummy and never handed out.
"""

import heapq
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from overlap_spec.errors import OutOfPages
from overlap_spec.messages import TOKEN_BYTES


class PagePool:
    """Pages 1..num_pages-1, counted by holders."""

    def __init__(self, num_pages: int) -> None:
        self.free = list(range(num_pages - 1, 0, -1))  # a stack
        self.holders = [0] * num_pages

    @property
    def num_total(self) -> int:
        return len(self.holders) - 1

    def take(self, count: int) -> list[int]:
        """Hand out `count` free pages with one holder each. Raises: OutOfPages."""
        if count > len(self.free):
            raise OutOfPages(f"{count} pages asked for, {len(self.free)} of {self.num_total} are free")
        if count == 1:  # what a decode step adds to a request, as a rule
            page = self.free.pop()
            self.holders[page] = 1
            return [page]
        if count == 0:
            return []
        pages = self.free[-count:]
        del self.free[-count:]
        for page in pages:
            self.holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that have one."""
        for page in pages:
            assert self.holders[page] > 0, f"page {page} is free"
            self.holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Take a holder from each page; a page without any is free again."""
        for page in pages:
            left = self.holders[page] - 1
            assert left >= 0, f"page {page} is free"
            self.holders[page] = left
            if left == 0:
                self.free.append(page)


IDLE_S = 600.0  # a named share that no request has asked for so long is evicted before the others
COMPARED = 8  # times, about, that shares are compared in one eviction: each of them may lose an eighth too much


class Share:
    """What is cached for one name, or with salts that have none."""

    __slots__ = ("leaves", "name", "num_pages", "num_salts", "used_s")

    def __init__(self, name: str, used_s: float) -> None:
        self.name = name
        self.num_pages = 0
        self.num_salts = 0  # nodes of its salts: the share is forgotten with the last one
        self.leaves: list[tuple[int, int, Node]] = []  # heap: (used_at, tie break, unlocked leaf); may be stale
        self.used_s = used_s  # when a request last asked for its pages, in seconds


class Node:
    """An edge of the tree and the node at its end."""

    __slots__ = ("children", "key", "locks", "pages", "parent", "queued", "salt", "share", "snapshot", "used_at")

    def __init__(self, parent: "Node | None", key: bytes, pages: list[int], share: Share, salt: str = "") -> None:
        self.parent = parent  # None: the root, or no longer in the tree
        self.share = share
        self.key = key
        self.pages = pages
        self.children: dict[bytes | str, Node] = {}  # by the key of the child's first page, or by its salt
        self.salt = salt  # of a salt's node, which has no pages; "" of all others
        self.locks = 0
        self.used_at = 0
        self.queued = False  # has an entry in the eviction heap
        self.snapshot = -1  # of the states where this edge ends (`snapshots.py`); -1: there is none


class Match(NamedTuple):
    """The longest cached prefix: where it ends, its pages, and how many of them are evictable now."""

    node: Node
    pages: list[int]
    num_evictable: int
    cut_at: int = 0  # pages: a prompt is to be cut there, for the sake of others that branch off


class PrefixCache:
    """Radix tree over page-sized chunks. It is one holder of each of its pages in the pool."""

    def __init__(
        self, pool: PagePool, page_size: int, key_lookahead: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: in seconds."""
        self._nameless = Share("", 0.0)
        self.shares = {"": self._nameless}
        self.root = Node(None, b"", [], self._nameless)
        self.num_pages = 0
        self.num_evictable = 0
        self.version = 0  # grows with every insertion: no longer prefix is found of the same tokens before that
        self._pool = pool
        self._page_size = page_size
        self._key_lookahead = key_lookahead
        self._now = 0
        self._clock = clock
        self._entries = 0

    def match(self, tokens: "array[int]", most_pages: int, salt: str = "", num_public: int = 0) -> Match:
        """Find the longest prefix of at most `most_pages` pages that was cached with this salt.

        `num_public`: of the first pages, how many are public.
        """
        node, _ = self._walk(tokens, most_pages, salt, num_public)
        path = list(self._path(node))
        pages = [page for above in reversed(path) for page in above.pages]
        return Match(node, pages, sum(len(above.pages) for above in path if above.locks == 0))

    def insert(self, tokens: "array[int]", pages: list[int], salt: str = "", num_public: int = 0) -> Node:
        """Cache the first len(pages) pages of `tokens`; what is cached already keeps its own pages.

        Returns the node where the prefix ends. The pages taken are those after the known prefix.
        """
        node, known = self._walk(tokens, len(pages), salt, num_public)
        if salt and known < num_public:
            upto = min(num_public, len(pages))
            node, known = self._add(node, tokens, known, pages[known:upto]), upto
        if known == len(pages):
            return node
        if salt and known == num_public and node.salt != salt:
            above = node
            node = above.children[salt] = Node(above, b"", [], self._share_of(salt), salt)
            node.share.num_salts += 1
        return self._add(node, tokens, known, pages[known:])

    def _add(self, node: Node, tokens: "array[int]", known: int, fresh: list[int]) -> Node:
        """Add a leaf below `node`, where `known` pages end. Returns it; without pages, `node`."""
        if not fresh:
            return node
        self.version += 1
        self._pool.hold(fresh)
        leaf = Node(node, self._key(tokens, known, known + len(fresh)), fresh, node.share)
        leaf.used_at = self._now
        node.children[self._head(leaf)] = leaf
        node.share.num_pages += len(fresh)
        self.num_pages += len(fresh)
        self.num_evictable += len(fresh)
        self._queue(leaf)
        return leaf

    def lock(self, node: Node) -> None:
        """Keep the path to `node` from eviction."""
        for above in self._path(node):
            if above.locks == 0:
                self.num_evictable -= len(above.pages)
            above.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the same node."""
        emptied = None
        for above in self._path(node):
            above.locks -= 1
            assert above.locks >= 0, "unlocked more often than locked"
            if above.locks == 0:
                self.num_evictable += len(above.pages)
                self._queue(above)
                emptied = above if above.salt and not above.children else emptied
        if emptied is not None:
            self._remove(emptied)

    def evict(self, count: int, salt: str = "") -> int:
        """Drop up to `count` pages: of shares that are idle, then of the largest ones. Returns how many.

        `salt`: of the request that needs as many; they count as its share's already.
        """
        if len(self.shares) == 1:
            return self._drop(self._nameless, count)
        idle_from, least, dropped = self._clock() - IDLE_S, max(1, count // COMPARED), 0
        asking = self.shares.get(name_in(salt))

        def size_of(share: Share) -> tuple[bool, int, str]:
            # The nameless share is never idle: what all clients may use is in it, if anything is.
            is_used = share is self._nameless or share.used_s > idle_from
            return is_used, -share.num_pages - (count if share is asking else 0), share.name

        sizes = [size_of(share) for share in self.shares.values() if share.leaves]
        heapq.heapify(sizes)
        while dropped < count and sizes:
            is_used, size, name = heapq.heappop(sizes)
            share = self.shares[name]
            surplus = sizes[0][1] - size if sizes and is_used == sizes[0][0] else count
            dropped += self._drop(share, min(count - dropped, max(least, surplus)))
            if share.leaves and name in self.shares:
                heapq.heappush(sizes, size_of(share))
        return dropped + self._drop(self._nameless, count - dropped)  # public pages below which nothing is left

    def _drop(self, share: Share, count: int) -> int:
        """Drop up to `count` pages of a share, least recently used leaves first, tails first. Returns how many."""
        dropped, leaves = 0, share.leaves
        while dropped < count and leaves:
            used_at, _, node = heapq.heappop(leaves)
            node.queued = False
            if node.parent is None or node.children or node.locks:
                continue
            if node.used_at != used_at:  # used since: an entry with the newer time is in the heap
                self._queue(node)
                continue
            dropped += self._trim(node, count - dropped)
        return dropped

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first; those of salts too."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _trim(self, node: Node, count: int) -> int:
        """Drop up to `count` pages from the end of an unlocked leaf, which leaves the tree when it is empty."""
        kept = max(0, len(node.pages) - count)
        dropped = node.pages[kept:]
        if kept:
            node.pages = node.pages[:kept]
            node.key = node.key[: self._num_bytes(kept)]
            self._queue(node)
        else:
            self._remove(node)
        self._pool.drop(reversed(dropped))
        node.share.num_pages -= len(dropped)
        self.num_pages -= len(dropped)
        self.num_evictable -= len(dropped)
        return len(dropped)

    def _remove(self, leaf: Node) -> None:
        """Take an unlocked leaf out of the tree, and its salt and share with it if that was the last one."""
        parent, share = leaf.parent, leaf.share
        assert parent is not None
        del parent.children[self._head(leaf)]
        leaf.parent = None
        if leaf.salt:
            share.num_salts -= 1
            if not share.num_salts and share is not self._nameless:
                del self.shares[share.name]
        if parent.salt and not (parent.children or parent.locks):
            self._remove(parent)
        else:
            self._queue(parent)

    def _walk(self, tokens: "array[int]", most_pages: int, salt: str, num_public: int) -> tuple[Node, int]:
        """Follow public pages, salt and the others from the root. Returns (node, pages known).

        The node is the one above the salt's if nothing is known of the salt.
        """
        self._now += 1
        node, known = self.root, 0
        if salt:
            node, known = self._follow(node, known, tokens, min(num_public, most_pages))
            found = node.children.get(salt) if known == num_public else None
            if found is None:
                return node, known
            node, found.used_at = found, self._now
            if found.share is not self._nameless:
                found.share.used_s = self._clock()
        return self._follow(node, known, tokens, most_pages)

    def _follow(self, node: Node, known: int, tokens: "array[int]", most_pages: int) -> tuple[Node, int]:
        """Follow `tokens` from where `known` pages end, splitting the edge where they leave it."""
        while known < most_pages:
            child = node.children.get(self._key(tokens, known, known + 1))
            if child is None:
                break
            same = self._num_same(child, tokens, known, min(len(child.pages), most_pages - known))
            node = self._split(child, same) if same < len(child.pages) else child
            node.used_at = self._now
            known += same
        return node, known

    def _num_same(self, node: Node, tokens: "array[int]", known: int, most: int) -> int:
        """Pages of this edge that agree with the tokens from page `known` on; at least one does."""
        key = self._key(tokens, known, known + most)
        if node.key.startswith(key):
            return most
        low, high = 1, most  # agrees at low, not at high
        while high - low > 1:
            middle = (low + high) // 2
            num_bytes = self._num_bytes(middle)
            if node.key[:num_bytes] == key[:num_bytes]:
                low = middle
            else:
                high = middle
        return low

    def _split(self, node: Node, count: int) -> Node:
        """Cut an edge after `count` pages. Returns the new upper node; `node` stays the lower one, locks and all."""
        parent = node.parent
        assert parent is not None
        upper = Node(parent, node.key[: self._num_bytes(count)], node.pages[:count], node.share)
        upper.locks = node.locks
        parent.children[self._head(upper)] = upper
        node.key = node.key[count * self._page_size * TOKEN_BYTES :]
        node.pages = node.pages[count:]
        node.parent = upper
        upper.children[self._head(node)] = node
        return upper

    def _path(self, node: Node) -> Iterator[Node]:
        """From `node` up to, not including, the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _queue(self, node: Node) -> None:
        """Offer a node for eviction if it is an unlocked leaf; every such leaf has exactly one heap entry."""
        if node.parent is None or node.children or node.locks or node.queued:
            return
        node.queued = True
        self._entries += 1
        heapq.heappush(node.share.leaves, (node.used_at, self._entries, node))

    def _share_of(self, salt: str) -> Share:
        """The share that a salt belongs to; a new one if nothing is cached for its name."""
        name = name_in(salt)
        share = self.shares.get(name)
        if share is None:
            share = self.shares[name] = Share(name, self._clock())
        return share

    def _key(self, tokens: "array[int]", first: int, last: int) -> bytes:
        """Key of pages first..last-1."""
        return tokens[first * self._page_size : last * self._page_size + self._key_lookahead].tobytes()

    def _num_bytes(self, num_pages: int) -> int:
        return (num_pages * self._page_size + self._key_lookahead) * TOKEN_BYTES

    def _head(self, node: Node) -> bytes | str:
        return node.salt or node.key[: self._num_bytes(1)]


def name_in(salt: str) -> str:
    """The name that the server has put into a salt; "" if the salt is a client's own."""
    return salt.partition("\0")[0] if "\0" in salt else ""


class NoPrefixCache(PrefixCache):
    """The cache of --disable-radix-cache: it stays empty."""

    def insert(self, tokens: "array[int]", pages: list[int], salt: str = "", num_public: int = 0) -> Node:
        return self.root
