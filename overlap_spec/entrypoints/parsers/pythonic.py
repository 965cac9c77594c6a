"""Calls as a list in Python: `[f(city="Rome", days=2), g()]`, perhaps between `<|python_start|>` and `<|python_end|>`.

Llama 4 and Llama 3.2. A list anywhere in the answer counts if its first call is of a tool of the request. The arguments
become JSON, so a call is given out when it is complete. One that is long to parse (MOST_CODE) is content.
"""

import ast
import json
import re
import warnings
from typing import Any

from overlap_spec.entrypoints.parsers.json_call import SPACE
from overlap_spec.entrypoints.parsers.pieces import MOST_SPACE, CallWriter, Markers, ToolNames

START, END = "<|python_start|>", "<|python_end|>"
SURROGATE = re.compile("[\ud800-\udfff]")
WORDS = {"true": True, "false": False, "null": None}
MOST_CODE = 8192  # characters of a call's arguments outside strings: Python parses them in 15 ms
MOST_CHARS = 1 << 20  # of a call's arguments
FORMATTED = tuple("fFtT")  # letters before a string with values in it, which is no literal
PAIRS = {"(": ")", "[": "]", "{": "}"}


class PythonicParser:
    """A `CallParser`."""

    def __init__(self, writer: CallWriter, tools: ToolNames) -> None:
        self._writer = writer
        self._tools = tools
        self._markers = Markers(START, END)
        self._state = self._text
        self._before = ""  # of the list, what becomes content if no call follows
        self._name = ""
        self._call = PythonCall()

    def push(self, char: str) -> None:
        self._state(char)

    def end(self, is_cut: bool) -> None:
        if self._state != self._text and self._state != self._after_call:
            self._writer.text(self._before + self._call.text)
        self._writer.text(self._markers.flush())

    def _text(self, char: str) -> None:
        text, _ = self._markers.push(char)
        for each in text:
            if self._state == self._text and each == "[":
                self._before, self._name, self._state = each, "", self._before_name
            elif self._state == self._text:
                self._writer.text(each)
            else:
                self._state(each)

    def _before_name(self, char: str) -> None:
        if char == "(" and self._name in self._tools:
            self._before += char
            self._call, self._state = PythonCall(), self._arguments
        elif char in SPACE and not self._name and len(self._before) < MOST_SPACE:
            self._before += char
        elif self._tools.begins(self._name + char):
            self._name += char
            self._before += char
        else:
            self._give_up(char)

    def _arguments(self, char: str) -> None:
        if not self._call.push(char):
            return
        arguments = self._call.arguments()
        if arguments is None:
            self._writer.text(self._before + self._call.text)
            self._before, self._call, self._state = "", PythonCall(), self._text
            return
        self._writer.begin(self._name)
        self._writer.arguments(arguments)
        self._writer.finish()
        self._before, self._call, self._state = "", PythonCall(), self._after_call

    def _after_call(self, char: str) -> None:
        if char == ",":
            self._before, self._name, self._state = char, "", self._before_name
        elif char == "]":
            self._state = self._text
        elif char not in SPACE:
            self._give_up(char)

    def _give_up(self, char: str) -> None:
        self._writer.text(self._before)
        self._before, self._state = "", self._text
        self._text(char)


class PythonCall:
    """Reads the arguments of a call up to its closing parenthesis."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._open = [")"]
        self._quote = ""
        self._escaped = False
        self._num_code = 0  # characters outside strings
        self._is_literal = True

    @property
    def text(self) -> str:
        return "".join(self._text)

    def push(self, char: str) -> bool:
        """Read one character; True with the last one, or when there are too many."""
        self._text.append(char)
        self._num_code += not self._quote
        if self._quote:
            if not self._escaped and char == self._quote:
                self._quote = ""
            self._escaped = char == "\\" and not self._escaped
        elif char in "'\"":
            self._quote = char
            before = "".join(self._text[-3:-1]).rstrip("rR")
            self._is_literal = self._is_literal and not before.endswith(FORMATTED)
        elif char in PAIRS:
            self._open.append(PAIRS[char])
        elif char == self._open[-1]:
            self._open.pop()
        if self._num_code > MOST_CODE or len(self._text) > MOST_CHARS:
            self._is_literal = False
            self._open.clear()
        return not self._open

    def arguments(self) -> str | None:
        """The keyword arguments as a JSON object; None if they are not all literals."""
        if not self._is_literal:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in a model's strings
                call = ast.parse(f"f({self.text}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return None
            values = {keyword.arg: _literal(keyword.value) for keyword in call.keywords if keyword.arg}
            text = json.dumps(values, ensure_ascii=False, allow_nan=False)
            if SURROGATE.search(text):  # JSON escapes a character as two halves
                text = json.dumps(values, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
        return text if len(values) == len(call.keywords) else None


def _literal(node: ast.expr) -> Any:
    """A value that JSON has too; JSON's own words count. Raises: ValueError."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in WORDS:
            return WORDS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case _:
            raise ValueError(type(node).__name__)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key of a JSON object is a string")
