"""`POST /v1/completions`: text or token ids, one prompt or a batch whose choices are flattened by index."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from overlap_spec.entrypoints.http.body_fields import terms_of
from overlap_spec.entrypoints.http.engine_client import DeltaLike, ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import NOTHING, Collected, Group, Runner, sent_by
from overlap_spec.entrypoints.http.speculation import Provenance, SpeculationReport, reported_counts
from overlap_spec.entrypoints.http.streams import DONE, EventStream, JsonParts, event, unless_gone
from overlap_spec.entrypoints.openai.logprobs import (
    CompletionEntries,
    completion_field,
    completion_params,
    num_log_probs,
)
from overlap_spec.entrypoints.openai.prompts import read_prompts
from overlap_spec.entrypoints.openai.replies import (
    CompletionLogProbs,
    Reply,
    ReplyHead,
    TextChoice,
    best_answers,
    kept_ids,
    wire_usage,
)
from overlap_spec.entrypoints.openai.requests import (
    COMPLETION_TOKENS,
    CompletionRequest,
    check_best_of,
    check_choices,
    length_names,
    numbered,
    read_openai,
    sampling_params,
    spread,
)
from overlap_spec.messages import LogProbParams, Prompt


class ShownPrompt(msgspec.Struct, frozen=True):
    """What an answer shows of its prompt: its text (`echo`), its ids (`return_token_ids`)."""

    text: str = ""
    ids: list[int] | None = None


NOT_SHOWN = ShownPrompt()


class Completions:
    """The endpoint."""

    def __init__(self, runner: Runner, info: ServerInfo) -> None:
        self._runner = runner
        self._info = info

    async def post(self, request: Request) -> Response:
        """Answer at once, or with a stream of chunks."""
        body, group = await read_openai(request, CompletionRequest, self._info, self._group)
        group = sent_by(request, group)
        head = ReplyHead(
            group.id,
            "text_completion",
            int(time.time()),
            self._info.model_name,
            body.stream_options,
            self._info.fingerprint,
        )
        if body.stream:
            return EventStream(self._events(group, head, body))
        return await unless_gone(request.receive, self._whole(group, head, body))

    async def _whole(self, group: Group, head: ReplyHead, body: CompletionRequest) -> Response:
        prompts, entries = await self._prompts(group, body), CompletionEntries(body)
        candidates = await self._runner.collect(group)
        usage = wire_usage([each.usage for each in candidates], body.num_candidates)
        answers = await best_answers(candidates, body.num_candidates, body.n)
        asked = group.requests[0].sampling.log_probs
        parts = JsonParts(num_log_probs(asked, answers), self._runner.writing(group))
        shown = enumerate(zip(answers, prompts, strict=True))
        choices = tuple(_choice(index, answer, prompt, (entries, parts)) for index, (answer, prompt) in shown)
        counts = reported_counts([a.report for a in answers], [a.usage for a in answers], self._info.num_steps)
        reply = Reply(head.id, head.object, head.created, head.model, choices, usage)
        return parts.response(head.named(reply.with_counts(counts)))

    async def _prompts(self, group: Group, body: CompletionRequest) -> list[ShownPrompt]:
        """What each choice shows of its prompt."""
        prompts = [request.prompt for request in group.requests[:: body.num_candidates]]
        shown = [await self._shown(prompt, body, group.terms.client) for prompt in prompts]
        return [each for each in shown for _ in range(body.n)]

    async def _shown(self, prompt: Prompt, body: CompletionRequest, owner: str) -> ShownPrompt:
        ids = await self._runner.prompt_ids(prompt, owner) if body.return_token_ids else None
        echoes = body.echo and not self._info.skip_tokenizer_init
        text = await self._runner.text_of(prompt, body.skip_special_tokens, owner) if echoes else ""
        return ShownPrompt(text, ids)

    def _group(self, body: CompletionRequest) -> Group:
        limit, most = body.max_new_tokens(COMPLETION_TOKENS)
        sampling = sampling_params(body, most, length_names(limit), self._info)
        if body.thinking_tokens is not None:
            field = body.thinking_field
            raise Problem(400, f"{field}: only a chat has reasoning to limit", field, "invalid_value")
        log_probs = completion_params(body)
        if body.num_candidates > body.n and log_probs is None:
            log_probs = LogProbParams()  # to rank them by
        sampling = msgspec.structs.replace(sampling, log_probs=log_probs)
        cut = body.truncate_prompt_tokens is not None
        prompts, _ = read_prompts(body.prompt, "prompt", self._info, body.add_special_tokens, cut)
        check_choices(body.n, len(prompts))
        check_best_of(body.num_candidates, body.n, len(prompts), body.stream)
        name, count = body.id("cmpl-"), len(prompts) * body.num_candidates
        ids = numbered(name, count, count > 1)
        names = {**length_names(limit), "grammar": body.grammar_field, "log_probs": completion_field(body)}
        requests = spread(ids, prompts, [sampling] * len(prompts), names, body.num_candidates)
        return Group(name, requests, terms_of(body))

    async def _events(self, group: Group, head: ReplyHead, body: CompletionRequest) -> AsyncGenerator[bytes, None]:
        last, entries = [NOTHING] * len(group.requests), CompletionEntries(body)
        reports = [SpeculationReport(request.sampling.speculative) for request in group.requests]
        asked = group.requests[0].sampling.log_probs
        prompts = await self._prompts(group, body)
        async with aclosing(self._runner.run(group)) as steps:
            async for step in steps:
                events = []
                parts = JsonParts(num_log_probs(asked, [delta for _, delta in step]), self._runner.writing(group))
                for index, delta in step:
                    shown = prompts[index] if last[index] is NOTHING else NOT_SHOWN
                    last[index] = delta.usage
                    log_probs = entries.read(index, delta, parts)
                    provenance = reports[index].add(delta.verified, len(delta.token_ids))
                    choice = _chunk(index, delta, shown, body.return_token_ids, (log_probs, provenance))
                    events.append(event(head.chunk(choice, delta.usage)))
                async for chunk in parts.written(b"".join(events)):
                    yield chunk
        counts = reported_counts(reports, last, self._info.num_steps)
        if (end := head.last_chunk(wire_usage(last, body.n), counts)) is not None:
            yield event(end)
        yield DONE


def _choice(
    index: int, answer: Collected, prompt: ShownPrompt, log_probs: tuple[CompletionEntries, JsonParts]
) -> TextChoice:
    assert answer.finish is not None
    entries, parts = log_probs
    end, ids = answer.finish, UNSET if prompt.ids is None else answer.token_ids
    return TextChoice(
        index,
        prompt.text + answer.text,
        end.kind.value,
        end.matched,
        entries.read(index, answer, parts),
        ids,
        kept_ids(prompt.ids, answer.usage),
        answer.report.provenance,
        entries.prompt(answer.prompt_log_probs, parts),
    )


def _chunk(
    index: int,
    delta: DeltaLike,
    prompt: ShownPrompt,
    shows_ids: bool,
    reported: tuple[CompletionLogProbs | msgspec.Raw | None, Provenance | UnsetType],
) -> TextChoice:
    """What a step adds; the last one has the finish as well. `prompt`: what a choice's first event shows of it."""
    finish, ids, prompt_ids = delta.finish, delta.token_ids if shows_ids else UNSET, kept_ids(prompt.ids, delta.usage)
    reason, matched = (None, UNSET) if finish is None else (finish.kind.value, finish.matched)
    text = prompt.text + delta.text
    log_probs, provenance = reported
    return TextChoice(index, text, reason, matched, log_probs, ids, prompt_ids, provenance)
