"""OLMo 2 (arXiv:2501.00656): what it does differently from Llama.

- norms stand behind attention and MLP alone, before their results are added to the residual
- queries are normalised over all heads at once, and so are keys
"""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import PostNormLayer, SelfAttention
from overlap_spec.models.layers.norm import NoNorm, QueryKeyNormLinear, RMSNorm
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import (
    finish,
    take_embedding,
    take_head,
    take_linear,
    take_mlp,
    take_qkv,
    with_kv_scales,
)
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.reading import ConfigReader, DecoderConfig

NO_NORM = NoNorm()


def read_config(config: Mapping[str, Any], origin: str) -> DecoderConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("hidden_act", "silu", "swish")
    reader.refuse_unless("attention_bias", False)
    reader.refuse_unless("sliding_window", None)
    heads = reader.heads()
    shape = AttentionShape(*heads, heads[2] ** -0.5, None, RopeConfig.from_hf(config, heads[2], origin))
    return reader.decoder((shape,) * reader.size("num_hidden_layers"))


def load(config: DecoderConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    embedding = take_embedding(checkpoint, config.vocab_size, config.hidden_size)
    layers = tuple(_load_layer(config, checkpoint, index) for index in range(config.num_layers))
    norm = _load_norm(config, checkpoint, "norm", config.hidden_size)
    head = take_head(checkpoint, embedding, config.tie_word_embeddings)
    finish(checkpoint)
    return DecoderWeights(embedding, layers, norm, head)


def _load_layer(config: DecoderConfig, checkpoint: Weights, index: int) -> PostNormLayer:
    name = f"layers.{index}"
    shape = with_kv_scales(checkpoint, f"{name}.self_attn", config.shapes[index])
    hidden, inner = config.hidden_size, config.intermediate_size
    projections, sizes = take_qkv(checkpoint, f"{name}.self_attn", shape, hidden)
    qkv = QueryKeyNormLinear(
        projections,
        _load_norm(config, checkpoint, f"{name}.self_attn.q_norm", sizes[0]),
        _load_norm(config, checkpoint, f"{name}.self_attn.k_norm", sizes[1]),
        sizes,
    )
    return PostNormLayer(
        input_norm=NO_NORM,
        attention=SelfAttention(qkv, take_linear(checkpoint, {f"{name}.self_attn.o_proj": hidden}, sizes[0]), shape),
        attention_norm=_load_norm(config, checkpoint, f"{name}.post_attention_layernorm", hidden),
        mlp_norm=NO_NORM,
        mlp=take_mlp(checkpoint, f"{name}.mlp", hidden, inner),
        output_norm=_load_norm(config, checkpoint, f"{name}.post_feedforward_layernorm", hidden),
    )


def _load_norm(config: DecoderConfig, checkpoint: Weights, name: str, size: int) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", (size,)), config.rms_norm_eps)
