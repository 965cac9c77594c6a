"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.entrypoints.http.client_identity import sent_by
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.json_parts import JsonParts
from overlap_spec.entrypoints.http.speculation import SpeculationReport, reported_counts
from overlap_spec.entrypoints.http.streams import DONE, EventStream, event, unless_gone
from overlap_spec.entrypoints.openai.chat_runs import ChatAnswer, ChatDelta, ChatGroup, ChatRunner
from overlap_spec.entrypoints.openai.logprobs import ChatEntries, num_log_probs
from overlap_spec.entrypoints.openai.replies import (
    DeltaChoice,
    FunctionCall,
    MessageChoice,
    Reply,
    ReplyHead,
    Text,
    WireToolCall,
    kept_ids,
    wire_usage,
)
from overlap_spec.entrypoints.openai.requests import ChatRequest, read_openai
from overlap_spec.entrypoints.parsers.pieces import ToolCallPiece
from overlap_spec.messages import Usage


class ChatCompletions:
    """The endpoint."""

    def __init__(self, chats: ChatRunner, info: ServerInfo) -> None:
        self._chats = chats
        self._info = info

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of chunks."""
        body, group = await read_openai(request, ChatRequest, self._info, self._prepare)
        group = sent_by(request, group)
        head = ReplyHead(
            group.id, "chat.completion.chunk", int(time.time()), self._info.model_name, body.stream_options
        )
        if body.stream:
            return EventStream(self._events(group, head, ChatEntries(body)))
        return await unless_gone(request.receive, self._whole(group, head, ChatEntries(body)))

    def _prepare(self, body: ChatRequest) -> ChatGroup:
        return self._chats.prepare(body, "chatcmpl-")

    async def _whole(self, group: ChatGroup, head: ReplyHead, entries: ChatEntries) -> Response:
        prompt_ids = await self._chats.prompt_ids(group)
        answers = await self._chats.collect(group)
        asked = group.requests[0].sampling.log_probs
        parts = JsonParts(num_log_probs(asked, answers), self._chats.writing(group))
        choices = tuple(_choice(index, answer, group, (entries, parts)) for index, answer in enumerate(answers))
        usage = wire_usage([answer.usage for answer in answers], len(answers))
        shown = kept_ids(prompt_ids, answers[0].usage), entries.prompt(answers[0].prompt_log_probs, parts)
        counts = reported_counts([a.report for a in answers], [a.usage for a in answers], self._info.num_steps)
        reply = Reply(head.id, "chat.completion", head.created, head.model, choices, usage, *shown)
        return parts.response(reply.with_counts(counts))

    async def _events(self, group: ChatGroup, head: ReplyHead, entries: ChatEntries) -> AsyncGenerator[bytes, None]:
        last: dict[int, Usage] = {}
        reports = [SpeculationReport(request.sampling.speculative) for request in group.requests]
        asked = group.requests[0].sampling.log_probs
        prompt_ids = await self._chats.prompt_ids(group)
        async with aclosing(self._chats.run(group)) as steps:
            async for step in steps:
                events = []
                parts = JsonParts(num_log_probs(asked, [delta for _, delta in step]), self._chats.writing(group))
                for index, delta in step:
                    if index not in last:
                        shown = kept_ids(None if last else prompt_ids, delta.usage)
                        events.append(_opening(head, index, delta.usage, group, shown))
                    last[index] = delta.usage
                    events.append(_chunks(head, index, delta, group, reports[index], (entries, parts)))
                if any(events):
                    async for chunk in parts.written(b"".join(events)):
                        yield chunk
        usages = [last[index] for index in range(len(group.requests))]
        counts = reported_counts(reports, usages, self._info.num_steps)
        if (end := head.last_chunk(wire_usage(usages, len(usages)), counts)) is not None:
            yield event(end)
        yield DONE


def _choice(
    index: int, answer: ChatAnswer, group: ChatGroup, log_probs: tuple[ChatEntries, JsonParts]
) -> MessageChoice:
    assert answer.finish is not None
    calls = tuple(
        WireToolCall(FunctionCall(call.name, call.arguments), id=call.id, type="function") for call in answer.tool_calls
    )
    message = Text(
        role="assistant",
        content=answer.content or None if calls or answer.reasoning else answer.content,
        reasoning_content=answer.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
    ids, finish = answer.token_ids if group.shows_ids else UNSET, answer.finish
    entries, parts = log_probs
    shown = entries.read(answer.log_probs, parts), ids, answer.report.provenance
    return MessageChoice(index, message, finish.reason, finish.matched, *shown)


def _opening(head: ReplyHead, index: int, usage: Usage, group: ChatGroup, prompt_ids: list[int] | UnsetType) -> bytes:
    """A choice's first event holds the role; no token has been sent yet. Content that may never come is null."""
    start = Usage(usage.prompt_tokens, usage.cached_tokens, 0, 0)
    content = "" if group.form.is_plain else None
    return event(head.chunk(DeltaChoice(index, Text(role="assistant", content=content)), start, prompt_ids))


def _chunks(
    head: ReplyHead,
    index: int,
    delta: ChatDelta,
    group: ChatGroup,
    report: SpeculationReport,
    written: tuple[ChatEntries, JsonParts],
) -> bytes:
    """One event for a step that adds something, and one more, without text, for the finish."""
    entries, parts = written
    text, finish, log_probs = _added(delta), delta.finish, entries.read(delta.log_probs, parts)
    ids = list(delta.token_ids) if group.shows_ids else UNSET
    provenance = report.add(delta.verified, len(delta.token_ids))
    shows_tokens = log_probs is not None or (finish is None and bool(ids or provenance))
    if text is None and (shows_tokens or (finish is None and group.form.is_plain)):
        text = Text(content="")
    added = b""
    if text is not None:
        choice = DeltaChoice(index, text, logprobs=log_probs, token_ids=ids, provenance=provenance)
        added = event(head.chunk(choice, delta.usage))
        ids, provenance = [] if group.shows_ids else UNSET, UNSET
    if finish is None:
        return added
    last = DeltaChoice(index, Text(), finish.reason, finish.matched, token_ids=ids, provenance=provenance)
    return added + event(head.chunk(last, delta.usage))


def _added(delta: ChatDelta) -> Text | None:
    if not (delta.content or delta.reasoning or delta.tool_calls):
        return None
    calls = tuple(map(_call_piece, delta.tool_calls))
    return Text(content=delta.content or UNSET, reasoning_content=delta.reasoning or UNSET, tool_calls=calls or UNSET)


def _call_piece(piece: ToolCallPiece) -> WireToolCall:
    if not piece.name:
        return WireToolCall(FunctionCall(arguments=piece.arguments), piece.index)
    return WireToolCall(FunctionCall(piece.name, piece.arguments), piece.index, piece.id, "function")
