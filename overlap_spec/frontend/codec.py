"""Text to token ids and back, from the files in a model's directory.

tokenizer.json  tokenizer_config.json  special_tokens_map.json  chat_template.jinja
"""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from tokenizers import Tokenizer

from overlap_spec.errors import CheckpointError, RequestError
from overlap_spec.frontend.chat_template import ChatTemplate, NoChatTemplate
from overlap_spec.frontend.output import (
    CloseSpecials,
    Detokenizer,
    NoText,
    StreamDetokenizer,
    TokenTexts,
    WholeTokens,
    is_byte_level,
)
from overlap_spec.frontend.pieces import Pieces, keeps_all_text
from overlap_spec.messages import ChatPrompt

T = TypeVar("T")
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Codec(Protocol):
    """What the service needs of a tokenizer."""

    name: str  # for the start-up table
    chat_template: str  # its source; empty if there is none
    special_tokens: Mapping[str, str]  # their texts by the names that templates know, as "bos_token"
    longest_token: int  # characters; no token covers more of a text; 0 if that is not known
    eos_token_ids: tuple[int, ...]
    directory: str  # of its files; "" if it has none

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None: there are token ids only."""

    def render(self, prompt: ChatPrompt) -> str:
        """Chat messages as text, by the model's template. Raises: RequestError."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. Releases the interpreter lock, so it may run in a thread. Raises: RequestError."""

    def pieces(self, text: str) -> Iterator[str]:
        """Parts of a long text that may be encoded one by one, without special tokens; one part if it has none.

        An empty one: the next is still looked for, and others may have their turn.
        """

    def with_special_tokens(self, ids: "array[int]") -> "array[int]":
        """The ids of a text with the tokens that `encode` would add to it."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids; thread and lock as in `encode`. Raises: RequestError."""

    def detokenizer(
        self,
        skip_special_tokens: bool,
        before: Sequence[int] = (),
        shown_tokens: Sequence[str] = (),
        spaces: bool = True,
    ) -> Detokenizer:
        """A new incremental decoder; `before` is the token that its text continues, if it does.

        `shown_tokens` are special tokens that are not skipped. `spaces`: special tokens that follow one another are
        decoded as any others, else without spaces between them.
        """

    def check_stop_strings(self, field: str, stops: tuple[str, ...]) -> None:
        """Raises: RequestError if the stop strings or patterns of this field cannot be found here."""


class TextCodec:
    """A tokenizer and its chat template."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | NoChatTemplate, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.name = f"{type(tokenizer.model).__name__}, {tokenizer.get_vocab_size()} tokens"
        self.eos_token_ids = eos_token_ids
        self.directory = ""
        self.longest_token = max(map(len, tokenizer.get_vocab())) if keeps_all_text(tokenizer) else 0
        self.pieces = Pieces(tokenizer).of
        self.tokenizer = tokenizer
        self.render = template.render
        self.chat_template = template.source
        self.special_tokens: Mapping[str, str] = template.special_tokens
        self._size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder().items()
        self._special = {token_id: token.content for token_id, token in added if token.special}
        self._is_silent = {False: self._is_unknown, True: self._is_special_or_unknown}  # by skip_special_tokens
        self._texts: dict[bool, TokenTexts] | None = None
        if is_byte_level(tokenizer):
            self._texts = {skip: TokenTexts(tokenizer, silent) for skip, silent in self._is_silent.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # Only the batch call releases the interpreter lock while it works; the fast one leaves out the offsets.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def with_special_tokens(self, ids: "array[int]") -> "array[int]":
        probe = self.encode("x", False)
        framed = self.encode("x", True)
        begin = next(at for at in range(len(framed)) if framed[at : at + len(probe)] == probe)
        return array("i", framed[:begin]) + ids + array("i", framed[begin + len(probe) :])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        (text,) = self.tokenizer.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def detokenizer(
        self,
        skip_special_tokens: bool,
        before: Sequence[int] = (),
        shown_tokens: Sequence[str] = (),
        spaces: bool = True,
    ) -> Detokenizer:
        if not skip_special_tokens:
            decoder = self._decoder(False, before)
            return decoder if spaces else CloseSpecials(decoder, self._special)
        shown = self._special.keys() & set(map(self.tokenizer.token_to_id, shown_tokens))
        if not shown:
            return self._decoder(True, before)
        # The library skips all special tokens or none: here it is given only those that are shown.
        return StreamDetokenizer(
            self.tokenizer, False, lambda i: i not in shown and self._is_special_or_unknown(i), before
        )

    def _decoder(self, skip_special_tokens: bool, before: Sequence[int]) -> Detokenizer:
        if self._texts is not None:
            return WholeTokens(self._texts[skip_special_tokens])
        return StreamDetokenizer(self.tokenizer, skip_special_tokens, self._is_silent[skip_special_tokens], before)

    def check_stop_strings(self, field: str, stops: tuple[str, ...]) -> None:
        pass

    def _is_unknown(self, token_id: int) -> bool:
        return token_id >= self._size  # a model's vocabulary is often padded beyond its tokenizer's

    def _is_special_or_unknown(self, token_id: int) -> bool:
        return token_id in self._special or token_id >= self._size


class IdsOnly:
    """The codec of `--skip-tokenizer-init`: token ids in, token ids out, everything else refused."""

    name = "none (--skip-tokenizer-init)"
    chat_template = ""
    special_tokens: Mapping[str, str] = {}
    longest_token = 0
    eos_token_ids: tuple[int, ...] = ()
    directory = ""
    tokenizer = None

    def render(self, prompt: ChatPrompt) -> NoReturn:
        raise _no_tokenizer("messages")

    def encode(self, text: str, add_special_tokens: bool) -> NoReturn:
        raise _no_tokenizer("prompt")

    def pieces(self, text: str) -> NoReturn:
        raise _no_tokenizer("prompt")

    def with_special_tokens(self, ids: "array[int]") -> NoReturn:
        raise _no_tokenizer("prompt")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> NoReturn:
        raise _no_tokenizer("tokens")

    def detokenizer(self, *_asked: object, **_named: object) -> Detokenizer:
        return NoText()

    def check_stop_strings(self, field: str, stops: tuple[str, ...]) -> None:
        if stops:
            raise _no_tokenizer(field)


def _no_tokenizer(field: str) -> RequestError:
    return RequestError(field, f"{field}: the engine runs with --skip-tokenizer-init and takes token ids only")


def load_codec(directory: Path, template: str | None = None) -> TextCodec:
    """Read a tokenizer from a model's directory. `template`: instead of its chat template, the source of another.

    Raises: CheckpointError naming the file.
    """
    tokenizer = load_tokenizer(directory)
    config = _read_json(directory / "tokenizer_config.json")
    tokens = special_tokens(_read_json(directory / "special_tokens_map.json") | config)
    eos = tokenizer.token_to_id(tokens["eos_token"]) if "eos_token" in tokens else None
    if template is None:
        chat = _load_template(directory, config, tokens)
    else:
        chat = _compile("--chat-template", template, tokens)
    codec = TextCodec(tokenizer, chat, () if eos is None else (eos,))
    codec.directory = str(directory)
    return codec


def load_tokenizer(directory: Path) -> Tokenizer:
    """Read tokenizer.json alone. It cuts off and pads nothing. Raises: CheckpointError naming the file."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; --tokenizer-path names a directory that has it")
    tokenizer: Tokenizer = _read(path, lambda file: Tokenizer.from_file(str(file)))
    tokenizer.no_truncation()  # the file may carry the settings of its training run
    tokenizer.no_padding()
    return tokenizer


def _compile(name: str, source: str, tokens: dict[str, str]) -> ChatTemplate:
    try:
        return ChatTemplate(source, tokens)
    except Exception as error:  # of Jinja's parser, or of Python's compiler
        raise CheckpointError(f"{name}: cannot be read: {error}") from error


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Names to texts, whether a token is stored as a string or as {"content": ..}."""
    found = {name: config.get(name) for name in TOKEN_NAMES}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _load_template(directory: Path, config: dict[str, Any], tokens: dict[str, str]) -> ChatTemplate | NoChatTemplate:
    """chat_template.jinja takes precedence over tokenizer_config.json, as in transformers."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read(path, lambda file: ChatTemplate(file.read_text(encoding="utf-8"), tokens))
    named = directory / "tokenizer_config.json"
    source = _read(named, lambda _: _template_source(config.get("chat_template")))
    if source is None:
        return NoChatTemplate(tokens)
    return _read(named, lambda _: ChatTemplate(source, tokens))


def _template_source(value: object) -> str | None:
    """The template in a tokenizer_config.json: a string, or a list of named ones of which "default" is meant."""
    if isinstance(value, list):
        value = {entry["name"]: entry["template"] for entry in value}
    if isinstance(value, dict):
        value = value.get("default")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = _read(path, lambda file: json.loads(file.read_text(encoding="utf-8")))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _read(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except Exception as error:  # the tokenizers library raises the bare class
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
