"""Prompts as a request shapes them: final messages that go on, templates of its own, truncation."""

import asyncio
from typing import Any

import pytest
from support.small_tokenizers import SMOLLM2, smollm2
from support.tokenizer_harness import LIMITS, Harness, serving

from overlap_spec.client.link import pack_ids, unpack_ids
from overlap_spec.errors import RequestError
from overlap_spec.messages import ChatPrompt, Generate, Rejected, SamplingParams, TextPrompt, TokenPrompt
from overlap_spec.tokenizer import stop_strings
from overlap_spec.tokenizer.chat_template import ChatTemplate, Limits
from overlap_spec.tokenizer.codec import load_codec
from overlap_spec.tokenizer.prompts import PromptReader
from overlap_spec.tokenizer.request_checks import truncated

TALK = [{"role": "user", "content": "Count"}, {"role": "assistant", "content": "One, two, "}]
TRIMMING = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[/{{ m.role }}]{% endfor %}"


def going_on(messages: list[dict[str, Any]] = TALK, **more: Any) -> ChatPrompt:
    return ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True, **more)


@pytest.mark.parametrize("content", ["One, two, ", "a", "[/assistant]", "  x", "é\n"])
def test_a_continued_message_is_the_end_of_the_prompt(content: str) -> None:
    prompt = going_on([TALK[0], {"role": "assistant", "content": content}])
    shipped = smollm2().render(prompt)
    assert shipped.endswith(f"<|im_start|>assistant\n{content}")
    closed = smollm2().render(ChatPrompt(prompt.messages, add_generation_prompt=False))
    assert closed == f"{shipped}<|im_end|>\n"
    assert ChatTemplate(TRIMMING, {}).render(prompt) == f"[user]Count[/user][assistant]{content.lstrip()}"


@pytest.mark.parametrize("content", ["", None])
def test_there_must_be_something_to_continue(content: object) -> None:
    with pytest.raises(RequestError) as caught:
        smollm2().render(going_on([TALK[0], {"role": "assistant", "content": content}]))
    assert caught.value.field == "continue_final_message"


def test_a_template_that_drops_the_message_cannot_continue_it() -> None:
    with pytest.raises(RequestError, match="leaves the message out"):
        ChatTemplate("{{ messages[0].content }}", {}).render(going_on())


def test_a_request_may_bring_a_template_where_it_is_trusted() -> None:
    prompt = ChatPrompt(
        TALK, template="{{ bos_token }}{{ messages[1].content }}{{ word }}", template_kwargs={"word": "!"}
    )

    async def read(trusts: bool) -> list[int]:
        return await PromptReader(smollm2(), trusts).encode(prompt, True, must_fit=False)

    ids = asyncio.run(read(True))
    assert smollm2().decode(ids, False) == "<|im_start|>One, two, !"
    with pytest.raises(RequestError, match="--trust-request-chat-template") as caught:
        asyncio.run(read(False))
    assert caught.value.field == "chat_template"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", "does not compile"),
        ("x" * (1 << 17), "has 131072 characters"),
        ("{{ 'x' * 10**9 }}", "only for numbers|no \\*\\* here"),
        ("{{ messages.__class__ }}{{ ''.__class__.__mro__ }}", "unsafe|cannot render|refuses"),
        ("{{ [0] * 1000000000 }}", "only for numbers"),
        ("{% for i in range(90000) %}{{ 'a' * 1 }}{% endfor %}", "only for numbers"),
    ],
)
def test_a_bad_template_of_a_request_is_the_requests_error(source: str, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        smollm2().render(ChatPrompt(TALK, template=source))


def test_a_template_of_a_request_writes_no_more_than_it_may() -> None:
    source = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    text = "".join(Limits(characters=5000).within(iter(["12345"] * 1000)))
    assert len(text) == 5000
    with pytest.raises(RequestError, match="more than 4999 characters"):
        list(Limits(characters=4999).within(iter(["12345"] * 1000)))
    with pytest.raises(RequestError, match="longer than 0 s"):
        ChatTemplate(source, {}, Limits(seconds=0.0)).render(ChatPrompt(TALK))


def test_the_template_of_the_command_line_replaces_the_models() -> None:
    codec = load_codec(SMOLLM2, "{{ bos_token }}<{{ messages[0].content }}>")
    assert codec.render(ChatPrompt(TALK)) == "<|im_start|><Count>"


@pytest.mark.parametrize(
    ("keep", "most_new", "expected"),
    [(None, 5, 1200), (1, 5, 1), (1199, 5, 1199), (5000, 5, 1200), (-1, 5, 995), (-1, None, 999), (-1, 0, 999)],
)
def test_truncation_keeps_the_end_of_the_prompt(keep: int | None, most_new: int | None, expected: int) -> None:
    ids = list(range(1200))
    params = SamplingParams(truncate_prompt_tokens=keep, max_new_tokens=most_new)
    assert truncated(ids, params, LIMITS) == ids[1200 - expected :]


def test_a_prompt_beyond_the_context_fits_once_it_is_truncated() -> None:
    async def inner() -> None:
        async with serving() as harness:
            ids = list(range(10, 1310))
            for prompt in (TokenPrompt(pack_ids(ids)), TextPrompt("word " * 40_000)):
                params = SamplingParams(truncate_prompt_tokens=-1, max_new_tokens=100)
                harness.say(Generate("a", prompt, params))
                admit = await harness.admitted()
                assert len(unpack_ids(admit.prompt)) == 900
                await end(harness, admit.uid)

    asyncio.run(inner())


def test_a_pattern_that_takes_for_ever_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_strings, "SEARCH_S", 0.005)

    async def inner() -> None:
        async with serving() as harness:
            slow = r"(?:a|a|aa)+(?:a|a|aa)+(?:a|aa|a)+[^a]c"
            harness.generate("Hi", "slow", stop_regex=(slow,))
            harness.generate("Hi", "quick")
            first, second = await harness.admitted(), await harness.admitted()
            tokens = smollm2().encode("a" * 400, False)
            harness.commit((first.uid, tokens, None), (second.uid, tokens, None))
            refused = await harness.heard(Rejected)
            assert (refused.request_id, refused.field) == ("slow", "stop_regex")
            assert (await harness.aborted()).uid == first.uid
            await end(harness, second.uid)

    asyncio.run(inner())


async def end(harness: Harness, uid: int) -> None:
    """The client leaves, so the request ends."""
    harness.leave()
    assert (await harness.aborted()).uid == uid
    while not harness.clients.heard.empty():
        harness.clients.heard.get_nowait()
