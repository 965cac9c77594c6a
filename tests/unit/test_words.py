"""The words of code and documents: the field's, so that a reader of other engines knows them.

A private word fails in comments, docstrings, identifiers and Markdown. `RIGHT` names the places where such a word is
the field's own. `ALLOWED` names the files that still have private words; it only shrinks.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Private word -> the field's. Whole words; `_` and a change of case end a word of an identifier.
WORDS = {
    "roster": "waiting queue, running batch",
    "score": "logit, log_prob",
    "scores": "logits, log_probs",
    "tap": "aux hidden state",
    "taps": "aux hidden states",
    "seat": "batch slot, chunk slot",
    "seats": "batch slots, chunk slots",
    "seating": "batch slots",
    "stands": "is, is accepted",
    "stood": "was, was accepted",
    "falls": "is rejected, decreases",
    "worth": "log_prob, value",
    "foresee": "draft without a model",
    "foresees": "is_self_drafting",
    "foreseer": "self-drafting method",
    "outlook": "lookahead",
    "awake": "polling, running",
    "asleep": "waiting, idle",
    "patience": "spin policy, timeout",
    "moment": "event, time",
    "nobody": "no request, no process, no caller",
    "somebody": "another request, another process",
    "anybody": "any caller",
    "everybody": "every request",
    "whoever": "the caller, its owner",
    "says": "states, reports, names",
    "storm": "random schedules",
    "storms": "random schedules",
    "twin": "reference",
    "twins": "references",
    "lanes": "threads, thread pool",
    "resting": "skipping lookups, dummy slots",
    "rested": "skipped its lookup",
    "credit": "lookup budget",
    "income": "lookup budget",
    "rehearsal": "warm-up",
}
ROUTERS = ("kernels/overlap_spec_kernels/experts/", "overlap_spec/models/layers/experts.py")
ROUTERS += ("overlap_spec/models/targets/",)
SCORES = ("kernels/overlap_spec_kernels/attention/", "overlap_spec/models/layers/attention.py")
RIGHT = {  # word -> where it is right, as paths begin
    "lanes": ("kernels/", "docs/correctness.md", "docs/history.md"),  # of a warp, and of a vector register
    "score": (*SCORES, *ROUTERS),  # of attention, before the softmax; of experts
    "scores": (*SCORES, *ROUTERS, "overlap_spec/hub/weight_files.py"),  # and of a unigram tokenizer
}
ALLOWED = ROOT / "tests" / "data" / "private_words.txt"


def texts() -> list[Path]:
    folders = (ROOT / "overlap_spec", ROOT / "kernels", ROOT / "docs")
    found = [path for folder in folders for kind in ("*.py", "*.md", "*.cu", "*.cuh") for path in folder.rglob(kind)]
    return sorted([*found, ROOT / "README.md"])


def words_of(text: str) -> set[str]:
    """Its words in lower case; `lastSeat`, `last_seat` and `seat's` have the word seat."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return {word.lower() for word in re.findall(r"[A-Za-z]+", split)}


def prose_of(path: Path) -> Iterator[str]:
    """What of a file is checked: of Python comments, docstrings and identifiers, of other files everything."""
    text = path.read_text()
    lowered = text.lower()
    if not any(word in lowered for word in WORDS) or not words_of(text) & WORDS.keys():
        return  # to take code apart takes long
    if path.suffix != ".py":
        yield text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.NAME):
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def private_words(path: Path) -> set[str]:
    return {word for text in prose_of(path) for word in words_of(text)} & WORDS.keys()


def wrong_words(path: Path) -> set[str]:
    return {word for word in private_words(path) if not name_of(path).startswith(RIGHT.get(word, ()))}


def allowed() -> set[str]:
    return {line for line in ALLOWED.read_text().splitlines() if line and not line.startswith("#")}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_files_use_the_words_of_the_field() -> None:
    """All files in one test: a test for each would take longer to start than to look."""
    private = {name_of(path): {word: WORDS[word] for word in wrong_words(path)} for path in texts()}
    found = {name for name, words in private.items() if words}
    assert allowed() <= found, f"clean: take them out of {name_of(ALLOWED)}: {allowed() - found}"
    assert found <= allowed(), {name: private[name] for name in found - allowed()}


def test_the_lists_name_files_that_exist() -> None:
    names = {name_of(path) for path in texts()}
    assert allowed() <= names
    assert all(any(name.startswith(place) for name in names) for places in RIGHT.values() for place in places)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1  # a seat's row", {"seat"}),
        ("def last_seat(): ...", {"seat"}),
        ("class SeatRows: ...", {"seat"}),
        ('def f():\n    """Nobody asks."""', {"nobody"}),
        ('raise ValueError("nobody")', set()),
        ("momentum, standstill = 0, 1", set()),
    ],
)
def test_what_is_found(tmp_path: Path, text: str, words: set[str]) -> None:
    path = tmp_path / "x.py"
    path.write_text(text)
    assert private_words(path) == words
    note = tmp_path / "x.md"
    note.write_text("It says: **Nobody** waits.")
    assert private_words(note) == {"says", "nobody"}
