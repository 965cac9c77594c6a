"""OpenAI's Responses API without storage, over chat completions: `POST /v1/responses`.

Here are the endpoint, the response object, and its stream of events.
"""

import base64
import time
from collections.abc import Iterator
from typing import Any, assert_never

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.openapi import STREAMED, Endpoint
from overlap_spec.entrypoints.http.operations import as_json
from overlap_spec.entrypoints.http.request_body import convert, read_body, without_nulls
from overlap_spec.entrypoints.http.request_runner import sent_by
from overlap_spec.entrypoints.http.streams import EventStream, named_event, unless_gone
from overlap_spec.entrypoints.openai.chat import ChatGroup, ChatRunner
from overlap_spec.entrypoints.responses.requests import (
    ENCRYPTED,
    RESPONSES,
    Items,
    ResponsesRequest,
    chat_fields,
    text_format,
)
from overlap_spec.messages import SamplingParams, Usage

PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.TOOL_CALL: "fc"}
DELTAS = {
    BlockKind.TEXT: "response.output_text",
    BlockKind.REASONING: "response.reasoning_text",
    BlockKind.TOOL_CALL: "response.function_call_arguments",
}


class ResponseHead:
    """What all snapshots of one response share: its id, its time and the request's own settings."""

    def __init__(self, name: str, model: str, body: ResponsesRequest, sampling: SamplingParams) -> None:
        self._name = name
        self._created_at = int(time.time())
        self._shared = {"model": model, **_settings(body, sampling)}
        self._encrypted = ENCRYPTED in body.include

    def snapshot(self, status: str, output: list[Json], answer: Blocks | None = None) -> Json:
        """The response object. `answer`: of a response that has ended."""
        return {
            "id": self._name,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": None if answer is None else _usage(answer.usage, answer.reasoning_tokens),
            **self._shared,
        }

    def whole(self, answer: Blocks) -> Json:
        """The response that has ended. Of a cut one, the last item is incomplete."""
        status = _status(answer)
        last = len(answer.blocks) - 1
        output = [self.item(block, status if block.index == last else "completed") for block in answer.blocks]
        return self.snapshot(status, output, answer)

    def item(self, block: Block, status: str) -> Json:
        head = {"id": self.item_id(block), "status": status}
        match block.kind:
            case BlockKind.TEXT:
                content = [_part(block)] if block.text else []
                return {**head, "type": "message", "role": "assistant", "content": content}
            case BlockKind.REASONING:
                content = [_part(block)] if block.text else []
                hidden = base64.b64encode(block.text.encode()).decode() if self._encrypted else None
                return {**head, "type": "reasoning", "summary": [], "content": content, "encrypted_content": hidden}
            case BlockKind.TOOL_CALL:
                call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
                return {**head, "type": "function_call", **call}

    def item_id(self, block: Block) -> str:
        """The id of an item, which is another than a call's."""
        return f"{PREFIXES[block.kind]}_{self._name.removeprefix('resp_')}_{block.index}"


class ResponseEvents:
    """A `BlockWriter`: the events of one stream, numbered."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._number = 0

    def opening(self, answer: Blocks) -> bytes:
        start = self._head.snapshot("in_progress", [])
        return self._event("response.created", response=start) + self._event("response.in_progress", response=start)

    def change(self, event: BlockEvent, answer: Blocks) -> Iterator[bytes]:
        block = event.block
        match event:
            case Opened():
                item = self._head.item(block, "in_progress")
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if block.kind is not BlockKind.TOOL_CALL:
                    yield self._at(block, "response.content_part.added", part=_part(block))
            case Grown(_, text):
                more: Json = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
                yield self._at(block, f"{DELTAS[block.kind]}.delta", delta=text, **more)
            case Closed():
                yield from self._close(block, answer)
            case _:
                assert_never(event)

    def closing(self, answer: Blocks) -> bytes:
        return self._event(f"response.{_status(answer)}", response=self._head.whole(answer))

    def failed(self, problem: Problem) -> bytes:
        """The last event of a stream that fails."""
        return self._event("error", code=problem.code, message=str(problem), param=problem.param)

    def _close(self, block: Block, answer: Blocks) -> Iterator[bytes]:
        done = f"{DELTAS[block.kind]}.done"
        if block.kind is BlockKind.TOOL_CALL:
            yield self._at(block, done, arguments=block.text, name=block.name)
        else:
            more: Json = {"logprobs": []} if block.kind is BlockKind.TEXT else {}
            yield self._at(block, done, text=block.text, **more)
            yield self._at(block, "response.content_part.done", part=_part(block))
        cut = answer.finish is not None and block is answer.blocks[-1]
        item = self._head.item(block, _status(answer) if cut else "completed")
        yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _at(self, block: Block, kind: str, **fields: Any) -> bytes:
        part: Json = {} if block.kind is BlockKind.TOOL_CALL else {"content_index": 0}
        return self._event(kind, item_id=self._head.item_id(block), output_index=block.index, **part, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})


def _status(answer: Blocks) -> str:
    assert answer.finish is not None
    return "incomplete" if answer.finish.reason == "length" else "completed"


def _settings(body: ResponsesRequest, sampling: SamplingParams) -> Json:
    """The request's settings as they are in force; what is never stored or run is null."""
    return {
        "instructions": body.instructions or None,
        "max_output_tokens": body.max_output_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "text": {"format": text_format(body.text)},
        "reasoning": {"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        "tools": [_tool(tool) for tool in msgspec.to_builtins(body.tools)],
        "tool_choice": msgspec.to_builtins(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "metadata": body.metadata,
        "store": False,
        "background": False,
        "previous_response_id": None,
        "truncation": body.truncation,
        "service_tier": "default",
    }


def _tool(tool: Json) -> Json:
    return {"type": "function", "parameters": None, "strict": None, **without_nulls(tool)}


def _part(block: Block) -> Json:
    if block.kind is BlockKind.REASONING:
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(usage: Usage, reasoning_tokens: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class Responses:
    """The endpoint."""

    def __init__(self, chats: ChatRunner, info: ServerInfo) -> None:
        self._chats = chats
        self._info = info

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of events."""
        body, group = await read_body(request, self._info.max_body_bytes, self._read)
        group = sent_by(request, group)
        head = ResponseHead(group.id, self._info.model_name, body, group.requests[0].sampling)
        if body.stream:
            events = ResponseEvents(head)
            return EventStream(stream_blocks(self._chats.run(group), events), events.failed)
        answer = await unless_gone(request.receive, collect_blocks(self._chats.run(group, streams=False)))
        return as_json(head.whole(answer))

    def _read(self, fields: Json) -> tuple[ResponsesRequest, ChatGroup]:
        RESPONSES.refuse_not_built(fields)
        body = convert(fields, ResponsesRequest)
        return body, prepare(self._chats, RESPONSES, fields, chat_fields(body), self._info)


PATH = "/v1/responses"
ENDPOINTS = {PATH: Endpoint(ResponsesRequest, media=STREAMED, inner=("input", Items))}


def attach(parts: ApiParts) -> Api:
    """Its route."""
    return Api([Route(PATH, Responses(parts.chats, parts.info).post, methods=["POST"])], ENDPOINTS)
