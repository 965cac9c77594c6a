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

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from overlap_spec_kernels import Grouping
from overlap_spec_kernels.experts.best_of_groups import sigmoid_scores

from overlap_spec.config.speculation import num_own_layers
from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import GatedAttention, PreNormLayer
from overlap_spec.models.layers.experts import BestOfGroups, MixtureMLP, Router, SeparateExperts
from overlap_spec.models.layers.linear import AnyLinear, make_linear
from overlap_spec.models.layers.mlp import MLP, BoundedMLP, GatedMLP
from overlap_spec.models.layers.norm import QueryKeyNormLinear, WideRMSNorm, wide_dtype
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import rotated_head, take_gate_up, take_linear, take_qkv, with_kv_scales
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.mixture import ByLayerConfig, ExpertSizes, load_by_layer, refuse_format
from overlap_spec.models.targets.reading import FULL, SLIDING, ConfigReader

LIMITS = ("swiglu_limits", "swiglu_limits_shared")
STRETCHED = ("default", "linear", "llama3")  # kinds of positions that may be over a part of a head
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
    expert_limit: float | None  # bound of its experts; None: none
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
    sparse, (of_experts, of_shared) = _sparse(reader, count), (_limits(reader, key, count) for key in LIMITS)
    shapes = _shapes(reader, count)
    kinds = tuple(
        LayerKind(shape, index in sparse, of_experts[index] or None, of_shared[index] or None)
        for index, shape in enumerate(shapes)
    )
    return Step35Config(
        decoder=reader.decoder(tuple(kind.shape for kind in kinds[:num_layers])),
        kinds=kinds,
        sparse=tuple(kind.sparse for kind in kinds[:num_layers]),
        experts=_experts(reader),
        origin=origin,
    )


def _experts(reader: ConfigReader) -> ExpertSizes:
    count, top_k = reader.size("moe_num_experts"), reader.size("moe_top_k")
    if top_k > count:
        raise CheckpointError(f"{reader.origin}: moe_top_k: found {top_k}, expected at most moe_num_experts {count}")
    grouping = Grouping(sigmoid_scores, scale=float(reader.values.get("moe_router_scaling_factor") or 1.0))
    shared = reader.size("share_expert_dim")
    return ExpertSizes(count, top_k, reader.size("moe_intermediate_size"), True, shared, grouping, corrected=True)


def _listed(reader: ConfigReader, key: str, count: int, what: str, holds: Callable[[Any], bool]) -> list[Any]:
    """A list with an entry for each layer, of which `count` are read. `what`: the entries, in words."""
    found = reader.values.get(key)
    if not isinstance(found, list | tuple) or len(found) < count or not all(map(holds, found)):
        raise CheckpointError(f"{reader.origin}: {key} must have {what} for each of {count} layers, found {found!r}")
    return list(found[:count])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _limits(reader: ConfigReader, key: str, count: int) -> list[float | None]:
    if reader.values.get(key) is None:
        return [None] * count
    return _listed(reader, key, count, "null or a number", lambda value: value is None or _number(value))


def _sparse(reader: ConfigReader, count: int) -> set[int]:
    """The layers that have experts: indices, in a list or between commas."""
    found = reader.values.get("moe_layers_enum")
    parts = found.split(",") if isinstance(found, str) else found
    indices = [str(part).strip() for part in parts] if isinstance(parts, list) else [""]
    if not all(index.isdecimal() and int(index) < count for index in indices):
        raise CheckpointError(
            f"{reader.origin}: moe_layers_enum: found {found!r}, expected indices of {count} layers, between commas"
        )
    return set(map(int, indices))


def _shapes(reader: ConfigReader, count: int) -> list[AttentionShape]:
    """The heads of each layer. All have as many of keys and values, which one cache holds."""
    kinds = _listed(reader, "layer_types", count, f"{FULL!r} or {SLIDING!r}", lambda value: value in (FULL, SLIDING))
    theta = reader.values.get("rope_theta")
    bases = _listed(reader, "rope_theta", count, "a base", _number) if isinstance(theta, list) else [theta] * count
    key = "partial_rotary_factors"
    listed = reader.values.get(key) is not None
    parts = _listed(reader, key, count, "a part of a head", _number) if listed else [1.0] * count
    other = reader.values.get("attention_other_setting")
    if other is not None and not isinstance(other, Mapping):
        raise CheckpointError(f"{reader.origin}: attention_other_setting must be null or an object, found {other!r}")
    of_window = ConfigReader(other or {}, f"{reader.origin}: attention_other_setting")
    heads, groups = reader.size("num_attention_heads"), reader.size("num_attention_groups")
    dim = reader.size("head_dim")
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
    values, rotated = reader.values, int(dim * part)
    if not 2 <= rotated <= dim or rotated % 2:
        raise CheckpointError(
            f"{reader.origin}: partial_rotary_factors rotates {rotated} of {dim} columns: expected pairs"
        )
    types = values.get("yarn_only_types")
    scaling = values.get("rope_scaling") if not types or kind in types else None
    parameters = {**(scaling or {}), "rope_theta": base}
    found = {"rope_parameters": parameters, "max_position_embeddings": values.get("max_position_embeddings")}
    rope = RopeConfig.from_hf(found, rotated, reader.origin)
    if rotated != dim and rope.kind not in STRETCHED:
        raise CheckpointError(f"{reader.origin}: rope type {rope.kind!r} over part of a head is not supported")
    return replace(rope, num_fixed=(dim - rotated) // 2)


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
