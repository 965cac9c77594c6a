"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.messages import Usage
from overlap_spec.server.chat_runs import ChatAnswer, ChatDelta, ChatRunner
from overlap_spec.server.engine_client import ServerInfo
from overlap_spec.server.openai_replies import DeltaChoice, MessageChoice, Reply, ReplyHead, Text, kept_ids, wire_usage
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
            return EventStream(self._events(group, head, body.return_token_ids))
        reply = await unless_gone(request.receive, self._whole(group, head, body.return_token_ids))
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def _whole(self, group: Group, head: ReplyHead, shows_ids: bool) -> Reply:
        prompt_ids = await self._chats.prompt_ids(group) if shows_ids else None
        answers = await self._chats.collect(group)
        choices = tuple(_choice(index, answer, shows_ids) for index, answer in enumerate(answers))
        usage = wire_usage([answer.usage for answer in answers], len(answers))
        shown = kept_ids(prompt_ids, answers[0].usage)
        return Reply(head.id, "chat.completion", head.created, head.model, choices, usage, shown)

    async def _events(self, group: Group, head: ReplyHead, shows_ids: bool) -> AsyncGenerator[bytes, None]:
        last: dict[int, Usage] = {}
        prompt_ids = await self._chats.prompt_ids(group) if shows_ids else None
        async with aclosing(self._chats.run(group)) as steps:
            async for step in steps:
                events = []
                for index, delta in step:
                    shown = kept_ids(None if last else prompt_ids, delta.usage)
                    opening = b"" if index in last else _opening(head, index, delta.usage, shown)
                    last[index] = delta.usage
                    events.append(opening + _chunks(head, index, delta, shows_ids))
                yield b"".join(events)
        if head.options.include_usage:
            usages = [last[index] for index in range(len(group.requests))]
            yield event(head.usage_chunk(wire_usage(usages, len(usages))))
        yield DONE


def _choice(index: int, answer: ChatAnswer, shows_ids: bool) -> MessageChoice:
    assert answer.finish is not None
    message = Text(role="assistant", content=answer.content)
    ids = answer.token_ids if shows_ids else UNSET
    return MessageChoice(index, message, answer.finish.reason, answer.finish.matched, token_ids=ids)


def _opening(head: ReplyHead, index: int, usage: Usage, prompt_ids: list[int] | UnsetType) -> bytes:
    """A choice's first event holds the role; no token has been sent yet."""
    start = Usage(usage.prompt_tokens, usage.cached_tokens, 0, 0)
    return event(head.chunk(DeltaChoice(index, Text(role="assistant", content="")), start, prompt_ids))


def _chunks(head: ReplyHead, index: int, delta: ChatDelta, shows_ids: bool) -> bytes:
    """One event for a step, and one more, without text, for the finish."""
    finish, ids = delta.finish, list(delta.token_ids) if shows_ids else UNSET
    if finish is None:
        return event(head.chunk(DeltaChoice(index, Text(content=delta.content), token_ids=ids), delta.usage))
    text = b""
    if delta.content:
        text = event(head.chunk(DeltaChoice(index, Text(content=delta.content), token_ids=ids), delta.usage))
        ids = [] if shows_ids else UNSET
    last = DeltaChoice(index, Text(), finish.reason, finish.matched, token_ids=ids)
    return text + event(head.chunk(last, delta.usage))
