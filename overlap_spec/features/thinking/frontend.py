"""The frontend's part of reasoning: a budget in tokens, and where the answer and its grammar begin.

A chat template may write the opening marker itself, or open and close the reasoning at once where none is wanted. So
whether a prompt ends in the middle of reasoning, or right after it, is found out by its end.
"""

from collections.abc import Sequence

import msgspec

from overlap_spec.frontend.codec import Codec
from overlap_spec.frontend.hooks import Parts, Preparing, RequestHook
from overlap_spec.frontend.request_checks import check_ids
from overlap_spec.messages import ChatPrompt, Prompt, Reasoning, SamplingParams, Thinking

TAIL = 16  # tokens; both markers and the white space around them


def attach(parts: Parts) -> RequestHook:
    """Any request may have markers of reasoning."""
    return ThinkingHook(parts.codec)


class ThinkingHook(RequestHook):
    """Settles what follows from a request's reasoning and its prompt."""

    fields = ("reasoning", "thinking")

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
        """Raises: RequestError if a marker is no token of the model, or has too many."""
        if (thinking := sampling.thinking) is not None:  # a client may send its markers, which index masks
            check_ids("thinking", (*thinking.opening, *thinking.closing), preparing.limits.vocab_size)
        if (reasoning := sampling.reasoning) is not None:
            opening = opening_of(preparing.prompt, preparing.ids, reasoning, self._codec)
            sampling = with_budget(sampling, reasoning, opening, self._codec)
            sampling = after_reasoning(sampling, reasoning, opening)
            sampling = msgspec.structs.replace(sampling, reasoning=None)  # no other process reads it
            preparing.request.opening = opening if reasoning.is_separate else ""
        return after_budget(sampling)


def opening_of(prompt: Prompt, ids: Sequence[int], reasoning: Reasoning, codec: Codec) -> str:
    """The markers that belong before the text of the answer."""
    tail = _continued(prompt) or codec.decode(ids[-TAIL:], skip_special_tokens=False).rstrip()
    if tail.endswith(reasoning.closing):
        return reasoning.opening + reasoning.closing
    opened, closed = tail.rfind(reasoning.opening), tail.rfind(reasoning.closing)
    is_open = tail.endswith(reasoning.opening) or (bool(_continued(prompt)) and opened > closed)
    return reasoning.opening if is_open else ""


def with_budget(sampling: SamplingParams, reasoning: Reasoning, opening: str, codec: Codec) -> SamplingParams:
    """The same request, with its thinking budget in token ids. Raises: RequestError if a marker has too many."""
    if reasoning.budget is None or opening.endswith(reasoning.closing):
        return sampling
    begins, ends = (tuple(codec.encode(text, False)) for text in (reasoning.opening, reasoning.closing))
    is_open = bool(opening) or reasoning.is_implicit
    return msgspec.structs.replace(sampling, thinking=Thinking(reasoning.budget, is_open, begins, ends))


def after_reasoning(sampling: SamplingParams, reasoning: Reasoning, opening: str) -> SamplingParams:
    """The same request, whose grammar is of what follows the reasoning; `opening` is what the prompt leaves open."""
    grammar = sampling.grammar
    if grammar is None or opening.endswith(reasoning.closing):
        return sampling
    settled = msgspec.structs.replace(grammar, reasoning=reasoning, is_reasoning=bool(opening))
    return msgspec.structs.replace(sampling, grammar=settled)


def after_budget(sampling: SamplingParams) -> SamplingParams:
    """The same request, whose grammar begins where its thinking budget ends the reasoning."""
    if sampling.grammar is None or sampling.thinking is None:
        return sampling
    return msgspec.structs.replace(
        sampling, grammar=msgspec.structs.replace(sampling.grammar, thinking=sampling.thinking)
    )


def _continued(prompt: Prompt) -> str:
    """What there is already of the message that is continued; empty if a new one begins."""
    if not isinstance(prompt, ChatPrompt) or prompt.add_generation_prompt:
        return ""
    last = prompt.messages[-1]
    content = last.get("content") if last.get("role") == "assistant" else None
    return content.rstrip() if isinstance(content, str) else ""
