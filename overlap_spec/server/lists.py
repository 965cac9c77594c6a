"""The lists of tokens and words in a body: OpenAI's logit_bias, vLLM's allowed_token_ids and bad_words."""

from typing import Any

from overlap_spec.server.engine_client import ServerInfo
from overlap_spec.server.grammars import GrammarFields
from overlap_spec.server.problems import Problem
from overlap_spec.server.prompts import need_tokenizer


class ListFields(GrammarFields, kw_only=True):
    """Fields of every endpoint, beside those of grammars. `logit_bias`: JSON has no other names than strings."""

    logit_bias: dict[str, float] = {}
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []

    def lists(self, info: ServerInfo) -> dict[str, Any]:
        """The same as fields of SamplingParams. Raises: Problem naming the field."""
        if self.bad_words:
            need_tokenizer("bad_words", info)
        allowed = None if self.allowed_token_ids is None else tuple(self.allowed_token_ids)
        bias = {_token_id(name): value for name, value in self.logit_bias.items()}
        return {"logit_bias": bias, "allowed_token_ids": allowed, "bad_words": tuple(self.bad_words)}


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdecimal()) or len(name) > 18:
        raise Problem(400, f"logit_bias: names must be token ids, got {name!r}", "logit_bias", "invalid_value")
    return int(name)
