"""Pages of the prefix cache are evicted fairly: a client that floods the cache evicts its own."""

import random
from array import array

import pytest
from msgspec.structs import replace
from support.fake_device import Bench, make_admit, make_ready

from overlap_spec.scheduler.prefix_cache import IDLE_S, PagePool, PrefixCache

NUM_PAGES, PAGE = 400, 4
CLIENTS = [f"client {number}" for number in range(10)]
FLOODER, *OTHERS = CLIENTS


class Cache:
    """A cache of a full pool: whoever adds evicts as a request does."""

    def __init__(self, num_pages: int = NUM_PAGES) -> None:
        self.now_s = 0.0
        self.pool = PagePool(1 + num_pages)
        self.cache = PrefixCache(self.pool, PAGE, 0, lambda: self.now_s)

    def ask(self, salt: str, tokens: "array[int]") -> float:
        """Cache what is not there. Returns the share that was."""
        count = len(tokens) // PAGE
        found = self.cache.match(tokens, count, salt)
        self.cache.lock(found.node)
        missing = count - len(found.pages)
        if missing > len(self.pool.free):
            self.cache.evict(missing - len(self.pool.free), salt)
        pages = self.pool.take(missing)
        self.cache.insert(tokens, found.pages + pages, salt)
        self.pool.drop(pages)
        self.cache.unlock(found.node)
        return len(found.pages) / count

    def sizes(self) -> dict[str, int]:
        """Pages of each name that has some."""
        return {name: share.num_pages for name, share in self.cache.shares.items() if share.num_pages}


def text(seed: object, num_pages: int) -> "array[int]":
    rng = random.Random(str(seed))
    return array("i", [rng.randrange(1000) for _ in range(num_pages * PAGE)])


def hit_rate(flood: int, salt_of_flood: str = f"{FLOODER}\0") -> float:
    """Of nine clients that ask again and again, each with 32 of 36 pages that it had before: beside so many others'."""
    cache, rates = Cache(), []
    for turn in range(30):
        for name in OTHERS:
            tokens = text((name, turn % 3), 12)
            rates.append(cache.ask(f"{name}\0{turn % 3}", tokens))
            for number in range(flood):
                own = (turn, name, number)
                cache.ask(salt_of_flood.format(own), text(own, 11))
    return sum(rates[27:]) / len(rates[27:])


@pytest.mark.parametrize("salt", [f"{FLOODER}\0", FLOODER + "\0{}", "", "{}"])
def test_others_find_what_they_had_beside_a_flood(salt: str) -> None:
    """Whether the flood has one salt or a new one in each request, of its name or made up."""
    alone = hit_rate(0)
    assert alone == 1.0
    assert hit_rate(5, salt) >= 0.9 * alone


def test_without_names_pages_are_evicted_in_one_order() -> None:
    """Salts that clients make up are of one share, however many: the least recently used pages go."""
    cache = Cache()
    for number in range(200):
        cache.ask(f"made up {number}", text(number, 11))
    assert list(cache.cache.shares) == [""]
    kept = [cache.cache.match(text(number, 11), 11, f"made up {number}").pages for number in range(200)]
    assert [len(pages) for pages in kept] == [0] * 163 + [4] + [11] * 36


def test_the_largest_share_is_evicted_first() -> None:
    cache = Cache(100)
    cache.ask("a\0", text("a", 60))
    cache.ask("b\0", text("b", 40))
    cache.ask("c\0", text("c", 10))
    assert cache.sizes() == {"a": 50, "b": 40, "c": 10}
    cache.ask("c\0", text("c2", 20))
    sizes = cache.sizes()
    assert sizes["c"] == 30 and abs(sizes["a"] - sizes["b"]) <= 3 and sizes["a"] + sizes["b"] == 70
    cache.ask("c\0", text("c3", 40))
    sizes = cache.sizes()
    assert sizes["c"] == 40 and abs(sizes["a"] - sizes["b"]) <= 3, "what it asks for counts: its own go first"
    assert cache.cache.match(text("b", 40), 40, "b\0").pages, "the beginning is kept"


def test_an_idle_name_keeps_nothing_from_those_that_ask() -> None:
    """Else a server with many names would have room for few tokens of each, most of whom are not there."""
    cache = Cache(100)
    for name in "abcde":
        cache.ask(f"{name}\0", text(name, 20))
    cache.now_s = IDLE_S / 2
    cache.ask("b\0", text("b", 20))
    cache.now_s = IDLE_S + 1
    cache.ask("b\0", text("b2", 80))
    assert cache.sizes() == {"b": 100}
    cache.now_s += IDLE_S - 1
    cache.ask("a\0", text("a", 50))
    assert cache.sizes() == {"a": 50, "b": 50}


def test_a_name_is_forgotten_with_its_last_page() -> None:
    cache = Cache(40)
    for number in range(1000):
        cache.ask(f"name {number}\0own {number}", text(number, 10))
        assert len(cache.cache.shares) <= 41 and len(cache.cache.root.children) <= 40, "as many as pages"
    found = cache.cache.match(text(999, 10), 0, "name 999\0own 999")
    cache.cache.lock(found.node)
    cache.cache.evict(40)
    assert list(cache.cache.shares) == ["", "name 999"], "a request has it"
    cache.cache.unlock(found.node)
    assert list(cache.cache.shares) == [""] and not cache.cache.root.children


def test_locked_pages_are_of_a_share_too() -> None:
    """What its running requests hold counts: so a client that runs much keeps less for later."""
    cache = Cache(100)
    cache.ask("a\0", text("a", 40))
    cache.cache.lock(cache.cache.match(text("a", 40), 40, "a\0").node)
    cache.ask("a\0", text("a2", 20))
    cache.ask("b\0", text("b", 40))
    cache.ask("c\0", text("c", 20))
    assert cache.sizes() == {"a": 40, "b": 40, "c": 20}
    cache.ask("c\0", text("c2", 10))
    assert cache.sizes() == {"a": 40, "b": 30, "c": 30}, "a has none to give"


def rounds_of_requests(flood: int) -> float:
    """The hit rate of nine clients in a scheduler, beside so many requests of the tenth for each of theirs."""
    bench, uid, found = Bench(make_ready(num_slots=4, num_pages=361), seed=1), 0, []
    for turn in range(4):
        for name in OTHERS:
            uid += 1
            prompt = list(text((name, turn % 2), 12))
            bench.admit(replace(make_admit(uid, prompt, 4), client=name, salt=f"{name}\0"))
            mine = uid
            for _ in range(flood):
                uid += 1
                of_flood = make_admit(uid, list(text(uid, 12)), 4)
                bench.admit(replace(of_flood, client=FLOODER, salt=f"{FLOODER}\0{uid}"))
            bench.finish_all()
            found.append(bench.usages[mine].cached_tokens / len(prompt))
    return sum(found[18:]) / 18


@pytest.mark.slow
def test_requests_find_what_their_clients_had_beside_a_flood() -> None:
    alone = rounds_of_requests(0)
    assert alone > 0.8
    assert rounds_of_requests(8) >= 0.9 * alone
