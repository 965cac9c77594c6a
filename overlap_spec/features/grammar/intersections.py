"""Bounds what the intersection of regular expressions in a grammar may cost.

llguidance limits what a token's mask may cost, but for one step of its lexer: the derivative of an intersection. For a
byte it pairs every continuation of one expression with every continuation of the others, so it takes time and memory
that grow as their product, in one piece. Any text may come before such an intersection, so that only the model's output
leads to it. So the product is bounded before a grammar is taken:

    {"allOf": [{"pattern": p}, {"pattern": q}]}     of patterns of JSON schemas that hold for one place
    A: /p/ & /q/                                    of terminals of Lark
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any
from urllib.parse import unquote

MOST_BITS = 16.0  # of the product of the expressions' continuations: some 50 ms of one step
MOST_STEPS = 200_000  # of following schemas to the places where they hold together
MOST_ATOMS = 256  # an expression's continuations for a byte
FORMAT_BITS = 3.0  # of the library's own expressions
ALTERNATIVES = ("anyOf", "oneOf")
LITERAL_REPEATS = re.compile(r"\{\d*,?\d*\}")
ATOM = re.compile(r"\\[pP]\{[^}]*\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^()|*+?^$]", re.DOTALL)
LARK_TOKEN = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*"i?)|(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)|(?P<comment>(?:\#|//)[^\n]*)'
    r"|(?P<name>[!?_]*[A-Za-z][\w-]*)|(?P<other>.)",
    re.DOTALL,
)
DEFINITION = re.compile(r"^[ \t]*[!?]*(_?[A-Za-z][\w-]*)(?:\.-?\d+)?[ \t]*(?:\[[^\]\n]*\]|::\w*)?[ \t]*:", re.MULTILINE)

Node = dict[str, Any]


def check_intersections(rules: str) -> None:
    """Raises: ValueError if expressions in a grammar of llguidance's language are intersected at too high a cost."""
    parts = json.loads(rules)["grammars"] if rules.lstrip().startswith("{") else [{"lark_grammar": rules}]
    for part in parts:
        if part.get("json_schema") is not None:
            _check_schema(part["json_schema"])
        if part.get("lark_grammar") is not None:
            _check_lark(part["lark_grammar"])


def _bits(expression: str) -> float:
    """Of how many continuations the expression has for a byte, at most."""
    atoms = {match.group() for match in ATOM.finditer(LITERAL_REPEATS.sub("", expression))}
    return math.log2(1 + min(len(atoms), MOST_ATOMS))


def _check(bits: float, what: str) -> None:
    if bits > MOST_BITS:
        text = f"the intersection of {what} may cost 2^{bits:.0f} steps for one character, of at most 2^{MOST_BITS:.0f}"
        raise ValueError(f"{text}: use fewer or simpler ones")


# --- JSON schemas ---------------------------------------------------------------------------------------------


def _check_schema(schema: Any) -> None:
    """Follow all places of a JSON value with the sets of schemas that hold there."""
    if sum(bits for _, bits in {each for node in _all_nodes(schema) for each in _expressions(node)}) <= MOST_BITS:
        return  # even if all of them held for one place
    found = _Schemas(schema)
    pending, known = [frozenset({found.add(schema)})], set[frozenset[int]]()
    while pending:
        place = pending.pop()
        if place in known:
            continue
        known.add(place)
        for together in found.closures(place):
            expressions = found.expressions(together)
            if len(expressions) > 1:
                _check(sum(bits for _, bits in expressions), f"{len(expressions)} patterns and formats")
            pending += found.below(together)


def _expressions(node: Node) -> Iterator[tuple[str, float]]:
    """What a string must match by a schema itself, and the bits of that."""
    for name in ("pattern", "format"):
        if isinstance(text := node.get(name), str):
            yield f"{name} {text}", FORMAT_BITS if name == "format" else _bits(text)


class _Schemas:
    """The schemas of one document, numbered."""

    def __init__(self, document: Any) -> None:
        self._document = document
        self._left = MOST_STEPS
        self._nodes: list[Node] = []
        self._numbers: dict[int, int] = {}  # by the address of a node, which `document` keeps
        self._named = {name: node for node in _all_nodes(document) for name in _names(node)}

    def add(self, schema: Any) -> int:
        node = schema if isinstance(schema, dict) else {}
        if id(node) not in self._numbers or not node:
            self._numbers[id(node)] = len(self._nodes)
            self._nodes.append(node)
        return self._numbers[id(node)]

    def expressions(self, together: frozenset[int]) -> set[tuple[str, float]]:
        """What a string must match where these schemas hold."""
        return {each for number in together for each in _expressions(self._nodes[number])}

    def closures(self, place: frozenset[int]) -> Iterator[frozenset[int]]:
        """All that holds together at a place, for each choice of alternatives. Raises: ValueError."""
        pending = [(list(place), frozenset[int]())]
        while pending:
            todo, done = pending.pop()
            self._spend(1 + len(todo) + len(done))
            while todo and todo[-1] in done:
                todo.pop()
            if not todo:
                yield done
                continue
            number = todo.pop()
            node, done = self._nodes[number], done | {number}
            todo += [self.add(each) for each in _list(node.get("allOf"))]
            if isinstance(reference := node.get("$ref"), str):
                todo.append(self.add(self._target(reference)))
            for chosen in product(*(_list(node.get(name)) for name in ALTERNATIVES if node.get(name))):
                self._spend(len(todo))
                pending.append(([*todo, *map(self.add, chosen)], done))

    def _spend(self, num_steps: int) -> None:
        self._left -= num_steps
        if self._left < 0:
            raise ValueError(f"it takes more than {MOST_STEPS} steps to find which of its schemas hold together")

    def below(self, together: frozenset[int]) -> Iterator[frozenset[int]]:
        """The places within a value: its properties and its items."""
        nodes = [self._nodes[number] for number in together]
        names = {name for node in nodes for name in _dict(node.get("properties"))}
        for name in (*names, None):
            self._spend(len(nodes))
            yield self._numbered(each for node in nodes for each in _of_property(node, name))
        length = max((len(_list(node.get(name))) for node in nodes for name in ("prefixItems", "items")), default=0)
        for index in range(length + 1):
            self._spend(len(nodes))
            yield self._numbered(each for node in nodes for each in _of_item(node, index))

    def _numbered(self, schemas: Iterator[Any]) -> frozenset[int]:
        return frozenset(self.add(each) for each in schemas if isinstance(each, dict) and each)

    def _target(self, reference: str) -> Any:
        """The schema that is referred to. Raises: ValueError if it is not in the document."""
        base, _, fragment = reference.partition("#")
        if reference in self._named:
            return self._named[reference]
        node = self._named.get(base) if base else self._document
        for step in unquote(fragment).split("/")[1:]:
            node = _step(node, step.replace("~1", "/").replace("~0", "~"))
        if node is None or (fragment and not fragment.startswith("/")):
            raise ValueError(f"$ref {reference!r} is not found in the schema")
        return node


def _all_nodes(value: Any) -> Iterator[Node]:
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            yield value
            pending += value.values()
        elif isinstance(value, list):
            pending += value


def _names(node: Node) -> Iterator[str]:
    for key, prefix in (("$id", ""), ("id", ""), ("$anchor", "#")):
        if isinstance(name := node.get(key), str):
            yield prefix + name


def _of_property(node: Node, name: str | None) -> Iterator[Any]:
    """Schemas of a property; None: of one without a name here."""
    properties, patterned = _dict(node.get("properties")), _dict(node.get("patternProperties"))
    yield from patterned.values()
    if name in properties:
        yield properties[name]
    else:
        yield node.get("additionalProperties")


def _of_item(node: Node, index: int) -> Iterator[Any]:
    first = _list(node.get("prefixItems")) or _list(node.get("items"))
    yield first[index] if index < len(first) else node.get("items")
    yield node.get("additionalItems")


def _step(node: Any, step: str) -> Any:
    if isinstance(node, dict):
        return node.get(step)
    return node[int(step)] if isinstance(node, list) and step.isdecimal() and int(step) < len(node) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> Node:
    return value if isinstance(value, dict) else {}


# --- Lark -----------------------------------------------------------------------------------------------------


def _check_lark(text: str) -> None:
    """Check its JSON schemas, and every definition that has `&`, with all that it refers to."""
    text = _without_schemas(text)
    if "&" not in text:
        return
    begins = [(match.group(1), match.start(), match.end()) for match in DEFINITION.finditer(text)]
    ends = [start for _, start, _ in begins[1:]] + [len(text)]
    bodies: dict[str, _Body] = {}
    for (name, _, start), end in zip(begins, ends, strict=True):
        bodies.setdefault(name, _Body()).read(text[start:end])
    for name in [name for name, body in bodies.items() if body.num_ands]:
        reached = _reached(name, bodies)
        num_expressions = 1 + sum(bodies[each].num_ands for each in reached)
        atoms = set[str]().union(*(bodies[each].atoms for each in reached))
        bits = num_expressions * math.log2(1 + min(len(atoms), MOST_ATOMS))
        _check(bits, f"{num_expressions} expressions in {name}")


class _Body:
    """What the definitions of a name hold."""

    def __init__(self) -> None:
        self.num_ands = 0
        self.atoms: set[str] = set()
        self.names: set[str] = set()

    def read(self, text: str) -> None:
        """Add the text of a definition."""
        for token in LARK_TOKEN.finditer(text):
            match token.lastgroup:
                case "text":
                    self.atoms.update(token.group()[1:].rpartition('"')[0])
                case "regex":
                    source = LITERAL_REPEATS.sub("", token.group()[1:].rpartition("/")[0])
                    self.atoms.update(match.group() for match in ATOM.finditer(source))
                case "name":
                    self.names.add(token.group().lstrip("!?"))
                case "other":
                    self.num_ands += token.group() == "&"


def _reached(name: str, bodies: dict[str, _Body]) -> set[str]:
    """A terminal, and those that it refers to. Rules are no expressions."""
    pending, reached = [name], set[str]()
    while pending:
        each = pending.pop()
        if each in reached or each not in bodies or (each != name and not each.strip("_")[:1].isupper()):
            continue
        reached.add(each)
        pending += bodies[each].names
    return reached


def _without_schemas(text: str) -> str:
    """The same without the values of `%json`, which are checked as schemas."""
    parts: Sequence[str] = text.split("%json")
    kept, decoder = [parts[0]], json.JSONDecoder()
    for part in parts[1:]:
        stripped = part.lstrip()
        try:
            schema, end = decoder.raw_decode(stripped)
        except ValueError:  # the word is part of a text or a comment, or it is an error that the library names
            kept.append(part)
            continue
        _check_schema(schema)
        kept.append(stripped[end:])
    return " ".join(kept)
