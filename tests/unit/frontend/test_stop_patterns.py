"""Reading stop patterns: what is refused, by which name, and how little work that is."""

import contextlib
import random
import re

import pytest
from support.stops import compiled, feed_all, search_of

from overlap_spec.errors import RequestError
from overlap_spec.frontend.stop_patterns import MOST_EDGES, MOST_PARTS, ClassTable, PatternReader

NESTED = "(" * 61 + "a" + ")" * 61


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is no regular expression: missing"),
        ("[", "is no regular expression: unterminated"),
        ("a{3,2}", "is no regular expression: min repeat"),
        ("a" * 1001, "has 1001 characters, of at most 1000"),
        (NESTED, "has more than 60 groups within groups"),
        ("(" * 999, "has more than 60 groups within groups"),
        *[(pattern, "matches the empty text") for pattern in ("", "a*", "^", r"\b", "(?:a|b?)", "(?:)", "^$", "a{0}")],
        *[
            (pattern, "matches no text: its conditions exclude one another")
            for pattern in (r"\b\B", r"(?:\b\B|\B\b){2}")
        ],
        (r"(a)\1", "uses a back-reference, which a search without backtracking does not have"),
        ("(?P<a>x)(?P=a)", "uses a back-reference"),
        ("(a)?(?(1)b|c)", "uses a conditional group"),
        *[
            (pattern, "uses look-ahead or look-behind")
            for pattern in ("a(?=b)", "a(?!b)", "(?<=b)a", "(?<!b)a", "a(?!)")
        ],
        ("(?>a|ab)c", "uses an atomic group"),
        ("a++b", "uses a possessive repeat"),
        ("a$b", "has '\\$' or '\\\\Z' before its end"),
        (r"(?:a\Z)+b", "before its end"),
        ("(?:(?:(?:(?:a?){1000}){1000}){1000}){1000}b", "have 2001001001002 parts .*, of at most 1000"),
        ("(?:a{65535}){65535}", "parts with their repeats written out, of at most 1000"),
        ("(?:(?:a*){1000}){1000}", "parts with their repeats written out, of at most 1000"),
        ("a?" * 120 + "x", "have 50[0-9]{2} pairs of parts that may follow one another, of at most 5000"),
    ],
)
def test_what_cannot_be_searched_for_is_refused_by_name(pattern: str, why: str) -> None:
    with pytest.raises(RequestError, match=f"stop_regex: .*{why}") as caught:
        compiled((), (pattern,))
    assert caught.value.field == "stop_regex"
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("pattern", ["a^b", r"[^\s\S]a", r"a\b\Bb"])
def test_a_pattern_that_can_never_match_holds_nothing_back_for_long(pattern: str) -> None:
    out, found = feed_all(search_of(pattern), "ab \na.")
    assert ("".join(out), found) == ("ab \na.", None)
    assert "".join(out[:2]) in ("a", "ab")


def test_the_patterns_of_a_request_have_one_budget() -> None:
    patterns = ["a{1,200}a{1,60}[bc]"] * 16
    compiled((), patterns[:3])
    with pytest.raises(RequestError, match="the patterns of a request have 1052 parts"):
        compiled((), patterns)
    with pytest.raises(RequestError, match="have 4001 characters, of at most 4000"):
        compiled((), ["[abcdefgh]" * 100] * 4 + ["a"])


def random_pattern(draw: random.Random, depth: int) -> str:
    if not depth:
        return draw.choice(["a", "b?", "[a-f]", r"\b", "c*", ""])
    repeats = ["", "", "?", "+", "{9}", "{2,40}", "{0,9}", "{3,}"]
    inner = [random_pattern(draw, draw.randrange(depth)) + draw.choice(["", "|"]) for _ in range(draw.randint(1, 6))]
    return f"({draw.choice(['', '?:', '?i:'])}{''.join(inner)}){draw.choice(repeats)}"


def test_the_size_is_bounded_before_anything_is_built() -> None:
    """Counted work: no pattern makes more positions and edges than the limits say, refused or not."""
    draw = random.Random(0)
    sizes = []
    for _ in range(600):
        reader = PatternReader()
        with contextlib.suppress(RequestError):
            reader.read(random_pattern(draw, 3) + "x")
            sizes.append(len(reader.edges))
        assert len(reader.class_of) <= MOST_PARTS + 1 and len(reader.edges) <= MOST_EDGES
    assert 100 < len(sizes) < 500 and max(sizes) > MOST_EDGES / 2


def test_optional_copies_are_nested_so_edges_grow_with_the_pattern_and_not_its_square() -> None:
    reader = PatternReader()
    reader.read("a{1,400}b")
    assert len(reader.class_of) == 402
    assert len(reader.edges) == 1 + 399 + 400  # in, along the copies, and from each to the end


CHARACTERS = [*map(chr, range(256)), *"ŁłſKΑαΣςσЯя٣५漢字\u2003\u2028🦙_ǅ"]


@pytest.mark.parametrize(
    "pattern",
    [
        *[
            r"\d",
            r"\D",
            r"\w",
            r"\W",
            r"\s",
            r"\S",
            ".",
            "(?s:.)",
            "a",
            "[^a]",
            "[a-fx-z]",
            r"[^\d\s-]",
            r"[\W_]",
            "[]a]",
        ],
        *[
            "(?i)k",
            "(?i)[a-fX]",
            "(?i)[^k]",
            "(?i)я",
            "(?a)\\w",
            "(?a)[^\\d]",
            "(?ai)k",
            "(?i)σ",
            r"(?i:[\w])",
            "[^\n]",
        ],
        *[
            "(?i:k)",
            "(?-i:k)",
            "(?i)(?-i:k)",
            "(?x) a # b",
            r"\x41",
            r"\u0041",
            r"\N{DIGIT ONE}",
            r"[\b]",
            "(?i)ſ",
            "(?i)s",
        ],
    ],
)
def test_a_class_has_the_characters_that_python_finds(pattern: str) -> None:
    reader = PatternReader()
    reader.read(pattern)
    table = ClassTable(list(reader.classes))
    found = [char for char in CHARACTERS if table.of(char)[0]]
    assert found == [char for char in CHARACTERS if re.fullmatch(pattern, char)]


def test_flags_hold_where_python_has_them() -> None:
    assert search_of("(?i)end").feed("an End")[1] == "(?i)end"
    assert search_of("e(?i:n)d").feed("an eNd")[1] is not None
    assert search_of("e(?i:n)d").feed("an End")[1] is None
    assert search_of("(?m)^#").feed("a\n#")[1] is not None
    assert search_of("^#").feed("a\n#")[1] is None
    assert search_of(r"(?a)é\b").feed("xé.")[1] is None
    assert search_of(r"(?a)é\b").feed("xée")[1] is not None
