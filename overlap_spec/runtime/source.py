"""Identifies the source code that a result was measured with, computed from the files that run.

`describe_source` hashes the packages that run as git hashes a tree, so a result can be compared with a commit:

    git rev-parse COMMIT:overlap_spec COMMIT:kernels/overlap_spec_kernels

The commit is git's HEAD or the manifest's, whichever has equal trees. If neither has, "+" follows it; without git and
manifest it is `UNKNOWN`. The manifest is a file that names the commit, for a machine that has the files but no git.
It is written where there is one:

    python -m overlap_spec.runtime.source

Each part of the code also has a hash without comments, docstrings and blank lines, so that a change of prose does not
make a result old.
"""

import ast
import functools
import hashlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

UNKNOWN = "unknown"
MANIFEST = ".source.json"
PACKAGES = ("overlap_spec", "kernels/overlap_spec_kernels")  # paths in the repository
ROOMS = ("entrypoints", "features", "frontend", "models", "sampling", "scheduler", "speculative", "worker")
PARTS = (*(f"overlap_spec/{name}" for name in ROOMS), "kernels/overlap_spec_kernels")  # of the code, each with a hash
COMMIT_DIGITS = 12
_NOT_SOURCE = ("__pycache__", ".DS_Store")
# Python's tokenizer takes 4 s for the packages. A string of f"" has no quotes of its own kind inside.
STRING_OR_COMMENT = re.compile(
    r"""(?P<string>\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|\#[^\n]*""",
    re.DOTALL,
)
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # what can hold a definition


@dataclass(frozen=True)
class Source:
    """The files that run. `commit`: a commit with equal trees; with "+" they differ. `trees`: git's SHA-1 by path."""

    commit: str
    trees: Mapping[str, str]
    code: Mapping[str, str]  # part -> hash of its code

    def describe(self) -> dict[str, Any]:
        """The fields of a report."""
        return {"commit": self.commit, "source": {"trees": dict(self.trees), "code": dict(self.code)}}


def describe_source(more: Iterable[str] = ()) -> Source:
    """Hash the imported packages, and `more` paths beside them (tests, a script)."""
    return source_of(package_places() | {name: root() / name for name in more}, root())


def source_of(places: Mapping[str, Path], top: Path) -> Source:
    """`places`: path in the repository -> path on this machine. `top`: the directory of git or a manifest."""
    trees = {name: git_hash(place) for name, place in places.items() if place.exists()}
    recorded = [found for found in (_from_git(top, trees), _from_manifest(top)) if found is not None]
    code = {part: found for part in PARTS if (found := _code_of(part, places)) is not None}
    return Source(_commit(trees, recorded), trees, code)


def root() -> Path:
    """The directory that holds the package: the repository's root, or site-packages."""
    return _package("overlap_spec").parent


def package_places() -> dict[str, Path]:
    """Where each of `PACKAGES` was or would be imported from."""
    return {name: _package(name.rpartition("/")[2]) for name in PACKAGES}


def git_hash(path: Path) -> str:
    """The SHA-1 that git gives a file or a directory, compiled files left out."""
    if path.is_dir():
        entries = sorted(
            (child.name.encode() + (b"/" if child.is_dir() else b""), child)
            for child in path.iterdir()
            if _is_source(child)
        )
        lines = (
            _mode(child) + b" " + child.name.encode() + b"\0" + bytes.fromhex(git_hash(child)) for _, child in entries
        )
        return _git_object(b"tree", b"".join(lines))
    return _git_object(b"blob", path.read_bytes())


def code_hash(path: Path) -> str:
    """A hash of the code under `path`: Python files without comments, docstrings and blank lines; no Markdown."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files = [file for file in files if file.suffix != ".md"]
    for file in files:
        if all(_is_source(part) for part in (file, *file.relative_to(path).parents)):
            text = bare_code(file.read_text()).encode() if file.suffix == ".py" else file.read_bytes()
            digest.update(f"{file.relative_to(path).as_posix()} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:COMMIT_DIGITS]


@functools.cache  # a file is part of several places
def bare_code(text: str) -> str:
    """Python source without comments, docstrings, blank lines and spaces at line ends."""
    lines = STRING_OR_COMMENT.sub(lambda found: found["string"] or "", text).splitlines(keepends=True)
    for start, end in reversed(_docstrings(ast.parse(text))):
        _cut(lines, start, end)
    return "\n".join(bare for line in "".join(lines).splitlines() if (bare := line.rstrip()))


def write_manifest(top: Path) -> str:
    """Write MANIFEST from git. Returns the commit. Raises: RuntimeError outside git, or if the trees have changes."""
    source = source_of({name: top / name for name in measured_paths(top)}, top)
    if source.commit == UNKNOWN or source.commit.endswith("+"):
        raise RuntimeError(f"{top} has no clean checkout (commit {source.commit}): commit first")
    manifest = {"commit": source.commit, "trees": dict(source.trees)}
    (top / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return source.commit


def measured_paths(top: Path) -> tuple[str, ...]:
    """What a figure can depend on: the packages, the tests, and all of benchmarks/ but its results."""
    inside = sorted((top / "benchmarks").glob("*"))
    return (*PACKAGES, "tests", *(f"benchmarks/{path.name}" for path in inside if _is_measured(path)))


def git_output(top: Path, *arguments: str) -> str:
    """The output of a git command; empty if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=top, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    return Path(spec.origin).parent


def _commit(trees: Mapping[str, str], recorded: Sequence[Mapping[str, Any]]) -> str:
    """The first recorded commit with these trees; the first one and "+" if none has them."""
    for known in recorded:
        if all(known["trees"].get(name) == found for name, found in trees.items()):
            return str(known["commit"])
    return f"{recorded[0]['commit']}+" if recorded else UNKNOWN


def _from_git(top: Path, names: Iterable[str]) -> dict[str, Any] | None:
    """HEAD and its hashes; None if git does not track the packages."""
    commit = git_output(top, "rev-parse", f"--short={COMMIT_DIGITS}", "HEAD")
    trees = {name: git_output(top, "rev-parse", "--verify", "--quiet", f"HEAD:{name}") for name in names}
    return {"commit": commit, "trees": trees} if commit and trees.get(PACKAGES[0]) else None


def _from_manifest(top: Path) -> dict[str, Any] | None:
    path = top / MANIFEST
    if not path.is_file():
        return None
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


def _code_of(part: str, places: Mapping[str, Path]) -> str | None:
    for name, place in places.items():
        if part == name or part.startswith(f"{name}/"):
            path = place / part.removeprefix(name).lstrip("/")
            return code_hash(path) if path.exists() else None
    return None


def _docstrings(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Begin and end of every docstring, in the order of the text: (line from 1, column)."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        left += (each for each in ast.iter_child_nodes(node) if isinstance(each, STATEMENTS))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                end = (first.end_lineno or first.lineno, first.end_col_offset or 0)
                found.append(((first.lineno, first.col_offset), end))
    return sorted(found)


def _cut(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> None:
    """Remove the text between two places, except line breaks."""
    (first, left), (last, right) = start, end
    if first == last:
        lines[first - 1] = lines[first - 1][:left] + lines[first - 1][right:]
        return
    lines[first - 1] = lines[first - 1][:left] + "\n"
    lines[last - 1] = lines[last - 1][right:]
    lines[first : last - 1] = ["\n"] * (last - 1 - first)


def _git_object(kind: bytes, content: bytes) -> str:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _mode(path: Path) -> bytes:
    if path.is_dir():
        return b"40000"
    return b"100755" if path.stat().st_mode & 0o100 else b"100644"


def _is_measured(path: Path) -> bool:
    return path.name != "results" and _is_source(path)


def _is_source(path: Path) -> bool:
    """Git knows no empty directory: one that holds nothing else than compiled files is left out with them."""
    if path.name in _NOT_SOURCE or path.suffix == ".pyc":
        return False
    return not path.is_dir() or any(_is_source(child) for child in path.iterdir())


if __name__ == "__main__":
    try:
        print(f"{MANIFEST}: commit {write_manifest(root())}")
    except RuntimeError as error:
        sys.exit(f"overlap_spec.runtime.source: {error}")
