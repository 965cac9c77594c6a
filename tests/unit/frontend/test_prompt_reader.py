"""Which prompts are read in a thread."""

from typing import Any

import pytest

from overlap_spec.frontend.encode_pool import LONG
from overlap_spec.frontend.request_reader import is_long
from overlap_spec.messages import ChatPrompt, Prompt, TextPrompt, TokenPrompt


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("prompt", "long"),
    [
        (TextPrompt("x" * LONG), False),
        (TextPrompt("x" * (LONG + 1)), True),
        (TokenPrompt(bytes(4 * LONG + 4)), False),
        (ChatPrompt([{"content": "x" * 1500}, {"content": "x" * 1500}]), True),
        (ChatPrompt([{"content": ["x" * LONG]}]), True),
        (ChatPrompt([{"content": "x"}], [{"name": "x" * LONG}]), True),
        (ChatPrompt([{"content": "x"}], [{"deep": nested(3000)}]), True),
        (ChatPrompt([{"content": nested(3000)}]), True),
    ],
)
def test_what_would_keep_the_loop_is_long(prompt: Prompt, long: bool) -> None:
    assert is_long(prompt) is long
