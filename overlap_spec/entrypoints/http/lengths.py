"""How long the strings and lists of a body may be. They are checked before anything is made of them.

Names mean the same in every API. What is not here is bounded otherwise: prompts and messages by the context, grammars
when they are read, the rest by the body.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.messages import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_ID_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_TEMPLATE_ARGUMENTS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOLS,
    MAX_WORD_CHARS,
)

MAX_PROMPTS = 2048  # in one HTTP request; the engine has no room for more
MAX_DOCUMENTS = 1024
MAX_CHOICES_OF_GRAMMAR = 1 << 14


class Length(NamedTuple):
    """Most items of a list or an object, and most characters of a string, of each in a list and of each name."""

    items: int = 0
    chars: int = 0


PATTERNS = Length(MAX_STOP_STRINGS, MAX_STOP_CHARS)
OF_PROMPTS = Length(MAX_PROMPTS)  # one value for each
NAME = Length(chars=256)
RECORDS = Length(64, 512)  # for the client itself; OpenAI takes 16 names of 64 characters

LENGTHS = {
    **dict.fromkeys(("stop", "stop_sequences", "stop_regex"), PATTERNS),
    "bad_words": Length(MAX_BAD_WORDS, MAX_WORD_CHARS),
    "allowed_token_ids": Length(MAX_ALLOWED_IDS),
    "logit_bias": Length(MAX_BIASES, MAX_ID_CHARS),
    "stop_token_ids": Length(MAX_STOP_IDS // 2),
    "guided_choice": Length(MAX_CHOICES_OF_GRAMMAR),
    "guided_whitespace_pattern": Length(chars=MAX_STOP_CHARS),
    "tools": Length(MAX_TOOLS),
    "documents": Length(MAX_DOCUMENTS),
    "chat_template": Length(chars=MAX_TEMPLATE_CHARS),
    "chat_template_kwargs": Length(MAX_TEMPLATE_ARGUMENTS, MAX_ID_CHARS),
    **dict.fromkeys(("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"), OF_PROMPTS),
    "sampling_params": OF_PROMPTS,
    "rid": Length(MAX_PROMPTS, MAX_ID_CHARS),
    "request_id": Length(chars=MAX_ID_CHARS),
    **dict.fromkeys(("metadata", "prompt_cache_options", "cache_control"), RECORDS),
    "include": Length(16, 256),
    **dict.fromkeys(("model", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), NAME),
    **dict.fromkeys(("service_tier", "reasoning_effort", "tool_choice"), NAME),
}


def check_lengths(fields: Mapping[str, Any]) -> None:
    """Raises: Problem naming the field that is too long, its limit and what was sent."""
    for name, value in fields.items():
        length = LENGTHS.get(name) if isinstance(value, str | list | dict) else None
        if length is not None:
            _check(name, value, length)


def _check(name: str, value: str | list[Any] | dict[str, Any], length: Length) -> None:
    if not isinstance(value, str) and len(value) > length.items > 0:
        _refuse(f"{name}: at most {length.items} items are taken, got {len(value)}", name)
    strings = (value,) if isinstance(value, str) else value
    longest = max((len(each) for each in strings if isinstance(each, str)), default=0)
    if longest > length.chars > 0:
        what = "" if isinstance(value, str) else " in each item"
        _refuse(f"{name}: at most {length.chars} characters are taken{what}, got {longest}", name)


def _refuse(text: str, name: str) -> None:
    raise Problem(400, text, name, "invalid_value")
