"""Calls whose arguments stand between tags (GLM-4.5 to 4.7): a string is written as it is, other values as JSON.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Rome</arg_value>
<arg_key>days</arg_key>
<arg_value>[1, 2]</arg_value>
</tool_call>

White space around tags is left out (GLM-4.7 writes none). Whether `5` is a string or a number is told by the tool's
schema alone, so the parser and the grammar of forced calls read it in the same way (`is_text`). Where the schema leaves
it open, what is JSON is JSON. A string is given out while it grows, other values when they are complete.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overlap_spec.entrypoints.parsers.call_rules import CallableTool, alternatives, grammar, is_name, sequence
from overlap_spec.entrypoints.parsers.json_call import SPACE, JsonObject, Status
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, Markers, ToolNames
from overlap_spec.errors import RequestError
from overlap_spec.messages import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
MARKERS = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)
MOST_NAME = 256  # characters of a tool's name, and of an argument's
State = Callable[[str], None]  # reads a character
MOST_DEPTH = 16  # references of a schema that are followed


def is_text(schema: Any, root: Mapping[str, Any], depth: int = MOST_DEPTH) -> bool:
    """Whether a schema, a part of `root`, allows strings alone."""
    if not isinstance(schema, dict) or not depth:
        return False
    if isinstance(reference := schema.get("$ref"), str):
        return is_text(_referred(reference, root), root, depth - 1)
    if "const" in schema:
        return isinstance(schema["const"], str)
    if isinstance(choices := schema.get("enum"), list) and choices:
        return all(isinstance(choice, str) for choice in choices)
    if (kind := schema.get("type")) is not None:
        return kind in ("string", ["string"])
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            return all(is_text(part, root, depth - 1) for part in parts)
    parts = schema.get("allOf")
    return isinstance(parts, list) and any(is_text(part, root, depth - 1) for part in parts)


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schemas of arguments by name."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


class TaggedValue:
    """Writes the value of one argument, which is a string if `is_text`. `words`: those that mean words of JSON."""

    def __init__(self, writer: CallWriter, is_text: bool, words: Mapping[str, str] | None = None) -> None:
        self._writer = writer
        self._words = words or {}
        self._is_text = is_text
        self._text: list[str] = []
        self._checked, self._status = JsonObject(), Status.OPEN  # of an object whose only value this is
        for char in '{"":':
            self._checked.push(char)
        if is_text:
            writer.arguments('"')

    @property
    def is_in_string(self) -> bool:
        """It is JSON so far, and a string of it has begun: a tag is a part of that."""
        return not self._is_text and self._status is Status.OPEN and self._checked.is_in_string

    def push(self, text: str) -> None:
        """Read more of it."""
        if self._is_text:
            self._writer.arguments(quoted(text)[1:-1])
            return
        self._text.append(text)
        for char in text:
            if self._status is Status.OPEN:
                self._status = self._checked.push(char)
            else:
                self._status = Status.BROKEN

    def end(self) -> None:
        """It is complete."""
        if self._is_text:
            self._writer.arguments('"')
            return
        text = "".join(self._text)
        if (word := self._words.get(text.strip(SPACE))) is not None:
            self._writer.arguments(word)
            return
        is_json = self._status is Status.OPEN and self._checked.push("}") is Status.DONE
        alone = is_json and len(self._checked.members) == 1
        self._writer.arguments(text.strip(SPACE) if alone else quoted(text))


def quoted(text: str) -> str:
    """A string of JSON."""
    return json.dumps(text, ensure_ascii=False)


class TaggedParser:
    """A `CallParser`. Tools that a request has not are called too: its client can tell the model."""

    def __init__(self, writer: CallWriter, tools: ToolNames) -> None:
        self._writer = writer
        self._tools = tools
        self._state: State = self._text
        self._markers = Markers(OPEN)
        self._read: list[str] = []  # of the call: what becomes content if it is none
        self._num_space = 0
        self._name = self._key = ""
        self._keys: set[str] = set()  # of arguments whose values have begun
        self._value = TaggedValue(writer, False)

    def push(self, char: str) -> None:
        self._state(char)

    def end(self, is_cut: bool) -> None:
        if self._state == self._text:
            self._writer.text(self._markers.flush())
        else:
            self._writer.break_off("".join(self._read), is_cut)

    def _text(self, char: str) -> None:
        text, marker = self._markers.push(char)
        self._writer.text(text)
        if marker:
            self._read, self._name, self._keys, self._num_space = [marker], "", set(), 0
            self._state = self._before_name

    def _before_name(self, char: str) -> None:
        """The name of the tool, white space before it, and what ends it."""
        if char in SPACE and not self._name:
            self._space(char)
        elif char not in SPACE and char != "<":
            self._read.append(char)
            self._name += char
            if len(self._name) > MOST_NAME:
                self._give_up("")
        elif is_name(self._name):
            self._expect(self._between, KEY, CLOSE)
            self._between(char)
        else:
            self._give_up(char)

    def _between(self, char: str) -> None:
        """Before an argument, or the end of the call."""
        marker = self._tag(char)
        if marker == KEY:
            self._key = ""
            self._expect(self._in_key, KEY_END)
        elif marker:
            self._begin()
            self._writer.arguments("}" if self._keys else "{}")
            self._writer.finish()
            self._read = []
            self._expect(self._text, OPEN)

    def _in_key(self, char: str) -> None:
        self._read.append(char)
        text, marker = self._markers.push(char)
        self._key += text
        if len(self._key) > MOST_NAME:
            self._give_up("")
        elif marker and (key := self._key.strip(SPACE)) and key not in self._keys:
            self._key = key
            self._expect(self._before_value, VALUE)
        elif marker:
            self._give_up("")

    def _before_value(self, char: str) -> None:
        if not self._tag(char):
            return
        self._begin()
        self._writer.arguments(f"{', ' if self._keys else '{'}{quoted(self._key)}: ")
        self._keys.add(self._key)
        schema = self._tools.schemas.get(self._name) or {}
        self._value = TaggedValue(self._writer, is_text(properties_of(schema).get(self._key), schema))
        self._expect(self._in_value, VALUE_END)

    def _in_value(self, char: str) -> None:
        self._read.append(char)
        text, marker = self._markers.push(char)
        if text:
            self._value.push(text)
        if marker and self._value.is_in_string:
            self._value.push(marker)
        elif marker:
            self._value.end()
            self._expect(self._between, KEY, CLOSE)

    def _tag(self, char: str) -> str:
        """Read a character where a marker has to follow, perhaps after white space. Returns it when it is complete."""
        if char in SPACE and not self._markers.held:
            self._space(char)
            return ""
        text, marker = self._markers.push(char)
        if text:
            self._give_up(text + self._markers.flush())
        else:
            self._read.append(char)
        return marker

    def _space(self, char: str) -> None:
        self._read.append(char)
        self._num_space += 1
        if self._num_space > MOST_SPACE:
            self._give_up("")

    def _begin(self) -> None:
        if not self._keys:
            self._writer.begin(self._name)

    def _expect_text(self) -> None:
        self._expect(self._text, OPEN)

    def _expect(self, state: State, *markers: str) -> None:
        self._state, self._markers, self._num_space = state, Markers(*markers), 0

    def _give_up(self, rest: str) -> None:
        """There is no call. `rest` may begin another one; some of it may have been read."""
        read = "".join(self._read)
        held = rest[:-1]
        assert read.endswith(held)
        self._writer.abandon(read[: len(read) - len(held)])
        self._read = []
        self._expect_text()
        for each in rest:
            self._state(each)


IDLE_KEYS = (
    "type",
    "$ref",
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "deprecated",
)  # they allow all text
LENGTHS = ("minLength", "maxLength")
# What a pattern may not have, as nothing but a regular expression of the whole text can follow it.
LOOKS_AROUND = re.compile(r"\(\?(?!:)|\\[1-9bBkpP]|(?<![\\\[])[\^$]")


def tagged_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """Each call as in the module's picture, with line breaks around tags or without."""
    rules = [sequence("call", "\\n", many), alternatives("call", len(tools)), 'gap: "\\n"?']
    for index, tool in enumerate(tools):
        properties, required = properties_of(tool.schema), tool.schema.get("required") or ()
        unknown: dict[str, Any] = {name: {} for name in required if isinstance(name, str) and name not in properties}
        arguments = []
        for place, (name, schema) in enumerate({**properties, **unknown}.items()):
            rule = f"{index}_{place}"
            arguments.append(f"argument_{rule}" + ("" if name in required else "?"))
            tags = f"marker_2 {json.dumps(name)} marker_3 gap marker_4"
            rules += [f"argument_{rule}: {tags} value_{rule} gap", *_value_rules(rule, schema, tool)]
        rules.append(f'call_{index}: marker_0 "{tool.name}" gap {" ".join(arguments)} marker_1')
    return grammar(rules, *MARKERS)


def _value_rules(rule: str, schema: Any, tool: CallableTool) -> list[str]:
    """Rules for `value_`: the value of an argument, and the tag after it.

    Text ends with the first such tag, whether that is a special token or is spelled: only one of the two is an end that
    a tokenizer can write.
    """
    if not is_text(schema, tool.schema):
        known = schema if isinstance(schema, dict) else {}
        return [f"value_{rule}: json_{rule} marker_5", f"json_{rule}: {tool.value(known)}"]
    tag, patterns = escaped(VALUE_END), text_patterns(schema, tool)
    text, closed = (" & ".join(f"/(?:{each}){end}/" for each in patterns) for end in ("", tag))
    return [
        f"value_{rule}: TEXT_{rule} marker_5 | CLOSED_{rule}",
        f"TEXT_{rule}: {text} & ~/(?s:.*){tag}(?s:.*)/",
        f"CLOSED_{rule}: {closed} & ~/(?s:.*){tag}(?s:.+)/",
    ]


def text_patterns(schema: dict[str, Any], tool: CallableTool) -> list[str]:
    """Regular expressions that text of this schema fits, all of them.

    What they cannot follow is left open. Raises: RequestError if the tool is strict.
    """
    while isinstance(reference := schema.get("$ref"), str):
        schema = _referred(reference, tool.schema)
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices:
        return ["|".join(map(escaped, choices))]
    found, left = [], [key for key in schema if key not in (*IDLE_KEYS, *LENGTHS)]
    if any(key in schema for key in LENGTHS):
        found.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
    if isinstance(pattern := schema.get("pattern"), str) and (whole := _whole(pattern)) is not None:
        found.append(whole)
        left.remove("pattern")
    if left and tool.is_strict:
        raise RequestError("tools", f"tool {tool.name}: text in its calls cannot be made to follow {left[0]}")
    return found or ["(?s:.*)"]


def _whole(pattern: str) -> str | None:
    """The regular expression of a text in which this one is found; None if it cannot be told."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    is_one = inner.startswith("(") and inner.endswith(")") and inner.count("(") == 1
    if LOOKS_AROUND.search(inner) or ("|" in inner and (begins or ends) and not is_one):
        return None
    inner = re.sub(r"(?<!\\)/", r"\\/", inner).replace("\n", "\\n")
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def escaped(text: str) -> str:
    """A regular expression of this text, as it is written in Lark."""
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")
