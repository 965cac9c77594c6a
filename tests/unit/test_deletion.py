"""Which failures of a copy without a folder are those of the folder's own tests (`tests/deletion/run.py`)."""

import ast
from functools import cache
from pathlib import Path

import pytest
from deletion.run import ENGINE, PACKAGE, ROOT, TESTS, asks_for, drawn, folders, gone_with

REFUSED = "E   RequestError: grammar: is of the feature 'grammar', which is not part of this installation"
BY_TEST = """tests/unit/x.py:5: in <module>
    from overlap_spec.features.grammar.compiler import compile
E   ModuleNotFoundError: No module named 'overlap_spec.features.grammar'"""
BY_ENGINE = """overlap_spec/worker/loop.py:5: in <module>
    from overlap_spec.features.grammar.messages import DropGrammar
E   ModuleNotFoundError: No module named 'overlap_spec.features.grammar'"""


@pytest.mark.parametrize(
    ("text", "is_own"), [(REFUSED, True), (BY_TEST, True), (BY_ENGINE, False), ("assert 1", False)]
)
def test_a_test_of_the_folder_names_it(text: str, is_own: bool) -> None:
    assert asks_for(["features/grammar"], text) == is_own
    assert not asks_for(["features/audit"], text)


def test_what_needs_a_folder_goes_with_it() -> None:
    assert gone_with("features/grammar") == ["features/grammar"]
    assert gone_with("entrypoints/cli") == ["entrypoints/cli", "entrypoints/top", "entrypoints/ray"]
    assert len(gone_with("entrypoints/http")) > 10


def test_folders_are_drawn_by_the_tree() -> None:
    assert len(set(drawn(2))) == 2
    assert drawn(2) == drawn(2)
    assert set(drawn(99)) == set(folders())


def test_what_is_checked_is_there() -> None:
    """A path that is not there would end the tests before the first one."""
    assert all((ROOT / place).exists() for place in TESTS)
    assert all((PACKAGE / place).exists() for place in ENGINE)


@cache
def imported(module: Path) -> tuple[str, ...]:
    """Names that are imported with a file of tests, as soon as it is."""
    found: list[str] = []
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{each.name}" for each in node.names]
    return tuple(found)


def support(module: Path) -> set[Path]:
    """Modules of `tests/support` that come with a file of tests."""
    found, waiting = set[Path](), [module]
    while waiting:
        names = [each for name in imported(waiting.pop()) for each in (name, name.rpartition(".")[0])]
        paths = {ROOT / "tests" / f"{name.replace('.', '/')}.py" for name in names if name.startswith("support.")}
        new = {path for path in paths if path.exists()} - found
        found |= new
        waiting += new
    return found


@cache
def features_of(module: Path) -> set[str]:
    names = (name.split(".") for name in imported(module))
    return {parts[2] for parts in names if parts[:2] == ["overlap_spec", "features"] and len(parts) > 3}


ABOUT_FEATURES = {"test_launches.py", "test_scheduler_width_cells.py"}  # they name those by what they play


def test_no_test_of_the_engine_needs_a_feature_that_it_does_not_name() -> None:
    """It could not be imported without that feature, and would count as one of its tests."""
    places = [ROOT / place for place in TESTS]
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))]
    engines = [file for file in files if "features" not in file.parts and file.name not in ABOUT_FEATURES]
    needed = {file.name: {name for each in support(file) for name in features_of(each)} for file in engines}
    assert len(engines) > 150
    assert {file.name: found for file in engines if (found := needed[file.name] - features_of(file))} == {}
