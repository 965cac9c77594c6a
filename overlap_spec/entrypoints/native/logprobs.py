"""Log-probs of `/generate`, in SGLang's shapes: lists of [log-prob, token id, text] in `meta_info`."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from overlap_spec.client.log_probs import Candidate, TokenLogProb, alone
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.http.request_runner import Collected, renamed
from overlap_spec.entrypoints.http.streams import JsonParts, list_parts
from overlap_spec.entrypoints.openai.logprobs import blocks, finite
from overlap_spec.errors import RequestError
from overlap_spec.messages import LogProbParams

NAMES = {
    "log_probs": "return_logprob",
    "log_probs.top": "top_logprobs_num",
    "log_probs.prompt_from": "logprob_start_len",
    "log_probs.token_ids": "token_ids_logprob",
}
Triple = tuple[float | None, int, str | None]


class NativeLogProbFields(msgspec.Struct, kw_only=True):
    """Fields of a body: one value for all prompts, or one for each. `logprob_start_len` -1: none of the prompt."""

    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_text_in_logprobs: bool = False

    def log_probs(self, count: int) -> list[LogProbParams | None]:
        """What each prompt asks for. Raises: RequestError, Problem naming the field."""
        asked = _each("return_logprob", self.return_logprob, count)
        starts = _each("logprob_start_len", self.logprob_start_len, count)
        tops = _each("top_logprobs_num", self.top_logprobs_num, count)
        columns = zip(asked, starts, tops, self._token_ids(count), strict=True)
        return [_params(*parts) if is_asked else None for is_asked, *parts in columns]

    def _token_ids(self, count: int) -> list[list[int]]:
        given = self.token_ids_logprob or []
        flat = [item for item in given if isinstance(item, int)]
        if len(flat) == len(given):
            return [flat] * count
        if flat or len(given) != count:
            text = f"token_ids_logprob: expected a list of token ids, or one for each of {count} prompts"
            raise Problem(400, text, "token_ids_logprob", "invalid_value")
        return [item or [] for item in given if not isinstance(item, int)]


def _each(field: str, given: Any, count: int) -> list[Any]:
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise Problem(400, f"{field}: {len(given)} for {count} prompts", field, "invalid_value")
    return given


def _params(start: int, top: int, token_ids: list[int]) -> LogProbParams:
    try:
        return LogProbParams(top=top, token_ids=tuple(token_ids), prompt_from=None if start == -1 else start)
    except RequestError as error:
        raise renamed(error, NAMES) from None


def meta_log_probs(asked: LogProbParams, answer: Collected, with_text: bool, parts: JsonParts) -> dict[str, Any]:
    """The fields of `meta_info`. The first prompt token that is returned has null for its log-prob, as in SGLang."""
    sides = {"input": answer.prompt_log_probs, "output": answer.log_probs}
    meta: dict[str, Any] = {}

    def listed(entries: Sequence[TokenLogProb], write: Callable[[TokenLogProb], Any]) -> list[Any] | msgspec.Raw:
        if parts.is_large:
            return parts.later(list_parts(list(map(write, block)) for block in blocks(entries)))
        return list(map(write, entries))

    for side, entries in sides.items():
        meta[f"{side}_token_logprobs"] = listed(alone(entries), lambda entry: _own(entry, with_text))
        if asked.top:
            meta[f"{side}_top_logprobs"] = listed(entries, lambda entry: _triples(entry, entry.top, with_text))
        if asked.token_ids:
            others = listed(entries, lambda entry: _triples(entry, entry.listed, with_text))
            meta[f"{side}_token_ids_logprobs"] = others
    meta["output_token_logprobs_length"] = len(answer.log_probs)
    return meta


def _own(entry: TokenLogProb, with_text: bool) -> Triple:
    log_prob = None if entry.log_prob is None else finite(entry.log_prob)
    return log_prob, entry.token_id, entry.text if with_text else None


def _triples(entry: TokenLogProb, others: Sequence[Candidate], with_text: bool) -> list[Triple] | None:
    if entry.log_prob is None:
        return None
    texts = [each.token.decode(errors="replace") if with_text else None for each in others]
    return [(finite(each.log_prob), each.token_id, text) for each, text in zip(others, texts, strict=True)]
