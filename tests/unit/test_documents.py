"""What the documents say is so: generated places are current; commands, flags and links exist."""

import argparse
import ast
import importlib
import re
import shlex
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from documents.age import documents
from documents.figures import at_least, at_most
from documents.fill import BLOCKS, FIGURE, ROOT, fill, generated, prose
from documents.result_tables import MARKED

import overlap_spec
from overlap_spec.config.fields import config_fields
from overlap_spec.entrypoints import cli
from overlap_spec.entrypoints.cli import COMMANDS
from overlap_spec.entrypoints.cli.flags import Parser, flag_name
from overlap_spec.messages import SamplingParams
from overlap_spec.metrics.prometheus import COUNTERS, GAUGES, PREFIX, ServerMetrics

DOCUMENTS = documents(ROOT)
README, DOCS = ROOT / "README.md", ROOT / "docs"
NOT_OURS = {
    "--address",
    "--ages",
    "--cells",
    "--dist",
    "--fuzz-cases",
    "--fuzz-seconds",
    "--group",
    "--head",
    "--help",
    "--judge",
    "--list",
    "--matrix",
    "--part",
    "--parts",
    "--seconds",
    "--since",
    "--target",
    "--work",
}  # flags of pip, of pytest, of Ray, and of scripts in benchmarks/ and tests/
MOST_LINES, MOST_COLUMNS = 150, 120
MOST_FILES = 45  # that a chat request passes

every_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())


def fences(path: Path, *languages: str) -> list[str]:
    """The fenced code of these languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```$", path.read_text(), re.DOTALL | re.MULTILINE)


def commands(path: Path) -> list[list[str]]:
    """The shell commands of a document, as words."""
    lines = "".join(fences(path, "sh", "bash")).replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines]


def known_flags() -> set[str]:
    flags: set[str] = set()
    for command in COMMANDS.values():
        parser: argparse.ArgumentParser = Parser()
        importlib.import_module(command.module).add_arguments(parser)
        flags |= set(parser._option_string_actions)
    return flags


def anchors(path: Path) -> set[str]:
    """What `#..` of a link to this document may be: GitHub's names of its headings."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_is_generated_is_current() -> None:
    stale = [path.relative_to(ROOT).as_posix() for path, text in generated().items() if path.read_text() != text]
    assert not stale, f"run: python benchmarks/write_docs.py, which writes {stale}"


def test_a_stale_figure_is_found() -> None:
    lines = len((ROOT / "examples/05_toy_proposer.py").read_text().splitlines())
    assert fill("has **0**<!-- figure: method-lines --> lines") == f"has **{lines}**<!-- figure: method-lines --> lines"
    with pytest.raises(KeyError, match="no-such"):
        fill("**0**<!-- figure: no-such -->")


@pytest.mark.parametrize(
    ("value", "digits", "most", "least"),
    [(30.31, 0, "31", "30"), (30.0, 0, "30", "30"), (1.071, 2, "1.08", "1.07"), (0.3, 1, "0.3", "0.3")],
)
def test_bounds_are_rounded_away_from_what_was_measured(value: float, digits: int, most: str, least: str) -> None:
    assert (at_most(value, digits), at_least(value, digits)) == (most, least)


@every_document
def test_every_comment_is_a_mark_that_is_filled(path: Path) -> None:
    """A figure whose stars are missing would be left as it is."""
    text = path.read_text()
    assert text.count("<!-- figure: ") == len(FIGURE.findall(text))
    assert text.count("<!--") == text.count("<!-- figure: ") + 2 * len(BLOCKS.findall(text))


def test_every_table_says_where_it_comes_from() -> None:
    tables = [match for path in DOCUMENTS for match in MARKED.finditer(path.read_text())]
    assert len(tables) > 5
    for match in tables:
        assert re.search(r"; commit [0-9a-f]{12}( with uncommitted changes)?; .*; `", match[0]), match[2]


@pytest.mark.parametrize(("name", "most"), [("history.md", MOST_LINES), ("benchmarks.md", 350)])
def test_a_page_is_short(name: str, most: int) -> None:
    assert len((DOCS / name).read_text().splitlines()) <= most


def test_the_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > MOST_COLUMNS] == []


@every_document
def test_lines_are_short(path: Path) -> None:
    """Tables and code have the lines that they need, and so does a link."""
    text = re.sub(r"^```.*?^```$", "", prose(path.read_text()), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in text.splitlines() if len(line) > MOST_COLUMNS and not line.startswith("|")]
    assert [line for line in long if " " in re.sub(r"\]\([^)]*\)|`[^`]*`", "", line[MOST_COLUMNS:])] == []


@every_document
def test_flags_exist(path: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]", prose(path.read_text())))
    assert named - NOT_OURS <= known_flags(), named - NOT_OURS - known_flags()


def test_every_flag_of_the_engine_is_named() -> None:
    text = (DOCS / "flags.md").read_text()
    missing = [flag_name(field.name) for field in config_fields() if f"`{flag_name(field.name)}`" not in text]
    assert not missing


@every_document
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            found = (path.parent / name).resolve() if name else path
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target


@every_document
def test_files_that_are_named_exist(path: Path) -> None:
    for name in re.findall(r"(?<![\w/.-])(?:tests|benchmarks|examples|docs)/[\w./*-]+\w", prose(path.read_text())):
        assert any(ROOT.glob(name)), name


@every_document
def test_a_link_names_the_file_that_it_leads_to(path: Path) -> None:
    for name, target in re.findall(r"\[`([\w/.-]+(?:\.\w+|/))`\]\(([^)#]+)\)", path.read_text()):
        assert f"/{target}".rstrip("/").endswith(f"/{name}".rstrip("/")), (name, target)


@every_document
def test_commands_can_be_given(path: Path) -> None:
    for words in commands(path):
        if re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # a variable for this command
            words = words[1:]
        if words[0] == ".venv/bin/overlap-spec":
            cli._parser(words[1:]).parse_args(words[1:])
        elif words[0] == ".venv/bin/python" and words[1] != "-m":
            assert (ROOT / words[1]).is_file(), words[1]


@every_document
def test_python_code_is_python(path: Path) -> None:
    for code in fences(path, "python"):
        ast.parse(code)


def test_a_request_passes_few_files() -> None:
    text = (DOCS / "architecture.md").read_text()
    section = text.partition("## One request, from socket to socket")[2].partition("\n## ")[0]
    files = set(re.findall(r"\]\(\.\./([^)]+)\)", section))
    assert 40 <= len(files) <= MOST_FILES and all((ROOT / name).is_file() for name in files)
    assert f"{len(files)} in all" in section


def test_every_public_name_is_described() -> None:
    """In the documents and by itself. The types that the fields of SamplingParams hold are public too."""
    text = (DOCS / "operating.md").read_text().partition("## From Python")[2].partition("\n## ")[0]
    names = set(overlap_spec.__all__) - {"__version__"}
    assert {name for name in names if f"`{name}`" not in text} == set()
    assert {name for name in names if not (getattr(overlap_spec, name).__doc__ or "").strip()} == set()
    held = {held for field in get_type_hints(SamplingParams).values() for held in (field, *get_args(field))}
    own = {each.__name__ for each in held if getattr(each, "__module__", "").startswith("overlap_spec")}
    assert own - names == {"Thinking"}, "the frontend makes it of `reasoning`"


def test_every_metric_is_named() -> None:
    text = (DOCS / "operating.md").read_text()
    own = [metric.name.removeprefix(PREFIX) for metric in ServerMetrics().collect() if metric.name.startswith(PREFIX)]
    names = {*own, *(name for name, *_ in GAUGES), *(name for name, *_ in COUNTERS)}
    assert {name for name in names if f"`{name}`" not in text} == set()
