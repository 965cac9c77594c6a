"""The rules of sampling parameters: what they refuse, by which name, and that defaults do not travel."""

from typing import Any

import msgspec
import pytest

from overlap_spec.errors import RequestError
from overlap_spec.messages import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    MAX_WORD_CHARS,
    SamplingParams,
    shown,
)
from overlap_spec.messages.sampling import SAMPLING_RULES

NAN, INFINITE = float("nan"), float("inf")
REFUSED: dict[str, list[Any]] = {  # by field, just outside of what is taken
    "logit_bias": [
        dict.fromkeys(range(MAX_BIASES + 1), 0.0),
        {-1: 0.0},
        {2**63: 0.0},
        {0: 100.5},
        {0: -100.5},
        {0: NAN},
    ],
    "allowed_token_ids": [(), (-1,), (3, 2**31), (3, 2**63), (7,) * (MAX_ALLOWED_IDS + 1)],
    "allowed_ids": [b"abc", bytes(4 * MAX_ALLOWED_IDS + 4)],
    "bad_words": [("x",) * (MAX_BAD_WORDS + 1), ("x", " "), ("x", ""), ("x" * (MAX_WORD_CHARS + 1),)],
    "bad_word_ids": [((),), ((1,) * 9,), ((1, -1),), ((1,),) * (2 * MAX_BAD_WORDS + 1)],
    "max_new_tokens": [-1, 2**63],
    "min_new_tokens": [-1, 2**63, 129],  # the last: beyond max_new_tokens
    "temperature": [-0.1, NAN, INFINITE],
    "top_k": [0, -2, 2**63],
    "top_p": [0.0, 1.01, NAN],
    "min_p": [-0.01, 1.01, NAN],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "repetition_penalty": [0.0, 1e-7, 2.1, NAN],
    "seed": [2**63, -(2**63) - 1],
    "stop": [("",), ("x",) * (MAX_STOP_STRINGS + 1), ("x", "y" * (MAX_STOP_CHARS + 1))],
    "stop_regex": [("",), ("x",) * (MAX_STOP_STRINGS + 1), ("x", "y" * (MAX_STOP_CHARS + 1))],
    "truncate_prompt_tokens": [0, -2, 2**63],
    "stop_token_ids": [(-1,), (2**63,), (1,) * (MAX_STOP_IDS // 2 + 1)],
}
TAKEN: dict[str, Any] = {  # the last that is taken
    "logit_bias": {i: -100.0 for i in range(MAX_BIASES)},
    "allowed_token_ids": (0, 2**31 - 1),
    "allowed_ids": bytes(4 * MAX_ALLOWED_IDS),
    "bad_words": ("x" * MAX_WORD_CHARS,) * MAX_BAD_WORDS,
    "bad_word_ids": ((0,) * 8,) * (2 * MAX_BAD_WORDS),
    "max_new_tokens": 2**63 - 1,
    "min_new_tokens": 128,
    "temperature": 0.0,
    "top_k": 1,
    "top_p": 1e-9,
    "min_p": 1.0,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "repetition_penalty": 2.0,
    "seed": -(2**63),
    "stop": ("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS,
    "stop_regex": ("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS,
    "truncate_prompt_tokens": -1,
    "stop_token_ids": (0,) * (MAX_STOP_IDS // 2),
}


def test_every_rule_has_a_case() -> None:
    assert {rule.field for rule in SAMPLING_RULES} == REFUSED.keys() == TAKEN.keys()


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_outside_is_refused_by_name_and_the_last_value_is_taken(field: str) -> None:
    SamplingParams(**{field: TAKEN[field]})
    for value in REFUSED[field]:
        with pytest.raises(RequestError, match=f"^{field} must") as refused:
            SamplingParams(**{field: value})
        assert refused.value.field == field


@pytest.mark.parametrize("field", TAKEN)
def test_a_value_of_another_type_is_refused_by_name(field: str) -> None:
    with pytest.raises(RequestError, match=f"^{field} must .*, got <object"):
        SamplingParams(**{field: object()})


def test_defaults_do_not_travel_and_all_else_does() -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}
    for asked in (SamplingParams(), *(SamplingParams(**{field: value}) for field, value in TAKEN.items())):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=SamplingParams) == asked


@pytest.mark.parametrize(
    ("value", "text"), [("x" * 100, repr("x" * 100)), ("x" * 101, "101 characters"), (b"x" * 101, "101 bytes")]
)
def test_an_error_shows_no_long_value(value: str | bytes, text: str) -> None:
    assert shown(value) == text
