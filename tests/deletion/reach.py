"""Which files of tests can reach `features/` or `entrypoints/`: the others run the same code without a folder of it.

A file reaches what it imports, anywhere in it, what that imports, and so on; a module that a string names counts as
imported, as processes are started so. The tables in `features/__init__.py` and `entrypoints/__init__.py` reach all of
their folders. `conftest.py`, which comes with every test, is left out: it asks neither table.
"""

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

PLACES = (("overlap_spec", "."), ("overlap_spec_kernels", "kernels"), ("support", "tests"))  # package, where it stands
NAMED = re.compile(r"\b(?:overlap_spec|overlap_spec_kernels|support)(?:\.\w+)+")
STARTED = "overlap_spec"  # it imports its names when they are used; `python -m` starts it


class Reach:
    """The modules of a tree, and what each reaches."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._paths = {
            _module(path, root / place): path
            for package, place in PLACES
            for path in (root / place / package).rglob("*.py")
        }

    def files(self, places: Iterable[str], room: str) -> tuple[list[str], int]:
        """The files of tests below `places` that reach `overlap_spec.<room>`, and how many do not."""
        found = [file for place in places for file in self._tests(place)]
        reaching = [file for file in found if f"overlap_spec.{room}" in self.reached(file)]
        return [str(file.relative_to(self._root)) for file in reaching], len(found) - len(reaching)

    def reached(self, file: Path) -> set[str]:
        """Names of the modules that are imported with a file, and of their packages."""
        found, waiting = set[str](), [file]
        while waiting:
            new = self._imported(waiting.pop()) - found
            found |= new
            waiting += [self._paths[name] for name in new if name != STARTED]
        return found

    def _tests(self, place: str) -> Sequence[Path]:
        path = self._root / place
        return [path] if path.is_file() else sorted(path.rglob("test_*.py"))

    @functools.cache  # noqa: B019 - a tree is looked at once
    def _imported(self, file: Path) -> set[str]:
        names = {name for node in ast.walk(ast.parse(file.read_text())) for name in _names(node)}
        parts = (name.split(".") for name in names)
        prefixes = {".".join(each[:length]) for each in parts for length in range(1, len(each) + 1)}
        return prefixes & self._paths.keys()


def _module(path: Path, place: Path) -> str:
    parts = path.relative_to(place).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _names(node: ast.AST) -> Iterator[str]:
    """Modules that a node may import. A public name of the package stands for the engine, which has all of them."""
    if isinstance(node, ast.Import):
        yield from (each.name for each in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield from (f"{node.module}.{each.name}" for each in node.names)
        if node.module == STARTED:
            yield "overlap_spec.engine"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from NAMED.findall(node.value)
    elif isinstance(node, ast.List | ast.Tuple | ast.Call):
        words = [getattr(each, "value", None) for each in (node.args if isinstance(node, ast.Call) else node.elts)]
        if ("-m", STARTED) in itertools.pairwise(words):
            yield from ("overlap_spec.engine", "overlap_spec.entrypoints.cli")
