"""Builds the weights of a Llama-family target from a checkpoint.

Query, key and value become one map, gate and up another: fewer, larger products.
"""

import torch
from torch import Tensor

from overlap_spec.config.draft_kind import can_only_draft
from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.mtp_layouts import is_draft_part
from overlap_spec.models.layers.head_norm import HeadNormLinear
from overlap_spec.models.layers.linear import AnyLinear, GatedMLP, Linear, RMSNorm, linear_map
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.targets.llama import LlamaLayer, LlamaWeights
from overlap_spec.models.targets.llama_config import LlamaConfig

DERIVED = ("rotary_emb.inv_freq", "masked_bias")  # buffers that old checkpoints saved; computed from the config


def canonical_name(name: str) -> str:
    """Checkpoints differ in the leading `model.`."""
    return name.removeprefix("model.")


def load_llama(config: LlamaConfig, checkpoint: Weights) -> LlamaWeights:
    """Take every weight of the target.

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    _refuse_draft_heads(checkpoint)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = checkpoint.take("embed_tokens.weight", (vocab, hidden))
    layers = tuple(
        load_layer(config, checkpoint, index, hidden, "input_layernorm") for index in range(config.num_layers)
    )
    norm = load_norm(config, checkpoint, "norm")
    if config.tie_word_embeddings:
        checkpoint.skip("lm_head.weight")
        head = Linear(embedding)
    else:
        head = Linear(checkpoint.take("lm_head.weight", (vocab, hidden)))
    if config.brings_draft:
        checkpoint.skip(*(name for name in checkpoint.names() if is_draft_part(name, config.num_layers)))
    skip_derived(checkpoint)
    checkpoint.finish()
    return LlamaWeights(config, embedding, layers, norm, head)


def load_layer(
    config: LlamaConfig, checkpoint: Weights, index: int, input_size: int, input_norm: str | RMSNorm
) -> LlamaLayer:
    """Take one layer. `input_size` is the width that attention reads, `input_norm` the norm before it, or its name."""
    prefix = f"layers.{index}"
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    if isinstance(input_norm, str):
        input_norm = load_norm(config, checkpoint, f"{prefix}.{input_norm}")
    return LlamaLayer(
        input_norm=input_norm,
        qkv=_load_qkv(config, checkpoint, attention, input_size),
        output=_fused(checkpoint, {f"{attention}.o_proj": hidden}, queries, config.attention_bias.output),
        post_norm=load_norm(config, checkpoint, f"{prefix}.post_attention_layernorm"),
        mlp=GatedMLP(
            _fused(checkpoint, {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}, hidden, config.mlp_bias),
            _fused(checkpoint, {f"{mlp}.down_proj": hidden}, inner, config.mlp_bias),
        ),
    )


def _load_qkv(config: LlamaConfig, checkpoint: Weights, attention: str, input_size: int) -> AnyLinear | HeadNormLinear:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
    qkv = _fused(checkpoint, sizes, input_size, config.attention_bias.qkv)
    if not config.head_norms:
        return qkv
    query, key = (checkpoint.take(f"{attention}.{name}.weight", (config.head_dim,)) for name in ("q_norm", "k_norm"))
    return HeadNormLinear(qkv, query, key, config.num_kv_heads, config.rms_norm_eps)


def load_norm(config: LlamaConfig, checkpoint: Weights, name: str) -> RMSNorm:
    """Take a norm as wide as the residual stream."""
    return RMSNorm(checkpoint.take(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)


def skip_derived(checkpoint: Weights) -> None:
    """Old checkpoints also hold what follows from the config."""
    checkpoint.skip(*(name for name in checkpoint.names() if name.endswith(DERIVED)))


def _fused(checkpoint: Weights, sizes: dict[str, int], input_size: int, bias: bool) -> AnyLinear:
    """Maps of the same input, stacked. `sizes`: output rows by name."""
    weights = [checkpoint.take(f"{name}.weight", (size, input_size)) for name, size in sizes.items()]
    return linear_map(torch.cat(weights), _biases(checkpoint, sizes) if bias else None)


def _biases(checkpoint: Weights, sizes: dict[str, int]) -> Tensor | None:
    """A stored bias of zeros changes nothing, and would keep the map from being fused on a GPU; a made-up one stands
    for what the model's own costs.
    """
    biases = torch.cat([checkpoint.take(f"{name}.bias", (size,)) for name, size in sizes.items()])
    is_stored = all(f"{name}.bias" in checkpoint for name in sizes)
    return None if is_stored and not biases.any() else biases


def _refuse_draft_heads(checkpoint: Weights) -> None:
    if can_only_draft({name: checkpoint.shape(name) for name in checkpoint.names()}):
        raise CheckpointError(
            f"{checkpoint.origin}: this is a draft head, not a target; give it as --speculative-draft-model-path"
        )
