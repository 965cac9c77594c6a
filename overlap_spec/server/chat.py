"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.messages import Usage
from overlap_spec.server.chat_runs import ChatAnswer, ChatDelta, ChatRunner
from overlap_spec.server.engine_client import ServerInfo
from overlap_spec.server.openai_replies import DeltaChoice, MessageChoice, Reply, ReplyHead, Text, wire_usage
from overlap_spec.server.openai_requests import ChatRequest, read_openai
from overlap_spec.server.running import Group
from overlap_spec.server.streams import DONE, EventStream, event, unless_gone


class ChatCompletions:
    """The endpoint."""

    def __init__(self, chats: ChatRunner, info: ServerInfo) -> None:
        self._chats = chats
        self._info = info

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of chunks."""
        body = await read_openai(request, ChatRequest, self._info)
        group = self._chats.prepare(body, "chatcmpl-")
        head = ReplyHead(
            group.id, "chat.completion.chunk", int(time.time()), self._info.model_name, body.stream_options
        )
        if body.stream:
            return EventStream(self._events(group, head))
        answers = await unless_gone(request.receive, self._chats.collect(group))
        choices = tuple(_choice(index, answer) for index, answer in enumerate(answers))
        usage = wire_usage([answer.usage for answer in answers], body.n)
        reply = Reply(head.id, "chat.completion", head.created, head.model, choices, usage)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def _events(self, group: Group, head: ReplyHead) -> AsyncGenerator[bytes, None]:
        last: dict[int, Usage] = {}
        async with aclosing(self._chats.run(group)) as steps:
            async for step in steps:
                events = []
                for index, delta in step:
                    opening = b"" if index in last else _opening(head, index, delta.usage)
                    last[index] = delta.usage
                    events.append(opening + _chunks(head, index, delta))
                yield b"".join(events)
        if head.options.include_usage:
            usages = [last[index] for index in range(len(group.requests))]
            yield event(head.usage_chunk(wire_usage(usages, len(usages))))
        yield DONE


def _choice(index: int, answer: ChatAnswer) -> MessageChoice:
    assert answer.finish is not None
    message = Text(role="assistant", content=answer.content)
    return MessageChoice(index, message, answer.finish.reason, answer.finish.matched)


def _opening(head: ReplyHead, index: int, usage: Usage) -> bytes:
    """A choice's first event holds the role; no token has been sent yet."""
    start = Usage(usage.prompt_tokens, usage.cached_tokens, 0, 0)
    return event(head.chunk(DeltaChoice(index, Text(role="assistant", content="")), start))


def _chunks(head: ReplyHead, index: int, delta: ChatDelta) -> bytes:
    """One event for a step, and one more, without text, for the finish."""
    finish = delta.finish
    if finish is None:
        return event(head.chunk(DeltaChoice(index, Text(content=delta.content)), delta.usage))
    text = event(head.chunk(DeltaChoice(index, Text(content=delta.content)), delta.usage)) if delta.content else b""
    return text + event(head.chunk(DeltaChoice(index, Text(), finish.reason, finish.matched), delta.usage))
