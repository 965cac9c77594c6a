"""The frontend's part of what requests ask of tokens: it encodes bad words, and checks the lists of ids."""

import msgspec
import numpy as np

from overlap_spec.client.link import id_array
from overlap_spec.errors import RequestError
from overlap_spec.features.penalties.bad_words import BadWords
from overlap_spec.frontend.hooks import Parts, Preparing, RequestHook
from overlap_spec.frontend.request_checks import RequestChecks, check_ids
from overlap_spec.messages import SamplingParams


def attach(parts: Parts) -> RequestHook:
    """Any request may list tokens and words."""
    return ListsHook(BadWords(parts.codec, parts.run_apart), parts.checks)


class ListsHook(RequestHook):
    """Settles the lists of a request in token ids. Penalties are numbers, and complete as they are."""

    fields = ("logit_bias", "allowed_ids", "bad_words", "bad_word_ids")

    def __init__(self, words: BadWords, checks: RequestChecks) -> None:
        self._words = words
        self._checks = checks

    def takes_long(self, asked: SamplingParams) -> bool:
        return self._words.takes_long(asked)

    async def prepare(self, sampling: SamplingParams, preparing: Preparing) -> SamplingParams:
        """The same with bad words as ids alone. Raises: RequestError naming a list that cannot be followed."""
        vocab_size = preparing.limits.vocab_size
        sampling = await self._words.added(sampling, vocab_size, preparing.request.owner)
        check_lists(sampling, self._checks.stop_ids(sampling), vocab_size)
        return msgspec.structs.replace(sampling, bad_words=()) if sampling.bad_words else sampling


def check_lists(sampling: SamplingParams, stop_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises: RequestError naming the list with a token that the model lacks, or lists that leave no token."""
    allowed = id_array(sampling.allowed_ids)
    if len(allowed) > vocab_size:
        text = f"allowed_token_ids must be at most {vocab_size} token ids, the model's vocabulary, got {len(allowed)}"
        raise RequestError("allowed_token_ids", text)
    listed = {
        "logit_bias": tuple(sampling.logit_bias),
        "allowed_token_ids": allowed,
        "bad_words": tuple(token for word in sampling.bad_word_ids for token in word),
    }
    for field, ids in listed.items():
        check_ids(field, ids, vocab_size)
    forbidden = {word[0] for word in sampling.bad_word_ids if len(word) == 1}
    if sampling.min_new_tokens:
        forbidden.update(stop_ids)
    if forbidden and allowed and np.isin(np.frombuffer(allowed, np.int32), list(forbidden)).all():
        raise RequestError("allowed_token_ids", "allowed_token_ids: bad_words or min_new_tokens forbid all of them")
