"""The frontend's part of what requests ask of tokens: it encodes bad words, and checks the lists of ids.

**Bad words** become token ids as vLLM encodes them: as they are, and as a word that follows a space. A word is refused
by its characters before it is encoded: no token covers more of a text than the longest. The words of a request are
encoded in a thread, and those that many requests share once.
"""

import asyncio
from collections.abc import Iterable

import msgspec
import numpy as np

from overlap_spec.client.link import id_array
from overlap_spec.errors import RequestError
from overlap_spec.frontend.codec import Codec
from overlap_spec.frontend.hooks import Parts, Preparing, RequestHook, RunApart
from overlap_spec.frontend.request_checks import RequestChecks, check_ids
from overlap_spec.messages import MAX_WORD_TOKENS, SamplingParams, shown

FIELD = "bad_words"
FEW_CHARS = 500  # of words that are encoded at once: some milliseconds of work
NUM_KNOWN = 4  # lists of words whose ids are kept

Words = tuple[str, ...]
WordIds = tuple[tuple[int, ...], ...]


class BadWords:
    """Encodes bad words with one codec. `run_apart`: where many of them are encoded."""

    def __init__(self, codec: Codec, run_apart: RunApart) -> None:
        self._codec = codec
        self._run_apart = run_apart
        self._known: dict[Words, asyncio.Future[WordIds]] = {}  # the newest lists, oldest first

    async def added(self, sampling: SamplingParams, vocab_size: int, owner: str = "") -> SamplingParams:
        """Add them to `bad_word_ids`. `owner`: whose turn it takes.

        Raises: RequestError naming the word that cannot be forbidden.

        Cancellation: words that are being encoded are encoded to their end, for others that have the same.
        """
        words = sampling.bad_words
        if not words:
            return sampling
        check_words(words, self._codec.longest_token)
        ids = await asyncio.shield(self._encoding(words, vocab_size, owner))
        return msgspec.structs.replace(sampling, bad_word_ids=tuple(dict.fromkeys((*sampling.bad_word_ids, *ids))))

    def takes_long(self, sampling: SamplingParams) -> bool:
        """Whether they are encoded in a thread."""
        return bool(sampling.bad_words) and sum(map(len, sampling.bad_words)) > FEW_CHARS

    def _encoding(self, words: Words, vocab_size: int, owner: str) -> "asyncio.Future[WordIds]":
        known = self._known.pop(words, None)
        if known is None or (known.done() and (known.cancelled() or known.exception() is not None)):
            known = asyncio.ensure_future(self._encode(words, vocab_size, owner))
            known.add_done_callback(_noted)
        self._known[words] = known
        while len(self._known) > NUM_KNOWN:
            del self._known[next(iter(self._known))]
        return known

    async def _encode(self, words: Words, vocab_size: int, owner: str) -> WordIds:
        num_chars = sum(map(len, words))
        if num_chars <= FEW_CHARS:
            return _encoded_all(words, self._codec, vocab_size)
        return await self._run_apart(owner, num_chars, lambda: _encoded_all(words, self._codec, vocab_size))


def _noted(encoding: "asyncio.Future[WordIds]") -> None:
    """Take an error note of, whose requests may all be gone."""
    if not encoding.cancelled():
        encoding.exception()


def check_words(words: Iterable[str], longest_token: int) -> None:
    """Raises: RequestError if a word has too many characters for its tokens. `longest_token`: 0 if not known."""
    most, longest = MAX_WORD_TOKENS * longest_token, max(len(word.lstrip()) for word in words)
    if longest_token and longest > most:
        text = f"{FIELD}: words of {MAX_WORD_TOKENS} tokens have at most {most} characters here, got one of {longest}"
        raise RequestError(FIELD, text)


def _encoded_all(words: Words, codec: Codec, vocab_size: int) -> WordIds:
    return tuple(ids for word in words for ids in _encoded(word, codec, vocab_size))


def _encoded(word: str, codec: Codec, vocab_size: int) -> list[tuple[int, ...]]:
    plain, spaced = (tuple(codec.encode(space + word.lstrip(), False)) for space in ("", " "))
    if not plain:
        raise RequestError(FIELD, f"{FIELD}: {shown(word)} has no tokens")
    if len(plain) > MAX_WORD_TOKENS:
        text = f"{FIELD}: {shown(word)} has {len(plain)} tokens, at most {MAX_WORD_TOKENS} are taken"
        raise RequestError(FIELD, text)
    if max(*plain, *spaced) >= vocab_size:
        raise RequestError(FIELD, f"{FIELD}: {shown(word)} has tokens outside the model's vocabulary")
    # A space that is a token of its own makes no other word.
    return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]


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
