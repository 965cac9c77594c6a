"""The model's tokens as bytes, with the tree of their prefixes that masks are computed with.

To build it takes a third of a second for 50,000 tokens, with the interpreter lock held. So it is built once, when the
first grammar needs it, or at the start where that takes longer anyway.
"""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from overlap_spec.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class GrammarVocabulary:
    """A tokenizer.json and the model's end tokens; may be used from any thread.

    `directory`: None without a tokenizer. `vocab_size`: columns of the model's logits, often
    more than there are tokens.
    """

    def __init__(self, directory: str | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.directory = directory
        self._path = None if directory is None else Path(directory) / "tokenizer.json"
        self.eos_token_ids = eos_token_ids
        self._built: LLTokenizer | None = None
        self._lock = threading.Lock()

    @property
    def why_not(self) -> str:
        """Why no grammar can be followed here; empty if one can."""
        if self._path is None:
            return "the engine has no tokenizer (--skip-tokenizer-init), and a grammar is about text"
        return "" if self.eos_token_ids else "the model names no end token, by which a grammar ends its output"

    def tokenizer(self) -> LLTokenizer:
        """Build it, or return what was built. Raises: RequestError if it cannot be had."""
        if self.why_not:
            raise RequestError("grammar", f"grammar: {self.why_not}")
        with self._lock:
            if self._built is None:
                self._built = self._build()
            return self._built

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Tokens that no text is encoded to: their texts and ids."""
        added = _read(self._path).get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in added if token.special}

    def _build(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper  # 10 MB that most processes never need

        read, eos = _read(self._path), list(self.eos_token_ids)
        try:
            return LLTokenizer(read.to_str(), n_vocab=self.vocab_size, eos_token=eos)
        except ValueError as error:
            if "decoder" not in str(error):  # which would tell what the bytes of a token are
                raise RequestError("grammar", f"grammar: the tokenizer cannot be used: {error}") from error
        tokens = _DecodedTokens(read, eos[0], self.vocab_size)
        return LLTokenizer(TokenizerWrapper(tokens), n_vocab=self.vocab_size, eos_token=eos)


class _DecodedTokens:
    """What llguidance asks of a tokenizer that it cannot read: the text of each token is what decodes from it alone.

    Columns of the logits without a token have no bytes, and no grammar allows them.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int, vocab_size: int) -> None:
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens = [tokenizer.decode([token], skip_special_tokens=False).encode() for token in range(size)]
        self.tokens += [b""] * (vocab_size - size)
        self.special_token_ids = [
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text is str here")  # llguidance tries bytes first
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _read(path: Path | None) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
