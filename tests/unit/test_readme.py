"""What the READMEs say is so: tables come from their result files, flags exist, links lead somewhere."""

import argparse
import importlib
import re
from pathlib import Path

import pytest

from overlap_spec.bench.tables import MARKED, fill
from overlap_spec.cli import COMMANDS
from overlap_spec.cli.flags import flag_name
from overlap_spec.cli.parser import Parser
from overlap_spec.config.fields import config_fields

ROOT = Path(__file__).parent.parent.parent
READMES = (ROOT / "README.md", ROOT / "kernels/overlap_spec_kernels/README.md")
NOT_OURS = {"--group", "--dist", "--judge"}  # flags of pip and pytest, in command 2, and of scripts in benchmarks/


def known_flags() -> set[str]:
    flags: set[str] = set()
    for command in COMMANDS.values():
        parser: argparse.ArgumentParser = Parser()
        importlib.import_module(command.module).add_arguments(parser)
        flags |= set(parser._option_string_actions)
    return flags


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_tables_are_those_of_their_result_files(readme: Path) -> None:
    text = readme.read_text()
    assert MARKED.search(text), "a README without a figure from a file"
    assert fill(text, ROOT) == text, "run: python -m overlap_spec.bench.tables README.md kernels/.../README.md"


def test_every_result_says_where_it_comes_from() -> None:
    for match in MARKED.finditer("".join(readme.read_text() for readme in READMES)):
        assert re.search(r"; commit [0-9a-f]{12}( with uncommitted changes)?; .*; `", match[0]), match[2]


def test_flags_exist() -> None:
    prose = MARKED.sub("", READMES[0].read_text())
    prose = prose.replace("--speculative-*", "")  # all of them
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+[a-z0-9]", prose))
    assert named - NOT_OURS <= known_flags() | {"--help"}, named - NOT_OURS - known_flags()


def test_every_flag_of_the_engine_is_named() -> None:
    text = READMES[0].read_text()
    missing = [flag_name(field.name) for field in config_fields() if f"`{flag_name(field.name)}`" not in text]
    assert not missing


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_links_lead_somewhere(readme: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", readme.read_text()):
        if "://" not in target:
            assert (readme.parent / target).exists(), target
