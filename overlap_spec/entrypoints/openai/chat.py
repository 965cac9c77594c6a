"""`POST /v1/chat/completions`, and chats of every API: what is asked of the engine, and the answer as it grows.

    ChatRequest --ChatRunner.prepare--> Group --ChatRunner.run--> lists of (choice, ChatDelta) --> collect | a stream

An endpoint turns its body into a `ChatRequest` and shows the deltas in the shapes of its API.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.client.log_probs import NONE, TokenLogProb, extended
from overlap_spec.entrypoints.http.body_fields import terms_of
from overlap_spec.entrypoints.http.engine_client import DeltaLike, ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import NOTHING, Group, Runner, sent_by
from overlap_spec.entrypoints.http.speculation import SpeculationReport, reported_counts
from overlap_spec.entrypoints.http.streams import DONE, EventStream, JsonParts, Turn, event, unless_gone
from overlap_spec.entrypoints.openai.logprobs import ChatEntries, chat_field, chat_params, num_log_probs
from overlap_spec.entrypoints.openai.prompts import chat_prompt, check_chat
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
from overlap_spec.entrypoints.openai.requests import (
    ChatRequest,
    check_choices,
    length_names,
    numbered,
    read_openai,
    sampling_params,
    spread,
)
from overlap_spec.entrypoints.openai.tools import AnswerFormat, AnswerParser, answer_format, template_tools, with_format
from overlap_spec.entrypoints.parsers.pieces import ToolCallPiece
from overlap_spec.messages import FinishKind, SamplingParams, Speculative, Usage, Verified


class ChatFinish(msgspec.Struct, frozen=True):
    """Why an answer has ended: "stop", "length", "tool_calls" or "abort"; `matched` is the stop string or token."""

    reason: str
    matched: str | int | None = None


class ChatDelta(msgspec.Struct, frozen=True):
    """What one step added to a choice. The delta with a `finish` is its last; `usage` counts so far."""

    usage: Usage
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()
    finish: ChatFinish | None = None
    token_ids: tuple[int, ...] = ()
    verified: Verified | None = None
    log_probs: Sequence[TokenLogProb] = NONE
    prompt_log_probs: Sequence[TokenLogProb] = NONE


class ChatGroup(Group, frozen=True):
    """A chat's requests, one for each choice, and what is to be found in their answers, or shown beside them."""

    form: AnswerFormat = AnswerFormat()
    shows_ids: bool = False


CHARS_OF_TURN = 2048  # that are looked through for calls, before other streams have a turn; 5 ms at most
ChatSteps = AsyncGenerator[list[tuple[int, ChatDelta]], None]


class ChatAnswer:
    """The whole answer of one choice so far."""

    def __init__(self, asked: Speculative) -> None:
        self.report = SpeculationReport(asked)
        self.content = ""
        self.reasoning = ""
        self.tool_calls: list[ToolCallPiece] = []
        self.finish: ChatFinish | None = None
        self.usage = NOTHING
        self.token_ids: list[int] = []
        self.log_probs = self.prompt_log_probs = NONE

    def add(self, delta: ChatDelta) -> None:
        """Append what a step added."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        self.usage, self.finish = delta.usage, delta.finish
        self.token_ids += delta.token_ids
        self.report.add(delta.verified, len(delta.token_ids))
        self.log_probs = extended(self.log_probs, delta.log_probs)
        self.prompt_log_probs = delta.prompt_log_probs or self.prompt_log_probs  # one delta has all
        for piece in delta.tool_calls:
            if piece.index == len(self.tool_calls):
                self.tool_calls.append(piece)
            else:
                call = self.tool_calls[piece.index]
                longer = call.arguments + piece.arguments
                self.tool_calls[piece.index] = msgspec.structs.replace(call, arguments=longer)


class ChatRunner:
    """Runs chats."""

    def __init__(self, runner: Runner, info: ServerInfo) -> None:
        self._runner = runner
        self._info = info

    def writing(self, group: ChatGroup) -> Turn:
        return self._runner.writing(group)

    def prepare(self, body: ChatRequest, prefix: str) -> ChatGroup:
        """Check what the struct does not; `prefix` begins the id of a request without one. Raises: Problem."""
        limit, sampling = self._sampling(body)
        form = answer_format(body, self._info)
        sampling = with_format(sampling, body, form, self._info)
        sampling = msgspec.structs.replace(sampling, log_probs=chat_params(body))
        template_kwargs = dict(body.chat_template_kwargs)
        if body.reasoning_effort:
            template_kwargs["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort == "none":  # as templates call it that have a switch
            template_kwargs = {"enable_thinking": False, "thinking": False, **template_kwargs}
        if body.documents:
            template_kwargs["documents"] = body.documents
        if body.add_special_tokens:
            text = "add_special_tokens: the chat template writes its own; leave it out or send false"
            raise Problem(400, text, "add_special_tokens", "unsupported_parameter")
        prompt = check_chat(chat_prompt(body, body.messages, template_tools(body), template_kwargs), self._info)
        check_choices(body.n, 1)
        name = body.id(prefix)
        ids = numbered(name, body.n, body.n > 1)
        names = length_names(limit) | {"prompt": "messages", "grammar": body.grammar_field}
        names["log_probs"] = chat_field(body)
        requests, terms = spread(ids, [prompt], [sampling], names, body.n), terms_of(body)
        return ChatGroup(name, requests, terms, form, body.return_token_ids)

    async def run(self, group: ChatGroup, streams: bool = True) -> ChatSteps:
        """Yield what the steps add, until every choice has finished. Raises: as `Runner.run`.

        `streams`: calls are given out while they grow, before it is known whether they become complete.
        """
        choices = [_Choice(group.form, streams) for _ in group.requests]
        async with aclosing(self._runner.run(group)) as steps:
            async for step in steps:
                read, num_chars = [], 0
                for index, delta in step:
                    read.append((index, choices[index].read(delta)))
                    num_chars += 0 if group.form.is_plain else len(delta.text)
                    if num_chars > CHARS_OF_TURN:
                        num_chars = 0
                        await asyncio.sleep(0)
                yield read

    async def prompt_ids(self, group: ChatGroup) -> list[int] | None:
        """The conversation's token ids, before they are truncated, if ids are to be shown. Raises: as `Runner.run`."""
        if not group.shows_ids:
            return None
        return await self._runner.prompt_ids(group.requests[0].prompt, group.terms.client)

    async def collect(self, group: ChatGroup) -> list[ChatAnswer]:
        """Wait for the whole answer, in the order of the choices."""
        answers = [ChatAnswer(request.sampling.speculative) for request in group.requests]
        async with aclosing(self.run(group, streams=False)) as steps:
            async for step in steps:
                for index, delta in step:
                    answers[index].add(delta)
        return answers

    def _sampling(self, body: ChatRequest) -> tuple[str, SamplingParams]:
        """Returns the field that limits the length, and the parameters; by default the model or the context does."""
        limit, most = body.max_new_tokens(self._info.sampling_defaults.max_new_tokens)
        if most == 0:
            raise Problem(400, f"{limit} must be at least 1 in a chat, got 0", limit, "invalid_value")
        return limit, sampling_params(body, most, length_names(limit), self._info)


class _Choice:
    """The answer of one choice, as it is read."""

    def __init__(self, form: AnswerFormat, streams: bool) -> None:
        self._parser = None if form.is_plain else AnswerParser(form, streams)

    def read(self, delta: DeltaLike) -> ChatDelta:
        """What a step added."""
        finish = None if delta.finish is None else ChatFinish(delta.finish.kind.value, delta.finish.matched)
        ids = tuple(delta.token_ids)
        if self._parser is None:
            taken = ids, delta.verified, delta.log_probs, delta.prompt_log_probs
            return ChatDelta(delta.usage, delta.text, "", (), finish, *taken)
        found = self._parser.push(delta.text)
        if delta.finish is not None:
            stopped = delta.finish.kind is FinishKind.STOP
            found = found.then(self._parser.end(is_cut=not stopped))
            if stopped and self._parser.num_calls:
                finish = ChatFinish("tool_calls")
        parts = found.content, found.reasoning, found.tool_calls
        return ChatDelta(delta.usage, *parts, finish, ids, delta.verified, delta.log_probs, delta.prompt_log_probs)


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
            *(group.id, "chat.completion.chunk", int(time.time()), self._info.model_name, body.stream_options),
            self._info.fingerprint,
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
        return parts.response(head.named(reply.with_counts(counts)))

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
