"""Step-3.5-Flash (arXiv:2602.10604): layers with a window and full ones in turn, with different numbers of heads, each
of which has a gate; experts scored by a sigmoid and chosen with a correction, beside one that all rows share.

Gate and up projections of some layers are bounded. Norms multiply by one plus their weight. Facts: sglang,
python/sglang/srt/models/step3p5.py, commit 01b5f572b7b678e2fa5a727881f1ff3ab4dd3c6d; transformers 5.17,
models/step3p7, whose text model this is.

    self_attn.{q, k, v, o}_proj, self_attn.{q_norm, k_norm} [d], self_attn.g_proj [n, H]
    moe.gate [E, H], moe.router_bias [E], moe.{gate, up}_proj [E, I, H], moe.down_proj [E, H, I]
    share_expert.{gate, up, down}_proj
    layers after the last one, which draft (`mtp_layouts.py`)
"""

from dataclasses import replace

import torch

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.experts import BestOfGroups, MixtureMLP, Router, SeparateExperts
from overlap_spec.models.layers.gated_attention import GatedAttention
from overlap_spec.models.layers.linear import AnyLinear, make_linear
from overlap_spec.models.layers.mlp import MLP, BoundedMLP, GatedMLP
from overlap_spec.models.layers.norm import QueryKeyNormLinear, WideRMSNorm, wide_dtype
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import rotated_head, take_gate_up, take_linear, take_qkv, with_kv_scales
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.targets.by_layer import load_by_layer
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.mixture import refuse_format
from overlap_spec.models.targets.step3p5_config import LayerKind, Step35Config


def load(config: Step35Config, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    layers = (load_layer(config, checkpoint, index, index) for index in range(config.num_layers))
    return load_by_layer(config, checkpoint, layers, load_norm(config, checkpoint, "norm", config.hidden_size))


def load_norm(config: Step35Config, checkpoint: Weights, name: str, size: int) -> WideRMSNorm:
    """Take a norm, which is stored as what is added to one."""
    weight = checkpoint.take(f"{name}.weight", (size,))
    return WideRMSNorm(1 + weight.to(wide_dtype(weight.dtype)), config.rms_norm_eps)


def load_layer(config: Step35Config, checkpoint: Weights, index: int, place: int) -> PreNormLayer:
    """Take layer `index` of the checkpoint, whose place among all layers of the config is `place`."""
    if place >= (known := len(config.kinds)):
        raise CheckpointError(
            f"{config.origin}: num_nextn_predict_layers: found {known - config.num_layers} layers that draft, expected"
            f" {place + 1 - config.num_layers} or more"
        )
    name, hidden, kind = f"layers.{index}", config.hidden_size, config.kinds[place]
    mlp: MLP
    if kind.sparse:
        mlp = _take_mixture(config, checkpoint, name, kind)
    else:
        mlp = _take_mlp(checkpoint, f"{name}.mlp", hidden, config.decoder.intermediate_size, kind.limit)
    return PreNormLayer(
        input_norm=load_norm(config, checkpoint, f"{name}.input_layernorm", hidden),
        attention=_take_attention(config, checkpoint, f"{name}.self_attn", kind.shape),
        mlp_norm=load_norm(config, checkpoint, f"{name}.post_attention_layernorm", hidden),
        mlp=mlp,
    )


def _take_attention(config: Step35Config, checkpoint: Weights, name: str, of_kind: AttentionShape) -> GatedAttention:
    shape, hidden, dim = with_kv_scales(checkpoint, name, of_kind), config.hidden_size, of_kind.head_dim
    qkv, sizes = take_qkv(checkpoint, name, shape, hidden)
    norms = [load_norm(config, checkpoint, f"{name}.{part}_norm", dim) for part in "qk"]
    if shape.rope.num_fixed:
        order = rotated_head(shape).to(norms[0].weight.device)
        norms = [replace(norm, weight=norm.weight[order]) for norm in norms]
    projection = QueryKeyNormLinear(qkv, norms[0], norms[1], sizes, groups=(shape.num_heads, shape.num_kv_heads))
    output = take_linear(checkpoint, {f"{name}.o_proj": hidden}, sizes[0])
    gate = make_linear(take_matrix(checkpoint, f"{name}.g_proj", (shape.num_heads, hidden)))
    return GatedAttention(projection, output, shape, gate)


def _take_mlp(checkpoint: Weights, name: str, hidden: int, inner: int, limit: float | None) -> GatedMLP:
    down = take_linear(checkpoint, {f"{name}.down_proj": hidden}, inner)
    return _mlp(take_gate_up(checkpoint, name, hidden, inner), down, limit)


def _mlp(gate_up: AnyLinear, down: AnyLinear, limit: float | None) -> GatedMLP:
    return GatedMLP(gate_up, down) if limit is None else BoundedMLP(gate_up, down, limit)


def _take_mixture(config: Step35Config, checkpoint: Weights, layer: str, kind: LayerKind) -> MixtureMLP:
    """Experts are one tensor for each linear, in 16 bits or more."""
    name, hidden, sizes = f"{layer}.moe", config.hidden_size, config.experts
    refuse_format(checkpoint, f"{name}.gate_proj", "experts in one tensor are not supported", "16-bit experts")
    count, inner = sizes.num_experts, sizes.inner_size
    weight = take_matrix(checkpoint, f"{name}.gate", (count, hidden))
    correction = checkpoint.take(f"{name}.router_bias", (count,), wide_dtype(checkpoint.forms.dtype))
    assert sizes.grouping is not None
    gate, up = (checkpoint.take(f"{name}.{part}_proj.weight", (count, inner, hidden)) for part in ("gate", "up"))
    down = checkpoint.take(f"{name}.down_proj.weight", (count, hidden, inner))
    both = zip(torch.cat((gate, up), dim=1), down, strict=True)
    experts = tuple(
        _mlp(make_linear(of_gate_up), make_linear(of_down), kind.expert_limit) for of_gate_up, of_down in both
    )
    shared = _take_mlp(checkpoint, f"{layer}.share_expert", hidden, sizes.shared_size, kind.limit)
    router = Router(weight, BestOfGroups(sizes.top_k, True, sizes.grouping, correction))
    return MixtureMLP(router, SeparateExperts(experts), shared=shared)
