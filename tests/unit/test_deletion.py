"""Which failures of a copy without a folder are those of the folder's own tests (`tests/deletion/run.py`)."""

import ast
import json
from functools import cache
from pathlib import Path

import pytest
from deletion.reach import Reach
from deletion.run import (
    ENGINE,
    PACKAGE,
    PARTS,
    ROOT,
    TESTS,
    Outcome,
    Part,
    asks_for,
    drawn,
    folders,
    gone_with,
    imports_of,
    name_in_report,
    parts_left,
    write_summary,
)

REFUSED = "E   RequestError: grammar: is of the feature 'grammar', which is not part of this installation"
BY_TEST = """tests/unit/x.py:5: in <module>
    from overlap_spec.features.grammar.compiler import compile
E   ModuleNotFoundError: No module named 'overlap_spec.features.grammar'"""
BY_ENGINE = """overlap_spec/worker/loop.py:5: in <module>
    from overlap_spec.features.grammar import DropGrammar
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


@pytest.mark.parametrize(
    ("line", "is_import"),
    [
        ("from overlap_spec.features.grammar.compiler import Checked", True),
        ("def late():\n    from overlap_spec.features import audit, grammar", True),
        ("import overlap_spec.features.grammar", True),
        ("from overlap_spec.features import grammars", False),
        ("from overlap_spec.features.audit import grammar", False),
        ("NAMES = ('overlap_spec.features.grammar',)", False),
    ],
)
def test_imports_of_what_is_gone_are_found(line: str, is_import: bool, tmp_path: Path) -> None:
    (tmp_path / "overlap_spec" / "worker").mkdir(parents=True)
    (tmp_path / "overlap_spec" / "engine.py").touch()
    (tmp_path / "overlap_spec" / "worker" / "loop.py").write_text(line)
    assert bool(imports_of(["features/ngram", "features/grammar"], tmp_path / "overlap_spec")) == is_import


@pytest.mark.slow
def test_the_engine_itself_imports_no_entry_point() -> None:
    assert imports_of([name for name in folders() if name.startswith("entrypoints/")], PACKAGE) == []


def test_names_of_tests_are_those_of_a_report() -> None:
    """A test with a separator in its parameter, and a file that could not be imported."""
    assert name_in_report("tests/unit/test_x.py::test_y[a::b/c.py]") == "tests.unit.test_x::test_y[a::b/c.py]"
    assert name_in_report("tests/unit/test_x.py") == "tests.unit.test_x"


def test_calls_share_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part names the tree that it was found in, and those that are there are not looked at again."""
    code = {"commit": "c", "source": {"trees": {"overlap_spec": "t"}}}  # of this tree: 4 s, test_source.py has them
    monkeypatch.setattr("deletion.run.described", lambda: code)
    file = tmp_path / "matrix.json"
    tests, types = Part({"passed": 7}), Part(problems=["a line of mypy"])
    write_summary(file, [Outcome("features/audit", ["features/audit"], {"tests": tests})])
    code["commit"], code["source"] = "d", {"trees": {"overlap_spec": "another"}}
    others = [Outcome(name, gone_with(name), {"types": types}) for name in ("features/audit", "entrypoints/ui")]
    write_summary(file, others)
    told = json.loads(file.read_text())
    audit = told["folders"]["features/audit"]
    assert [*told["folders"]] == ["features/audit", "entrypoints/ui"]
    assert audit["tests"]["figures"] == {"passed": 7}
    assert audit["types"]["problems"] == ["a line of mypy"]
    assert [told["trees"][audit[part]["tree"]]["commit"] for part in ("tests", "types")] == ["c", "d"]
    assert parts_left(file, "entrypoints/ui", PARTS) == ["answers", "tests"]
    assert parts_left(None, "entrypoints/ui", PARTS) == [*PARTS]
    write_summary(file, [Outcome("features/audit", ["features/audit"], {"tests": tests})])
    assert len(json.loads(file.read_text())["trees"]) == 1, "a tree of which nothing is left is dropped"


def test_what_a_file_of_tests_reaches(tmp_path: Path) -> None:
    """Through imports of any place, through tests' own modules, and through what is started by its name."""
    lines = {
        "overlap_spec/__init__.py": "",
        "overlap_spec/engine.py": "ACTOR = 'overlap_spec.worker.entry:serve'",
        "overlap_spec/worker/entry.py": "def serve():\n    from overlap_spec import features",
        "overlap_spec/features/__init__.py": "",
        "overlap_spec/models.py": "",
        "tests/support/ring.py": "from overlap_spec import Engine",
        "tests/unit/test_ring.py": "import support.ring",
        "tests/unit/test_models.py": "from overlap_spec.models import load",
        "tests/unit/test_start.py": "run([python, '-m', 'overlap_spec'])",
        "tests/unit/test_name.py": "assert name == 'overlap_spec'",
    }
    for name, text in lines.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    reaching = ["tests/unit/test_ring.py", "tests/unit/test_start.py"]
    assert Reach(tmp_path).files(["tests/unit"], "features") == (reaching, 2)


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


@pytest.mark.slow
def test_no_test_of_the_engine_needs_a_feature_that_it_does_not_name() -> None:
    """It could not be imported without that feature, and would count as one of its tests."""
    places = [ROOT / place for place in TESTS]
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("test_*.py"))]
    engines = [file for file in files if "features" not in file.parts and file.name not in ABOUT_FEATURES]
    needed = {file.name: {name for each in support(file) for name in features_of(each)} for file in engines}
    assert len(engines) > 150
    assert {file.name: found for file in engines if (found := needed[file.name] - features_of(file))} == {}
