"""`POST /v1/chat/completions`."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.messages import SamplingParams, Usage
from overlap_spec.server.engine_client import DeltaLike, ServerInfo
from overlap_spec.server.openai_replies import DeltaChoice, MessageChoice, Reply, ReplyHead, Text, wire_usage
from overlap_spec.server.openai_requests import ChatRequest, read_openai, sampling_params
from overlap_spec.server.problems import Problem
from overlap_spec.server.prompts import read_chat
from overlap_spec.server.running import Collected, EngineRequest, Group, Runner
from overlap_spec.server.streams import DONE, EventStream, event, unless_gone


class ChatCompletions:
    """The endpoint."""

    def __init__(self, runner: Runner, info: ServerInfo) -> None:
        self._runner = runner
        self._info = info

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of chunks."""
        body = await read_openai(request, ChatRequest, self._info)
        group = self._group(body)
        head = ReplyHead(
            group.id, "chat.completion.chunk", int(time.time()), self._info.model_name, body.stream_options
        )
        if body.stream:
            return EventStream(self._events(group, head))
        (answer,) = await unless_gone(request.receive, self._runner.collect(group))
        reply = Reply(
            head.id, "chat.completion", head.created, head.model, (_choice(answer),), wire_usage(answer.usage)
        )
        return Response(msgspec.json.encode(reply), media_type="application/json")

    def _group(self, body: ChatRequest) -> Group:
        limit, sampling = self._sampling(body)
        template_kwargs = dict(body.chat_template_kwargs)
        if body.reasoning_effort:
            template_kwargs["reasoning_effort"] = body.reasoning_effort
        tools = [] if body.tool_choice == "none" else body.tools
        prompt = read_chat(body.messages, tools, template_kwargs, body.add_generation_prompt, self._info)
        name = body.id("chatcmpl-")
        return Group(name, [EngineRequest(name, prompt, sampling, {**_names(limit), "prompt": "messages"})])

    def _sampling(self, body: ChatRequest) -> tuple[str, SamplingParams]:
        """Returns the field that limits the length, and the parameters; without a limit it is the context."""
        limits = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
        given = {name: value for name, value in limits.items() if value is not None}
        if len(set(given.values())) > 1:
            raise Problem(400, "max_tokens and max_completion_tokens differ: give one", "max_tokens", "invalid_value")
        limit = next(reversed(given), "max_tokens")
        return limit, sampling_params(body, given.get(limit), _names(limit), self._info)

    async def _events(self, group: Group, head: ReplyHead) -> AsyncGenerator[bytes, None]:
        last: Usage | None = None
        async with aclosing(self._runner.run(group)) as steps:
            async for ((_, delta),) in steps:
                opening = _opening(head, delta.usage) if last is None else b""
                last = delta.usage
                yield opening + _chunks(head, delta)
        assert last is not None
        if head.options.include_usage:
            yield event(head.usage_chunk(last))
        yield DONE


def _names(limit: str) -> dict[str, str]:
    return {"max_new_tokens": limit, "min_new_tokens": "min_tokens"}


def _choice(answer: Collected) -> MessageChoice:
    assert answer.finish is not None
    message = Text(role="assistant", content=answer.text)
    return MessageChoice(0, message, answer.finish.kind.value, answer.finish.matched)


def _opening(head: ReplyHead, usage: Usage) -> bytes:
    """The first event holds the role; no token has been sent yet."""
    start = Usage(usage.prompt_tokens, usage.cached_tokens, 0, 0)
    return event(head.chunk(DeltaChoice(0, Text(role="assistant", content="")), start))


def _chunks(head: ReplyHead, delta: DeltaLike) -> bytes:
    """One event for a step, and one more, without text, for the finish."""
    finish = delta.finish
    if finish is None:
        return event(head.chunk(DeltaChoice(0, Text(content=delta.text)), delta.usage))
    text = event(head.chunk(DeltaChoice(0, Text(content=delta.text)), delta.usage)) if delta.text else b""
    return text + event(head.chunk(DeltaChoice(0, Text(), finish.kind.value, finish.matched), delta.usage))
