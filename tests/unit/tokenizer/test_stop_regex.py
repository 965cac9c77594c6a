"""Stop patterns: where the text is cut, what is held back, and what ends a search that takes for ever."""

import random
import re

import pytest

from overlap_spec.errors import RequestError
from overlap_spec.tokenizer import stop_strings
from overlap_spec.tokenizer.stop_strings import StopStrings, compile_patterns


def search_of(*patterns: str, stops: tuple[str, ...] = (), keep_match: bool = False) -> StopStrings:
    return StopStrings(stops, keep_match, compile_patterns(patterns))


def feed_all(search: StopStrings, pieces: list[str]) -> tuple[list[str], str | None]:
    out = []
    for piece in pieces:
        text, found = search.feed(piece)
        out.append(text)
        if found is not None:
            return out, found
    return [*out, search.flush()], None


def slow_answer(patterns: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    """After every piece, Python's own search over the whole text; the match that ends first, of those the longest."""
    text = ""
    for piece in pieces:
        text += piece
        found = [(match.end(), match.start(), pattern) for pattern in patterns if (match := re.search(pattern, text))]
        if found:
            _, start, pattern = min(found, key=lambda each: each[:2])
            return text[:start], pattern
    return text, None


def test_what_may_become_a_match_is_held_back_and_nothing_else() -> None:
    search = search_of(r"\d{3}-\d{2}")
    assert feed_all(search, ["call 12", "3 or ", "123", "-4", "x 999-", "11!"]) == (
        ["call ", "123 or ", "", "", "123-4x ", ""],
        r"\d{3}-\d{2}",
    )


def test_a_kept_match_is_shown_to_its_end() -> None:
    assert feed_all(search_of("E[NM]D", keep_match=True), ["the E", "MD of"]) == (["the ", "EMD"], "E[NM]D")


@pytest.mark.parametrize("seed", range(60))
def test_random_patterns_and_cuts_match_where_a_search_of_the_whole_text_does(seed: int) -> None:
    rng = random.Random(seed)
    atoms = ["a", "b", "[ab]", "a{2,3}", "b+", "(?:ab|ba)", "c?", r"\bab", "(?<=b)a", "^a", "ab?c"]
    patterns = tuple("".join(rng.choices(atoms, k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
    patterns = tuple(pattern for pattern in patterns if not re.match(pattern, ""))
    for _ in range(20):
        pieces = ["".join(rng.choices("abc ", [4, 4, 1, 1], k=rng.randint(0, 4))) for _ in range(12)]
        texts, found = feed_all(search_of(*patterns), pieces)
        assert ("".join(texts), found) == slow_answer(patterns, pieces), (patterns, pieces)


def test_strings_and_patterns_compete_for_the_earliest_end() -> None:
    assert feed_all(search_of("b.d", stops=("bc",)), ["abcd"]) == (["a"], "bc")
    assert feed_all(search_of("b", stops=("abc",)), ["abc"]) == (["a"], "b")


def test_a_pattern_without_an_end_holds_no_more_than_the_look_back() -> None:
    search = search_of("x.*y")
    text = "x" + "a" * 5000
    out, found = feed_all(search, list(text) + ["y"])
    assert found is None
    assert "".join(out) == text + "y"
    assert len(search_of("x.*y").feed(text)[0]) == len(text) - stop_strings.LOOK_BACK


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is no regular expression"),
        ("a*", "matches the empty text"),
        ("", "matches the empty text"),
        ("a" * 1001, "has 1001 characters"),
        ("[", "is no regular expression"),
        ("(?P<a>x)(?P=b)", "is no regular expression"),
    ],
)
def test_a_bad_pattern_is_named(pattern: str, why: str) -> None:
    with pytest.raises(RequestError, match=f"stop_regex: .*{why}") as caught:
        compile_patterns((pattern,))
    assert caught.value.field == "stop_regex"


def test_a_search_that_takes_for_ever_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_strings, "SEARCH_S", 0.005)
    with pytest.raises(RequestError, match="took longer than 5 ms"):
        search_of(r"(?:a|a|aa)+(?:a|a|aa)+(?:a|aa|a)+[^a]c").feed("a" * 200)
