"""From JSON text to fields, in time that is linear in the text, and only so deep."""

import json
import re
from typing import Any

import msgspec

from overlap_spec.entrypoints.http.errors import Problem

Json = dict[str, Any]

SMALL_BODY_BYTES = 64 << 10  # larger bodies get no second, slower parse of what msgspec refuses
MOST_DIGITS = 4300  # of a number that msgspec does not take; Python reads integers of so many
MOST_DEPTH = 128  # lists and objects in one another
# Possessive, and it takes a string without an end as well: otherwise each quote of one is looked at from every other.
STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def parse_fields(body: bytes) -> Json:
    """The fields of a body; none if it is empty. Raises: Problem (400)."""
    value = parse(body) if body.strip() else {}
    if not isinstance(value, dict):
        raise Problem(400, "the body must be a JSON object", code="invalid_json")
    if num_brackets(body) > MOST_DEPTH:
        for name, field in value.items():
            check_depth(field, name)
    return value


def num_brackets(text: bytes) -> int:
    """How many lists and objects there are at most."""
    return text.count(b"[") + text.count(b"{")


def without_strings(text: bytes) -> bytes:
    """What of a JSON text is in no string."""
    return STRINGS.sub(b"", text)


def check_depth(value: Any, field: str) -> None:
    """Raises: Problem for a value that is nested too deep."""
    level = [[value]]
    for _ in range(MOST_DEPTH + 1):
        level = [child for each in level for child in _children(each) if type(child) in (dict, list)]
        if not level:
            return
    raise _too_deep(field)


def _children(value: Any) -> Any:
    return value.values() if type(value) is dict else value


def _too_deep(field: str | None) -> Problem:
    text = f"{field or 'the body'}: lists and objects may be nested {MOST_DEPTH} deep, got more"
    return Problem(400, text, field, "invalid_value" if field else "invalid_json")


def parse(body: bytes) -> Any:
    """A value of any depth that can be parsed. Raises: Problem (400)."""
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(None) from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        why = str(error)
    if len(body) <= SMALL_BODY_BYTES:
        try:
            return _parse_leniently(body)
        except RecursionError:
            raise _too_deep(None) from None
        except ValueError as error:  # it names the place, and what is wrong with a lone surrogate
            why = str(error)
    raise Problem(400, f"the body is not valid JSON: {why}", code="invalid_json")


def _parse_leniently(body: bytes) -> Any:
    """Accept the NaN, Infinity and 1e400 that Python's clients can send, so that the check of the field names it."""
    value = json.loads(body, parse_float=_short_number)
    json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text
    return value


def _short_number(text: str) -> float:
    """Raises: ValueError as Python does for integers of so many digits."""
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number may have {MOST_DIGITS} characters, got {len(text)}")
    return float(text)
