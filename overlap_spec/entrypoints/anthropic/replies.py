"""Answers of `/v1/messages`, whole and as events."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, assert_never

from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.json_bodies import Json
from overlap_spec.entrypoints.http.streams import named_event
from overlap_spec.entrypoints.openai.content_parts import Block, BlockEvent, BlockKind, Blocks, Closed, Grown, Opened
from overlap_spec.messages import Usage

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
        """The event of one change of a block."""
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
        """The last events."""
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
