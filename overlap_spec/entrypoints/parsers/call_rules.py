"""Grammars of answers that are tool calls and nothing else, one function for each format.

The rules are llguidance's Lark. `marker_0`, `marker_1`, .. are the grammar's markers: a tokenizer may have them as
special tokens, which only the engine knows.
"""

import json
import random
import re
import string
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlap_spec.messages import JSON_WHITE_SPACE, Grammar, GrammarKind

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
SHORT_ID_LENGTH = 9
_LETTERS = string.ascii_letters + string.digits


def is_name(name: str) -> bool:
    """Whether a tool may have this name."""
    return NAME.fullmatch(name) is not None


def new_id() -> str:
    """As OpenAI's."""
    return f"call_{uuid.uuid4().hex[:24]}"


def short_id() -> str:
    """Nine letters and digits: Mistral's chat templates refuse any other."""
    return "".join(random.choices(_LETTERS, k=SHORT_ID_LENGTH))


@dataclass(frozen=True)
class CallableTool:
    """A tool that may be called: its name and the JSON schema of its arguments."""

    name: str
    schema: dict[str, Any]
    is_strict: bool = False

    def value(self, schema: dict[str, Any]) -> str:
        """A rule for JSON of this schema, a part of the tool's. What the library cannot follow is left open, or an
        error if the tool is strict."""
        shared = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        options = {"whitespace_pattern": JSON_WHITE_SPACE, "lenient": not self.is_strict}
        return f"%json {json.dumps({'x-guidance': options, **shared, **schema})}"

    @property
    def arguments(self) -> str:
        """A rule for the arguments as a JSON object."""
        return self.value({**self.schema, "type": "object"})


def hermes_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """`<tool_call>`, a JSON object, `</tool_call>`."""
    rules = _json_calls(tools, "arguments")
    tagged = 'call: marker_0 "\\n" object "\\n" marker_1'
    return grammar([sequence("call", "\\n", many), tagged, *rules], "<tool_call>", "</tool_call>")


def llama3_json_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """Bare JSON objects."""
    return grammar([sequence("object", "; ", many), *_json_calls(tools, "parameters")])


def mistral_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """A marker and a list of JSON objects."""
    rules = ['start: marker_0 / ?\\[/ calls "]"', sequence("object", ", ", many, "calls")]
    return grammar([*rules, *_json_calls(tools, "arguments")], "[TOOL_CALLS]")


def pythonic_rules(tools: Sequence[CallableTool], many: bool) -> Grammar:
    """A list of calls in Python, whose arguments are written as in JSON."""
    rules = ['start: "[" calls "]"', sequence("call", ", ", many, "calls"), alternatives("call", len(tools))]
    for index, tool in enumerate(tools):
        rules += _python_call(f"call_{index}", tool)
    return grammar(rules)


def grammar(rules: Sequence[str], *markers: str) -> Grammar:
    """Rules in Lark, and what `marker_0`, `marker_1`, .. stand for."""
    return Grammar(GrammarKind.LARK, "\n".join(rules), markers)


def sequence(item: str, separator: str, many: bool, rule: str = "start") -> str:
    """A rule for one item, or for several apart by the separator, as it is written in Lark."""
    more = f'"{separator}" {item}' if separator else item
    return f"{rule}: {item} ({more})*" if many else f"{rule}: {item}"


def alternatives(rule: str, count: int) -> str:
    """A rule for any of `rule_0`, `rule_1`, .."""
    return f"{rule}: " + " | ".join(f"{rule}_{index}" for index in range(count))


def tool_rules(tools: Sequence[CallableTool], call: str) -> list[str]:
    """Rules for `call`: a call of one of the tools. `call` is the rule for one, with its `{index}` and `{name}`."""
    rules = [alternatives("call", len(tools))]
    for index, tool in enumerate(tools):
        rules += [call.format(index=index, name=tool.name), f"arguments_{index}: {tool.arguments}"]
    return rules


def _json_calls(tools: Sequence[CallableTool], key: str) -> list[str]:
    """Rules for `object`: a call of one of the tools."""
    rules = [alternatives("object", len(tools))]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": "{tool.name}", "{key}": ')
        rules += [f'object_{index}: {head} arguments_{index} "}}"', f"arguments_{index}: {tool.arguments}"]
    return rules


def _python_call(rule: str, tool: CallableTool) -> list[str]:
    """Rules for one call: required arguments, and any of the others, in the order of the schema.

    From argument i on, `first` has none before it, `more` has one.
    """
    properties, required = tool.schema.get("properties") or {}, tool.schema.get("required") or ()
    rules = [f'{rule}: "{tool.name}(" {rule}_first_0 ")"']
    for index, (name, schema) in enumerate(properties.items()):
        argument, rest = f"{rule}_argument_{index}", f"{rule}_more_{index + 1}"
        may_miss = "" if name in required else "?"
        rules += [
            f"{rule}_first_{index}: {argument} {rest}" + (f" | {rule}_first_{index + 1}" if may_miss else ""),
            f'{rule}_more_{index}: (", " {argument}){may_miss} {rest}',
            f"{argument}: {json.dumps(name + '=')} {rule}_value_{index}",
            f"{rule}_value_{index}: {tool.value(schema if isinstance(schema, dict) else {})}",
        ]
    return [*rules, f'{rule}_first_{len(properties)}: ""', f'{rule}_more_{len(properties)}: ""']
