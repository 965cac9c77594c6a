"""Anthropic's Messages API, over chat completions: `POST /v1/messages` and `/v1/messages/count_tokens`.

Here are the endpoints and the answers, whole and as events.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, assert_never

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from overlap_spec.entrypoints.anthropic.requests import MESSAGES, CountRequest, MessagesRequest, chat_fields
from overlap_spec.entrypoints.http.api_translation import (
    Block,
    BlockEvent,
    BlockKind,
    Blocks,
    Closed,
    Grown,
    Opened,
    collect_blocks,
    prepare,
    stream_blocks,
)
from overlap_spec.entrypoints.http.app import Api, ApiParts
from overlap_spec.entrypoints.http.auth import identity_of
from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.entrypoints.http.engine_client import EngineClient, ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.openapi import STREAMED, Endpoint
from overlap_spec.entrypoints.http.operations import as_json
from overlap_spec.entrypoints.http.request_body import convert, read_body
from overlap_spec.entrypoints.http.request_runner import sent_by
from overlap_spec.entrypoints.http.streams import EventStream, named_event, unless_gone
from overlap_spec.entrypoints.openai.chat import ChatGroup, ChatRunner
from overlap_spec.messages import ChatPrompt, Usage

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = named_event("ping", {"type": "ping"})


class MessageHead:
    """What the whole answer and the events of one message share."""

    def __init__(self, name: str, model: str, stop_sequences: Sequence[str]) -> None:
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model}
        self._stop_sequences = stop_sequences

    def snapshot(self, content: list[Json], stop: Json, usage: Usage) -> Json:
        """A message, whole or at its beginning."""
        return {**self._head, "content": content, **stop, "usage": usage_fields(usage)}

    def whole(self, answer: Blocks) -> Json:
        """The whole answer. A call that max_tokens has cut is left out: its input is no JSON."""
        content = [shown for block in answer.blocks if (shown := _content(block)) is not None]
        return self.snapshot(content, self.stop_fields(answer), answer.usage)

    def stop_fields(self, answer: Blocks) -> Json:
        """Why the answer ended."""
        finish = answer.finish
        assert finish is not None
        if finish.reason == "stop" and finish.matched in self._stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": finish.matched}
        return {"stop_reason": STOP_REASONS[finish.reason], "stop_sequence": None}


class MessageEvents:
    """A `BlockWriter`: the events of one stream."""

    def __init__(self, head: MessageHead) -> None:
        self._head = head

    def opening(self, answer: Blocks) -> bytes:
        """The first events. No token has been sent yet."""
        start = Usage(answer.usage.prompt_tokens, answer.usage.cached_tokens, 0, 0)
        empty = self._head.snapshot([], {"stop_reason": None, "stop_sequence": None}, start)
        return _event({"type": "message_start", "message": empty}) + PING

    def change(self, event: BlockEvent, answer: Blocks) -> Iterator[bytes]:
        index = event.block.index
        match event:
            case Opened(block):
                yield _event({"type": "content_block_start", "index": index, "content_block": _empty(block)})
            case Grown(block, text):
                yield _event({"type": "content_block_delta", "index": index, "delta": _piece(block.kind, text)})
            case Closed():
                yield _event({"type": "content_block_stop", "index": index})
            case _:
                assert_never(event)

    def closing(self, answer: Blocks) -> bytes:
        delta = self._head.stop_fields(answer)
        last = {"type": "message_delta", "delta": delta, "usage": usage_fields(answer.usage)}
        return _event(last) + _event({"type": "message_stop"})

    def failed(self, problem: Problem) -> bytes:
        """The last event of a stream that fails."""
        return _event(problem.anthropic())


def usage_fields(usage: Usage) -> Json:
    """Counts in tokens. Anthropic's `input_tokens` leave out those that were read from the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _content(block: Block) -> Json | None:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": block.text}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case BlockKind.TOOL_CALL:
            given = _parsed(block.text)
            return None if given is None else {**_empty(block), "input": given}


def _empty(block: Block) -> Json:
    match block.kind:
        case BlockKind.TEXT:
            return {"type": "text", "text": ""}
        case BlockKind.REASONING:
            return {"type": "thinking", "thinking": "", "signature": ""}
        case BlockKind.TOOL_CALL:
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _piece(kind: BlockKind, text: str) -> Json:
    match kind:
        case BlockKind.TEXT:
            return {"type": "text_delta", "text": text}
        case BlockKind.REASONING:
            return {"type": "thinking_delta", "thinking": text}
        case BlockKind.TOOL_CALL:
            return {"type": "input_json_delta", "partial_json": text}


def _parsed(arguments: str) -> Any:
    """The input of a call; None if it is cut."""
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return None


def _event(payload: Json) -> bytes:
    return named_event(payload["type"], payload)


C = TypeVar("C", MessagesRequest, CountRequest)


class Messages:
    """The endpoints."""

    def __init__(self, client: EngineClient, chats: ChatRunner, info: ServerInfo) -> None:
        self._client = client
        self._chats = chats
        self._info = info

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.post, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count, methods=["POST"]),
        ]

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of events."""
        body, group = await self._read(request, MessagesRequest)
        group = sent_by(request, group)
        head = MessageHead(group.id, self._info.model_name, body.stop_sequences)
        if body.stream:
            events = MessageEvents(head)
            return EventStream(stream_blocks(self._chats.run(group), events), events.failed)
        answer = await unless_gone(request.receive, collect_blocks(self._chats.run(group, streams=False)))
        return as_json(head.whole(answer))

    async def count(self, request: Request) -> Response:
        """Count the tokens of the prompt."""
        _, group = await self._read(request, CountRequest)
        prompt = group.requests[0].prompt
        assert isinstance(prompt, ChatPrompt)
        ids = await unless_gone(request.receive, self._client.tokenize(prompt, owner=identity_of(request).client))
        return as_json({"input_tokens": len(ids)})

    async def _read(self, request: Request, shape: type[C]) -> tuple[C, ChatGroup]:
        def check(fields: Json) -> tuple[C, ChatGroup]:
            MESSAGES.refuse_not_built(fields)
            body = convert(fields, shape)
            return body, prepare(self._chats, MESSAGES, fields, chat_fields(body, fields), self._info)

        return await read_body(request, self._info.max_body_bytes, check)


ENDPOINTS = {
    "/v1/messages": Endpoint(MessagesRequest, media=STREAMED),
    "/v1/messages/count_tokens": Endpoint(CountRequest, dict[str, int]),
}


def attach(parts: ApiParts) -> Api:
    """Its routes."""
    return Api(Messages(parts.client, parts.chats, parts.info).routes(), ENDPOINTS)
