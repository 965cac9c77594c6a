"""Which snapshot holds what: where prompts are cut, what a prompt goes on from, and which snapshot is evicted."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from overlap_spec.messages import Admit, SamplingParams
from overlap_spec.scheduler.prefix_cache import Match, PagePool
from overlap_spec.scheduler.requests import Request, RequestPages
from overlap_spec.scheduler.snapshots import NONE, SnapshotCache, SnapshotStates

PAGE, CHUNK = 2, 4


class Scene:
    """Pages of 2 tokens and snapshots at multiples of 4; prompts are letters."""

    def __init__(
        self,
        num_snapshots: int = 4,
        num_pages: int = 60,
        lookahead: int = 0,
        interval: int = 100,
        drawn_apart: bool = False,
    ) -> None:
        pool = PagePool(num_pages)
        self.cache = SnapshotCache(pool, PAGE, lookahead, num_snapshots=num_snapshots)
        self.limits: Any = SimpleNamespace(
            num_pages=num_pages,
            page_size=PAGE,
            state_chunk=CHUNK,
            drawn_apart=drawn_apart,
            key_lookahead=lookahead,
            num_snapshots=num_snapshots,
            width=1,
            pages_for=lambda num_tokens: -(-num_tokens // PAGE),
        )
        self.states = SnapshotStates(self.cache, self.limits, interval)
        self.memory = RequestPages(pool, self.cache, self.limits, self.states)

    def placed(self, prompt: str, salt: str = "", public_len: int = 0, output: str = "") -> Request:
        tokens = array("i", map(ord, prompt)).tobytes()
        sampling = SamplingParams(max_new_tokens=4, seed=0)
        admit = Admit(1, tokens, sampling, (), 0.0, salt=salt, public_len=public_len)
        request = Request(admit, self.cache.root)
        request.tokens.extend(map(ord, output))
        self.memory.place(request, self.memory.match(request))
        return request

    def run(self, request: Request, ends: list[int] | None = None) -> list[int]:
        """Plan and settle a prompt in chunks as long as may be, or that end so. Returns where its snapshots are."""
        taken, asked = [], iter(ends or [])
        self.states.restore(request)
        while request.planned_len < request.target:
            end = self.states.cut(request, next(asked, request.target))
            if (snapshot := self.states.take(request, end)) != NONE:
                taken.append(end)
                assert (end, snapshot) == request.kept[-1]
            request.planned_len = request.prefilled_len = end
            self.memory.share(request)
        return taken

    def served(self, prompt: str, salt: str = "", public_len: int = 0) -> int:
        """A prompt from its beginning to its end. Returns how many of its tokens were cached."""
        request = self.placed(prompt, salt, public_len)
        cached = request.cached_len
        self.run(request)
        self.memory.release(request)
        return cached


def test_a_prompt_is_cut_where_its_last_snapshot_may_be() -> None:
    scene = Scene()
    assert scene.run(scene.placed("abcdefghij")) == [8]
    assert scene.run(scene.placed("ABCDEFGH")) == [4]  # a token is left to compute the next one from
    assert not scene.run(scene.placed("xyz"))


@pytest.mark.parametrize(("lookahead", "end"), [(0, 8), (1, 8), (2, 4)])
def test_what_a_snapshot_needs_of_the_tokens_after_it(lookahead: int, end: int) -> None:
    """Keys of pages are of the tokens after them, too."""
    scene = Scene(lookahead=lookahead)
    assert scene.run(scene.placed("abcdefghi")) == [end]
    assert scene.served("abcdefghi") == end


def test_long_prompts_have_snapshots_on_their_way() -> None:
    for interval, expected in ((8, [8, 16, 24, 36]), (12, [16, 28, 36])):
        scene = Scene(num_snapshots=8, interval=interval)
        assert scene.run(scene.placed("a" * 40), [4, 8, 14, 16, 20, 24, 28]) == expected


def test_a_prompt_goes_on_from_the_longest_prefix_with_a_snapshot() -> None:
    scene = Scene()
    assert scene.served("abcdefghij") == 0
    assert scene.served("abcdefghij") == 8
    assert scene.served("abcdefghijklmnop") == 8
    assert scene.served("abcdefghijklmnop") == 12
    assert scene.served("abcdefgx") == 0  # pages are there up to 6, and the state of 8 is not that of 6
    assert (scene.states.num_begun, scene.states.num_restored) == (5, 3)


def test_a_third_prompt_finds_a_snapshot_where_the_second_left_the_first() -> None:
    scene = Scene()
    assert scene.served("abcdefghijkl") == 0
    second = scene.placed("abcdefxxxxxx")
    assert second.cached_len == 0 and second.cuts == (4, 8)
    assert scene.run(second) == [4, 8]
    scene.memory.release(second)
    assert scene.served("abcdefyyyy") == 4


def test_what_a_request_has_said_leaves_nothing_and_finds_nothing_where_it_is_computed_apart() -> None:
    """It was preempted. As a part of another's prompt it is cached."""
    scene = Scene(num_snapshots=8, interval=CHUNK, drawn_apart=True)
    spoken = scene.placed("abcdefghij", output="klmnopqrstuvw")
    assert scene.run(spoken, [4, 8, 10, 12, 16, 20]) == [4, 8]
    scene.memory.release(spoken)
    assert scene.cache.num_pages == 4
    assert scene.served("abcdefghijklmnopqrstuvw") == 8 and scene.served("abcdefghijklmnopqrstuvw") == 20
    again = scene.placed("abcdefghij", output="klmnopqrstuvw")
    assert again.cached_len == 8 and scene.run(again, [10, 12, 16]) == []
    assert scene.placed("abcdefgh", output="ijklmnopq").cached_len == 8


def test_the_snapshot_used_longest_ago_is_evicted() -> None:
    scene = Scene(num_snapshots=2)
    assert [scene.served(letter * 6) for letter in "abacabc"] == [0, 0, 4, 0, 4, 0, 0]


def test_a_snapshot_that_a_request_waits_for_is_not_evicted() -> None:
    scene = Scene(num_snapshots=1)
    scene.served("aaaaaa")
    waiting = scene.placed("aaaaaa")
    assert waiting.restored != NONE and not scene.run(scene.placed("bbbbbb"))
    assert scene.states.restore(waiting) != NONE and waiting.restored == NONE
    assert scene.run(scene.placed("cccccc")) == [4]


def test_a_request_that_leaves_before_its_first_chunk_waits_for_nothing() -> None:
    scene = Scene(num_snapshots=1)
    scene.served("aaaaaa")
    waiting = scene.placed("aaaaaa")
    scene.memory.release(waiting)
    assert scene.run(scene.placed("bbbbbb")) == [4]


def test_a_snapshot_goes_with_its_last_page() -> None:
    scene = Scene(num_snapshots=1)
    scene.served("abcdefghij")
    scene.cache.evict(2)
    assert scene.cache.free == [0] and scene.served("abcdefghij") == 0


def test_snapshots_of_other_salts_are_not_found() -> None:
    scene = Scene()
    assert [scene.served("abcdefghij", salt) for salt in ("", "x", "y", "x", "")] == [0, 0, 0, 8, 8]


def test_public_tokens_are_shared_by_all_salts() -> None:
    """The second client is cut where the public tokens end, and the third goes on from there."""
    scene = Scene()
    assert [scene.served("abcdefgh" + own, own, 8) for own in ("xxxxx", "yyyyy", "zzzzz")] == [0, 0, 8]


def test_a_snapshot_where_public_tokens_end_is_of_all_salts_and_goes_with_its_pages() -> None:
    """Also if it is of a client that has cached more below them already."""
    scene = Scene(num_snapshots=6)
    prompts = [("abcdefgh" + own, salt, 8) for own, salt in (("xxxxxx", "x"), ("zzzzzz", "x"), ("yyyyyy", "y"))]
    assert [scene.served(*prompt) for prompt in prompts] == [0, 0, 8]
    scene.cache.evict(scene.cache.num_evictable)
    assert len(scene.cache.free) == 6 and not scene.cache.places


def test_a_split_edge_keeps_its_snapshot_at_its_end() -> None:
    scene = Scene()
    scene.served("abcdefghij")
    found: Match = scene.memory.match(scene.placed("abcdxx"))
    assert not found.pages and found.cut_at == 2
    assert scene.served("abcdefghij") == 8


def test_snapshots_of_a_broken_request_are_free_again() -> None:
    """Not even pages that another request has left there get one."""
    scene = Scene(num_snapshots=1)
    assert [scene.served(prompt) for prompt in ("abcdefghij", "zzzzzz")] == [0, 0]
    request = scene.placed("abcdefghij")
    assert scene.states.take(request, 8) != NONE
    request.planned_len = request.prefilled_len = 8
    request.is_broken = True
    scene.memory.release(request)
    assert scene.cache.free == [0] and scene.served("abcdefghij") == 0


def test_a_snapshot_is_not_found_before_its_chunk_has_settled() -> None:
    """Whatever pages another request has left there."""
    scene = Scene(num_snapshots=1)
    assert [scene.served(prompt) for prompt in ("abcdefghij", "zzzzzz")] == [0, 0]
    request = scene.placed("abcdefghij")
    scene.states.take(request, 8)
    request.planned_len = 8
    scene.memory.share(request)
    assert not scene.memory.match(request).pages and request.kept
    request.prefilled_len = 8
    scene.memory.share(request)
    assert len(scene.memory.match(request).pages) == 4 and not request.kept


def test_of_two_snapshots_of_one_prefix_one_is_free_again() -> None:
    scene = Scene()
    one, other = scene.placed("abcdefghij"), scene.placed("abcdefghij")
    for request in (one, other):
        scene.run(request)
    for request in (one, other):
        scene.memory.release(request)
    assert len(scene.cache.free) == 3 and len(scene.cache.places) == 1
