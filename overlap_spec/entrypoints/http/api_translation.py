"""Bodies of other APIs as chat requests: the same checks, the same path, errors that name the other API's fields.

The last functions make the parts of a chat request that each of these APIs spells in its own way.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec

from overlap_spec.entrypoints.http.body_fields import OF_COMPLETIONS, UNSUPPORTED, Json, refuse_unsupported
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import EngineRequest, renamed
from overlap_spec.entrypoints.openai.chat import ChatGroup, ChatRunner
from overlap_spec.entrypoints.openai.requests import ChatRequest, check_openai
from overlap_spec.entrypoints.openai.response_format import GRAMMAR_FIELDS
from overlap_spec.errors import RequestError

# Fields of chat completions that these APIs have no name for, and that leave the shape of the answer as it is.
EXTENSIONS = frozenset(
    {
        *(GRAMMAR_FIELDS - {"response_format"}),
        *("rid", "request_id", "speculative", "chat_template", "chat_template_kwargs"),
        *("seed", "top_k", "min_p", "min_tokens", "stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("logit_bias", "bad_words", "allowed_token_ids", "timeout", "first_token_timeout"),
        *("cache_salt", "extra_key"),
    }
)


class Dialect(msgspec.Struct, frozen=True):
    """An API other than chat completions. `own`: the fields of its body; `names`: of ours, by chat completions'.

    `not_built`: fields that are known and refused, and why.
    """

    path: str
    id_prefix: str
    own: frozenset[str]
    names: Mapping[str, str]
    not_built: Mapping[str, str]

    def refuse_not_built(self, fields: Json) -> None:
        """Raises: Problem for the first feature that is known and not built."""
        for name, why in self.not_built.items():
            if fields.get(name):
                raise Problem(400, f"{name} is not supported: {why}", name, "unsupported_parameter")


class TextPart(Protocol):
    """A part of a content that is text."""

    @property
    def text(self) -> str: ...


def prepare(chats: ChatRunner, dialect: Dialect, given: Json, made: Json, info: ServerInfo) -> ChatGroup:
    """Prepare the chat with the fields that were made of a body, and the extensions that the body itself has.

    Raises: Problem or RequestError naming the body's field.
    """
    refuse_unsupported(given, OF_COMPLETIONS)
    extensions = _extensions(given, dialect)
    with naming(dialect.names):
        body = check_openai({**extensions, **made}, ChatRequest, info)
        if body.speculative.is_reported or body.return_spec_tokens_details:
            text = f"speculative: {dialect.path} reports no provenance and no metrics; use /v1/chat/completions"
            raise Problem(400, text, "speculative", "unsupported_parameter")
        group = chats.prepare(body, dialect.id_prefix)
    requests = [_renamed_request(request, dialect.names) for request in group.requests]
    return msgspec.structs.replace(group, requests=requests)


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Let the errors of chat completions name the other API's fields."""
    try:
        yield
    except RequestError as error:
        raise renamed(error, names) from None
    except Problem as problem:
        name = names.get(problem.param or "", problem.param)
        text = str(problem)
        if problem.param and text.startswith(problem.param):
            text = f"{name}{text.removeprefix(problem.param)}"
        raise Problem(problem.status, text, name, problem.code) from None


def _extensions(given: Json, dialect: Dialect) -> Json:
    known = UNSUPPORTED.keys() | frozenset(ChatRequest.__struct_fields__)
    others = {name: value for name, value in given.items() if name not in dialect.own}
    for name in others:
        if name in known and name not in EXTENSIONS:
            hint = f": here it is {dialect.names[name]}" if name in dialect.names else ""
            text = f"{name} is a parameter of /v1/chat/completions, not of {dialect.path}{hint}"
            raise Problem(400, text, name, "unsupported_parameter")
    return {name: value for name, value in others.items() if name in EXTENSIONS}


def _renamed_request(request: EngineRequest, names: Mapping[str, str]) -> EngineRequest:
    through = {ours: names.get(theirs, theirs) for ours, theirs in request.names.items()}
    return msgspec.structs.replace(request, names={**names, **through})


def system_message(text: str) -> list[Json]:
    """The messages that instructions become: none if they are empty."""
    return [{"role": "system", "content": text}] if text else []


def joined_text(content: str | Sequence[TextPart]) -> str:
    """The text of a content, which may come in parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def function_tool(function: Json) -> Json:
    """A tool of the client's own, from its name, description, parameters and strictness."""
    return {"type": "function", "function": function}


def function_call(call_id: str, name: str, arguments: str) -> Json:
    """A call of an earlier answer; its arguments are JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool_result(call_id: str, text: str) -> Json:
    """The message with what a call returned."""
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def choice_of(name: str) -> Json:
    """The `tool_choice` that calls this function."""
    return {"type": "function", "function": {"name": name}}
