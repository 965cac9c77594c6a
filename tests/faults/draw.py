"""Draws faults at random from the package's own code: candidates for `planted/drawn.toml`.

    python tests/faults/draw.py --seed 1 --count 40

Each is one change of one expression: a comparison is flipped or loses its equality, an integer is one more, `and`
becomes `or`, a `not` goes, `min` becomes `max`, or the last term of a sum goes. The same seed draws the same places of
the same tree. What is drawn may change nothing that can be observed: such a change is listed under `equivalent`, with
the reason, and is no fault.
"""

import argparse
import ast
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "overlap_spec"
LEFT_OUT = ("data/", "ray/", "__main__.py", "version.py")
FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "in": "not in", "not in": "in"}
FLIPPED |= {"is": "is not", "is not": "is"}
OTHER = {"min": "max", "max": "min", "and": "or", "or": "and"}
SKIPPED = (ast.JoinedStr, ast.Raise, ast.Assert, ast.AnnAssign)  # words, internal checks, and types


@dataclass(frozen=True)
class Edit:
    """Characters of a file that are replaced."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Module:
    """A file, and where its lines begin."""

    text: str
    starts: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "Module":
        """Counts characters: the columns of a syntax tree are bytes, so other files than ASCII are left out."""
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return cls(text, tuple(starts))

    def span(self, node: ast.expr) -> tuple[int, int]:
        """Where an expression begins and ends."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def edits(self) -> Iterator[Edit]:
        """Every change of every expression, in the order of the tree."""
        for node in _expressions(ast.parse(self.text)):
            match node:
                case ast.Compare(left=left, comparators=[right]):
                    yield from self._between(left, right, FLIPPED)
                case ast.BoolOp(values=[left, right]):
                    yield from self._between(left, right, OTHER)
                case ast.UnaryOp(op=ast.Not(), operand=operand):
                    yield Edit(self.span(node)[0], self.span(operand)[0], "")
                case ast.Constant(value=int(value)) if not isinstance(value, bool):
                    yield Edit(*self.span(node), str(value + 1))
                case ast.Call(func=ast.Name(id="min" | "max" as name) as called):
                    yield Edit(*self.span(called), OTHER[name])
                case ast.BinOp(left=left, op=ast.Add() | ast.Sub()):
                    yield Edit(self.span(left)[1], self.span(node)[1], "")

    def _between(self, left: ast.expr, right: ast.expr, words: dict[str, str]) -> Iterator[Edit]:
        """A change of the operator between two expressions."""
        start, end = self.span(left)[1], self.span(right)[0]
        found = re.fullmatch(r"(\)*\s*)([<>=!]+|[a-z]+(?: [a-z]+)?)(\s*\(*)", self.text[start:end])
        if found is not None and found[2] in words:
            yield Edit(start + found.start(2), start + found.end(2), words[found[2]])

    def lines(self, edit: Edit) -> tuple[str, str]:
        """The lines that an edit changes, before and after, with as many above as name one place of the file."""
        first = max(line for line, start in enumerate(self.starts) if start <= edit.start)
        last = min(line for line, start in enumerate(self.starts) if start >= edit.end)
        while first and self.text.count(self.text[self.starts[first] : self.starts[last]]) > 1:
            first -= 1
        start, end = self.starts[first], self.starts[last]
        return self.text[start:end], self.text[start : edit.start] + edit.text + self.text[edit.end : end]


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Every expression that decides something; no default of a parameter and no decorator."""
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "defaults", "kw_defaults"):
            continue
        for child in field if isinstance(field, list) else [field]:
            if isinstance(child, ast.AST) and not isinstance(child, SKIPPED):
                if isinstance(child, ast.expr):
                    yield child
                yield from _expressions(child)


def drawn(seed: int, count: int, room: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, lines before and lines after of `count` faults in a directory below the package."""
    places = []
    for path in sorted((PACKAGE / room).rglob("*.py")):
        text = path.read_text()
        if text.isascii() and not path.relative_to(PACKAGE).as_posix().startswith(LEFT_OUT):
            module = Module.of(text)
            places += [(path, module, edit) for edit in module.edits()]
    for path, module, edit in random.Random(seed).sample(places, count):
        yield (path.relative_to(ROOT).as_posix(), *module.lines(edit))


def main() -> None:
    """Print them as entries without tests and reasons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--room", default="", help="directory below the package; default: all")
    given = parser.parse_args()
    for path, before, after in drawn(given.seed, given.count, given.room):
        print(f"[[fault]]\npath = {json.dumps(path)}\nbefore = {json.dumps(before)}\nafter = {json.dumps(after)}\n")


if __name__ == "__main__":
    main()
