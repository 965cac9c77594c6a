"""Log-probs in the shapes of OpenAI's chat and completions, with vLLM's `prompt_logprobs`.

A token that is no whole character has no text: it is written as its bytes, "bytes:\\xe2\\x80", as OpenAI does. So two
tokens never share a key of `top_logprobs`. JSON has no infinity: -9999 is the least log-prob, as in vLLM.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any, Protocol

from msgspec import UNSET, Raw, UnsetType

from overlap_spec.client.log_probs import NONE, Candidate, TokenLogProb, alone
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import renamed
from overlap_spec.entrypoints.http.streams import JsonParts, list_parts, object_parts
from overlap_spec.entrypoints.openai.replies import (
    ChatLogProbs,
    CompletionLogProbs,
    PromptLogProbs,
    WireCandidate,
    WireTokenLogProb,
)
from overlap_spec.entrypoints.openai.requests import ChatRequest, CommonRequest, CompletionRequest
from overlap_spec.errors import RequestError
from overlap_spec.messages import LogProbParams

LEAST = -9999.0
BLOCK = 24  # tokens, each of up to 21 log-probs, that are written at once
BLOCK_ALONE = 256  # the same where each has its own log-prob alone
CHAT_NAMES = {"log_probs.top": "top_logprobs"}
COMPLETION_NAMES = {"log_probs.top": "logprobs"}


class HasLogProbs(Protocol):
    """An answer, or what a step adds to it."""

    @property
    def log_probs(self) -> Sequence[TokenLogProb]: ...
    @property
    def prompt_log_probs(self) -> Sequence[TokenLogProb]: ...


def chat_params(body: ChatRequest) -> LogProbParams | None:
    """What a chat asks for. Raises: RequestError, Problem."""
    if body.top_logprobs and not body.logprobs:
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


def chat_field(body: ChatRequest) -> str:
    """The field that asks for most of a chat's log-probs."""
    names = {"prompt_logprobs": _prompt_top(body), "top_logprobs": body.top_logprobs if body.logprobs else 0}
    return next((name for name, asked in names.items() if asked), "logprobs")


def completion_field(body: CompletionRequest) -> str:
    """The same of a completion. The best candidates are found by their log-probs."""
    if body.logprobs is not None and body.logprobs is not False:
        return "logprobs"
    return "best_of" if _prompt_top(body) is None else "prompt_logprobs"


def blocks(*runs: Sequence[TokenLogProb], most: int = BLOCK) -> Iterator[list[TokenLogProb]]:
    """The tokens of all runs in order, a few at a time."""
    for run in runs:
        entries = iter(run)
        while block := list(islice(entries, most)):
            yield block


def num_log_probs(asked: LogProbParams | None, answers: Iterable[HasLogProbs]) -> int:
    """How many there are in answers, or in what a step adds to them."""
    if asked is None:
        return 0
    return asked.width * sum(len(answer.log_probs) + len(answer.prompt_log_probs) for answer in answers)


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

    def chat(self, entries: Sequence[TokenLogProb], top: int) -> ChatLogProbs:
        """Of output tokens, which all have log-probs."""
        return ChatLogProbs([self._chat_token(entry, top) for entry in entries])

    def chat_parts(self, entries: Sequence[TokenLogProb], top: int) -> Iterator[bytes]:
        """JSON of `chat`, in parts."""
        content = list_parts([self._chat_token(entry, top) for entry in block] for block in blocks(entries))
        return object_parts({"content": content, "refusal": (b"null",)})

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
            [_own(entry) for entry in entries],
            [self._top_of(entry, top) for entry in entries],
            offsets,
        )

    def completion_parts(
        self, runs: Sequence[Sequence[TokenLogProb]], top: int, offset: int, at_end: Callable[[int], None]
    ) -> Iterator[bytes]:
        """JSON of `completion`, in parts; the tokens are those of all runs. `at_end` is told where their text ends."""
        own = [alone(run) for run in runs]
        tokens = ([self.of(entry) for entry in block] for block in blocks(*own, most=BLOCK_ALONE))
        log_probs = ([_own(entry) for entry in block] for block in blocks(*own, most=BLOCK_ALONE))
        others = ([self._top_of(entry, top) for entry in block] for block in blocks(*runs))
        return object_parts(
            {
                "tokens": list_parts(tokens),
                "token_logprobs": list_parts(log_probs),
                "top_logprobs": list_parts(others),
                "text_offset": list_parts(self._offsets(own, offset, at_end)),
            }
        )

    def _offsets(
        self, runs: Sequence[Sequence[TokenLogProb]], offset: int, at_end: Callable[[int], None]
    ) -> Iterator[list[int]]:
        for block in blocks(*runs, most=BLOCK_ALONE):
            ends = list(accumulate((len(self.of(entry)) for entry in block), initial=offset))
            offset = ends.pop()
            yield ends
        at_end(offset)

    def _top_of(self, entry: TokenLogProb, top: int) -> dict[str, float] | None:
        """The most probable tokens and the token itself; the larger log-prob where ids share a text."""
        if entry.log_prob is None:
            return None
        found: dict[str, float] = {}
        for each in (*entry.top[:top], Candidate(entry.token_id, entry.log_prob, entry.token)):
            name = self.of(each)
            found[name] = max(finite(each.log_prob), found.get(name, LEAST))
        return found

    def prompt(self, entries: Sequence[TokenLogProb], top: int, parts: JsonParts) -> PromptLogProbs:
        """vLLM's `prompt_logprobs`, by token id. `rank` is null outside the most probable tokens."""
        if parts.is_large:
            return parts.later(list_parts(self._prompt_block(block, top) for block in blocks(entries)))
        return self._prompt_block(entries, top)

    def _prompt_block(self, entries: Sequence[TokenLogProb], top: int) -> list[dict[str, Any] | None]:
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


def _own(entry: TokenLogProb) -> float | None:
    return None if entry.log_prob is None else finite(entry.log_prob)


def finite(log_prob: float) -> float:
    """As JSON can hold it."""
    return max(log_prob, LEAST)


class _Entries:
    """Log-probs of an answer. `top`: of its tokens; None: they have none."""

    def __init__(self, body: CommonRequest, top: int | None) -> None:
        self._names = TokenNames(body.return_tokens_as_token_ids)
        self._top, self._prompt_top = top, _prompt_top(body)

    def prompt(self, entries: Sequence[TokenLogProb], parts: JsonParts) -> PromptLogProbs | UnsetType:
        """vLLM's `prompt_logprobs`; left out if they are not asked for."""
        return UNSET if self._prompt_top is None else self._names.prompt(entries, self._prompt_top, parts)


class ChatEntries(_Entries):
    """A chat's log-probs."""

    def __init__(self, body: ChatRequest) -> None:
        super().__init__(body, (body.top_logprobs or 0) if body.logprobs else None)

    def read(self, entries: Sequence[TokenLogProb], parts: JsonParts) -> ChatLogProbs | Raw | None:
        """Of an answer's tokens; None if none are asked for, or there are no tokens."""
        if self._top is None or not entries:
            return None
        if parts.is_large:
            return parts.later(self._names.chat_parts(entries, self._top))
        return self._names.chat(entries, self._top)


class CompletionEntries(_Entries):
    """A completion's log-probs as its deltas bring them, for each choice. `echo`: the prompt's come first."""

    def __init__(self, body: CompletionRequest) -> None:
        super().__init__(body, None if body.logprobs is None or body.logprobs is False else int(body.logprobs))
        self._echo = body.echo
        self._offsets: dict[int, int] = {}

    def read(self, index: int, answer: HasLogProbs, parts: JsonParts) -> CompletionLogProbs | Raw | None:
        """What a delta of choice `index` adds, or the whole answer; None if none are asked for."""
        if self._top is None:
            return None
        runs, offset = (answer.prompt_log_probs if self._echo else NONE, answer.log_probs), self._offsets.get(index, 0)
        if parts.is_large:
            at_end = partial(self._offsets.__setitem__, index)
            return parts.later(self._names.completion_parts(runs, self._top, offset, at_end))
        found = self._names.completion([*runs[0], *runs[1]], self._top, offset)
        self._offsets[index] = offset + sum(map(len, found.tokens))
        return found
