"""Stop strings: where the text is cut, what is held back, and that the cuts of the pieces do not matter."""

import asyncio
import random

import pytest
from support.stops import compiled, feed_all, search_of

from overlap_spec.errors import RequestError
from overlap_spec.frontend import stop_strings
from overlap_spec.frontend.stop_strings import FEW, MOST_BYTES, SHORT, StopCompiler, Stops, StopString


def fed(stops: tuple[str, ...], pieces: list[str], keep_match: bool = False) -> tuple[str, str | None]:
    out, found = feed_all(search_of(stops=stops, keep_match=keep_match), pieces)
    return "".join(out), found


def slow_answer(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """Read letter by letter; the first stop to be complete wins, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def test_the_picture_of_the_module() -> None:
    search = search_of(stops=("END",))
    assert [search.feed(piece) for piece in ("to be", " E", "N", "Dless")] == [
        ("to be", None),
        (" ", None),
        ("", None),
        ("", "END"),
    ]


def test_text_that_did_not_become_a_stop_string_is_given_out() -> None:
    search = search_of(stops=("END",))
    assert search.feed("EN") == ("", None)
    assert search.feed("E") == ("EN", None)
    assert search.flush() == ("E", None)
    assert search.flush() == ("", None)


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
    assert fed(stops, [text]) == expected
    assert fed(stops, list(text)) == expected


def test_the_match_is_kept_if_asked_and_what_follows_is_not() -> None:
    assert fed(("END",), ["the E", "NDless"], keep_match=True) == ("the END", "END")


@pytest.mark.slow_but_every(10)
@pytest.mark.parametrize("seed", range(300))
def test_any_cut_gives_the_answer_of_reading_letter_by_letter(seed: int) -> None:
    draw = random.Random(seed)
    letters, longest = draw.choice([("abc", 4), ("aab", 7)])
    text = "".join(draw.choices("aab", k=draw.randint(0, 6 * longest)))
    stops = tuple("".join(draw.choices(letters, k=draw.randint(1, longest))) for _ in range(draw.randint(1, 3)))
    pieces, rest = [], text
    while rest:
        cut = draw.randint(0, len(rest))
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert fed(stops, pieces) == slow_answer(stops, text)


class CountingText(str):
    """Counts the characters that are looked at."""

    num_read = 0

    def __getitem__(self, at: object) -> str:
        CountingText.num_read += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("text", ["c" * 4000, ("c" * 399 + "d") * 10, "cc" * 3 + "cd" * 2000])
def test_a_character_costs_the_same_whatever_is_held_back(text: str) -> None:
    """The attack: stops of one character repeated, and a text that always begins them."""
    stop, matched = StopString(CountingText("c" * 400 + "x")), 0
    CountingText.num_read = 0
    for at in range(0, len(text), 80):
        matched, end = stop.advance(matched, text[at : at + 80])
        assert end == -1
    assert CountingText.num_read <= 6 * len(text)


def test_only_few_short_strings_are_searched_for_at_once() -> None:
    assert not compiled(["x"] * FEW).takes_long
    assert compiled(["x"] * (FEW + 1)).takes_long
    assert compiled(["x" * (SHORT + 1)]).takes_long
    assert compiled((), ["x"]).takes_long
    assert not Stops().takes_long and not Stops()


async def compile_many(compiler: StopCompiler, num: int, *patterns: str) -> list[Stops | BaseException]:
    asked = (compiler.compiled(("END",), patterns, f"owner {index % 3}") for index in range(num))
    return await asyncio.gather(*asked, return_exceptions=True)


def test_all_choices_share_what_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0

    class Reader(stop_strings.PatternReader):
        def read(self, pattern: str) -> None:
            nonlocal num_read
            num_read += 1
            super().read(pattern)

    monkeypatch.setattr(stop_strings, "PatternReader", Reader)

    async def inner() -> None:
        compiler = StopCompiler()
        assert len(set(map(id, await compile_many(compiler, 2048, "a+b", "c")))) == 1
        assert num_read == 2
        errors = await compile_many(compiler, 2048, "c", "(")
        assert all(isinstance(each, RequestError) and "is no regular" in str(each) for each in errors)
        assert num_read == 4

    asyncio.run(inner())


def test_what_is_kept_is_bounded_by_bytes() -> None:
    async def inner() -> None:
        compiler = StopCompiler()
        for index in range(60):
            await compiler.compiled((), (f"a{{{index + 1}}}b",), "owner")
            await compiler.compiled((f"{index + 10}" * 50_000,), (), "owner")
        assert compiler._num_bytes <= MOST_BYTES
        assert compiler._num_bytes == sum(stop_strings._num_bytes(*each) for each in compiler._kept.items())
        assert 30 < len(compiler._kept) < 60

    asyncio.run(inner())
