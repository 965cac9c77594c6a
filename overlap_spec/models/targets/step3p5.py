"""Step-3.5-Flash (arXiv:2602.10604): layers with a window and full ones in turn, with different numbers of heads, each
of which has a gate; experts scored by a sigmoid and chosen with a correction, beside one that all rows share.

Gate and up projections of some layers are bounded. Norms multiply by one plus their weight. Facts: sglang,
python/sglang/srt/models/step3p5.py, commit 01b5f572b7b678e2fa5a727881f1ff3ab4dd3c6d; transformers 5.17,
models/step3p7, whose text model this is.

    self_attn.{q, k, v, o}_proj, self_attn.{q_norm, k_norm} [d], self_attn.g_proj [n, H]
    moe.gate [E, H], moe.router_bias [E], moe.{gate, up}_proj [E, I, H], moe.down_proj [E, H, I]
    share_expert.{gate, up, down}_proj
    layers after the last one, which draft (`mtp_layouts.py`)

What varies by layer is in lists of the config: the kind of attention, the base of rotary positions, the part of a head
that is rotated, and the bounds of gate and up projections. They go on past the last layer, for those that draft.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from overlap_spec_kernels import Grouping
from overlap_spec_kernels.experts.best_of_groups import sigmoid_scores

from overlap_spec.config.speculation import num_own_layers
from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import GatedAttention, PreNormLayer
from overlap_spec.models.layers.experts import MixtureMLP, separated
from overlap_spec.models.layers.linear import make_linear
from overlap_spec.models.layers.mlp import MLP
from overlap_spec.models.layers.norm import QueryKeyNormLinear
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import (
    take_linear,
    take_mlp,
    take_qkv,
    take_raised_head_norms,
    take_raised_norm,
    with_kv_scales,
)
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.mixture import ByLayerConfig, load_by_layer, read_sizes, refuse_format, take_router
from overlap_spec.models.targets.reading import FULL, SLIDING, ConfigReader

LIMITS = ("swiglu_limits", "swiglu_limits_shared")
MUST_BE = {
    "hidden_act": "silu",
    "att_impl_type": "GQA",
    "moe_router_activation": "sigmoid",
    **dict.fromkeys(("use_moe_router_bias", "norm_expert_weight", "use_qk_norm", "use_head_wise_attn_gate"), True),
    **dict.fromkeys(("zero_centered", "use_moe"), True),
    **dict.fromkeys(("sink", "attention_bias"), False),
}


@dataclass(frozen=True)
class LayerKind:
    """What is a layer's own."""

    shape: AttentionShape
    sparse: bool  # it has experts
    expert_limit: float | None  # bound of its experts; None or 0: none
    limit: float | None  # bound of the expert that all rows share, or of its one MLP


@dataclass(frozen=True, kw_only=True)
class Step35Config(ByLayerConfig):
    """A decoder whose layers are not alike."""

    kinds: tuple[LayerKind, ...]  # of all layers, then of those that draft


def read_config(config: Mapping[str, Any], origin: str) -> Step35Config:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    for key, supported in MUST_BE.items():
        reader.refuse_unless(key, supported)
    reader.refuse_unless("use_rope_layers", [])
    num_layers = reader.size("num_hidden_layers")
    count = num_layers + num_own_layers(config)
    limits = [reader.listed(key, count, absent=[None] * count) for key in LIMITS]
    sizes = read_sizes(reader, "moe_num_experts", "moe_intermediate_size", normalised=True, top_k="moe_top_k")
    grouping = Grouping(sigmoid_scores, scale=float(config.get("moe_router_scaling_factor") or 1.0))
    kinds = tuple(map(LayerKind, _shapes(reader, count), _sparse(reader, count), *limits))
    return Step35Config(
        decoder=reader.decoder(tuple(kind.shape for kind in kinds[:num_layers])),
        kinds=kinds,
        sparse=tuple(kind.sparse for kind in kinds[:num_layers]),
        experts=replace(sizes, shared_size=reader.size("share_expert_dim"), grouping=grouping, corrected=True),
        origin=origin,
    )


def _sparse(reader: ConfigReader, count: int) -> list[bool]:
    """By layer, whether it has experts: there are indices, in a list or between commas."""
    found = reader.values.get("moe_layers_enum")
    parts = found.split(",") if isinstance(found, str) else found
    indices = [str(part).strip() for part in parts] if isinstance(parts, list) else [""]
    if not all(index.isdecimal() and int(index) < count for index in indices):
        raise CheckpointError(
            f"{reader.origin}: moe_layers_enum: found {found!r}, expected indices of {count} layers, between commas"
        )
    return [index in map(int, indices) for index in range(count)]


def _shapes(reader: ConfigReader, count: int) -> list[AttentionShape]:
    """The heads of each layer. All have as many of keys and values, which one cache holds."""
    kinds = reader.listed("layer_types", count, entries=(FULL, SLIDING))
    theta = reader.values.get("rope_theta")
    bases = reader.listed("rope_theta", count) if isinstance(theta, list) else [theta] * count
    parts = reader.listed("partial_rotary_factors", count, absent=[1.0] * count)
    heads, groups, dim = map(reader.size, ("num_attention_heads", "num_attention_groups", "head_dim"))
    key = "attention_other_setting"
    of_window = ConfigReader(reader.values.get(key) or {}, f"{reader.origin}: {key}")
    of_window.refuse_unless("num_attention_groups", groups)
    of_window.refuse_unless("head_dim", dim)
    num_heads = {FULL: heads, SLIDING: of_window.size("num_attention_heads", heads)}
    for kind, number in num_heads.items():
        if number % groups:
            raise CheckpointError(
                f"{reader.origin}: num_attention_groups: found {groups}, expected a divisor of {number} heads of {kind}"
            )
    window = reader.size("sliding_window") if SLIDING in kinds else None
    return [
        AttentionShape(
            *(num_heads[kind], groups, dim),
            dim**-0.5,
            window if kind == SLIDING else None,
            _rope(reader, kind, dim, base, part),
        )
        for kind, base, part in zip(kinds, bases, parts, strict=True)
    ]


def _rope(reader: ConfigReader, kind: str, dim: int, base: float | None, part: float) -> RopeConfig:
    """Positions of full layers alone may be stretched: `yarn_only_types` names them, whatever stretches them."""
    types = reader.values.get("yarn_only_types")
    scaling = reader.values.get("rope_scaling") if not types or kind in types else None
    return reader.rope({**(scaling or {}), "rope_theta": base, "partial_rotary_factor": part}, dim, part)


def load(config: Step35Config, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    layers = (load_layer(config, checkpoint, index, index) for index in range(config.num_layers))
    norm = take_raised_norm(checkpoint, "norm", config.hidden_size, config.rms_norm_eps)
    return load_by_layer(config, checkpoint, layers, norm)


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
        mlp = take_mlp(checkpoint, f"{name}.mlp", hidden, config.decoder.intermediate_size, limit=kind.limit)
    return PreNormLayer(
        input_norm=take_raised_norm(checkpoint, f"{name}.input_layernorm", hidden, config.rms_norm_eps),
        attention=_take_attention(config, checkpoint, f"{name}.self_attn", kind.shape),
        mlp_norm=take_raised_norm(checkpoint, f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps),
        mlp=mlp,
    )


def _take_attention(config: Step35Config, checkpoint: Weights, name: str, of_kind: AttentionShape) -> GatedAttention:
    shape, hidden = with_kv_scales(checkpoint, name, of_kind), config.hidden_size
    qkv, sizes = take_qkv(checkpoint, name, shape, hidden)
    norms = take_raised_head_norms(checkpoint, name, shape, config.rms_norm_eps)
    projection = QueryKeyNormLinear(qkv, *norms, sizes, groups=(shape.num_heads, shape.num_kv_heads))
    output = take_linear(checkpoint, {f"{name}.o_proj": hidden}, sizes[0])
    gate = make_linear(take_matrix(checkpoint, f"{name}.g_proj", (shape.num_heads, hidden)))
    return GatedAttention(projection, output, shape, gate)


def _take_mixture(config: Step35Config, checkpoint: Weights, layer: str, kind: LayerKind) -> MixtureMLP:
    """Experts are one tensor for each linear, in 16 bits or more."""
    name, hidden, sizes = f"{layer}.moe", config.hidden_size, config.experts
    refuse_format(checkpoint, f"{name}.gate_proj", "experts in one tensor are not supported", "16-bit experts")
    count, inner = sizes.num_experts, sizes.inner_size
    gate, up = (checkpoint.take(f"{name}.{part}_proj.weight", (count, inner, hidden)) for part in ("gate", "up"))
    down = checkpoint.take(f"{name}.down_proj.weight", (count, hidden, inner))
    experts = separated(torch.cat((gate, up), dim=1), down, kind.expert_limit)
    shared = take_mlp(checkpoint, f"{layer}.share_expert", hidden, sizes.shared_size, limit=kind.limit)
    router = take_router(checkpoint, f"{name}.gate", hidden, sizes, f"{name}.router_bias")
    return MixtureMLP(router, experts, shared=shared)
