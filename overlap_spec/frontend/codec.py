"""Text to token ids and back, from the files in a model's directory.

tokenizer.json  tokenizer_config.json  special_tokens_map.json  chat_template.jinja

**Pieces**: a long text is cut into pieces whose token ids, one after another, are those of the whole text. Byte-level
BPE encodes each match of its splitting pattern by itself. All patterns listed here end a match before a space between
two letters, and after a single line feed between two characters; none looks behind. So a text may be cut there. With a
tokenizer that does anything else the text stays whole. Where a text is cut depends on what is before the cut alone, so
all but the last piece of a conversation are pieces of its next turn as well. `KnownPieces` keeps their ids.
"""

import json
import re
from array import array
from collections import OrderedDict
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
from overlap_spec.messages import ChatPrompt

PIECE = 4_096  # characters: some 2 ms of work
WINDOW = 65_536  # characters that are searched for a cut at once: some 4 ms of work
MOST_KNOWN = 8 << 20  # characters of pieces whose ids are kept: some 2 million tokens, of 4 bytes each
CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])|(?<=\S\n)(?=\S)")
CUT_CHARS = 2  # behind a cut, of which it depends
PATTERNS = {  # of Llama 3, Qwen 2 and later, and GPT-2, which is also the one inside ByteLevel
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}
KEEPS_LENGTH = {"NFC", "Prepend", "Replace"}  # normalizers that leave out no text


class Pieces:
    """The rule of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.can_cut = _can_cut(tokenizer)

    def of(self, text: str) -> Iterator[str]:
        """Cut a text. An empty piece: the next cut is still looked for."""
        begin, at = 0, PIECE
        while self.can_cut and at < len(text):
            cut = CUT.search(text, at, at + WINDOW)
            if cut is not None:
                yield text[begin : cut.start()]
                begin, at = cut.start(), cut.start() + PIECE
            else:
                at += WINDOW - CUT_CHARS
                if at < len(text):
                    yield ""
        if begin < len(text) or not text:
            yield text[begin:]


class KnownPieces:
    """Ids of the pieces that were encoded, or asked for, last. `most` bounds the characters of all."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._ids: OrderedDict[str, array[int]] = OrderedDict()  # the one that was used last is the last
        self._num_chars = 0

    def get(self, piece: str) -> "array[int] | None":
        """Its ids, which are not to be changed; None if they are not known."""
        ids = self._ids.get(piece)
        if ids is not None:
            self._ids.move_to_end(piece)
        return ids

    def put(self, piece: str, ids: "array[int]") -> None:
        """Keep the ids of a piece; others make room."""
        if piece in self._ids or len(piece) > self._most:
            return
        self._ids[piece] = ids
        self._num_chars += len(piece)
        while self._num_chars > self._most:
            oldest, _ = self._ids.popitem(last=False)
            self._num_chars -= len(oldest)


def keeps_all_text(tokenizer: Tokenizer) -> bool:
    """Whether no part of a text is left out, so that n tokens hold at most n times the longest one's characters."""
    steps = _steps(tokenizer.normalizer, "normalizers")
    if not all(step["type"] in KEEPS_LENGTH for step in steps):
        return False
    if any(step["type"] == "Replace" and step["content"] == "" for step in steps):
        return False
    splits = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    is_byte_level = any(step["type"] == "ByteLevel" for step in splits)
    has_fallback = bool(getattr(tokenizer.model, "byte_fallback", False))
    removes = any(step.get("behavior") == "Removed" or step["type"].startswith("Whitespace") for step in splits)
    return (is_byte_level or has_fallback) and not removes


def _can_cut(tokenizer: Tokenizer) -> bool:
    if type(tokenizer.model).__name__ != "BPE":
        return False
    if any(step["type"] != "NFC" for step in _steps(tokenizer.normalizer, "normalizers")):
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip or token.single_word or CUT.search(token.content) for token in added):
        return False
    splits = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    return bool(splits) and splits[-1]["type"] == "ByteLevel" and all(map(_splits_at_cuts, splits)) and _splits(splits)


def _splits(steps: list[dict[str, Any]]) -> bool:
    """Whether one of the steps splits at every cut: ByteLevel need not, if a pattern goes before it."""
    return any(step["type"] == "Split" or step.get("use_regex") for step in steps)


def _splits_at_cuts(step: dict[str, Any]) -> bool:
    """Whether this step, if it splits at all, does so at every place where a text is cut or keeps to one side of it."""
    match step["type"]:
        case "ByteLevel":
            return not step["add_prefix_space"]
        case "Digits":
            return True
        case "Split":
            return step["pattern"].get("Regex") in PATTERNS and step["behavior"] == "Isolated" and not step["invert"]
        case _:
            return False


def _steps(component: Any, inside: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as its file describes it, a sequence as its parts."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    return list(state[inside]) if state["type"] == "Sequence" else [state]


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
