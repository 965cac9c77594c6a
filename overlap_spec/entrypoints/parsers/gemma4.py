"""Calls of Gemma 4, whose strings are between tokens of their own and whose keys are bare.

<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:[1,2],where:{dry:true}}<tool_call|>

Several calls follow each other. The arguments become JSON while they come, which `JsonArguments` checks; a bare value
comes when it is complete. One that is no JSON is a string (`None` and `True` are Python's words), a key may be
between the tokens too. Nothing in a string is escaped, so none can have `<|"|>` in it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from overlap_spec.entrypoints.parsers.call_rules import CallableTool, alternatives, grammar, is_name, sequence
from overlap_spec.entrypoints.parsers.json_call import (
    MOST_DIGITS,
    NUMBER,
    SPACE,
    WORDS as JSON_WORDS,
    JsonArguments,
    Status,
)
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, ToolNames
from overlap_spec.entrypoints.parsers.tagged import (
    IDLE_KEYS,
    MOST_NAME,
    escaped,
    is_text,
    properties_of,
    quoted,
    text_patterns,
)
from overlap_spec.entrypoints.parsers.xml_calls import WORDS, XmlParser
from overlap_spec.errors import RequestError
from overlap_spec.messages import Grammar

OPEN, CLOSE, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
MARKERS = (OPEN, CLOSE, QUOTE)
CALL = "call:"
THOUGHT, THOUGHT_END = "<|channel>thought", "<channel|>"
CHANNELS = ("<|channel>", THOUGHT_END)  # the special tokens of them
NO_KEY, NO_SCALAR = ':{}[],"<\n', '{["<'
CLOSING = {"{": "}", "[": "]"}


class BareObject:
    """Writes an object of Gemma's as JSON. `is_in_string`: a string has begun and has not ended."""

    def __init__(self, call: JsonArguments) -> None:
        self.is_in_string = False
        self._call = call
        self._open: list[str] = []  # closing brackets, the innermost last
        self._is_key = False  # a key follows, or the end of an empty object
        self._bare = ""  # so far: a key or a value
        self._num_space = 0

    def quote(self) -> Status:
        """A string begins or ends."""
        if self._bare:
            return Status.BROKEN
        self.is_in_string, self._is_key = not self.is_in_string, False
        return self._put('"')

    def push(self, char: str) -> Status:
        """Read a character that is of no marker."""
        if self.is_in_string:
            return self._put(quoted(char)[1:-1])
        if char in SPACE and not self._bare:
            self._num_space += 1
            return Status.OPEN if self._num_space <= MOST_SPACE else Status.BROKEN
        return self._key(char) if self._is_key else self._value(char)

    def _key(self, char: str) -> Status:
        if char == ":" and self._bare:
            key, self._bare, self._is_key = self._bare.rstrip(SPACE), "", False
            return self._put(f"{quoted(key)}: ")
        if char == "}" and not self._bare:
            return self._close(char)
        return self._more(char, NO_KEY, MOST_NAME)

    def _value(self, char: str) -> Status:
        if char in CLOSING and not self._bare:
            self._open.append(CLOSING[char])
            self._is_key = char == "{"
            return self._put(char)
        if char == ":" and not self._bare:  # after a key between tokens
            return self._put(": ")
        if char not in ",]}":
            return self._more(char, NO_SCALAR, MOST_DIGITS)
        if self._put(self._scalar()) is Status.BROKEN:
            return Status.BROKEN
        if char != ",":
            return self._close(char)
        self._is_key = self._open[-1] == "}"
        return self._put(", ")

    def _more(self, char: str, forbidden: str, most: int) -> Status:
        if char in forbidden or len(self._bare) >= most:
            return Status.BROKEN
        self._bare += char
        return Status.OPEN

    def _scalar(self) -> str:
        """The bare value that ends here, as JSON; "" if there is none."""
        text, self._bare = self._bare.rstrip(SPACE), ""
        word = WORDS.get(text, text)
        is_json = not word or word in JSON_WORDS or NUMBER.fullmatch(word) is not None
        return word if is_json else quoted(text)

    def _close(self, char: str) -> Status:
        self._is_key = False
        status = self._put(char)
        if status is not Status.BROKEN:
            self._open.pop()
        return status

    def _put(self, text: str) -> Status:
        status = Status.OPEN
        for char in text:
            status = self._call.push(char)
            if status is Status.BROKEN:
                break
        return status


class Gemma4Parser(XmlParser):
    """A `CallParser`. Tools that a request has not are called too: its client can tell the model."""

    def __init__(self, writer: CallWriter, tools: ToolNames) -> None:
        super().__init__(writer, tools)
        self._object = BareObject(JsonArguments(writer, ""))

    def _expect_text(self) -> None:
        self._expect(self._text, OPEN)

    def _text(self, char: str) -> None:
        text, marker = self._markers.push(char)
        self._writer.text(text)
        if marker:
            self._read, self._name = [marker], ""
            self._expect(self._before_name, CALL)

    def _before_name(self, char: str) -> None:
        if self._tag(char):
            self._expect(self._in_name)

    def _in_name(self, char: str) -> None:
        if char == "{" and is_name(self._name):
            self._object = BareObject(JsonArguments(self._writer, self._name))
            self._expect(self._in_object, QUOTE)
            self._in_object(char)
        elif is_name(self._name + char):
            self._read.append(char)
            self._name += char
        else:
            self._give_up(char)

    def _in_object(self, char: str) -> None:
        text, marker = self._markers.push(char)
        status = Status.OPEN
        for place, each in enumerate(text):
            status = self._object.push(each)
            if status is Status.BROKEN:
                self._give_up(text[place:] + self._markers.flush())
                return
        if marker and self._object.quote() is Status.BROKEN:
            self._give_up(marker)
        elif status is Status.DONE:
            self._read = []
            self._expect(self._after, CLOSE)
        else:
            self._read.append(char)


def gemma4_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """Each call as in the module's picture."""
    rules = [sequence("call", "", many), alternatives("call", len(tools))]
    for index, tool in enumerate(tools):
        values = ValueRules(tool, f"{index}_")
        whole = values.of({**tool.schema, "type": "object"})
        rules += [f'call_{index}: marker_0 "{CALL}{tool.name}" {whole} marker_1', *values.rules]
    return grammar(rules, *MARKERS)


class ValueRules:
    """Rules for values of a tool's schema as Gemma writes them: arguments in the order of the schema.

    What they cannot follow is left open. Raises: RequestError if the tool is strict, or a key cannot be written.
    """

    def __init__(self, tool: CallableTool, prefix: str) -> None:
        self.rules: list[str] = []
        self._tool = tool
        self._prefix = prefix
        self._num_rules = 0
        self._referred: dict[str, str] = {}  # rules of references, which may refer to themselves

    def of(self, schema: Any) -> str:
        """The name of a rule for values of this schema, a part of the tool's."""
        known: Mapping[str, Any] = schema if isinstance(schema, dict) else {}
        reference = known.get("$ref")
        if isinstance(reference, str) and reference in self._referred:
            return self._referred[reference]
        rule = self._new("v")
        if isinstance(reference, str):
            self._referred[reference] = rule
            found: Any = self._tool.schema
            for part in reference.removeprefix("#").split("/")[1:]:
                found = found.get(part) if isinstance(found, dict) else None
            known = found if isinstance(found, dict) and "$ref" not in found else {}
        self.rules.append(f"{rule}: {self._body(known)}")
        return rule

    def _body(self, schema: Mapping[str, Any]) -> str:
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices and is_text(schema, self._tool.schema):
            return self._text(dict(schema))
        if choices:
            return " | ".join(map(self._literal, choices))
        for key in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(key), list) and parts:
                return " | ".join(map(self.of, parts))
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            return " | ".join(self.of({**schema, "type": each}) for each in kind)
        if kind == "string":
            return self._text(dict(schema))
        if kind in ("integer", "number", "boolean", "null"):
            return self._tool.value(dict(schema))
        if kind == "array":
            return self._list(schema)
        properties = properties_of(schema)
        required = [name for name in schema.get("required") or () if isinstance(name, str)]
        if kind == "object" and (properties or required):
            self._refuse(schema, "properties", "required", "additionalProperties", "$defs", "definitions")
            return self._members({**properties, **{name: {} for name in required if name not in properties}}, required)
        if kind == "object" and schema.get("additionalProperties") is False:
            return '"{" "}"'
        self._refuse(schema, "additionalProperties", "properties", "$defs", "definitions")
        return self._any(str(kind))

    def _list(self, schema: Mapping[str, Any]) -> str:
        self._refuse(schema, "items", "minItems", "maxItems")
        item, least, most = self.of(schema.get("items")), schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" ({item} ("," {item}){more}){"" if least else "?"} "]"'

    def _members(self, members: Mapping[str, Any], required: Sequence[str]) -> str:
        """From member i on, `first` has none before it, `more` has one."""
        first, more = self._new("first"), self._new("more")
        for index, (name, schema) in enumerate(members.items()):
            if not name or any(each in name for each in NO_KEY + SPACE) or len(name) > MOST_NAME:
                raise RequestError(
                    "tools", f"tool {self._tool.name}: no argument of its calls can have the name {name[:64]!r}"
                )
            member, may_miss = f"{json.dumps(name + ':')} {self.of(schema)}", name not in required
            self.rules += [
                f"{first}_{index}: {member} {more}_{index + 1}" + (f" | {first}_{index + 1}" if may_miss else ""),
                f'{more}_{index}: ("," {member}){"?" if may_miss else ""} {more}_{index + 1}',
            ]
        self.rules += [f'{rule}_{len(members)}: ""' for rule in (first, more)]
        return f'"{{" {first}_0 "}}"'

    def _text(self, schema: dict[str, Any]) -> str:
        """As of `tagged.py`: it ends with the first token of strings, whether that is special or is spelled."""
        patterns, rule, end = text_patterns(schema, self._tool), self._new("").upper(), escaped(QUOTE)
        text, closed = (" & ".join(f"/(?:{each}){tail}/" for each in patterns) for tail in ("", end))
        self.rules += [
            f"TEXT{rule}: {text} & ~/(?s:.*){end}(?s:.*)/",
            f"CLOSED{rule}: {closed} & ~/(?s:.*){end}(?s:.+)/",
        ]
        return f"marker_2 (TEXT{rule} marker_2 | CLOSED{rule})"

    def _literal(self, value: Any) -> str:
        """Rules for one value."""
        if isinstance(value, str):
            return self._text({"const": value})
        if isinstance(value, dict):
            members = ' "," '.join(f"{json.dumps(key + ':')} {self._literal(each)}" for key, each in value.items())
            return f'"{{" {members} "}}"'
        if isinstance(value, list):
            members = ' "," '.join(map(self._literal, value))
            return f'"[" {members} "]"'
        return json.dumps(json.dumps(value))

    def _any(self, kind: str) -> str:
        """Any value, or any object."""
        value, members, key = self._new("any"), self._new("members"), self._new("").upper()
        self.rules += [
            f'{value}: {members} | "[" ({value} ("," {value})*)? "]" | {self._text({})} | json{key.lower()}',
            f"json{key.lower()}: {self._tool.value({'type': ['number', 'boolean', 'null']})}",
            f'{members}: "{{" (KEY{key} ":" {value} ("," KEY{key} ":" {value})*)? "}}"',
            f"KEY{key}: /[A-Za-z0-9_-]{{1,64}}/",
        ]
        return members if kind == "object" else value

    def _refuse(self, schema: Mapping[str, Any], *followed: str) -> None:
        """What is left open cannot be promised."""
        left = [key for key in schema if key not in (*IDLE_KEYS, *followed)]
        if left and self._tool.is_strict:
            raise RequestError("tools", f"tool {self._tool.name}: its calls cannot be made to follow {left[0]}")

    def _new(self, kind: str) -> str:
        self._num_rules += 1
        return f"{kind}_{self._prefix}{self._num_rules}"
