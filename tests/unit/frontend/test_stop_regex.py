"""Stop patterns: which match counts, what is held back, and that the cuts of the text do not matter."""

import functools
import gc
import itertools
import re

import pytest
from hypothesis import given, settings, strategies as st
from support.stops import compiled, feed_all, search_of

from overlap_spec.errors import RequestError
from overlap_spec.frontend.stop_automaton import LOOK_BACK, MOST_BYTES, State
from overlap_spec.frontend.stop_strings import StopStrings

ATOMS = [
    "a",
    "b",
    "[ab]",
    "[^a]",
    ".",
    "a{2,3}",
    "b+",
    "(?:ab|ba)",
    "c?",
    "a*",
    "c*?b",
    "(?:a?b){2}",
    "(?:a|bc?)*",
    "(?:a?b?){2}",
]
CONDITIONS = [r"\b", r"\B", "^", "(?m:^)", r"(?a:\b)"]
patterns_without_conditions = st.lists(st.sampled_from(ATOMS), min_size=1, max_size=4).map("".join)
patterns_with_conditions = st.lists(st.sampled_from(ATOMS + CONDITIONS), min_size=1, max_size=5).map("".join)
NEXT = ("", "a", " ", "\n", "é")  # one of each kind that a condition may ask for


def does_not_match_nothing(pattern: str) -> bool:
    """Not the empty text, wherever it is."""
    return not any(matches(pattern, one + other, len(one), len(one)) for one in NEXT for other in NEXT)


def matches(pattern: str, text: str, start: int, end: int) -> bool:
    """Whether the pattern matches exactly this part of the text, as Python searches."""
    return bool(followed(pattern, len(text) - end).match(text, start))


@functools.cache
def followed(pattern: str, rest: int) -> re.Pattern[str]:
    """By so many characters and the end of the text."""
    return re.compile(f"(?:{pattern})(?=(?s:.{{{rest}}})\\Z)")


def first_match(patterns: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """By brute force: for each end, the matches that hold whatever follows, and then those that this text shows."""
    for end in range(1, len(text) + 1):
        for texts in ([text[:end] + each for each in NEXT], [text]):
            for start, pattern in itertools.product(range(end), patterns):
                if all(matches(pattern, each, start, end) for each in texts):
                    return text[:start], pattern
    return text, None


@settings(max_examples=80, deadline=None)
@given(
    st.lists(patterns_with_conditions.filter(does_not_match_nothing), min_size=1, max_size=3),
    st.lists(st.text("abc é\n", max_size=4), max_size=5),
)
def test_any_cut_gives_the_match_that_brute_force_finds(patterns: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        stops = compiled((), patterns)
    except RequestError as error:
        assert "matches no text" in str(error)
        return
    expected = first_match(tuple(patterns), text)
    for cut in (pieces, [text], list(text)):
        out, found = feed_all(StopStrings(stops, False), cut)
        assert ("".join(out), found) == expected, cut


@settings(max_examples=60, deadline=None)
@given(patterns_without_conditions.filter(lambda p: len(p) < 16 and not re.fullmatch(p, "")), st.text("ab", max_size=7))
def test_exactly_what_may_become_a_match_is_held_back(pattern: str, text: str) -> None:
    search = search_of(pattern)
    shown, found = search.feed(text)
    if found is not None:
        return
    longer = [text + "".join(rest) for num in range(1, 6) for rest in itertools.product("abc", repeat=num)]
    begins = [
        start
        for start in range(len(text))
        if any(
            matches(pattern, each[:end], start, end) for each in longer for end in range(len(text) + 1, len(each) + 1)
        )
    ]
    assert len(shown) == min(begins, default=len(text))


def test_what_may_become_a_match_is_held_back_and_nothing_else() -> None:
    search = search_of(r"\d{3}-\d{2}")
    assert feed_all(search, ["call 12", "3 or ", "123", "-4", "x 999-", "11!"]) == (
        ["call ", "123 or ", "", "", "123-4x ", ""],
        r"\d{3}-\d{2}",
    )


def test_a_kept_match_is_shown_to_its_end() -> None:
    assert feed_all(search_of("E[NM]D", keep_match=True), ["the E", "MD of"]) == (["the ", "EMD"], "E[NM]D")


@pytest.mark.parametrize("pieces", [["abcd"], ["ab", "cd"], list("abcd")])
def test_strings_and_patterns_compete_for_the_earliest_end(pieces: list[str]) -> None:
    def text_and_match(*patterns: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
        out, found = feed_all(search_of(*patterns, stops=stops), pieces)
        return "".join(out), found

    assert text_and_match("b.d", stops=("bc",)) == ("a", "bc")
    assert text_and_match("b", stops=("abc",)) == ("a", "b")
    assert text_and_match("a.c", stops=("bc",)) == ("", "a.c")  # both end there; it begins first
    assert text_and_match("b[c]", stops=("bc",)) == ("a", "bc")
    assert text_and_match(r"ab\b", stops=("bcd",)) == ("a", "bcd")


@pytest.mark.parametrize("size", [1, 7, 2000])
def test_of_a_long_match_only_the_end_is_held_back_and_cut_off(size: int) -> None:
    text = "x" + "a" * 3000 + "y and more"
    out, found = feed_all(search_of("x.*y"), [text[at : at + size] for at in range(0, len(text), size)])
    assert (found, len("".join(out))) == ("x.*y", 3002 - LOOK_BACK)
    assert len(search_of("x.*y").feed("x" + "a" * 3000)[0]) == 3001 - LOOK_BACK


def test_a_dollar_is_the_end_of_the_text_so_far() -> None:
    assert feed_all(search_of(r"[.!?]\s*$"), ["So it is", ". And", " so on."]) == (["So it is", ""], r"[.!?]\s*$")
    assert feed_all(search_of(r"(?:a\Z|b$)"), ["xb"]) == (["x"], r"(?:a\Z|b$)")


@pytest.mark.parametrize("pattern", ["(?:a?){2,3}c", "(?:a*b?){2}c", "(?:a?){2,}c"])
def test_copies_of_what_may_be_empty_may_all_be(pattern: str) -> None:
    assert feed_all(search_of(pattern), ["xc"]) == (["x"], pattern)
    assert feed_all(search_of(pattern), ["xaac"]) == (["x"], pattern)


def test_a_condition_on_what_follows_is_decided_by_the_next_character_or_the_end() -> None:
    assert feed_all(search_of(r"END\b"), ["an END", "ING"]) == (["an ", "ENDING", ""], None)
    assert feed_all(search_of(r"END\b"), ["an END", ", so"]) == (["an ", ""], r"END\b")
    assert feed_all(search_of(r"END\b"), ["an END"]) == (["an ", ""], r"END\b")
    assert feed_all(search_of(r"a^\Bb"), ["ab"])[1] is None, "both conditions"


def test_text_that_is_not_searched_is_what_conditions_look_back_at() -> None:
    for before, expected in (("a", None), (" ", r"\bEND")):
        search = search_of(r"\bEND")
        search.skip(before)
        assert feed_all(search, ["END!"])[1] == expected
    search = search_of("^END")
    search.skip("x")
    assert feed_all(search, ["END"]) == (["END", ""], None)


@pytest.mark.slow
def test_an_automaton_that_forgets_finds_the_same_and_keeps_little() -> None:
    pattern = "[ab]{1,240}a[ab]{1,240}c"
    text = "".join("ab"[(index * index // 7 + index // 3) % 2] for index in range(600)) + "c"
    stops = compiled((), [pattern])
    assert stops.automaton is not None
    search, waiting = StopStrings(stops, False), StopStrings(stops, False)
    waiting.feed(text[:100])
    out, found = feed_all(search, text)
    start = min(start for start in range(601) if re.fullmatch(pattern, text[start:]))
    assert ("".join(out), found) == (text[:start], pattern)
    assert stops.automaton._num_bytes <= MOST_BYTES
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, State)]
    assert sum(8 * len(each.positions) for each in alive) < MOST_BYTES, "what a search that waits can reach as well"
