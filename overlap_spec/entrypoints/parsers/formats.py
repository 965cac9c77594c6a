"""The formats of tool calls and of reasoning: their names, which are SGLang's and vLLM's, and how templates tell them.

`--tool-call-parser` and `--reasoning-parser` take a name; `auto` looks for the formats' markers in the chat template.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlap_spec.config import ServerSettings
from overlap_spec.entrypoints.parsers import hermes, llama3_json, mistral, pythonic
from overlap_spec.entrypoints.parsers.call_rules import (
    CallableTool,
    hermes_rules,
    llama3_json_rules,
    mistral_rules,
    pythonic_rules,
)
from overlap_spec.entrypoints.parsers.names import new_id, short_id
from overlap_spec.entrypoints.parsers.pieces import CallParser, CallWriter, ToolNames
from overlap_spec.messages import Grammar

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls.

    `markers`: they stay in the text for the parser, also where they are special tokens of a tokenizer.
    """

    name: str
    aliases: tuple[str, ...]
    parser: Callable[[CallWriter, ToolNames], CallParser]
    is_in: Callable[[str], bool]  # whether a chat template is of such a family
    markers: tuple[str, ...]
    rules: Callable[[Sequence[CallableTool], bool], Grammar]  # of an answer that calls one tool, or several
    new_id: Callable[[], str] = new_id


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks reasoning. `is_implicit`: answers may begin with it without the opening marker."""

    name: str
    aliases: tuple[str, ...]
    is_in: Callable[[str], bool]
    is_implicit: bool = False
    opening: str = "<think>"
    closing: str = "</think>"


def _is_llama3(template: str) -> bool:
    return "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template)


def _is_hermes(template: str) -> bool:
    """Other families put something else than JSON between the same tags."""
    return "<tool_call>" in template and not any(other in template for other in ("<function=", "<arg_key>"))


CALL_FORMATS = (  # in the order in which a template is looked at
    CallFormat(
        "mistral",
        (),
        mistral.MistralParser,
        lambda template: mistral.CALLS in template,
        (mistral.CALLS, mistral.ARGS, mistral.CALL_ID),
        mistral_rules,
        short_id,
    ),
    CallFormat(
        "pythonic",
        ("llama4_pythonic",),
        pythonic.PythonicParser,
        lambda template: pythonic.START in template,
        (pythonic.START, pythonic.END),
        pythonic_rules,
    ),
    CallFormat(
        "hermes", ("qwen25", "qwen"), hermes.HermesParser, _is_hermes, (hermes.OPEN, hermes.CLOSE), hermes_rules
    ),
    CallFormat(
        "llama3_json", ("llama3",), llama3_json.Llama3JsonParser, _is_llama3, (llama3_json.TAG,), llama3_json_rules
    ),
)
REASONING_FORMATS = (
    ReasoningFormat(
        "deepseek-r1",
        ("deepseek_r1",),
        lambda template: "</think>" in template and "<\N{FULLWIDTH VERTICAL LINE}Assistant" in template,
        is_implicit=True,
    ),
    ReasoningFormat("qwen3", ("qwen3-thinking",), lambda template: "</think>" in template),
)


def call_format(name: str, template: str) -> CallFormat | None:
    """The format of this name, or of this template if the name is auto; None if there is none."""
    return next((each for each in CALL_FORMATS if _fits(name, template, each)), None)


def reasoning_format(name: str, template: str) -> ReasoningFormat | None:
    """As `call_format`."""
    return next((each for each in REASONING_FORMATS if _fits(name, template, each)), None)


def format_names(server: ServerSettings, template: str) -> tuple[str, str]:
    """The formats in which tool calls and reasoning are read behind this template; "" where they are not."""
    calls, reasoning = (
        call_format(server.tool_call_parser, template),
        reasoning_format(server.reasoning_parser, template),
    )
    return calls.name if calls else "", reasoning.name if reasoning else ""


def _fits(name: str, template: str, known: CallFormat | ReasoningFormat) -> bool:
    return known.is_in(template) if name == AUTO else name in (known.name, *known.aliases)
