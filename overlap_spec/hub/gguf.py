"""Reads the metadata of a .gguf file as a Hugging Face config, and writes its tokenizer as the files that others have.

    tokenizer.ggml.tokens, .merges, .token_type    the model, and its special tokens
    tokenizer.ggml.pre                             the name of how text is split before; a file has no pattern
    tokenizer.chat_template                        tokenizer_config.json

Only byte-level BPE with a split that is known here is taken. A wrong one would give other tokens, and never an error.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_spec.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

    from overlap_spec.hub.gguf_reader import TensorReader

_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}
_BETAS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
_END_TOKENS = ("eos", "eot", "eom")  # of the text, of a turn, of a message that calls a tool
_GEMMA_PATTERN = 6  # every so manieth layer has no window; files do not say
_GEMMA_27B_LAYERS = 62  # the one size whose queries are scaled by hidden size / heads instead of the head dim


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The config of a GGUF file.

    Raises: CheckpointError naming the file, the key, found and expected.
    """
    from overlap_spec.hub.gguf_reader import TensorReader  # imports numpy, so only for .gguf targets

    try:
        return _Metadata(path, TensorReader(path)).config()
    except CheckpointError:
        raise
    except Exception as error:  # gguf interprets bytes as they come: a damaged file raises whatever follows from it
        raise CheckpointError(f"{path}: not a readable GGUF file, perhaps cut or damaged ({error})") from None


class _Metadata:
    """Fields of one file, by name."""

    def __init__(self, path: Path, reader: "GGUFReader") -> None:
        self._path = path
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = self._text("general.architecture")

    def config(self) -> dict[str, Any]:
        family = self._family()
        config: dict[str, Any] = {"architectures": [family.name], "model_type": family.model_type}
        config |= {key: self.size(name) for key, name in _SIZES.items()}
        config |= {key: self.size(name) for key, name in _OPTIONAL.items() if self.has(name)}
        if "vocab_size" not in config:
            config["vocab_size"] = self._num_embeddings()
        config["rms_norm_eps"] = self.number("attention.layer_norm_rms_epsilon", family.norm_eps)
        config["rope_parameters"] = self.rope()
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        if ids := self._end_tokens():
            config["eos_token_id"] = ids if len(ids) > 1 else ids[0]
        if (field := self._fields.get("tokenizer.ggml.bos_token_id")) is not None:
            config["bos_token_id"] = int(field.contents())
        self._check_heads(config)
        return config | family.own(self, config)

    def _family(self) -> "_Family":
        if self.architecture not in FAMILIES:
            expected = ", ".join(map(repr, FAMILIES))
            raise self.error("general.architecture", repr(self.architecture), f"one of {expected}")
        if self.has("expert_count") and self.size("expert_count") > 0:
            raise CheckpointError(f"{self._path}: {self._key('expert_count')}: mixtures of experts are not supported")
        shards = self._fields.get("split.count")
        if shards is not None and int(shards.contents()) > 1:
            raise self.error("split.count", str(shards.contents()), "one file (llama-gguf-split --merge makes it)")
        return FAMILIES[self.architecture]

    def _num_embeddings(self) -> int:
        if (tensor := self._tensors.get("token_embd.weight")) is None:
            raise CheckpointError(f"{self._path}: tensor token_embd.weight is missing")
        return int(tensor.shape[-1])

    def _end_tokens(self) -> list[int]:
        """Each id once, that of the text's end first."""
        fields = (self._fields.get(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS)
        return list(dict.fromkeys(int(field.contents()) for field in fields if field is not None))

    def _check_heads(self, config: dict[str, Any]) -> None:
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        for name in ("rope.dimension_count", "attention.value_length"):
            if self.has(name) and (found := self.size(name)) != head_dim:
                raise self.error(self._key(name), str(found), str(head_dim))

    def rope(self) -> dict[str, Any]:
        """The RoPE scaling. In a GGUF, Llama 3's is a tensor of divisors; others are metadata."""
        rope: dict[str, Any] = {"rope_theta": self.number("rope.freq_base", 10000.0), "rope_type": "default"}
        if (divisors := self._tensors.get("rope_freqs.weight")) is not None:
            return rope | {"rope_type": "divisors", "divisors": [float(value) for value in divisors.data]}
        if not self.has("rope.scaling.type"):
            factor = self.number("rope.scale_linear", 1.0)  # how files named it before 2024
            return rope if factor in (0.0, 1.0) else rope | {"rope_type": "linear", "factor": factor}
        kind = self._text(self._key("rope.scaling.type"))
        if kind != "none":
            rope |= {"rope_type": kind, "factor": self.number("rope.scaling.factor", 1.0)}
            rope |= {key: self.number(name, 0.0) for key, name in _BETAS.items() if self.has(name)}
            self.refuse_unless("rope.scaling.attn_factor", 1.0)
            if self.has("rope.scaling.original_context_length"):
                rope["original_max_position_embeddings"] = self.size("rope.scaling.original_context_length")
        return rope

    def refuse_unless(self, name: str, *supported: float) -> None:
        """A number that may be left out, or is one of these."""
        if self.has(name) and (found := self.number(name, 0.0)) not in supported:
            raise self.error(self._key(name), str(found), " or ".join(map(str, supported)))

    def error(self, key: str, found: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {key}: found {found}, expected {expected} (others are not supported)")

    def has(self, name: str) -> bool:
        return self._key(name) in self._fields

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def _text(self, key: str) -> str:
        field = self._fields.get(key)
        return "nothing" if field is None else str(field.contents())

    def size(self, name: str) -> int:
        key = self._key(name)
        if key not in self._fields:
            raise CheckpointError(f"{self._path}: metadata {key} is missing")
        value = self._fields[key].contents() if self._fields[key].data else "an array"
        if not isinstance(value, int):
            raise CheckpointError(f"{self._path}: metadata {key}: found {value!r}, expected one integer")
        return value

    def number(self, name: str, default: float) -> float:
        """A float32 as the shortest decimal that rounds to it, which is the number in the original config."""
        if not self.has(name):
            return default
        part = self._fields[self._key(name)]
        return float(str(part.parts[part.data[0]][0]))


@dataclass(frozen=True, slots=True)
class _Family:
    """An architecture's name in Hugging Face configs, and the part of its config that others do not have."""

    name: str
    model_type: str
    own: Callable[[_Metadata, dict[str, Any]], dict[str, Any]]
    norm_eps: float = 1e-5


def _llama(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    metadata.refuse_unless("attention.sliding_window", 0.0)
    return {"hidden_act": "silu"}


def _gemma3(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    """The metadata's RoPE is that of layers without a window; the others have a base of their own and no scaling."""
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        metadata.refuse_unless(name, 0.0)
    if "head_dim" not in config:
        raise metadata.error("gemma3.attention.key_length", "nothing", "the size of a head")
    layers, window = config["num_hidden_layers"], metadata.has("attention.sliding_window")
    pattern = metadata.size(_PATTERN) if metadata.has(_PATTERN) else _GEMMA_PATTERN
    kinds = ["sliding_attention" if window and (index + 1) % pattern else "full_attention" for index in range(layers)]
    scaled_by = config["head_dim"]
    if layers == _GEMMA_27B_LAYERS:
        scaled_by = config["hidden_size"] // config["num_attention_heads"]
    local = {"rope_theta": metadata.number("rope.freq_base_swa", 10000.0), "rope_type": "default"}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scaled_by,
        "sliding_window": metadata.size("attention.sliding_window") if window else None,
        "layer_types": kinds,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


_PATTERN = "attention.sliding_window_pattern"
FAMILIES = {
    "llama": _Family("LlamaForCausalLM", "llama", _llama),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2", _llama, 1e-6),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3", _llama, 1e-6),
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", _gemma3, 1e-6),
}

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
