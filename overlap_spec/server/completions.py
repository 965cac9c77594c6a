"""`POST /v1/completions`: text or token ids, one prompt or a batch whose choices are flattened by index."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.server.choices import check_best_of, check_choices, numbered, spread
from overlap_spec.server.engine_client import DeltaLike, ServerInfo
from overlap_spec.server.log_probs import CompletionEntries, completion_params
from overlap_spec.server.openai_replies import Reply, ReplyHead, TextChoice, wire_usage
from overlap_spec.server.openai_requests import COMPLETION_TOKENS, CompletionRequest, read_openai, sampling_params
from overlap_spec.server.prompts import read_prompts
from overlap_spec.server.running import NOTHING, Collected, Group, Runner
from overlap_spec.server.streams import DONE, EventStream, event, unless_gone

NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}


class Completions:
    """The endpoint."""

    def __init__(self, runner: Runner, info: ServerInfo) -> None:
        self._runner = runner
        self._info = info

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of chunks."""
        body = await read_openai(request, CompletionRequest, self._info)
        group = self._group(body)
        head = ReplyHead(group.id, "text_completion", int(time.time()), self._info.model_name, body.stream_options)
        echoes = await unless_gone(request.receive, self._echoes(body, group))
        if body.stream:
            return EventStream(self._events(group, head, body, echoes))
        answers = await unless_gone(request.receive, self._runner.collect(group))
        entries = CompletionEntries(body)
        choices = tuple(_choice(index, answer, echoes[index], entries) for index, answer in enumerate(answers))
        usage = wire_usage([answer.usage for answer in answers], body.n)
        reply = Reply(head.id, head.object, head.created, head.model, choices, usage)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    def _group(self, body: CompletionRequest) -> Group:
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = sampling_params(body, max_tokens, NAMES, self._info)
        sampling = msgspec.structs.replace(sampling, log_probs=completion_params(body))
        prompts, _ = read_prompts(body.prompt, "prompt", self._info)
        check_choices(body.n, len(prompts))
        check_best_of(body.best_of, body.n)
        name, count = body.id("cmpl-"), len(prompts) * body.n
        ids = numbered(name, count, count > 1)
        names = {**NAMES, "grammar": body.grammar_field}
        return Group(name, spread(ids, prompts, [sampling] * len(prompts), names, body.n))

    async def _echoes(self, body: CompletionRequest, group: Group) -> list[str]:
        """For each choice the prompt's text, if it is to be returned and there is text."""
        if not body.echo or self._info.skip_tokenizer_init:
            return [""] * len(group.requests)
        prompts = [request.prompt for request in group.requests[:: body.n]]
        texts = [await self._runner.text_of(prompt, body.skip_special_tokens) for prompt in prompts]
        return [text for text in texts for _ in range(body.n)]

    async def _events(
        self, group: Group, head: ReplyHead, body: CompletionRequest, echoes: list[str]
    ) -> AsyncGenerator[bytes, None]:
        last, entries, echoes = [NOTHING] * len(group.requests), CompletionEntries(body), list(echoes)
        async with aclosing(self._runner.run(group)) as steps:
            async for step in steps:
                for index, delta in step:
                    last[index] = delta.usage
                events = []
                for index, delta in step:
                    events.append(_chunk(head, index, delta, echoes[index], entries))
                    echoes[index] = ""  # with the first chunk alone
                yield b"".join(events)
        if head.options.include_usage:
            yield event(head.usage_chunk(wire_usage(last, body.n)))
        yield DONE


def _choice(index: int, answer: Collected, echo: str, entries: CompletionEntries) -> TextChoice:
    assert answer.finish is not None
    log_probs, of_prompt = entries.read(index, answer.prompt_log_probs, answer.log_probs), answer.prompt_log_probs
    finish = answer.finish.kind.value, answer.finish.matched
    return TextChoice(index, echo + answer.text, *finish, log_probs, entries.prompt(of_prompt))


def _chunk(head: ReplyHead, index: int, delta: DeltaLike, echo: str, entries: CompletionEntries) -> bytes:
    """One event for a step; the last one has the finish as well."""
    log_probs, text = entries.read(index, delta.prompt_log_probs, delta.log_probs), echo + delta.text
    finish = delta.finish
    if finish is None:
        return event(head.chunk(TextChoice(index, text, logprobs=log_probs), delta.usage))
    return event(head.chunk(TextChoice(index, text, finish.kind.value, finish.matched, log_probs), delta.usage))
