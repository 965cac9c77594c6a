"""Gemma 3, text (arXiv:2503.19786): what it does differently from Llama.

- the embedding is scaled by sqrt(hidden size); draft heads that share it get the scaled rows too
- norms multiply by 1 + w in float32, and stand before and behind both attention and MLP
- heads of queries and keys are normalised; queries are scaled by `query_pre_attn_scalar` instead of the head dim
- five of six layers have a window, and rotate with another base than the others
- the MLP's gate is a GELU
"""

from collections.abc import Mapping
from typing import Any

import torch

from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import PostNormLayer, SelfAttention
from overlap_spec.models.layers.mlp import GeluMLP
from overlap_spec.models.layers.norm import QueryKeyNormLinear
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import (
    finish,
    take_embedding,
    take_gate_up,
    take_head,
    take_linear,
    take_qkv,
    take_raised_norm,
    with_kv_scales,
)
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.reading import FULL, SLIDING, ConfigReader, DecoderConfig

HEAD_DIM, QUERY_SCALAR, WINDOW = 256, 256, 4096  # where the config does not say
BASES = {FULL: ("rope_theta", 1e6), SLIDING: ("rope_local_base_freq", 1e4)}
PATTERN = 6  # every so manieth layer has no window


def read_config(config: Mapping[str, Any], origin: str) -> DecoderConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("hidden_activation", "gelu_pytorch_tanh")
    for key in ("attention_bias", "use_bidirectional_attention"):
        reader.refuse_unless(key, False)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.refuse_unless(key, None)
    heads = reader.heads(HEAD_DIM)
    scale = float(reader.size("query_pre_attn_scalar", QUERY_SCALAR)) ** -0.5
    window = reader.window(WINDOW)
    ropes = {kind: _rope(reader, kind, heads[2]) for kind in BASES}
    shapes = (
        AttentionShape(*heads, scale, window if kind == SLIDING else None, ropes[kind]) for kind in _layer_types(reader)
    )
    return reader.decoder(tuple(shapes), tied=True)


def _layer_types(reader: ConfigReader) -> tuple[str, ...]:
    pattern = reader.size("sliding_window_pattern", PATTERN)
    default = (SLIDING if (index + 1) % pattern else FULL for index in range(reader.size("num_hidden_layers")))
    return reader.layer_types() or tuple(default)


def _rope(reader: ConfigReader, kind: str, head_dim: int) -> RopeConfig:
    """A base for each kind of layer; `rope_scaling` stretches that of layers without a window alone."""
    key, base = BASES[kind]
    given = reader.ropes_by_kind().get(kind) or (reader.values.get("rope_scaling") if kind == FULL else None) or {}
    return reader.rope({"rope_theta": reader.values.get(key) or base, **given}, head_dim)


def load(config: DecoderConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    scale = torch.tensor(config.hidden_size**0.5, dtype=torch.float32)  # then rounded to the model's type
    embedding = take_embedding(checkpoint, config.vocab_size, config.hidden_size)
    embedding = embedding.scaled(float(scale.to(embedding.dtype)))
    layers = tuple(_load_layer(config, checkpoint, index) for index in range(config.num_layers))
    norm = take_raised_norm(checkpoint, "norm", config.hidden_size, config.rms_norm_eps)
    head = take_head(checkpoint, embedding, config.tie_word_embeddings)
    finish(checkpoint)
    return DecoderWeights(embedding, layers, norm, head)


def _load_layer(config: DecoderConfig, checkpoint: Weights, index: int) -> PostNormLayer:
    name = f"layers.{index}"
    shape = with_kv_scales(checkpoint, f"{name}.self_attn", config.shapes[index])
    hidden, inner, dim = config.hidden_size, config.intermediate_size, shape.head_dim
    projections, sizes = take_qkv(checkpoint, f"{name}.self_attn", shape, hidden)
    qkv = QueryKeyNormLinear(
        projections,
        take_raised_norm(checkpoint, f"{name}.self_attn.q_norm", dim, config.rms_norm_eps),
        take_raised_norm(checkpoint, f"{name}.self_attn.k_norm", dim, config.rms_norm_eps),
        sizes,
        groups=(shape.num_heads, shape.num_kv_heads),
    )
    output = take_linear(checkpoint, {f"{name}.self_attn.o_proj": hidden}, sizes[0])
    return PostNormLayer(
        input_norm=take_raised_norm(checkpoint, f"{name}.input_layernorm", hidden, config.rms_norm_eps),
        attention=SelfAttention(qkv, output, shape),
        attention_norm=take_raised_norm(checkpoint, f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps),
        mlp_norm=take_raised_norm(checkpoint, f"{name}.pre_feedforward_layernorm", hidden, config.rms_norm_eps),
        mlp=GeluMLP(
            take_gate_up(checkpoint, f"{name}.mlp", hidden, inner),
            take_linear(checkpoint, {f"{name}.mlp.down_proj": hidden}, inner),
        ),
        output_norm=take_raised_norm(checkpoint, f"{name}.post_feedforward_layernorm", hidden, config.rms_norm_eps),
    )
