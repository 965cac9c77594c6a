"""The packages' source as other scripts count it: files, imports, circles, the words of the code."""

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGES = {"overlap_spec": Path(), "overlap_spec_kernels": Path("kernels")}  # name -> the folder that it stands in
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
CODE = {".py", ".cu", ".cuh", ".h", ".cpp", ".js", ".css", ".html"}


class Tree:
    """The source files of both packages, and which imports which.

    A file's name is its place below `overlap_spec/`, or its place in the repository for the other package.

    paths: of all source files, whatever their language
    files: paths of Python files, by name
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = sorted(path for path in self._tracked() if path.suffix in CODE)
        self.files = {self._name(path): path for path in self.paths if path.suffix == ".py"}
        self._names = {self._module(path): name for name, path in self.files.items()}
        self._words: dict[str, set[str]] = {}  # of the files that have been asked for

    @functools.cached_property
    def trees(self) -> dict[str, ast.Module]:
        """Of Python files, by name."""
        return {name: ast.parse(path.read_text()) for name, path in self.files.items()}

    @functools.cached_property
    def imports(self) -> dict[str, set[str]]:
        """The files that each imports, anywhere in it; a name that a package passes on is that of its own file."""
        return {name: set(self._imported(name)) - {name} for name in self.files}

    def code_words(self, name: str) -> set[str]:
        """The names in a file's code and in its strings. Comments and docstrings are left out."""
        if name not in self._words:
            self._words[name] = self._read_words(name)
        return self._words[name]

    def _read_words(self, name: str) -> set[str]:
        found = set[str]()
        documented = docstring_lines(self.trees[name])
        for token in tokenize.generate_tokens(io.StringIO(self.files[name].read_text()).readline):
            if token.type == tokenize.NAME or (token.type in STRINGS and token.start[0] not in documented):
                found.update(re.findall(r"\w+", token.string))
        return found

    def _tracked(self) -> Iterator[Path]:
        """Files of the packages that git tracks, or all of them in a copy without git."""
        folders = [(place / name).as_posix() for name, place in PACKAGES.items()]
        if (self.root / ".git").exists():
            listed = subprocess.run(
                ["git", "-C", self.root, "ls-files", "-z", *folders], check=True, capture_output=True, text=True
            )
            found = (self.root / name for name in listed.stdout.split("\0") if name)
            yield from (path for path in found if path.exists())
        else:
            yield from (path for folder in folders for path in (self.root / folder).rglob("*") if path.is_file())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix().removeprefix("overlap_spec/")

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        parts = parts[1:] if parts[0] == "kernels" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def _imported(self, name: str) -> Iterator[str]:
        for node in ast.walk(self.trees[name]):
            if isinstance(node, ast.Import):
                yield from (self._names[alias.name] for alias in node.names if alias.name in self._names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield from filter(None, (self._source(node.module, alias.name) for alias in node.names))

    def _source(self, module: str, imported: str) -> str | None:
        """The file that defines what `from module import imported` names."""
        if f"{module}.{imported}" in self._names:
            return self._names[f"{module}.{imported}"]
        name = self._names.get(module)
        if name is None or not name.endswith("__init__.py"):
            return name
        for node in self.trees[name].body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module != module:
                for alias in node.names:
                    if imported == (alias.asname or alias.name):
                        return self._source(node.module, alias.name)
        return name


def lines_of(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def docstring_lines(tree: ast.Module) -> set[int]:
    """The lines on which docstrings begin."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(first.lineno)
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            start = stack.index(node)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found
