"""MiMo-V2-Flash (arXiv:2601.02780): layers with a window, whose heads have sinks, and full layers in turn; experts
scored by a sigmoid and chosen with a correction, but in layers that stay dense.

Both kinds of layers have heads of their own (keys of `swa_` in the config), values have fewer columns than keys
(`NarrowHeads`) and are scaled, and a third of a head is rotated. Facts: transformers 5.17, models/mimo_v2_flash;
sglang, python/sglang/srt/models/mimo_v2_flash.py, commit 0a41b3bf99b058546df836907a9876724feb205e, for the names below.

    self_attn.{q, k, v, o}_proj, self_attn.attention_sink_bias [n] (`sinks` as transformers writes it)
    mlp.gate, mlp.experts and dense layers as elsewhere (`mixture.py`)
    mtp.layers.i.*, which draft (`mtp_layouts.py`)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import NarrowAttention, NarrowHeads, NarrowHeadsLinear, PreNormLayer
from overlap_spec.models.layers.mlp import MLP
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import rotated_head, take_linear, take_mlp, with_kv_scales
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.llama import load_norm
from overlap_spec.models.targets.mixture import (
    NAMES,
    RATED_BY,
    ByLayerConfig,
    load_by_layer,
    read_grouped,
    take_mixture,
)
from overlap_spec.models.targets.reading import FULL, SLIDING, ConfigReader

PREFIX = {FULL: "", SLIDING: "swa_"}  # of keys that each kind of layer has
SINKS = {FULL: ("add_full_attention_sink_bias", False), SLIDING: ("add_swa_attention_sink_bias", True)}
THETA = {FULL: 5e6, SLIDING: 1e4}  # where the config does not say, as are the next
HEAD_DIM, VALUE_DIM, ROTATED, VALUE_SCALE, WINDOW, EPS = 192, 128, 0.334, 0.707, 128, 1e-5
EVERY = 6  # the first layer and every sixth one are full


@dataclass(frozen=True)
class LayerKind:
    """The attention of layers with a window, or of full ones."""

    shape: AttentionShape  # as the cache has it
    heads: NarrowHeads
    sinks: bool


@dataclass(frozen=True, kw_only=True)
class MimoV2Config(ByLayerConfig):
    """A decoder with two kinds of layers."""

    kinds: Mapping[str, LayerKind]  # `FULL` and `SLIDING`
    layers: tuple[str, ...]  # the kind of each
    attention_bias: bool


def read_config(config: Mapping[str, Any], origin: str) -> MimoV2Config:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    for key, supported in {"hidden_act": "silu", "n_shared_experts": 0, "topk_method": "noaux_tc"}.items():
        reader.refuse_unless(key, supported)
    num_layers = reader.size("num_hidden_layers")
    listed = reader.layer_types() or tuple(
        FULL if i == 0 or (i + 1) % EVERY == 0 else SLIDING for i in range(num_layers)
    )
    pattern = reader.by_layer("hybrid_layer_pattern", (0, 1))
    layers = listed if pattern is None else tuple(SLIDING if windowed else FULL for windowed in pattern)
    sparse = reader.by_layer("moe_layer_freq", (0, 1)) or reader.by_layer("mlp_layer_types", ("dense", "sparse"))
    experts = replace(
        read_grouped(reader, ("sigmoid",), RATED_BY, bool(config.get("norm_topk_prob", True))), corrected=True
    )
    kinds = _read_kinds(reader)
    decoder = reader.decoder(tuple(kinds[kind].shape for kind in layers))
    eps = config.get("layernorm_epsilon") or config.get("rms_norm_eps") or EPS
    return MimoV2Config(
        decoder=replace(decoder, rms_norm_eps=float(eps)),
        kinds=kinds,
        layers=layers,
        sparse=sparse or (False,) + (True,) * (num_layers - 1),
        experts=experts,
        attention_bias=bool(config.get("attention_bias", False)),
        origin=origin,
    )


def _read_kinds(reader: ConfigReader) -> dict[str, LayerKind]:
    """Both kinds, whose keys and values fit one cache."""
    head_dim, value_dim = reader.size("head_dim", HEAD_DIM), reader.size("v_head_dim", VALUE_DIM)
    num_heads, few = reader.size("num_attention_heads"), reader.size("num_key_value_heads")
    of_kind = {FULL: few, SLIDING: reader.size("swa_num_key_value_heads", 2 * few)}
    stored = max(of_kind.values())
    reader.refuse_unless("swa_head_dim", head_dim)
    scale = reader.values.get("attention_value_scale", VALUE_SCALE)
    kinds = {}
    for kind, prefix in PREFIX.items():
        heads = reader.size(f"{prefix}num_attention_heads", num_heads)
        narrow = reader.size(f"{prefix}v_head_dim", value_dim)
        if heads % stored or stored % of_kind[kind]:
            raise CheckpointError(
                f"{reader.origin}: {prefix}num_key_value_heads: found {of_kind[kind]} for {heads} heads, expected that"
                f" they divide {stored}, which one cache holds for all layers, and that {stored} divide {heads}"
            )
        if narrow > head_dim:
            raise CheckpointError(
                f"{reader.origin}: {prefix}v_head_dim: found {narrow}, expected at most head_dim {head_dim}"
            )
        window = reader.window() or reader.size("sliding_window_size", WINDOW)
        shape = AttentionShape(
            *(heads, stored, head_dim), head_dim**-0.5, window if kind == SLIDING else None, _rope(reader, kind)
        )
        key, default = SINKS[kind]
        sinks = bool(reader.values.get(key, default))
        factor = 1.0 if scale is None else float(scale)
        kinds[kind] = LayerKind(shape, NarrowHeads(of_kind[kind], narrow, factor), sinks)
    return kinds


def _rope(reader: ConfigReader, kind: str) -> RopeConfig:
    values, key = reader.values, f"{PREFIX[kind]}rope_theta"
    scaling, given = values.get("rope_scaling") or {}, reader.ropes_by_kind()
    parameters = {
        "rope_type": scaling.get("type") or "default",
        "rope_theta": values.get(key) or THETA[kind],
        "partial_rotary_factor": values.get("partial_rotary_factor") or ROTATED,
        **scaling,
        **given.get(kind, {}),
    }
    return reader.rope(parameters, reader.size("head_dim", HEAD_DIM), part=1.0)


def load(config: MimoV2Config, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    layers = (
        load_layer(config, checkpoint, index, kind, sparse)
        for index, (kind, sparse) in enumerate(zip(config.layers, config.sparse, strict=True))
    )
    return load_by_layer(config, checkpoint, layers, load_norm(config, checkpoint, "norm"))


def load_layer(config: MimoV2Config, checkpoint: Weights, index: int, kind: str, sparse: bool) -> PreNormLayer:
    """Take one layer. `sparse`: it has experts."""
    name, hidden, inner = f"layers.{index}", config.hidden_size, config.decoder.intermediate_size
    mlp: MLP
    if sparse:
        mlp = take_mixture(checkpoint, name, NAMES, hidden, config.experts)
    else:
        mlp = take_mlp(checkpoint, f"{name}.mlp", hidden, inner)
    return PreNormLayer(
        input_norm=load_norm(config, checkpoint, f"{name}.input_layernorm"),
        attention=_take_attention(config, checkpoint, f"{name}.self_attn", config.kinds[kind]),
        mlp_norm=load_norm(config, checkpoint, f"{name}.post_attention_layernorm"),
        mlp=mlp,
    )


def _take_attention(config: MimoV2Config, checkpoint: Weights, name: str, kind: LayerKind) -> NarrowAttention:
    shape, heads, hidden = with_kv_scales(checkpoint, name, kind.shape), kind.heads, config.hidden_size
    if kind.sinks:
        sinks = f"{name}.sinks" if f"{name}.sinks" in checkpoint else f"{name}.attention_sink_bias"
        shape = replace(shape, sinks=checkpoint.take(sinks, (shape.num_heads,)))
    queries, keys = shape.num_heads * shape.head_dim, heads.num_kv_heads * shape.head_dim
    values = heads.num_kv_heads * heads.value_dim
    sizes = dict(zip((f"{name}.{part}_proj" for part in "qkv"), (queries, keys, values), strict=True))
    qkv = take_linear(checkpoint, sizes, hidden, config.attention_bias, _order(shape, queries + keys, values))
    output = take_linear(checkpoint, {f"{name}.o_proj": hidden}, shape.num_heads * heads.value_dim)
    return NarrowAttention(NarrowHeadsLinear(qkv, heads, shape), output, shape, heads.value_dim)


def _order(shape: AttentionShape, rotated: int, values: int) -> Tensor | None:
    """The rows of queries and keys, which are `rotated` ones, with rotated pairs first, and of values as they are."""
    if not shape.rope.num_fixed:
        return None
    heads = torch.arange(rotated).unflatten(0, (-1, shape.head_dim))[:, rotated_head(shape)]
    return torch.cat((heads.flatten(), torch.arange(rotated, rotated + values)))
