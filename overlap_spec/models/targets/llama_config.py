"""The numbers of a Llama-family model, read from a Hugging Face config.

What this project cannot compute exactly is refused here by name, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlap_spec.models.drafts.mtp_layouts import has_layer
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.targets.families import AttentionBias, Windows, family_of
from overlap_spec.models.targets.reading import ConfigReader


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
    sinks: bool
    windows: Windows
    brings_draft: bool  # the checkpoint also holds a layer that drafts (`mtp_layouts.py`)
    rope: RopeConfig
    origin: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str) -> "LlamaConfig":
        """Read a target's or a head's config.json.

        Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported.
        """
        reader, family = ConfigReader(config, origin), family_of(config)
        reader.refuse_unless("hidden_act", "silu", "swish")
        heads, kv_heads, head_dim = reader.heads(family.head_dim)
        return cls(
            hidden_size=reader.size("hidden_size"),
            intermediate_size=reader.size("intermediate_size"),
            num_layers=reader.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=reader.size("vocab_size"),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=family.attention_bias(config),
            mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
            head_norms=family.head_norms(config),
            sinks=family.sinks,
            windows=family.windows(reader),
            brings_draft=has_layer(config),
            rope=RopeConfig.from_hf(config, head_dim, origin, family.rotated),
            origin=origin,
        )

    def attention_shape(self, window: int | None) -> AttentionShape:
        """The heads of a layer with this window."""
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        return AttentionShape(*sizes, self.head_dim**-0.5, window, self.rope)
