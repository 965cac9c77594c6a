"""Reads the metadata of a .gguf file as a Hugging Face config."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlap_spec.errors import CheckpointError

if TYPE_CHECKING:
    from gguf import GGUFReader

_ARCHITECTURE = "llama"
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


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The config of a llama GGUF.

    Raises: CheckpointError naming the file, the key, found and expected.
    """
    from gguf import GGUFReader  # imports numpy, so only for .gguf targets

    try:
        return _Metadata(path, GGUFReader(path)).config()
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

    def config(self) -> dict[str, Any]:
        self._check_architecture()
        config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        config |= {key: self._size(name) for key, name in _SIZES.items()}
        config |= {key: self._size(name) for key, name in _OPTIONAL.items() if self._has(name)}
        if "vocab_size" not in config:
            config["vocab_size"] = len(self._fields["tokenizer.ggml.tokens"].data)
        config["rms_norm_eps"] = self._number("attention.layer_norm_rms_epsilon", 1e-5)
        config["rope_parameters"] = self._rope()
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        for key in ("bos_token_id", "eos_token_id"):
            if (field := self._fields.get(f"tokenizer.ggml.{key}")) is not None:
                config[key] = int(field.contents())
        self._check_rotation(config)
        return config

    def _check_architecture(self) -> None:
        field = self._fields.get("general.architecture")
        found = field.contents() if field is not None else None
        if found != _ARCHITECTURE:
            raise CheckpointError(
                f"{self._path}: general.architecture: found {found!r}, expected {_ARCHITECTURE!r}"
                " (others are not supported)"
            )
        if self._has("expert_count") and self._size("expert_count") > 0:
            raise CheckpointError(f"{self._path}: llama.expert_count: mixtures of experts are not supported")

    def _check_rotation(self, config: dict[str, Any]) -> None:
        head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        if self._has("rope.dimension_count") and (found := self._size("rope.dimension_count")) != head_dim:
            raise CheckpointError(f"{self._path}: llama.rope.dimension_count: found {found}, expected {head_dim}")

    def _rope(self) -> dict[str, Any]:
        """The RoPE scaling. In a GGUF, Llama 3's is a tensor of divisors; others are metadata."""
        rope: dict[str, Any] = {"rope_theta": self._number("rope.freq_base", 10000.0), "rope_type": "default"}
        if (divisors := self._tensors.get("rope_freqs.weight")) is not None:
            return rope | {"rope_type": "divisors", "divisors": [float(value) for value in divisors.data]}
        if not self._has("rope.scaling.type"):
            return rope
        kind = str(self._fields[f"{_ARCHITECTURE}.rope.scaling.type"].contents())
        if kind != "none":
            rope |= {"rope_type": kind, "factor": self._number("rope.scaling.factor", 1.0)}
            if self._has("rope.scaling.original_context_length"):
                rope["original_max_position_embeddings"] = self._size("rope.scaling.original_context_length")
        return rope

    def _has(self, name: str) -> bool:
        return f"{_ARCHITECTURE}.{name}" in self._fields

    def _size(self, name: str) -> int:
        key = f"{_ARCHITECTURE}.{name}"
        if key not in self._fields:
            raise CheckpointError(f"{self._path}: metadata {key} is missing")
        value = self._fields[key].contents()
        if not isinstance(value, int):
            raise CheckpointError(f"{self._path}: metadata {key}: found {value!r}, expected one integer")
        return value

    def _number(self, name: str, default: float) -> float:
        """A float32 as the shortest decimal that rounds to it, which is the number in the original config."""
        if not self._has(name):
            return default
        part = self._fields[f"{_ARCHITECTURE}.{name}"]
        return float(str(part.parts[part.data[0]][0]))
