"""Templates of requests and conversations that take long are rendered in processes that are killed at their limits."""

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from support.least_time import least_time
from support.small_tokenizers import smollm2

from overlap_spec.errors import RequestError
from overlap_spec.frontend import chat_template
from overlap_spec.frontend.chat_template import MOST_MESSAGES, MOST_VALUES, Rendering, takes_long
from overlap_spec.frontend.request_reader import PromptReader
from overlap_spec.messages import ChatPrompt

TALK = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two, "}]
SAYS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def rendered() -> Iterator[Rendering]:
    made = Rendering(SAYS, {"bos_token": "<s>"})
    yield made
    made.close()


def render(rendered: Rendering, prompt: ChatPrompt) -> str:
    return asyncio.run(rendered.render(prompt, "key:a"))


def test_the_models_template_and_a_requests_own(rendered: Rendering) -> None:
    assert render(rendered, ChatPrompt(TALK)) == "[user]Count[assistant]One, two, "
    own = ChatPrompt(TALK, template="{{ bos_token }}{{ word }}{{ messages[0].content }}", template_kwargs={"word": "é"})
    assert render(rendered, own) == "<s>éCount"


def test_a_template_that_is_too_large_for_an_argument_is_passed_with_each_prompt() -> None:
    noise = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz0123456789", k=200_000))
    made = Rendering(f"{{# {noise} #}}{SAYS}", {})
    try:
        assert render(made, ChatPrompt(TALK)) == "[user]Count[assistant]One, two, "
    finally:
        made.close()


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", "chat_template: it does not compile: "),
        ("x" * (1 << 17), "chat_template: it has 131072 characters, of at most 65536"),
        ("{{ messages.__class__ }}{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('no') }}", "refuses these messages: `no`"),
        ("{{ messages[7].content }}", "refuses these messages"),
        # Each takes any memory or time, some already while the template is compiled:
        ("{{ '%999999999d' % 1 }}", "rendering took more than 96 MiB"),
        ("{{ '%300000000d'|format(1)|length }}", "rendering took more than 96 MiB"),
        ("{{ 'a'|center(900000000) }}", "rendering took more than 96 MiB"),
        ("{{ 'x' * 10**9 }}", "rendering took more than 96 MiB"),
        ("{{ [0] * 1000000000 }}", "rendering took more than 96 MiB"),
        ("{{ [1]|batch(100000000, 0)|list }}", "rendering took more than 96 MiB"),
        (
            "{% set ns = namespace(x='a'*1000) %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "96 MiB",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_template_is_the_requests_error(rendered: Rendering, source: str, why: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(rendered, ChatPrompt(TALK, template=source))
    assert why in str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["{{ lipsum(n=200000) }}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"],
)
def test_a_template_that_goes_on_is_killed(rendered: Rendering, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "OWN_S", 0.2)
    with pytest.raises(RequestError, match=r"chat_template: rendering took more than 0.2 s") as caught:
        render(rendered, ChatPrompt(TALK, template=source))
    assert caught.value.field == "chat_template"


def test_a_conversation_that_takes_too_long_is_the_messages_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MODEL_S", 0.2)
    # A thousand million turns: no processor is fast enough.
    made = Rendering("{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}", {})
    try:
        with pytest.raises(RequestError, match=r"messages: rendering took more than 0.2 s") as caught:
            render(made, ChatPrompt(TALK * 16_000))
    finally:
        made.close()
    assert caught.value.field == "messages"


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {}}}}}


@pytest.mark.parametrize(
    ("prompt", "is_long"),
    [
        (ChatPrompt(TALK * (MOST_MESSAGES // 2)), False),
        (ChatPrompt(TALK * (MOST_MESSAGES // 2 + 1)), True),
        (ChatPrompt([{"role": "user", "content": "Some words, as they are said. " * 2000}]), False),
        (ChatPrompt([{"role": "user", "content": "word " * 250_000}]), True),
        (ChatPrompt(TALK, tools=[TOOL] * 100), False),
        (ChatPrompt(TALK, tools=[{"x": [0] * (MOST_VALUES + 10)}]), True),
        (ChatPrompt(TALK, template_kwargs={"documents": [[]] * (MOST_VALUES + 10)}), True),
        (ChatPrompt(TALK, template="{{ x }}"), True),
        (ChatPrompt([{"role": "user", "content": nested(100_000)}]), True),
    ],
    ids=range(9),
)
def test_what_takes_long_is_told_before(prompt: ChatPrompt, is_long: bool) -> None:
    assert takes_long(prompt) is is_long


def test_what_is_rendered_here_takes_some_milliseconds() -> None:
    codec = smollm2()
    for prompt in (
        ChatPrompt(TALK * (MOST_MESSAGES // 2)),
        ChatPrompt([{"role": "user", "content": "a" * 1_000_000}]),
        ChatPrompt(TALK, tools=[{"x": [0] * 3_850}, {"y": nested(90)}]),
    ):
        assert not takes_long(prompt)
        assert least_time(partial(codec.render, prompt), 0.04) < 0.04  # the least machine is half as fast as a server


@pytest.mark.slow
def test_a_reader_renders_large_conversations_apart() -> None:
    async def inner() -> None:
        reader, codec = PromptReader(smollm2(), trusts_templates=False), smollm2()
        try:
            for messages in (TALK, TALK * 200):
                prompt = ChatPrompt(messages)
                expected = codec.encode(codec.render(prompt), False)
                assert list(await reader.encode(prompt, True, must_fit=False)) == expected
                assert (reader._rendering._isolated.pid is not None) is (messages is not TALK)
        finally:
            reader.close()

    asyncio.run(inner())
