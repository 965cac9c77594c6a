"""Prompts as a request shapes them: final messages that go on, templates of its own, truncation."""

import asyncio
from typing import Any

import pytest
from support.frontend_harness import LIMITS, Harness, serving
from support.small_tokenizers import SMOLLM2, smollm2

from overlap_spec.client.link import pack_ids, unpack_ids
from overlap_spec.errors import RequestError
from overlap_spec.frontend.chat_template import ChatTemplate
from overlap_spec.frontend.codec import load_codec
from overlap_spec.frontend.request_checks import truncated
from overlap_spec.frontend.request_reader import PromptReader
from overlap_spec.messages import ChatPrompt, Generate, SamplingParams, TextPrompt, TokenPrompt

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
        reader = PromptReader(smollm2(), trusts)
        try:
            return list(await reader.encode(prompt, True, must_fit=False))
        finally:
            reader.close()

    ids = asyncio.run(read(True))
    assert smollm2().decode(ids, False) == "<|im_start|>One, two, !"
    with pytest.raises(RequestError, match="--trust-request-chat-template") as caught:
        asyncio.run(read(False))
    assert caught.value.field == "chat_template"


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


async def end(harness: Harness, uid: int) -> None:
    """The client leaves, so the request ends."""
    harness.leave()
    assert (await harness.aborted()).uid == uid
    while not harness.clients.heard.empty():
        harness.clients.heard.get_nowait()
