"""`POST /v1/completions`: text or token ids, one prompt or a batch whose choices are flattened by index."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.server.choices import check_best_of, check_choices, numbered, spread
from overlap_spec.server.engine_client import DeltaLike, ServerInfo
from overlap_spec.server.openai_replies import Reply, ReplyHead, TextChoice, kept_ids, wire_usage
from overlap_spec.server.openai_requests import COMPLETION_TOKENS, CompletionRequest, read_openai, sampling_params
from overlap_spec.server.prompts import read_prompts
from overlap_spec.server.running import NOTHING, Collected, Group, Runner
from overlap_spec.server.speculation import SpeculationReport, reported_counts
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
        if body.stream:
            return EventStream(self._events(group, head, body))
        reply = await unless_gone(request.receive, self._whole(group, head, body))
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def _whole(self, group: Group, head: ReplyHead, body: CompletionRequest) -> Reply[TextChoice]:
        prompts = await self._prompt_ids(group, body)
        answers = await self._runner.collect(group)
        usage = wire_usage([answer.usage for answer in answers], body.n)
        parts = enumerate(zip(answers, prompts, strict=True))
        choices = tuple(_choice(index, answer, prompt) for index, (answer, prompt) in parts)
        counts = reported_counts([a.report for a in answers], [a.usage for a in answers], self._info.num_steps)
        return Reply(head.id, head.object, head.created, head.model, choices, usage).with_counts(counts)

    async def _prompt_ids(self, group: Group, body: CompletionRequest) -> list[list[int] | None]:
        """The prompt's token ids for each choice, if the answer is to show ids."""
        if not body.return_token_ids:
            return [None] * len(group.requests)
        ids = [await self._runner.prompt_ids(request.prompt) for request in group.requests[:: body.n]]
        return [each for each in ids for _ in range(body.n)]

    def _group(self, body: CompletionRequest) -> Group:
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = sampling_params(body, max_tokens, NAMES, self._info)
        cut = body.truncate_prompt_tokens is not None
        prompts, _ = read_prompts(body.prompt, "prompt", self._info, body.add_special_tokens, cut)
        check_choices(body.n, len(prompts))
        check_best_of(body.best_of, body.n)
        name, count = body.id("cmpl-"), len(prompts) * body.n
        ids = numbered(name, count, count > 1)
        names = {**NAMES, "grammar": body.grammar_field}
        return Group(name, spread(ids, prompts, [sampling] * len(prompts), names, body.n))

    async def _events(self, group: Group, head: ReplyHead, body: CompletionRequest) -> AsyncGenerator[bytes, None]:
        last = [NOTHING] * len(group.requests)
        reports = [SpeculationReport(request.sampling.speculative) for request in group.requests]
        prompts = await self._prompt_ids(group, body)
        async with aclosing(self._runner.run(group)) as steps:
            async for step in steps:
                events = []
                for index, delta in step:
                    shown = prompts[index] if last[index] is NOTHING else None
                    last[index] = delta.usage
                    events.append(_chunk(head, index, delta, shown, body.return_token_ids, reports[index]))
                yield b"".join(events)
        counts = reported_counts(reports, last, self._info.num_steps)
        if (end := head.last_chunk(wire_usage(last, body.n), counts)) is not None:
            yield event(end)
        yield DONE


def _choice(index: int, answer: Collected, prompt: list[int] | None) -> TextChoice:
    """`prompt`: its ids, if ids are to be shown."""
    assert answer.finish is not None
    ids = UNSET if prompt is None else answer.token_ids
    end, prompt_ids = answer.finish, kept_ids(prompt, answer.usage)
    choice = TextChoice(index, answer.text, end.kind.value, end.matched, token_ids=ids, prompt_token_ids=prompt_ids)
    return replace(choice, provenance=answer.report.provenance)


def _chunk(
    head: ReplyHead, index: int, delta: DeltaLike, prompt: list[int] | None, shows_ids: bool, report: SpeculationReport
) -> bytes:
    """One event for a step; the last one has the finish as well. `prompt`: its ids, in the choice's first event."""
    finish, ids, prompt_ids = delta.finish, delta.token_ids if shows_ids else UNSET, kept_ids(prompt, delta.usage)
    reason, matched = (None, UNSET) if finish is None else (finish.kind.value, finish.matched)
    choice = TextChoice(index, delta.text, reason, matched, token_ids=ids, prompt_token_ids=prompt_ids)
    choice = replace(choice, provenance=report.add(delta.verified, len(delta.token_ids)))
    return event(head.chunk(choice, delta.usage))
