"""Bad words as token ids, as vLLM encodes them: as they are, and as a word that follows a space."""

import msgspec

from overlap_spec.errors import RequestError
from overlap_spec.messages import MAX_WORD_TOKENS, SamplingParams
from overlap_spec.tokenizer.codec import Codec

FIELD = "bad_words"


def with_bad_words(sampling: SamplingParams, codec: Codec, vocab_size: int) -> SamplingParams:
    """Add them to `bad_word_ids`. Raises: RequestError naming the word that cannot be forbidden."""
    if not sampling.bad_words:
        return sampling
    ids = [each for word in sampling.bad_words for each in _encoded(word, codec, vocab_size)]
    return msgspec.structs.replace(sampling, bad_word_ids=tuple(dict.fromkeys((*sampling.bad_word_ids, *ids))))


def _encoded(word: str, codec: Codec, vocab_size: int) -> list[tuple[int, ...]]:
    plain, spaced = (tuple(codec.encode(space + word.lstrip(), False)) for space in ("", " "))
    if not plain:
        raise RequestError(FIELD, f"{FIELD}: {word!r} has no tokens")
    if len(plain) > MAX_WORD_TOKENS:
        text = f"{FIELD}: {word!r} has {len(plain)} tokens, at most {MAX_WORD_TOKENS} are taken"
        raise RequestError(FIELD, text)
    if max(*plain, *spaced) >= vocab_size:
        raise RequestError(FIELD, f"{FIELD}: {word!r} has tokens outside the model's vocabulary")
    # A space that is a token of its own makes no other word.
    return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]
