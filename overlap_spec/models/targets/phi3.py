"""Phi-3 (arXiv:2404.14219): Llama's layers in another checkpoint layout.

- queries, keys and values are one tensor, gate and up another
- only a part of each head may be rotated, and all layers may have a window
"""

from collections.abc import Mapping
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import PreNormLayer, SelfAttention
from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import RMSNorm
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import (
    finish,
    rotated_first,
    take_embedding,
    take_head,
    take_linear,
    with_kv_scales,
)
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.reading import ConfigReader, DecoderConfig


def read_config(config: Mapping[str, Any], origin: str) -> DecoderConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("hidden_act", "silu", "swish")
    heads = reader.heads()
    shape = AttentionShape(*heads, heads[2] ** -0.5, reader.window(), _rope(reader, heads[2]))
    return reader.decoder((shape,) * reader.size("num_hidden_layers"))


def _rope(reader: ConfigReader, head_dim: int) -> RopeConfig:
    """Of the part that is rotated. Frequencies that change with the length of a request (longrope) are refused."""
    key = "rope_parameters" if reader.values.get("rope_parameters") else "rope_scaling"
    given = reader.values.get(key) or {}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind != "default":
        raise CheckpointError(f"{reader.origin}: {key} of type {kind!r} is not supported; expected 'default'")
    return RopeConfig.from_hf(reader.values, head_dim, reader.origin, part=1.0)


def load(config: DecoderConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    embedding = take_embedding(checkpoint, config.vocab_size, config.hidden_size)
    layers = tuple(_load_layer(config, checkpoint, index) for index in range(config.num_layers))
    norm = _load_norm(config, checkpoint, "norm")
    head = take_head(checkpoint, embedding, config.tie_word_embeddings)
    finish(checkpoint)
    return DecoderWeights(embedding, layers, norm, head)


def _load_layer(config: DecoderConfig, checkpoint: Weights, index: int) -> PreNormLayer:
    name = f"layers.{index}"
    shape = with_kv_scales(checkpoint, f"{name}.self_attn", config.shapes[index])
    hidden, inner, dim = config.hidden_size, config.intermediate_size, shape.head_dim
    rows = (shape.num_heads + 2 * shape.num_kv_heads) * dim
    qkv = take_linear(checkpoint, {f"{name}.self_attn.qkv_proj": rows}, hidden, order=rotated_first(shape))
    output = take_linear(checkpoint, {f"{name}.self_attn.o_proj": hidden}, shape.num_heads * dim)
    return PreNormLayer(
        input_norm=_load_norm(config, checkpoint, f"{name}.input_layernorm"),
        attention=SelfAttention(qkv, output, shape),
        mlp_norm=_load_norm(config, checkpoint, f"{name}.post_attention_layernorm"),
        mlp=GatedMLP(
            take_linear(checkpoint, {f"{name}.mlp.gate_up_proj": 2 * inner}, hidden),
            take_linear(checkpoint, {f"{name}.mlp.down_proj": hidden}, inner),
        ),
    )


def _load_norm(config: DecoderConfig, checkpoint: Weights, name: str) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)
