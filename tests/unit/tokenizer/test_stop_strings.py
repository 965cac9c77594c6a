"""Stop strings: where the text is cut, what is held back, and that the cuts of the pieces do not matter."""

import random

import pytest

from overlap_spec.tokenizer.stop_strings import StopStrings


def feed_all(stops: tuple[str, ...], pieces: list[str], keep_match: bool = False) -> tuple[str, str | None]:
    search = StopStrings(stops, keep_match)
    out: list[str] = []
    for piece in pieces:
        text, found = search.feed(piece)
        out.append(text)
        if found is not None:
            return "".join(out), found
    return "".join((*out, search.flush())), None


def slow_answer(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """Read letter by letter; the first stop to be complete wins, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_the_picture_of_the_module() -> None:
    search = StopStrings(("END",), keep_match=False)
    assert [search.feed(piece) for piece in ("to be", " E", "N", "Dless")] == [
        ("to be", None),
        (" ", None),
        ("", None),
        ("", "END"),
    ]


def test_text_that_did_not_become_a_stop_string_is_given_out() -> None:
    search = StopStrings(("END",), keep_match=False)
    assert search.feed("EN") == ("", None)
    assert search.feed("E") == ("EN", None)
    assert search.flush() == "E"
    assert search.flush() == ""


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (("abcd", "bc"), "xabcd", ("xa", "bc")),  # "bc" is complete first
        (("bcd", "abcd"), "xabcd", ("x", "abcd")),  # both end together: the longer
        (("aab",), "aaab", ("a", "aab")),
        (("\n\n",), "one\n\ntwo", ("one", "\n\n")),
        (("é",), "café", ("caf", "é")),
        (("zz",), "abc", ("abc", None)),
    ],
)
def test_which_stop_string_is_the_first(stops: tuple[str, ...], text: str, expected: tuple[str, str | None]) -> None:
    assert feed_all(stops, [text]) == expected
    assert feed_all(stops, list(text)) == expected


def test_the_match_is_kept_if_asked_and_what_follows_is_not() -> None:
    assert feed_all(("END",), ["the E", "NDless"], keep_match=True) == ("the END", "END")


@pytest.mark.parametrize("seed", range(300))
def test_any_cut_gives_the_answer_of_reading_letter_by_letter(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choices("ab", k=draw.randint(0, 14)))
    stops = tuple("".join(draw.choices("abc", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 3)))
    pieces, rest = [], text
    while rest:
        cut = draw.randint(0, len(rest))
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert feed_all(stops, pieces) == slow_answer(stops, text)
