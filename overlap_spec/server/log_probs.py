"""Log-probs in the shapes of OpenAI's chat and completions, with vLLM's `prompt_logprobs`.

A token that is no whole character has no text: it is written as its bytes, "bytes:\\xe2\\x80", as OpenAI does. So two
tokens never share a key of `top_logprobs`. JSON has no infinity: -9999 is the least log-prob, as in vLLM.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from overlap_spec.client.log_probs import Candidate, TokenLogProb
from overlap_spec.errors import RequestError
from overlap_spec.messages import LogProbParams
from overlap_spec.server.openai_replies import (
    ChatLogProbs,
    CompletionLogProbs,
    PromptLogProbs,
    WireCandidate,
    WireTokenLogProb,
)
from overlap_spec.server.openai_requests import ChatRequest, CommonRequest, CompletionRequest
from overlap_spec.server.problems import Problem
from overlap_spec.server.running import renamed

LEAST = -9999.0
CHAT_NAMES = {"log_probs.top": "top_logprobs"}
COMPLETION_NAMES = {"log_probs.top": "logprobs"}


def chat_params(body: ChatRequest) -> LogProbParams | None:
    """What a chat asks for. Raises: RequestError, Problem."""
    if body.top_logprobs is not None and body.top_logprobs > 0 and not body.logprobs:
        raise Problem(400, "top_logprobs: logprobs must be true if it is used", "top_logprobs", "invalid_value")
    asked = (body.top_logprobs or 0) if body.logprobs else None
    return _params(asked, _prompt_top(body), CHAT_NAMES)


def completion_params(body: CompletionRequest) -> LogProbParams | None:
    """What a completion asks for. With `echo` the prompt's are those of the output. Raises: RequestError, Problem."""
    if body.logprobs is True:
        raise Problem(400, "logprobs: expected a number of tokens, 0 to 20, got true", "logprobs", "invalid_type")
    asked = None if body.logprobs is False else body.logprobs
    of_prompt = _prompt_top(body)
    if body.echo and asked is not None:
        of_prompt = max(asked, of_prompt or 0)
    return _params(asked, of_prompt, COMPLETION_NAMES)


def _prompt_top(body: CommonRequest) -> int | None:
    asked = body.prompt_logprobs
    if asked is None or asked is False:
        return None
    if asked is True:
        raise Problem(400, "prompt_logprobs: expected a number, 0 to 20, got true", "prompt_logprobs", "invalid_type")
    if body.stream:
        text = "prompt_logprobs are not in streams: leave out stream"
        raise Problem(400, text, "prompt_logprobs", "invalid_value")
    try:
        LogProbParams(top=asked)
    except RequestError as error:
        raise renamed(error, {"log_probs.top": "prompt_logprobs"}) from None
    return asked


def _params(of_output: int | None, of_prompt: int | None, names: dict[str, str]) -> LogProbParams | None:
    if of_output is None and of_prompt is None:
        return None
    try:
        LogProbParams(top=of_output or 0)
    except RequestError as error:
        raise renamed(error, names) from None
    return LogProbParams(top=max(of_output or 0, of_prompt or 0), prompt_from=None if of_prompt is None else 0)


class TokenNames:
    """How tokens are written. `as_ids`: "token_id:7", as vLLM's `return_tokens_as_token_ids` asks."""

    def __init__(self, as_ids: bool) -> None:
        self._as_ids = as_ids

    def of(self, token: TokenLogProb | Candidate) -> str:
        """The text, if it is one."""
        if self._as_ids:
            return f"token_id:{token.token_id}"
        try:
            return token.token.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token)

    def chat(self, entries: Iterable[TokenLogProb], top: int) -> ChatLogProbs:
        """Of output tokens, which all have log-probs."""
        return ChatLogProbs([self._chat_token(entry, top) for entry in entries])

    def _chat_token(self, entry: TokenLogProb, top: int) -> WireTokenLogProb:
        assert entry.log_prob is not None
        others = [WireCandidate(self.of(each), finite(each.log_prob), list(each.token)) for each in entry.top[:top]]
        return WireTokenLogProb(self.of(entry), finite(entry.log_prob), list(entry.token), others)

    def completion(self, entries: Sequence[TokenLogProb], top: int, offset: int) -> CompletionLogProbs:
        """`offset`: characters of the tokens before."""
        tokens, offsets = [self.of(entry) for entry in entries], []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return CompletionLogProbs(
            tokens,
            [None if entry.log_prob is None else finite(entry.log_prob) for entry in entries],
            [self._top_of(entry, top) for entry in entries],
            offsets,
        )

    def _top_of(self, entry: TokenLogProb, top: int) -> dict[str, float] | None:
        """The most probable tokens and the token itself; the larger log-prob where ids share a text."""
        if entry.log_prob is None:
            return None
        found: dict[str, float] = {}
        for each in (*entry.top[:top], Candidate(entry.token_id, entry.log_prob, entry.token)):
            name = self.of(each)
            found[name] = max(finite(each.log_prob), found.get(name, LEAST))
        return found

    def prompt(self, entries: Iterable[TokenLogProb], top: int) -> PromptLogProbs:
        """vLLM's `prompt_logprobs`, by token id. `rank` is null outside the most probable tokens."""
        return [None if entry.log_prob is None else self._by_id(entry, entry.log_prob, top) for entry in entries]

    def _by_id(self, entry: TokenLogProb, log_prob: float, top: int) -> dict[str, Any]:
        own = Candidate(entry.token_id, log_prob, entry.token)
        ranks = {each.token_id: rank for rank, each in enumerate(entry.top, start=1)}
        return {
            str(each.token_id): {
                "logprob": finite(each.log_prob),
                "rank": ranks.get(each.token_id),
                "decoded_token": self.of(each),
            }
            for each in (*entry.top[:top], own)
        }


def finite(log_prob: float) -> float:
    """As JSON can hold it."""
    return max(log_prob, LEAST)


class ChatEntries:
    """A chat's log-probs."""

    def __init__(self, body: ChatRequest) -> None:
        self._names = TokenNames(body.return_tokens_as_token_ids)
        self._top = (body.top_logprobs or 0) if body.logprobs else None
        self._prompt_top = _prompt_top(body)

    def read(self, entries: Sequence[TokenLogProb]) -> ChatLogProbs | None:
        """Of an answer's tokens; None if none are asked for, or there are no tokens."""
        return None if self._top is None or not entries else self._names.chat(entries, self._top)

    def prompt(self, entries: Sequence[TokenLogProb]) -> PromptLogProbs | UnsetType:
        """vLLM's `prompt_logprobs`; left out if they are not asked for."""
        return UNSET if self._prompt_top is None else self._names.prompt(entries, self._prompt_top)


class CompletionEntries:
    """A completion's log-probs as its deltas bring them, for each choice. `echo`: the prompt's come first."""

    def __init__(self, body: CompletionRequest) -> None:
        self._names = TokenNames(body.return_tokens_as_token_ids)
        self._top = None if body.logprobs is None or body.logprobs is False else int(body.logprobs)
        self._prompt_top = _prompt_top(body)
        self._echo = body.echo
        self._offsets: dict[int, int] = {}

    def read(
        self, index: int, prompt: Sequence[TokenLogProb], output: Sequence[TokenLogProb]
    ) -> CompletionLogProbs | None:
        """What a delta of choice `index` adds; None if none are asked for."""
        if self._top is None:
            return None
        entries = [*(prompt if self._echo else ()), *output]
        found = self._names.completion(entries, self._top, self._offsets.get(index, 0))
        self._offsets[index] = self._offsets.get(index, 0) + sum(map(len, found.tokens))
        return found

    def prompt(self, entries: Sequence[TokenLogProb]) -> PromptLogProbs | UnsetType:
        """vLLM's `prompt_logprobs`; left out if they are not asked for."""
        return UNSET if self._prompt_top is None else self._names.prompt(entries, self._prompt_top)
