"""Calls as elements (Qwen3-Coder and later): a string is written as it is, other values as JSON or in Python's words.

<tool_call>
<function=weather>
<parameter=city>
Rome
</parameter>
<parameter=days>
[1, 2]
</parameter>
</function>
</tool_call>

One line feed at either end of a value is not of the value. As with `tagged.py`'s calls, the tool's schema alone tells
strings from other values. Qwen3-Coder often leaves out `<tool_call>`: `<function=` begins a call, too.
"""

import json
from collections.abc import Sequence
from typing import Any

from overlap_spec.entrypoints.parsers.call_rules import CallableTool, alternatives, grammar, is_name, sequence
from overlap_spec.entrypoints.parsers.json_call import SPACE
from overlap_spec.entrypoints.parsers.pieces import CallWriter, ToolNames
from overlap_spec.entrypoints.parsers.tagged import (
    CLOSE,
    MOST_NAME,
    OPEN,
    TaggedParser,
    TaggedValue,
    escaped,
    is_text,
    properties_of,
    quoted,
    text_patterns,
)
from overlap_spec.errors import RequestError
from overlap_spec.messages import Grammar

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKERS = (OPEN, CLOSE)
NO_KEY = "<>\n"
WORDS = {"True": "true", "False": "false", "None": "null"}


class ElementValue(TaggedValue):
    """Writes the value of one argument, without a line feed at its ends."""

    def __init__(self, writer: CallWriter, is_text: bool) -> None:
        super().__init__(writer, is_text, WORDS)
        self._has_begun = False
        self._held = ""

    def push(self, text: str) -> None:
        if not self._has_begun:
            self._has_begun, text = True, text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        super().push(text.removesuffix("\n"))


class XmlParser(TaggedParser):
    """A `CallParser`. Tools that a request has not are called too: its client can tell the model."""

    def __init__(self, writer: CallWriter, tools: ToolNames) -> None:
        super().__init__(writer, tools)
        self._expect_text()

    def _expect_text(self) -> None:
        self._expect(self._text, OPEN, FUNCTION)

    def _text(self, char: str) -> None:
        text, marker = self._markers.push(char)
        self._writer.text(text)
        if marker:
            self._read, self._name, self._keys = [marker], "", set()
            if marker == OPEN:
                self._expect(self._before_function, FUNCTION)
            else:
                self._expect(self._in_name)

    def _before_function(self, char: str) -> None:
        if self._tag(char):
            self._expect(self._in_name)

    def _in_name(self, char: str) -> None:
        if char == ">" and is_name(self._name):
            self._read.append(char)
            self._expect(self._between, PARAMETER, FUNCTION_END)
        elif is_name(self._name + char):
            self._read.append(char)
            self._name += char
        else:
            self._give_up(char)

    def _between(self, char: str) -> None:
        """Before an argument, or the end of the call."""
        marker = self._tag(char)
        if marker == PARAMETER:
            self._key = ""
            self._expect(self._in_key)
        elif marker:
            self._begin()
            self._writer.arguments("}" if self._keys else "{}")
            self._writer.finish()
            self._read = []
            self._expect(self._after, CLOSE, FUNCTION)

    def _in_key(self, char: str) -> None:
        if char == ">" and self._key and self._key not in self._keys:
            self._read.append(char)
            self._begin()
            self._writer.arguments(f"{', ' if self._keys else '{'}{quoted(self._key)}: ")
            self._keys.add(self._key)
            schema = self._tools.schemas.get(self._name) or {}
            self._value = ElementValue(self._writer, is_text(properties_of(schema).get(self._key), schema))
            self._expect(self._in_value, PARAMETER_END)
        elif char in NO_KEY or len(self._key) >= MOST_NAME:
            self._give_up(char)
        else:
            self._read.append(char)
            self._key += char

    def _in_value(self, char: str) -> None:
        self._read.append(char)
        text, marker = self._markers.push(char)
        if text:
            self._value.push(text)
        if marker and self._value.is_in_string:
            self._value.push(marker)
        elif marker:
            self._value.end()
            self._expect(self._between, PARAMETER, FUNCTION_END)

    def _after(self, char: str) -> None:
        """What closes the call, one more function, or text if a model has left that out."""
        if char in SPACE and not self._markers.held:
            self._space(char)
            return
        text, marker = self._markers.push(char)
        if text:
            unread = "".join(self._read) + text + self._markers.flush()
            self._read = []
            self._expect_text()
            for each in unread:
                self._state(each)
        elif marker == FUNCTION:
            self._read, self._name, self._keys = [marker], "", set()
            self._expect(self._in_name)
        elif marker:
            self._expect_text()


def xml_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """Each call as in the module's picture."""
    rules = [sequence("call", "\\n", many), alternatives("call", len(tools))]
    for index, tool in enumerate(tools):
        properties, required = properties_of(tool.schema), tool.schema.get("required") or ()
        unknown: dict[str, Any] = {name: {} for name in required if isinstance(name, str) and name not in properties}
        arguments = []
        for place, (name, schema) in enumerate({**properties, **unknown}.items()):
            if not name or any(each in name for each in NO_KEY) or len(name) > MOST_NAME:
                raise RequestError(
                    "tools", f"tool {tool.name}: no argument of its calls can have the name {name[:64]!r}"
                )
            rule = f"{index}_{place}"
            arguments.append(f"argument_{rule}" + ("" if name in required else "?"))
            head = json.dumps(f"{PARAMETER}{name}>\n")
            rules += [f'argument_{rule}: {head} value_{rule} "\\n"', *_value_rules(rule, schema, tool)]
        begin, end = f'"\\n{FUNCTION}{tool.name}>\\n"', f'"{FUNCTION_END}\\n"'
        rules.append(f"call_{index}: marker_0 {begin} {' '.join(arguments)} {end} marker_1")
    return grammar(rules, *MARKERS)


def _value_rules(rule: str, schema: Any, tool: CallableTool) -> list[str]:
    """Rules for `value_`: the value of an argument, and the tag after it, with which text ends for the first time."""
    if not is_text(schema, tool.schema):
        known = schema if isinstance(schema, dict) else {}
        return [f'value_{rule}: json_{rule} "\\n{PARAMETER_END}"', f"json_{rule}: {tool.value(known)}"]
    end = escaped(f"\n{PARAMETER_END}")
    text = " & ".join(f"/(?:{each}){end}/" for each in text_patterns(schema, tool))
    return [f"value_{rule}: CLOSED_{rule}", f"CLOSED_{rule}: {text} & ~/(?s:.*){escaped(PARAMETER_END)}(?s:.+)/"]
