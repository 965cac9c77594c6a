"""The prefix cache against a dictionary of prefixes, and examples to read."""

import random
from array import array
from os.path import commonprefix
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_spec.errors import OutOfPages
from overlap_spec.scheduler.prefix_cache import NoPrefixCache, PagePool, PrefixCache
from overlap_spec.scheduler.requests import SHARE_AHEAD, NoStates, RequestPages


def tokens_of(text: str) -> "array[int]":
    return array("i", list(text.encode()))


def filled(pool: PagePool, cache: PrefixCache, text: str, num_pages: int) -> list[int]:
    """Insert as a request does that then lets its pages go. Returns the pages it offered."""
    pages = pool.take(num_pages)
    cache.insert(tokens_of(text), pages)
    pool.drop(pages)
    return pages


def test_bigram_keys_look_one_token_past_the_page():
    pool = PagePool(20)
    cache = PrefixCache(pool, 4, key_lookahead=1)
    pages = filled(pool, cache, "abcdefghi", 2)
    assert cache.match(tokens_of("abcdefghi"), 2).pages == pages
    # Position 7 is followed by another token: its draft KV differs, so its page is no hit.
    assert cache.match(tokens_of("abcdefghX"), 2).pages == pages[:1]
    assert cache.match(tokens_of("abcdXfghi"), 2).pages == []


def test_token_keys_do_not():
    pool = PagePool(20)
    cache = PrefixCache(pool, 4, key_lookahead=0)
    pages = filled(pool, cache, "abcdefgh", 2)
    assert cache.match(tokens_of("abcdefghX"), 2).pages == pages
    assert cache.match(tokens_of("abcdXfgh"), 2).pages == pages[:1]


def test_what_is_cached_keeps_its_pages():
    pool = PagePool(20)
    cache = PrefixCache(pool, 2, key_lookahead=0)
    first = filled(pool, cache, "aabbcc", 3)
    second = filled(pool, cache, "aabbddee", 4)
    assert cache.match(tokens_of("aabbddee"), 4).pages == first[:2] + second[2:]
    assert cache.num_pages == 5 and len(pool.free) == pool.num_total - 5


def test_locked_paths_stay_and_leaves_go_in_order_of_use():
    pool = PagePool(20)
    cache = PrefixCache(pool, 2, key_lookahead=0)
    for text in ("aabbcc", "aaddee", "ffgg"):
        filled(pool, cache, text, len(text) // 2)
    cache.match(tokens_of("aabbcc"), 3)
    kept = cache.match(tokens_of("aadd"), 2)
    cache.lock(kept.node)
    assert cache.num_evictable == cache.num_pages - 2
    assert cache.evict(1) == 1  # the end of aaddee was used before ffgg
    assert cache.match(tokens_of("aaddee"), 3).pages == kept.pages
    assert cache.evict(100) == 4
    assert cache.num_pages == 2 and cache.num_evictable == 0
    cache.unlock(kept.node)
    assert cache.evict(100) == 2
    assert len(pool.free) == pool.num_total


def test_a_match_counts_what_of_it_could_be_evicted():
    """Pages that another request has locked are not there to be evicted for this one."""
    cache = PrefixCache(PagePool(20), 2, key_lookahead=0)
    filled(cache._pool, cache, "aabbcc", 3)
    assert cache.match(tokens_of("aabbcc"), 3).num_evictable == 3
    cache.lock(cache.match(tokens_of("aa"), 1).node)
    found = cache.match(tokens_of("aabbcc"), 3)
    assert (len(found.pages), found.num_evictable) == (3, 2)


def test_pages_of_a_large_pool_are_evicted_together():
    """A page that a request takes makes room for a few that others are about to take; none is lost."""
    pool = PagePool(1 + 8 * SHARE_AHEAD)
    cache = PrefixCache(pool, 4, key_lookahead=0)
    limits: Any = SimpleNamespace(num_pages=8 * SHARE_AHEAD)
    memory = RequestPages(pool, cache, limits, NoStates())
    for index in range(4):
        filled(pool, cache, chr(ord("a") + index) * 8 * SHARE_AHEAD, 2 * SHARE_AHEAD)
    assert memory.num_available == cache.num_pages == 8 * SHARE_AHEAD and not pool.free
    assert len(memory.borrow(1)) == 1
    assert len(pool.free) == 8 and memory.num_available == 8 * SHARE_AHEAD - 1


def test_a_long_edge_is_evicted_from_its_end():
    pool = PagePool(20)
    cache = PrefixCache(pool, 1, key_lookahead=1)
    pages = filled(pool, cache, "abcdefg", 6)
    assert cache.evict(2) == 2
    assert cache.match(tokens_of("abcdefg"), 6).pages == pages[:4]


def test_no_prefix_cache_holds_nothing():
    pool = PagePool(20)
    cache = NoPrefixCache(pool, 2, key_lookahead=0)
    filled(pool, cache, "aabbcc", 3)
    assert cache.match(tokens_of("aabbcc"), 3).pages == []
    assert len(pool.free) == pool.num_total


def test_prefixes_of_different_salts_share_nothing():
    pool = PagePool(20)
    cache = PrefixCache(pool, 2, key_lookahead=1)
    pages = {salt: pool.take(2) for salt in ("", "mine", "yours")}
    for salt, own in pages.items():
        cache.insert(tokens_of("aabbc"), own, salt)
        pool.drop(own)
    for salt, own in pages.items():
        assert cache.match(tokens_of("aabbc"), 2, salt).pages == own
    assert cache.match(tokens_of("aabbc"), 2, "another").pages == []
    assert cache.num_pages == cache.num_evictable == 6


def test_public_pages_are_shared_and_evicted_after_what_is_below_them():
    pool = PagePool(20)
    cache = PrefixCache(pool, 2, key_lookahead=0)
    pages = {}
    for salt, text in {"a\0": "ppqqaabb", "b\0": "ppqqccdd"}.items():
        found = cache.match(tokens_of(text), 4, salt, 2)
        taken = pool.take(4 - len(found.pages))
        pages[salt] = found.pages + taken
        cache.insert(tokens_of(text), pages[salt], salt, 2)
        pool.drop(taken)
    mine, yours = pages.values()
    assert mine[:2] == yours[:2] and not set(mine[2:]) & set(yours[2:])
    assert cache.match(tokens_of("ppqqaabb"), 4, "b\0", 2).pages == mine[:2]
    assert cache.match(tokens_of("ppqqaabb"), 4).pages == mine[:2], "without a salt"
    assert cache.match(tokens_of("ppqqaabb"), 4, "a\0", 1).pages == mine[:1], "less of it is public"
    assert cache.evict(3) == 3 and cache.match(tokens_of("ppqqaabb"), 2).pages == mine[:2], "they go last"
    assert cache.evict(20) == 3 and not cache.root.children and list(cache.shares) == [""]


def test_nothing_is_kept_of_a_salt_without_pages():
    """Not by a look-up, nor for a request that has no whole page, nor once its pages are gone."""
    pool = PagePool(20)
    cache = PrefixCache(pool, 2, key_lookahead=0)
    cache.match(tokens_of("aa"), 1, "mine")
    cache.insert(tokens_of("a"), [], "mine")
    assert not cache.root.children
    cache.insert(tokens_of("aabb"), pool.take(2), "mine")
    found = cache.match(tokens_of("cc"), 1, "mine")
    cache.lock(found.node)  # of the salt alone: nothing else is known of it
    assert found.pages == [] and cache.num_evictable == 2
    assert cache.evict(5) == 2 and list(cache.root.children) == ["mine"]
    cache.unlock(found.node)
    cache.insert(tokens_of("dd"), pool.take(1), "yours")
    assert cache.evict(5) == 1 and not cache.root.children
    cache.insert(tokens_of("dd"), pool.take(1), "yours")
    assert cache.evict(1) == 1 and not cache.root.children, "no more is asked for"


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("page_size", [1, 3])
def test_against_a_dictionary(page_size, lookahead):
    """The longest cached prefix is what a dictionary of every inserted prefix says, splits and locks or not.

    Salts x and y have public pages: those whose keys begin as one of the texts does.
    """
    rng = random.Random(page_size * 10 + lookahead)
    pool = PagePool(5000)
    cache = PrefixCache(pool, page_size, lookahead)
    public = [rng.randrange(2) for _ in range(9)]
    known: dict[tuple[str, tuple[int, ...]], int] = {}  # salt and key of a prefix -> its last page
    for _ in range(300):
        tokens = array("i", [rng.randrange(3) for _ in range(rng.randint(lookahead, 25))])
        if rng.random() < 0.5:
            tokens = array("i", public[: rng.randrange(10)]) + tokens
        most, salt = (len(tokens) - lookahead) // page_size, rng.choice(("", "", "a", "b", "x", "y"))
        in_common = len(commonprefix([list(tokens), public])) if salt in ("x", "y") else 0
        num_public = max(0, in_common - lookahead) // page_size
        prefixes = [tuple(tokens[: (i + 1) * page_size + lookahead]) for i in range(most)]
        keys = [("" if i < num_public else salt, prefix) for i, prefix in enumerate(prefixes)]
        found = cache.match(tokens, most, salt, num_public)
        assert found.pages == [known[key] for key in keys if key in known]
        if rng.random() < 0.3:
            cache.lock(found.node)
            cache.unlock(found.node)
        pages = pool.take(most)
        cache.insert(tokens, pages, salt, num_public)
        pool.drop(pages)
        for key, page in zip(keys, pages, strict=True):
            known.setdefault(key, page)
        assert cache.num_pages == len(known) == cache.num_evictable
        assert len(pool.free) == pool.num_total - len(known)
    assert cache.evict(10_000) == len(known)
    assert not cache.root.children


def test_the_pool_counts_holders():
    pool = PagePool(4)
    pages = pool.take(3)
    assert sorted(pages) == [1, 2, 3]  # page 0 is the dummy
    with pytest.raises(OutOfPages, match="1 pages asked for, 0 of 3"):
        pool.take(1)
    pool.hold(pages[:1])
    pool.drop(pages)
    assert sorted(pool.free) == sorted(pages[1:])
    pool.drop(pages[:1])
    assert len(pool.free) == 3
    with pytest.raises(AssertionError, match="is free"):
        pool.drop(pages[:1])
