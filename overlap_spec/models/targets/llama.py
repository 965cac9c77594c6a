"""Models of the Llama family: their numbers, read from a Hugging Face config, and their weights, from a checkpoint.

What this project cannot compute exactly is refused by name, before any weight is read. What sets the cousins apart is a
table (`families.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from overlap_spec.models.drafts.mtp_layouts import has_layer, is_draft_part
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import PreNormLayer, Projection, SelfAttention
from overlap_spec.models.layers.mlp import MLP, GatedMLP
from overlap_spec.models.layers.norm import HeadNormLinear, Norm, RMSNorm
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import (
    finish,
    rotated_head,
    take_embedding,
    take_gate_up,
    take_head,
    take_linear,
    take_qkv,
    with_kv_scales,
)
from overlap_spec.models.targets.decoder import DecoderWeights
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


LoadMLP = Callable[[LlamaConfig, Weights, int], MLP]  # takes the MLP of a layer by its index


def load_dense_mlp(config: LlamaConfig, checkpoint: Weights, index: int) -> GatedMLP:
    """Take the MLP of a layer."""
    mlp, hidden, inner = f"layers.{index}.mlp", config.hidden_size, config.intermediate_size
    return GatedMLP(
        take_gate_up(checkpoint, mlp, hidden, inner, config.mlp_bias),
        take_linear(checkpoint, {f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
    )


def load_llama(config: LlamaConfig, checkpoint: Weights, load_mlp: LoadMLP = load_dense_mlp) -> DecoderWeights:
    """Take every weight of the target.

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    embedding = take_embedding(checkpoint, config.vocab_size, config.hidden_size)
    layers = tuple(
        load_layer(config, checkpoint, index, shape, config.hidden_size, "input_layernorm", load_mlp)
        for index, shape in enumerate(map(config.attention_shape, config.windows))
    )
    norm = load_norm(config, checkpoint, "norm")
    head = take_head(checkpoint, embedding, config.tie_word_embeddings)
    if config.brings_draft:
        checkpoint.skip(*(name for name in checkpoint.names() if is_draft_part(name, config.num_layers)))
    finish(checkpoint)
    return DecoderWeights(embedding, layers, norm, head)


def load_layer(
    config: LlamaConfig,
    checkpoint: Weights,
    index: int,
    shape: AttentionShape,
    input_size: int,
    input_norm: str | Norm,
    load_mlp: LoadMLP = load_dense_mlp,
) -> PreNormLayer:
    """Take one layer. `input_size` is the width that attention reads, `input_norm` the norm before it, or its name."""
    prefix = f"layers.{index}"
    hidden, attention = config.hidden_size, f"{prefix}.self_attn"
    shape = with_kv_scales(checkpoint, attention, shape)
    if config.sinks:
        shape = replace(shape, sinks=checkpoint.take(f"{attention}.sinks", (shape.num_heads,)))
    if isinstance(input_norm, str):
        input_norm = load_norm(config, checkpoint, f"{prefix}.{input_norm}")
    return PreNormLayer(
        input_norm=input_norm,
        attention=SelfAttention(
            _load_qkv(config, checkpoint, attention, shape, input_size),
            take_linear(
                checkpoint,
                {f"{attention}.o_proj": hidden},
                shape.num_heads * shape.head_dim,
                config.attention_bias.output,
            ),
            shape,
        ),
        mlp_norm=load_norm(config, checkpoint, f"{prefix}.post_attention_layernorm"),
        mlp=load_mlp(config, checkpoint, index),
    )


def _load_qkv(
    config: LlamaConfig, checkpoint: Weights, attention: str, shape: AttentionShape, input_size: int
) -> Projection:
    qkv, _ = take_qkv(checkpoint, attention, shape, input_size, config.attention_bias.qkv)
    if not config.head_norms:
        return qkv
    query, key = (checkpoint.take(f"{attention}.{name}.weight", (shape.head_dim,)) for name in ("q_norm", "k_norm"))
    if shape.rope.num_fixed:
        order = rotated_head(shape).to(query.device)
        query, key = query[order], key[order]
    return HeadNormLinear(qkv, query, key, shape.num_kv_heads, config.rms_norm_eps)


class NormSizes(Protocol):
    """What a config tells of norms as wide as the residual."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def rms_norm_eps(self) -> float: ...


def load_norm(config: NormSizes, checkpoint: Weights, name: str) -> RMSNorm:
    """Take a norm as wide as the residual."""
    return RMSNorm(checkpoint.take(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)
