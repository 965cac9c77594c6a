"""Chat templates: the text must be that of transformers, and what a template refuses is the client's error."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from support.small_tokenizers import SMOLLM2, smollm2
from support.tiny import tokenizer as tiny

from overlap_spec.errors import CheckpointError, RequestError
from overlap_spec.frontend.chat_template import ChatTemplate, NoChatTemplate
from overlap_spec.frontend.codec import load_codec, special_tokens
from overlap_spec.messages import ChatPrompt

USER = [{"role": "user", "content": 'Why is the sky <blue> & "wide"?'}]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi 🦙"},
    {"role": "assistant", "content": "Hello!\n"},
    {"role": "user", "content": "  Bye "},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'c' é", "parameters": {}}}]

# What templates on the hub use, in one: loop controls, trimming, tojson, tools, keyword, generation, bos and eos.
RICH = """{{ bos_token }}
{%- if tools is not none %}
    {{- 'TOOLS ' + tools | tojson(indent=2) }}
{% endif %}
{%- for message in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}
    {%- else %}
{{ message['role'] }}: {{ message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking %}<think>{% endif %}
{% if add_generation_prompt %}assistant:{% endif %}
{% if documents %}never{% endif %}"""


def as_transformers(source: str, prompt: ChatPrompt, **special: str) -> str:
    """The reference, of which the rendering alone is asked."""
    from transformers.utils.chat_template_utils import render_jinja_template

    (text,), _ = render_jinja_template(
        [prompt.messages],
        tools=prompt.tools,
        chat_template=source,
        add_generation_prompt=prompt.add_generation_prompt,
        **special,
        **prompt.template_kwargs,
    )
    return str(text)


@functools.cache
def smollm2_of_transformers() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SMOLLM2)


@pytest.mark.parametrize("generation_prompt", [True, False])
@pytest.mark.parametrize("messages", [USER, TALK])
def test_the_shipped_template_renders_and_tokenizes_as_in_transformers(
    messages: list[dict[str, Any]], generation_prompt: bool
) -> None:
    reference = smollm2_of_transformers()
    prompt = ChatPrompt(messages, add_generation_prompt=generation_prompt)
    text = smollm2().render(prompt)
    assert text == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
    expected = reference.apply_chat_template(messages, add_generation_prompt=generation_prompt)["input_ids"]
    assert smollm2().encode(text, add_special_tokens=False) == list(expected)


@pytest.mark.parametrize(
    "prompt",
    [
        ChatPrompt(USER),
        ChatPrompt(TALK, add_generation_prompt=False),
        ChatPrompt(TALK, tools=TOOLS),
        ChatPrompt(TALK[:3], template_kwargs={"enable_thinking": True}),
    ],
)
def test_a_rich_template_renders_as_in_transformers(prompt: ChatPrompt) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    text = ChatTemplate(RICH, special).render(prompt)
    assert text == as_transformers(RICH, prompt, **special)
    assert text.startswith("<s>")


def test_the_time_can_be_asked() -> None:
    text = ChatTemplate("{{ strftime_now('%Y') }}", {}).render(ChatPrompt(USER))
    assert text.isdigit() and len(text) == 4


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def test_parts_are_joined_for_a_template_that_reads_text_alone() -> None:
    template = ChatTemplate("{% for m in messages %}{{ '[' + m['content'] + ']' }}{% endfor %}", {})
    assert template.render(ChatPrompt([{"role": "user", "content": PARTS}])) == "[one\ntwo]"
    printing = ChatTemplate("{% for m in messages %}[{{ m['content'] }}]{% endfor %}", {})
    assert printing.render(ChatPrompt([{"role": "user", "content": PARTS}])) == "[one\ntwo]"


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("call.function.arguments | tojson", 'f{"city": "Rôme"}'),
        ("'' + call.function.arguments", 'f{"city": "Rôme"}'),
        ("call.function.arguments", 'f{"city": "Rôme"}'),
        ("call.function.arguments['city']", "fRôme"),
    ],
)
def test_arguments_of_calls_are_as_the_template_reads_them(written: str, text: str) -> None:
    source = "{% for m in messages %}{% for call in m.tool_calls %}{{ call.function.name + " + written
    template = ChatTemplate(source.replace("name + call", "name }}{{ call") + " }}{% endfor %}{% endfor %}", {})
    call = {"function": {"name": "f", "arguments": {"city": "Rôme"}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert template.render(ChatPrompt(messages)) == text


@pytest.mark.parametrize("calls", [7, [7], [{"function": 7}], [{"function": {"name": "f", "arguments": [1]}}]])
def test_calls_that_are_none_are_no_fault_of_the_renderer(calls: object) -> None:
    source = "{% for m in messages %}{% for call in m.tool_calls %}{{ '' + call.function.arguments }}"
    template = ChatTemplate(source + "{% endfor %}{% endfor %}", {})
    with pytest.raises(RequestError, match="these messages"):
        template.render(ChatPrompt([{"role": "assistant", "content": "", "tool_calls": calls}]))


def test_parts_are_left_to_a_template_that_reads_them() -> None:
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}({{ part.text }}){% endfor %}{% endif %}{% endfor %}"
    )
    template = ChatTemplate(source, {})
    assert template.render(ChatPrompt([{"role": "user", "content": PARTS}])) == "(one)(two)"
    assert template.render(ChatPrompt([{"role": "user", "content": "text"}])) == "text"


RAISING = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}{{ 'x' + messages[0].content }}"
)


@pytest.mark.parametrize(
    ("prompt", "field", "words"),
    [
        (ChatPrompt([]), "messages", "must not be empty"),
        (ChatPrompt([{"role": "bot", "content": "x"}]), "messages", "user first"),
        (ChatPrompt([{"role": "user"}]), "messages", "content"),
        (ChatPrompt([{"role": "user", "content": 3}]), "messages", "cannot render"),
        (ChatPrompt([{"role": "user", "content": [{"type": "image_url"}]}]), "messages", "image_url"),
        (ChatPrompt(USER, template_kwargs={"messages": []}), "chat_template_kwargs", "messages"),
    ],
)
def test_what_a_template_refuses_is_a_request_error(prompt: ChatPrompt, field: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ChatTemplate(RAISING, {}).render(prompt)
    assert caught.value.field == field


def test_a_template_cannot_reach_into_the_interpreter() -> None:
    with pytest.raises(RequestError):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(ChatPrompt(USER))


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        NoChatTemplate({}).render(ChatPrompt(USER))


def test_special_tokens_are_strings_however_they_are_stored() -> None:
    stored = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "pad_token": None, "other": "x"}
    assert special_tokens(stored) == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("one {{ bos_token }}", "one <s>"),
        ([{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}], "two"),
        ({"default": "three"}, "three"),
    ],
)
def test_templates_in_the_config_file(tmp_path: Path, stored: object, expected: str) -> None:
    write_tokenizer(tmp_path, {"bos_token": {"content": "<s>"}, "chat_template": stored})
    assert load_codec(tmp_path).render(ChatPrompt(USER)) == expected
    (tmp_path / "chat_template.jinja").write_text("the file wins")
    assert load_codec(tmp_path).render(ChatPrompt(USER)) == "the file wins"


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "nothing"),
        ("chat_template.jinja", "{% for %}"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, file: str, content: str) -> None:
    write_tokenizer(tmp_path, {})
    (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=file):
        load_codec(tmp_path)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        load_codec(tmp_path)


def test_truncation_and_padding_of_somebodys_training_are_dropped(tmp_path: Path) -> None:
    from support.small_tokenizers import byte_fallback_tokenizer

    tokenizer = byte_fallback_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(load_codec(tmp_path).encode("abcdef", add_special_tokens=True)) == 7  # a space is put before it


def write_tokenizer(directory: Path, config: dict[str, object]) -> None:
    tiny.write_tokenizer(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
