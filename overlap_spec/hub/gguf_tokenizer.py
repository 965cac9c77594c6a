"""Writes the tokenizer inside a .gguf file as the files that others have beside their weights.

    tokenizer.ggml.tokens, .merges, .token_type    the model, and its special tokens
    tokenizer.ggml.pre                             the name of how text is split before; a file has no pattern
    tokenizer.chat_template                        tokenizer_config.json

Only byte-level BPE with a split that is known here is taken. A wrong one would give other tokens, and never an error.
"""

import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_spec.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from overlap_spec.hub.gguf_reader import TensorReader

_FORMAT = "1"  # of what is written; a file from another version of this module is not taken
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Split:
    """How a family's tokenizer splits text before merges."""

    pattern: str | None = None  # None: that of GPT-2
    digits_apart: bool = False
    composes: bool = False  # characters are composed first (NFC)
    whole_first: bool = False  # a word that is a token is that token, whatever merges say
    begins: bool = False  # a text begins with the bos token, unless the file has another choice


_LLAMA3 = _Split(_WORDS + r"\p{N}{1,3}" + _REST, whole_first=True, begins=True)
_QWEN2 = _Split(_WORDS + r"\p{N}" + _REST, composes=True)
_SPLITS = {  # by `tokenizer.ggml.pre`
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "smollm": _Split(digits_apart=True),
    "gpt-2": _Split(),
}


def write_gguf_tokenizer(path: Path, cache: Path) -> Path:
    """The directory below `cache` with the tokenizer of this .gguf file, written if it is not there.

    Raises: CheckpointError naming the file, the key, found and expected.
    """
    from overlap_spec.hub.gguf_reader import TensorReader

    reader = TensorReader(path)
    directory = cache / "tokenizers" / _name_of(reader)
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as draft:
        try:
            _Vocabulary(path, reader).write(Path(draft))
        except (UnicodeDecodeError, IndexError) as error:
            raise CheckpointError(f"{path}: its tokenizer cannot be read, perhaps it is damaged ({error})") from None
        _publish(Path(draft), directory)
    return directory


def _name_of(reader: "TensorReader") -> str:
    """The same for the same metadata: every byte before the first tensor counts."""
    digest = hashlib.sha256(_FORMAT.encode())
    digest.update(reader.data[: reader.data_offset].tobytes())
    return digest.hexdigest()[:32]


def _publish(draft: Path, directory: Path) -> None:
    """Move a complete directory to its place, which another process may have filled meanwhile."""
    whole = draft / "whole"
    whole.mkdir()
    for file in list(draft.glob("*.json")):
        file.rename(whole / file.name)
    try:
        os.rename(whole, directory)
    except OSError:
        if not directory.is_dir():
            raise


class _Vocabulary:
    """The tokenizer's part of a file's metadata."""

    def __init__(self, path: Path, reader: "TensorReader") -> None:
        self._path = path
        self._reader = reader
        kind, pre = self._text("model"), self._text("pre")
        if kind != "gpt2" or pre not in _SPLITS:
            known = ", ".join(map(repr, _SPLITS))
            raise CheckpointError(
                f"{path}: tokenizer.ggml.model: found {kind!r} with pre {pre!r}, expected 'gpt2' with one of {known}:"
                " other tokenizers cannot be read from a .gguf file; give a directory with tokenizer.json by"
                " --tokenizer-path"
            )
        self._split = _SPLITS[pre]
        self._tokens = self._strings("tokens")
        self._types = reader.numbers("tokenizer.ggml.token_type")
        if len(self._types) not in (0, len(self._tokens)):
            found = f"found {len(self._types)}, expected {len(self._tokens)}, one for each token"
            raise CheckpointError(f"{path}: tokenizer.ggml.token_type: {found}")

    def write(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self._tokenizer().save(str(directory / "tokenizer.json"))
        config = json.dumps(self._config(), ensure_ascii=False, indent=1)
        (directory / "tokenizer_config.json").write_text(config, encoding="utf-8")

    def _tokenizer(self) -> "Tokenizer":
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

        merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in self._strings("merges"))]
        kinds = self._types or [0] * len(self._tokens)
        vocabulary = {token: index for index, token in enumerate(self._tokens) if kinds[index] != _UNUSED}
        try:
            model = models.BPE(vocabulary, merges, ignore_merges=self._split.whole_first)
        except Exception as error:  # of the library; a merge of what is no token, say
            raise CheckpointError(f"{self._path}: tokenizer.ggml.merges: {error}") from None
        tokenizer = Tokenizer(model)
        if self._split.composes:
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = self._pre_tokenizer()
        tokenizer.decoder = decoders.ByteLevel()
        for token, kind in zip(self._tokens, kinds, strict=True):
            if kind in (_CONTROL, _USER_DEFINED):
                tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
        if (bos := self._bos()) is not None:
            parts = {"single": f"{bos} $A", "pair": f"{bos} $A {bos} $B"}
            tokenizer.post_processor = processors.TemplateProcessing(**parts, special_tokens=[(bos, vocabulary[bos])])
        return tokenizer

    def _pre_tokenizer(self) -> "PreTokenizer":
        from tokenizers import Regex, pre_tokenizers

        parts: list[PreTokenizer] = []
        if self._split.digits_apart:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        if self._split.pattern is not None:
            parts.append(pre_tokenizers.Split(Regex(self._split.pattern), "isolated"))
        use_regex = self._split.pattern is None
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
        return pre_tokenizers.Sequence(parts)

    def _bos(self) -> str | None:
        """The token that every text begins with."""
        wanted = self._reader.fields.get("tokenizer.ggml.add_bos_token")
        begins = self._split.begins if wanted is None else bool(wanted.contents())
        return self._token("bos") if begins else None

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        tokens = {name: self._token(key) for key, name in names.items()}
        config |= {name: token for name, token in tokens.items() if token is not None}
        if (template := self._reader.fields.get("tokenizer.chat_template")) is not None:
            config["chat_template"] = str(template.contents())
        return config

    def _token(self, name: str) -> str | None:
        """A token that the file names by its id. Raises: CheckpointError if there is none."""
        key = f"tokenizer.ggml.{name}_token_id"
        if (field := self._reader.fields.get(key)) is None:
            return None
        index = int(field.contents())
        if not 0 <= index < len(self._tokens):
            raise CheckpointError(f"{self._path}: {key}: found {index}, expected one of {len(self._tokens)} tokens")
        return self._tokens[index]

    def _text(self, name: str) -> str:
        field = self._reader.fields.get(f"tokenizer.ggml.{name}")
        return "" if field is None else str(field.contents())

    def _strings(self, name: str) -> list[str]:
        key = f"tokenizer.ggml.{name}"
        strings = self._reader.strings(key)
        if not strings:
            raise CheckpointError(f"{self._path}: {key}: found none, expected a list of texts")
        return strings
