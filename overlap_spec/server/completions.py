"""`POST /v1/completions`: text or token ids, one prompt or a batch whose choices are flattened by index."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.server.choices import check_best_of, check_choices, numbered, spread
from overlap_spec.server.engine_client import DeltaLike, ServerInfo
from overlap_spec.server.openai_replies import Reply, ReplyHead, TextChoice, wire_usage
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
            return EventStream(self._events(group, head, body.n))
        answers = await unless_gone(request.receive, self._runner.collect(group))
        choices = tuple(_choice(index, answer) for index, answer in enumerate(answers))
        usage = wire_usage([answer.usage for answer in answers], body.n)
        counts = reported_counts([a.report for a in answers], [a.usage for a in answers], self._info.num_steps)
        reply = Reply(head.id, head.object, head.created, head.model, choices, usage).with_counts(counts)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    def _group(self, body: CompletionRequest) -> Group:
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = sampling_params(body, max_tokens, NAMES, self._info)
        prompts, _ = read_prompts(body.prompt, "prompt", self._info)
        check_choices(body.n, len(prompts))
        check_best_of(body.best_of, body.n)
        name, count = body.id("cmpl-"), len(prompts) * body.n
        ids = numbered(name, count, count > 1)
        names = {**NAMES, "grammar": body.grammar_field}
        return Group(name, spread(ids, prompts, [sampling] * len(prompts), names, body.n))

    async def _events(self, group: Group, head: ReplyHead, n: int) -> AsyncGenerator[bytes, None]:
        last = [NOTHING] * len(group.requests)
        reports = [SpeculationReport(request.sampling.speculative) for request in group.requests]
        async with aclosing(self._runner.run(group)) as steps:
            async for step in steps:
                for index, delta in step:
                    last[index] = delta.usage
                yield b"".join(_chunk(head, index, delta, reports[index]) for index, delta in step)
        counts = reported_counts(reports, last, self._info.num_steps)
        if (end := head.last_chunk(wire_usage(last, n), counts)) is not None:
            yield event(end)
        yield DONE


def _choice(index: int, answer: Collected) -> TextChoice:
    assert answer.finish is not None
    finish, provenance = answer.finish, answer.report.provenance
    return TextChoice(index, answer.text, finish.kind.value, finish.matched, provenance=provenance)


def _chunk(head: ReplyHead, index: int, delta: DeltaLike, report: SpeculationReport) -> bytes:
    """One event for a step; the last one has the finish as well."""
    finish, provenance = delta.finish, report.add(delta.verified, len(delta.token_ids))
    reason, matched = (None, UNSET) if finish is None else (finish.kind.value, finish.matched)
    return event(head.chunk(TextChoice(index, delta.text, reason, matched, provenance=provenance), delta.usage))
