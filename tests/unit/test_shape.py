"""`.ci/shape.py` on a tree made up for it: what it counts, and what it leaves out."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import shape
from source_tree import Tree, circles

FILES = {
    "__init__.py": "",
    "messages/__init__.py": "from overlap_spec.messages.ring import Plan\n",
    "messages/ring.py": "class Plan:\n    audit = False\n",
    "worker/__init__.py": "",
    "worker/loop.py": "from overlap_spec.messages import Plan\nfrom overlap_spec.features.audit.worker import replay\n",
    "worker/rows.py": '"""Rows of an audit."""\n\n# an audit\nrows = "grammar"\n',
    "worker/startup/warm.py": "from overlap_spec.worker import loop\n",
    "features/__init__.py": "",
    "features/audit/worker.py": "from overlap_spec.messages import Plan\nfrom overlap_spec.worker.rows import rows\n",
    "features/grammar/worker.py": "import overlap_spec.worker.loop\n",
}


def written(root: Path, files: Mapping[str, str]) -> Tree:
    for name, text in files.items():
        path = root / "overlap_spec" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Tree(root)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return written(tmp_path, FILES)


@pytest.fixture(scope="module")
def own() -> Tree:
    return Tree(shape.KEPT.parents[1])


def test_imports_are_of_the_file_that_defines_a_name(tree: Tree) -> None:
    assert tree.imports["worker/loop.py"] == {"messages/ring.py", "features/audit/worker.py"}
    assert tree.imports["worker/startup/warm.py"] == {"worker/loop.py"}


def test_the_engine_is_its_rooms_without_features(tree: Tree) -> None:
    own = ["messages/ring.py", "worker/__init__.py", "worker/loop.py", "worker/rows.py"]
    assert shape.engine(tree) == [*own, "worker/startup/warm.py"]
    assert shape.counted(tree, None)["engine files"] == own


def test_a_feature_is_named_in_code_and_strings_only(tree: Tree) -> None:
    assert shape.that_name(tree, "audit") == ["messages/ring.py", "worker/loop.py"]
    assert shape.that_name(tree, "grammar") == ["worker/rows.py"]


def test_imports_of_features_are_found_and_the_registry_is_none(tree: Tree) -> None:
    assert shape.features_imported(tree) == ["worker/loop.py -> features/audit/worker.py"]
    asks = {"worker/loop.py": "from overlap_spec import features\n\ndef serve():\n    return features.modules()\n"}
    assert shape.features_imported(written(tree.root, asks)) == []
    late = {"worker/loop.py": "def serve():\n    from overlap_spec.features.grammar import worker\n"}
    assert shape.features_imported(written(tree.root, late)) == ["worker/loop.py -> features/grammar/worker.py"]


def test_an_init_that_passes_names_on_is_no_importer(tree: Tree) -> None:
    assert shape.one_importer(tree) == ["features/audit/worker.py", "worker/rows.py"]


def test_circles_are_found_wherever_a_file_imports(tree: Tree) -> None:
    assert circles(tree.imports) == []
    back = {"worker/rows.py": "def late():\n    from overlap_spec.worker.loop import turn\n"}
    assert circles(written(tree.root, back).imports) == [
        ["features/audit/worker.py", "worker/loop.py", "worker/rows.py"]
    ]


def test_circles_of_a_graph() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a"}}
    assert circles(graph) == [["d", "e"], ["a", "b", "c"]]


def test_a_worse_number_fails_and_a_better_one_is_kept(
    tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "shape.json"
    kept.write_text(json.dumps({"engine files": 3, "import circles": 2, shape.WAY: 7}))
    monkeypatch.setattr(shape, "KEPT", kept)
    monkeypatch.setattr("sys.argv", ["shape.py", "--root", str(tree.root), "--update"])
    assert shape.main() == 1
    assert capsys.readouterr().err == "worse: engine files: 4, at most 3 (`--list` prints them)\n"
    found = json.loads(kept.read_text())
    assert (found["engine files"], found["import circles"], found[shape.WAY]) == (3, 0, 7)
    monkeypatch.setattr("sys.argv", ["shape.py", "--root", str(tree.root), "--update", "--allow", "engine files"])
    assert shape.main() == 0 and json.loads(kept.read_text())["engine files"] == 4


PATTERNS = (*shape.ENGINE, *shape.STARTUP, *(pattern for _, pattern in sorted(shape.OTHER_SENSE)), *shape.DECIDE_WIDTHS)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_names_files_of_the_tree(own: Tree, pattern: str) -> None:
    """A file or room that moves must not leave a pattern behind that counts nothing."""
    assert any(shape.matches(name, [pattern]) for name in own.files), pattern


def test_what_is_counted_by_name_is_a_feature_that_is_there_or_dissolved(own: Tree) -> None:
    folders = {shape.feature_of(name) for name in own.files}
    dissolved = {"mixed batches", "a draft's lag"}
    names = {"log-probs": "log_probs", "n-grams": "ngram"}
    assert {names.get(name, name) for name in shape.WORDS.keys() - dissolved} <= folders


def test_growth_is_told_by_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that leaves the number as it is is not listed, and small changes are one line."""
    monkeypatch.setattr(shape, "KEPT", tmp_path / ".ci" / "shape.json")
    shape.KEPT.parent.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    for subject, numbers in (
        ("first", {"lines": 1000}),
        ("ranks", {"lines": 1450}),
        ("files", {"lines": 1450, "files": 3}),
        ("small", {"lines": 1440}),
        ("smaller", {"lines": 1435}),
    ):
        shape.KEPT.write_text(json.dumps(numbers))
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", subject], check=True)
    found = [re.sub(r"  [0-9a-f]{7,} ", " ", line).split() for line in shape.since("lines")]
    assert found[:2] == [["+1,000", "first"], ["+450", "ranks"]]
    assert [each[0] for each in found[2:]] == ["-15", "1,435"]
