"""The lists of tokens and words in a body: OpenAI's logit_bias, vLLM's allowed_token_ids and bad_words."""

from typing import Any

from overlap_spec.client.link import pack_ids
from overlap_spec.entrypoints.http.engine_client import ServerInfo
from overlap_spec.entrypoints.http.errors import Problem
from overlap_spec.entrypoints.openai.prompts import need_tokenizer
from overlap_spec.entrypoints.openai.response_format import GrammarFields
from overlap_spec.messages import shown


class ListFields(GrammarFields, kw_only=True):
    """Fields of every endpoint, beside those of grammars. `logit_bias`: JSON has no other names than strings."""

    logit_bias: dict[str, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []

    def lists(self, info: ServerInfo) -> dict[str, Any]:
        """The same as fields of SamplingParams. Raises: Problem naming the field."""
        if self.bad_words:
            need_tokenizer("bad_words", info)
        bias = {_token_id(name): value for name, value in self.logit_bias.items()}
        lists = {"logit_bias": bias, "bad_words": tuple(self.bad_words)}
        return lists if self.allowed_token_ids is None else lists | {"allowed_ids": _packed(self.allowed_token_ids)}


def _packed(allowed: list[int]) -> bytes:
    """As messages carry them. The engine knows the vocabulary; here an id needs to fit 31 bits."""
    if not allowed or min(allowed) < 0:
        got = shown(allowed if not allowed else min(allowed))
        text = f"allowed_token_ids must be at least one token id, each >= 0, got {got}"
        raise Problem(400, text, "allowed_token_ids", "invalid_value")
    return pack_ids(allowed, "allowed_token_ids")


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal()) or len(name) > 18:
        raise Problem(400, f"logit_bias: names must be token ids, got {shown(name)}", "logit_bias", "invalid_value")
    return int(name)
