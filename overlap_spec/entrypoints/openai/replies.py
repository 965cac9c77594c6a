"""Answers of OpenAI's endpoints: completions, chat completions and their chunks, which are only encoded; and which
answers are best.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from overlap_spec.client.log_probs import TokenLogProb, own_log_probs
from overlap_spec.entrypoints.http.body_fields import Json
from overlap_spec.entrypoints.http.request_runner import Collected
from overlap_spec.entrypoints.http.speculation import Provenance, ReportedCounts
from overlap_spec.entrypoints.openai.requests import StreamOptions
from overlap_spec.messages import Usage

SUMMED_AT_ONCE = 1 << 15  # log-probs


class CachedTokens(msgspec.Struct, frozen=True):
    """Part of `usage`."""

    cached_tokens: int


class WireUsage(msgspec.Struct, frozen=True):
    """`usage`, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class FunctionCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call's function, or what a chunk adds to it."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class WireToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of a message (without index), or what a chunk adds to one (with index; id and type come first)."""

    function: FunctionCall
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Text(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat message or what a chunk adds to it."""

    role: str | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[WireToolCall, ...] | UnsetType = UNSET


class WireCandidate(msgspec.Struct, frozen=True, gc=False):
    """A token that might be at a position, in a chat."""

    token: str
    logprob: float
    bytes: list[int]


class WireTokenLogProb(msgspec.Struct, frozen=True, gc=False):
    """A chat's token."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[WireCandidate]


class ChatLogProbs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat's choice: the tokens of its answer, or of a chunk of it."""

    content: list[WireTokenLogProb]
    refusal: None = None


class CompletionLogProbs(msgspec.Struct, frozen=True):
    """`logprobs` of a completion's choice: columns of equal length. `text_offset` adds up the tokens' own texts."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


PromptLogProbs = list[dict[str, Any] | None] | msgspec.Raw  # vLLM's; raw where they are made in parts


class MessageChoice(msgspec.Struct, frozen=True):
    """The choice of a chat's whole answer."""

    index: int
    message: Text
    finish_reason: str | None
    matched_stop: str | int | None
    logprobs: ChatLogProbs | msgspec.Raw | None = None
    token_ids: list[int] | UnsetType = UNSET
    provenance: Provenance | UnsetType = UNSET


class DeltaChoice(msgspec.Struct, frozen=True):
    """The choice of a chat's chunk. Only the last one has a finish reason."""

    index: int
    delta: Text
    finish_reason: str | None = None
    matched_stop: str | int | None | UnsetType = UNSET
    logprobs: ChatLogProbs | msgspec.Raw | None = None
    token_ids: list[int] | UnsetType = UNSET
    provenance: Provenance | UnsetType = UNSET


class TextChoice(msgspec.Struct, frozen=True):
    """The choice of a completion, whole or chunk."""

    index: int
    text: str
    finish_reason: str | None = None
    matched_stop: str | int | None | UnsetType = UNSET
    logprobs: CompletionLogProbs | msgspec.Raw | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    provenance: Provenance | UnsetType = UNSET
    prompt_logprobs: PromptLogProbs | UnsetType = UNSET


C = TypeVar("C")


class Reply(msgspec.Struct, Generic[C], frozen=True):
    """An answer or a chunk of one, as `object` tells."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[C, ...]
    usage: WireUsage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # of a chat, as the next; a completion's choices have their own
    prompt_logprobs: PromptLogProbs | UnsetType = UNSET
    metrics: Json | UnsetType = UNSET  # vLLM's, of speculation
    sglext: Json | UnsetType = UNSET  # SGLang's
    system_fingerprint: str | UnsetType = UNSET  # with --enable-deterministic-inference: of what bits depend on

    def with_counts(self, counts: ReportedCounts | None) -> "Reply[C]":
        """The same with the counts of its speculation, if it shows them."""
        return self if counts is None else replace(self, metrics=counts.metrics, sglext=counts.sglext)


def wire_usage(usages: Sequence[Usage], n: int = 1) -> WireUsage:
    """The sum over a request's choices, `n` of each prompt, which counts once: as its first choice found it."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    cached = CachedTokens(sum(usage.cached_tokens for usage in usages[::n]))
    return WireUsage(prompt, completion, prompt + completion, cached)


def _running_usage(usage: Usage) -> WireUsage:
    prompt, completion = usage.prompt_tokens, usage.completion_tokens
    return WireUsage(prompt, completion, prompt + completion, CachedTokens(usage.cached_tokens))


def kept_ids(prompt_ids: list[int] | None, usage: Usage) -> list[int] | UnsetType:
    """The end of the prompt that the engine was given, if its ids are to be shown."""
    return UNSET if prompt_ids is None else prompt_ids[len(prompt_ids) - usage.prompt_tokens :]


class ReplyHead(msgspec.Struct, frozen=True):
    """The fields that all chunks of one answer share."""

    id: str
    object: str
    created: int
    model: str
    options: StreamOptions
    fingerprint: str | UnsetType = UNSET

    def chunk(self, choice: C, usage: Usage, prompt_ids: list[int] | UnsetType = UNSET) -> Reply[C]:
        """A chunk with a choice. Usage: running if asked for, null (as OpenAI does) if a chunk with it will follow."""
        shown: WireUsage | None | UnsetType = UNSET
        if self.options.continuous_usage_stats:
            shown = _running_usage(usage)
        elif self.options.include_usage:
            shown = None
        chunk = Reply(self.id, self.object, self.created, self.model, (choice,), shown, prompt_ids)
        return self.named(chunk)

    def named(self, reply: Reply[C]) -> Reply[C]:
        """The same with the fingerprint, if the server has one."""
        return reply if self.fingerprint is UNSET else replace(reply, system_fingerprint=self.fingerprint)

    def last_chunk(self, usage: WireUsage, counts: ReportedCounts | None) -> Reply[Any] | None:
        """The last chunk, without a choice; None if nothing is left to tell."""
        if not self.options.include_usage and counts is None:
            return None
        shown = usage if self.options.include_usage else UNSET
        last = Reply[Any](self.id, self.object, self.created, self.model, (), shown)
        return self.named(last.with_counts(counts))


async def best_answers(answers: Sequence[Collected], best_of: int, n: int) -> list[Collected]:
    """The n answers to each prompt with the highest mean log-prob of their tokens, best first; of equals the first.

    `answers`: `best_of` of each prompt, with log-probs if some are left out. Cancellation: safe.
    """
    if best_of == n:
        return list(answers)
    ranked = [(await _mean_log_prob(answer.log_probs), answer) for answer in answers]
    groups = (ranked[start : start + best_of] for start in range(0, len(ranked), best_of))
    best = (sorted(group, key=lambda each: each[0], reverse=True)[:n] for group in groups)
    return [answer for group in best for _, answer in group]


async def _mean_log_prob(entries: Sequence[TokenLogProb]) -> float:
    """Of the tokens that would be returned; an answer without tokens comes last. Others take turns with the sums."""
    sums: list[float] = []
    for first in range(0, len(entries), SUMMED_AT_ONCE):
        sums.append(math.fsum(own_log_probs(entries, first, first + SUMMED_AT_ONCE)))
        await asyncio.sleep(0)
    mean = math.fsum(sums) / len(entries) if entries else -math.inf
    return -math.inf if math.isnan(mean) else mean
