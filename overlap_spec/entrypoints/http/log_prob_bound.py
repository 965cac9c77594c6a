"""The bound of log-probs in the answers to one HTTP request, checked before any of its requests is started.

The tokenizer checks each request by itself, with its prompt's exact length. Here they are counted together, by what
their prompts can have at the most; only where that is too much are the prompts' tokens counted.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from overlap_spec.messages import (
    MAX_LOG_PROBS,
    TOKEN_BYTES,
    ChatPrompt,
    LogProbCount,
    LogProbParams,
    Prompt,
    SamplingParams,
    TextPrompt,
    TokenPrompt,
    check_log_prob_count,
)

ADDED = 16  # tokens that a tokenizer adds to a text, at the most
PromptIds = Callable[[Prompt], Awaitable[Sequence[int]]]


class _Asked(NamedTuple):
    """A request with log-probs."""

    prompt: Prompt
    sampling: SamplingParams
    log_probs: LogProbParams

    def at_most(self, prompt_len: int, max_len: int, is_exact: bool) -> LogProbCount:
        """What its answer may have."""
        keep = self.sampling.truncate_prompt_tokens
        prompt_len = min(prompt_len, max_len, keep if keep is not None and keep > 0 else max_len)
        most = self.sampling.max_new_tokens
        if most is None:
            most = max_len - (prompt_len if is_exact or self.log_probs.prompt_from is not None else 0)
        return LogProbCount(self.log_probs, prompt_len, min(most, max_len))


async def check_log_probs(
    requests: Sequence[tuple[Prompt, SamplingParams]], max_len: int, prompt_ids: PromptIds
) -> None:
    """Raises: RequestError if the answers together may have too many; what `prompt_ids` raises. A single one passes.

    Cancellation: safe.
    """
    asked = [_Asked(prompt, sampling, sampling.log_probs) for prompt, sampling in requests if sampling.log_probs]
    if len(requests) == 1 or not asked:
        return
    known = {id(each.prompt): _longest(each.prompt, max_len) for each in asked}
    counts = [each.at_most(known[id(each.prompt)], max_len, is_exact=False) for each in asked]
    if sum(count.total for count in counts) > MAX_LOG_PROBS:
        for prompt in {id(each.prompt): each.prompt for each in asked}.values():
            if not isinstance(prompt, TokenPrompt):
                known[id(prompt)] = len(await prompt_ids(prompt))
        counts = [each.at_most(known[id(each.prompt)], max_len, is_exact=True) for each in asked]
    check_log_prob_count(counts)


def _longest(prompt: Prompt, max_len: int) -> int:
    """Tokens that it can have: each covers a byte of its text."""
    match prompt:
        case TokenPrompt():
            return len(prompt.ids) // TOKEN_BYTES
        case TextPrompt():
            return len(prompt.text.encode("utf-8", "surrogatepass")) + ADDED
        case ChatPrompt():
            return max_len
