"""The source of a result is computed: git's own hashes, commits from git or a manifest, code without its prose."""

import json
import subprocess
from pathlib import Path

import pytest

from overlap_spec.runtime.source import MANIFEST, UNKNOWN, bare_code, code_hash, git_hash, source_of, write_manifest


def git(top: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=top, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with the two packages, one commit, and names that sort differently as files and as directories."""
    top = tmp_path / "tree"
    for name in ("overlap_spec/worker/loop.py", "overlap_spec/worker.py", "overlap_spec/worker-x.txt", "tests/t.py"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(f'"""{name}"""\nA = 1  # one\n')
    (top / "kernels/overlap_spec_kernels").mkdir(parents=True)
    (top / "kernels/overlap_spec_kernels/op.cu").write_bytes(b"\x00\xff")
    (top / "benchmarks").mkdir()
    (top / "benchmarks/run.py").write_text("B = 2\n")
    (top / "benchmarks/run.py").chmod(0o755)
    git(top, "init", "-q")
    git(top, "add", ".")
    git(top, "commit", "-qm", "all")
    return top


def places(top: Path) -> dict[str, Path]:
    return {name: top / name for name in ("overlap_spec", "kernels/overlap_spec_kernels", "benchmarks/run.py")}


def head(top: Path) -> str:
    return git(top, "rev-parse", "--short=12", "HEAD")


def test_hashes_are_gits(tree: Path) -> None:
    (tree / "overlap_spec/__pycache__").mkdir()
    (tree / "overlap_spec/__pycache__/a.pyc").write_bytes(b"x")
    for path in ("overlap_spec", "kernels", "benchmarks", "benchmarks/run.py", "overlap_spec/worker"):
        assert git_hash(tree / path) == git(tree, "rev-parse", f"HEAD:{path}"), path


def test_a_folder_without_sources_is_no_part_of_a_tree(tree: Path) -> None:
    """A package that has moved leaves its compiled files behind."""
    before = git_hash(tree)
    (tree / "moved" / "__pycache__").mkdir(parents=True)
    (tree / "moved" / "__pycache__" / "x.pyc").write_bytes(b"")
    assert git_hash(tree) == before


def test_the_commit_is_that_of_an_equal_tree(tree: Path) -> None:
    assert source_of(places(tree), tree).commit == head(tree)
    (tree / "README.md").write_text("not a part of what runs\n")
    assert source_of(places(tree), tree).commit == head(tree)


@pytest.mark.parametrize("path", ["overlap_spec/worker.py", "overlap_spec/new.py", "benchmarks/run.py"])
def test_a_changed_or_new_file_makes_the_commit_uncertain(tree: Path, path: str) -> None:
    (tree / path).write_text("A = 3\n")
    assert source_of(places(tree), tree).commit == head(tree) + "+"


def test_a_manifest_stands_for_git_while_the_trees_are_equal(tree: Path, tmp_path: Path) -> None:
    commit = write_manifest(tree)
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", tree, copy], check=True)
    subprocess.run(["rm", "-rf", copy / ".git"], check=True)
    assert commit == head(tree) == source_of(places(copy), copy).commit
    (copy / "overlap_spec/worker.py").write_text("A = 3\n")
    assert source_of(places(copy), copy).commit == commit + "+"
    (copy / MANIFEST).unlink()
    source = source_of(places(copy), copy)
    assert source.commit == UNKNOWN
    assert source.trees["overlap_spec"] == git_hash(copy / "overlap_spec")


def test_a_manifest_helps_where_git_has_another_commit(tree: Path) -> None:
    commit = write_manifest(tree)
    (tree / "overlap_spec/worker.py").write_text("A = 3\n")
    git(tree, "commit", "-qam", "another")
    (tree / "overlap_spec/worker.py").write_text('"""overlap_spec/worker.py"""\nA = 1  # one\n')
    assert source_of(places(tree), tree).commit == commit


def test_no_manifest_of_a_changed_tree(tree: Path) -> None:
    (tree / "tests/t.py").write_text("A = 3\n")
    with pytest.raises(RuntimeError, match="commit first"):
        write_manifest(tree)
    assert not (tree / MANIFEST).exists()


def test_a_manifest_holds_packages_tests_and_scripts(tree: Path) -> None:
    write_manifest(tree)
    trees = json.loads((tree / MANIFEST).read_text())["trees"]
    assert set(trees) == {"overlap_spec", "kernels/overlap_spec_kernels", "tests", "benchmarks/run.py"}


PROSE = '''"""Module."""
# a comment

def f(x: int) -> str:  # another
    """One line
    and more."""
    return f"#{x}" + "# no comment"
'''
BARE = '''def f(x: int) -> str:
    return f"#{x}" + "# no comment"'''


def test_prose_is_no_code() -> None:
    assert bare_code(PROSE) == BARE
    assert bare_code(BARE) == BARE
    assert bare_code('class A:\n    """Doc."""\n    text = """not a doc"""\n') == 'class A:\n    text = """not a doc"""'


def test_only_code_changes_the_hash_of_code(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(PROSE)
    before = code_hash(tmp_path)
    file.write_text(PROSE.replace("Module.", "A module.").replace("another", "one more"))
    (tmp_path / "README.md").write_text("prose\n")
    assert code_hash(tmp_path) == before
    file.write_text(PROSE.replace("x: int", "x: float"))
    assert code_hash(tmp_path) != before
    file.rename(tmp_path / "b.py")
    assert code_hash(tmp_path) != before
