"""The numbers of a Llama-family model, read from a Hugging Face config.

What this project cannot compute exactly is refused here by name, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.mtp_layouts import has_layer
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.targets.families import AttentionBias, Windows, family_of


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of one checkpoint. `origin` is the file that said so, for error messages."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: AttentionBias
    mlp_bias: bool
    head_norms: bool
    windows: Windows
    brings_draft: bool  # the checkpoint also holds a layer that drafts (`mtp_layouts.py`)
    rope: RopeConfig
    origin: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str) -> "LlamaConfig":
        """Read a target's or a head's config.json.

        Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported.
        """
        _refuse_unsupported(config, origin)
        family = family_of(config)
        num_layers = _size(config, "num_hidden_layers", origin)
        hidden, heads = _size(config, "hidden_size", origin), _size(config, "num_attention_heads", origin)
        kv_heads = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads", origin)
        head_dim = _head_dim(config, family.head_dim, hidden, heads, origin)
        if heads % kv_heads:
            raise CheckpointError(
                f"{origin}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        return cls(
            hidden_size=hidden,
            intermediate_size=_size(config, "intermediate_size", origin),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=_size(config, "vocab_size", origin),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=family.attention_bias(config),
            mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
            head_norms=family.head_norms,
            windows=family.windows(config, origin),
            brings_draft=has_layer(config),
            rope=RopeConfig.from_hf(config, head_dim, origin),
            origin=origin,
        )

    def attention_shape(self, window: int | None) -> AttentionShape:
        """The heads of a layer with this window."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        return AttentionShape(*sizes, self.head_dim**-0.5, window, self.rope)


def _head_dim(config: Mapping[str, Any], default: int | None, hidden: int, heads: int, origin: str) -> int:
    if config.get("head_dim") is not None:
        return _size(config, "head_dim", origin)
    if default is None and hidden % heads:
        raise CheckpointError(f"{origin}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    return hidden // heads if default is None else default


def _size(config: Mapping[str, Any], key: str, origin: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        found = "it is missing" if value is None else f"found {value!r}"
        raise CheckpointError(f"{origin}: {key} must be a positive integer, {found}")
    return value


def _refuse_unsupported(config: Mapping[str, Any], origin: str) -> None:
    if (activation := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise CheckpointError(f"{origin}: hidden_act {activation!r} is not supported; expected 'silu'")
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else "unnamed"
        raise CheckpointError(f"{origin}: quantization_config ({method}) is not supported; use unquantized weights")
