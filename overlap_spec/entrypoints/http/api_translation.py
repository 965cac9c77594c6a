"""Other APIs than chat completions. Bodies become chat requests: the same checks, the same path, errors that name the
other API's fields.

An answer is shown as a list of blocks, as Anthropic's messages and OpenAI's responses have it:

    reasoning | text | tool call | tool call ...        a block ends where the next one begins

`Blocks.add` turns the deltas of one choice into the events of a stream. Whole answers are the blocks that are left.
"""

import enum
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from overlap_spec.entrypoints.http.body_fields import UNSUPPORTED, Json, refuse_unsupported
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import NOTHING, EngineRequest, renamed
from overlap_spec.entrypoints.openai.chat import ChatDelta, ChatFinish, ChatGroup, ChatRunner, ChatSteps
from overlap_spec.entrypoints.openai.requests import OF_COMPLETIONS, ChatRequest, check_openai, refuse_other_names
from overlap_spec.entrypoints.openai.response_format import GRAMMAR_FIELDS
from overlap_spec.entrypoints.parsers.pieces import ToolCallPiece
from overlap_spec.errors import RequestAborted, RequestError

# Fields of chat completions that these APIs have no name for, and that leave the shape of the answer as it is.
EXTENSIONS = frozenset(
    {
        *(GRAMMAR_FIELDS - {"response_format"}),
        *("rid", "request_id", "speculative", "chat_template", "chat_template_kwargs"),
        *("seed", "top_k", "min_p", "min_tokens", "stop_token_ids", "stop_regex", "ignore_eos", "skip_special_tokens"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("logit_bias", "bad_words", "allowed_token_ids", "timeout", "first_token_timeout"),
        *("cache_salt", "extra_key", "adapt"),
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
            text = f"{name}{text.removeprefix(problem.param)}".replace("].function.", "].", 1)  # a level of ours alone
        raise Problem(problem.status, text, name, problem.code) from None


def _extensions(given: Json, dialect: Dialect) -> Json:
    known = UNSUPPORTED.keys() | frozenset(ChatRequest.__struct_fields__)
    others = {name: value for name, value in given.items() if name not in dialect.own}
    refuse_other_names(others, dialect.names)
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


class BlockKind(enum.Enum):
    """What a block holds."""

    REASONING = "reasoning"
    TEXT = "text"
    TOOL_CALL = "tool_call"


@dataclass
class Block:
    """One block so far. A tool call's `text` is its arguments; `call` counts the calls of the answer from 0."""

    kind: BlockKind
    index: int
    text: str = ""
    call: int = -1
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Opened:
    """A block begins; its text comes in `Grown`. This one stays empty: the answer's may grow before it is written."""

    block: Block


@dataclass(frozen=True)
class Grown:
    """Text was added to a block."""

    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    """A block is whole, unless the answer was cut."""

    block: Block


BlockEvent = Opened | Grown | Closed


class Blocks:
    """The blocks of one choice, and the last word on it."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.finish: ChatFinish | None = None
        self.usage = NOTHING
        self.reasoning_tokens = 0  # exact to a step: a step may end the reasoning and begin the answer
        self._open: Block | None = None

    def add(self, delta: ChatDelta) -> list[BlockEvent]:
        """Take what one step added. The last delta closes the last block.

        Raises: RequestAborted, for which these APIs have no reason to stop.
        """
        if delta.finish is not None and delta.finish.reason == "abort":
            raise RequestAborted("on request")
        self.usage, self.finish = delta.usage, delta.finish
        if delta.reasoning:
            self.reasoning_tokens = delta.usage.completion_tokens
        events = [*self._grow(BlockKind.REASONING, delta.reasoning), *self._grow(BlockKind.TEXT, delta.content)]
        for piece in delta.tool_calls:
            events += self._continue_call(piece)
        if delta.finish is not None:
            events += self._close()
        return events

    def _grow(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._begin(Block(kind, len(self.blocks)))
        yield self._append(text)

    def _continue_call(self, piece: ToolCallPiece) -> Iterator[BlockEvent]:
        if self._open is None or self._open.call != piece.index:
            yield from self._begin(Block(BlockKind.TOOL_CALL, len(self.blocks), "", piece.index, piece.id, piece.name))
        if piece.arguments:
            yield self._append(piece.arguments)

    def _begin(self, block: Block) -> Iterator[BlockEvent]:
        yield from self._close()
        self.blocks.append(block)
        self._open = block
        yield Opened(replace(block))

    def _append(self, text: str) -> Grown:
        assert self._open is not None
        self._open.text += text
        return Grown(self._open, text)

    def _close(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            yield Closed(self._open)
        self._open = None


class BlockWriter(Protocol):
    """Writes an answer as the server-sent events of an API."""

    def opening(self, answer: Blocks) -> bytes:
        """The first events, once there is something to tell."""

    def change(self, event: BlockEvent, answer: Blocks) -> Iterable[bytes]: ...

    def closing(self, answer: Blocks) -> bytes:
        """The last events of an answer that has ended."""


async def stream_blocks(steps: ChatSteps, writer: BlockWriter) -> AsyncGenerator[bytes, None]:
    """Yield the events of each step of a chat with one choice. Leaving early aborts the request."""
    answer, begun = Blocks(), False
    async with aclosing(steps):
        async for ((_, delta),) in steps:
            changes = answer.add(delta)
            parts = [] if begun else [writer.opening(answer)]
            begun = True
            parts += [part for change in changes for part in writer.change(change, answer)]
            if answer.finish is not None:
                parts.append(writer.closing(answer))
            if parts:
                yield b"".join(parts)


async def collect_blocks(steps: ChatSteps) -> Blocks:
    """Wait for the whole answer of a chat with one choice."""
    answer = Blocks()
    async with aclosing(steps):
        async for ((_, delta),) in steps:
            answer.add(delta)
    return answer
