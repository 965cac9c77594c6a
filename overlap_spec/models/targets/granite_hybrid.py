"""Granite 4, dense and with experts: Mamba-2 layers (`recurrent.py`) and a few that attend, most without positions.

Embedding, scores, what layers add and logits are multiplied by numbers of the config. Beside the experts of a layer
there is an MLP that all rows have; dense models have that alone. Facts: transformers 5.17, models/granitemoehybrid.

    mamba.in_proj [2 n p + 2 g s + n, H]      z, x, B, C, a step for each of n heads of p columns; s numbers, g groups
    mamba.conv1d.weight [C, 1, K], .bias [C]  of x, B, C; mamba.{dt_bias, A_log, D} [n], norm.weight [n p], out_proj
    shared_mlp.input_linear [2I, H], .output_linear [H, I]                                  gate first
    block_sparse_moe.router.layer [E, H], .input_linear [E, 2I, H], .output_linear [E, H, I]
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from overlap_spec_kernels.launch import capability_of

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import Attention, PostNormLayer, SelfAttention
from overlap_spec.models.layers.experts import Experts, MixtureMLP, MostProbable, Router, StackedExperts, separated
from overlap_spec.models.layers.linear import DividedLogits
from overlap_spec.models.layers.mlp import MLP, GatedMLP
from overlap_spec.models.layers.norm import RMSNorm, Scaled, wide_dtype
from overlap_spec.models.layers.recurrent import GatedRowNorm, Mamba2Shape, RecurrentLayer
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import take_linear, take_qkv, with_kv_scales
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.recurrent_state import StateShape
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.hybrid import NO_EXPERTS, HybridConfig, read_dtype, refuse_other_kind
from overlap_spec.models.targets.mixture import load_by_layer, read_sizes, refuse_format
from overlap_spec.models.targets.reading import FULL, ConfigReader

RECURS, ATTENDS = "mamba", "attention"  # what `layer_types` calls layers
OF_TRANSFORMERS = {"linear_attention": RECURS, FULL: ATTENDS}  # as it writes them
HEADS, STATE, GROUPS, KERNEL, EXPAND, SHARED = 128, 256, 1, 4, 2, 1024  # where the config does not say
MAX_STATE = 128  # numbers of B and C that a GPU's kernels take
ANY_STEP = [0.0, float("inf")], [0.0, {"__float__": "Infinity"}]  # a bound that bounds nothing, in two spellings


@dataclass(frozen=True, kw_only=True)
class GraniteConfig(HybridConfig):
    """A hybrid whose results are multiplied."""

    of_embedding: float
    of_layers: float  # what attention, recurrence and MLP add
    of_logits: float  # they are divided by it
    conv_bias: bool
    proj_bias: bool

    def refuse_on_gpu(self) -> None:
        super().refuse_on_gpu()
        if self.state.key_dim > MAX_STATE:
            found = f"found {self.state.key_dim}, expected at most {MAX_STATE} on a GPU; use --device cpu"
            raise CheckpointError(f"{self.origin}: mamba_d_state: {found}")


def read_config(config: Mapping[str, Any], origin: str) -> GraniteConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("hidden_act", "silu", "swish")
    reader.refuse_unless("position_embedding_type", "nope", "rope")
    reader.refuse_unless("time_step_limit", *ANY_STEP)
    attends, heads = _attends(reader), reader.heads()
    rope = RopeConfig.from_hf(config, heads[2], origin)
    if config.get("position_embedding_type") != "rope":
        rope = RopeConfig("default", rope.theta, 0, rope.max_positions, {}, num_fixed=heads[2] // 2)
    experts = NO_EXPERTS
    if config.get("num_local_experts") != 0:
        experts = read_sizes(reader, "num_local_experts", "intermediate_size", normalised=True)
    keys = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    scores, rows, added, logits = (float(1.0 if config.get(key) is None else config[key]) for key in keys)
    state, num_groups = _read_state(reader, attends.count(False))
    return GraniteConfig(
        decoder=reader.decoder((AttentionShape(*heads, scores, None, rope),) * len(attends)),
        experts=replace(experts, shared_size=reader.size("shared_intermediate_size", SHARED)),
        sparse=(experts.num_experts > 0,) * len(attends),
        origin=origin,
        attends=attends,
        attention_bias=bool(config.get("attention_bias", False)),
        state=state,
        num_key_heads=num_groups,
        kernel_key="mamba_d_conv",
        of_embedding=rows,
        of_layers=added,
        of_logits=logits,
        conv_bias=config.get("mamba_conv_bias") is not False,
        proj_bias=bool(config.get("mamba_proj_bias")),
    )


def _attends(reader: ConfigReader) -> tuple[bool, ...]:
    found = reader.values.get("layer_types")
    kinds = [OF_TRANSFORMERS.get(each, each) for each in found] if isinstance(found, list) else found
    named = ConfigReader({**reader.values, "layer_types": kinds}, reader.origin)
    attends = named.by_layer("layer_types", (RECURS, ATTENDS))
    if attends is None or not any(attends):
        raise CheckpointError(f"{reader.origin}: layer_types: found no {ATTENDS!r}, expected at least one")
    return attends


def _read_state(reader: ConfigReader, num_layers: int) -> tuple[StateShape, int]:
    """The state of layers that recur, and the groups of heads that share B and C."""
    heads, groups = reader.size("mamba_n_heads", HEADS), reader.size("mamba_n_groups", GROUPS)
    kernel, size = reader.size("mamba_d_conv", KERNEL), reader.size("mamba_d_state", STATE)
    columns, given = reader.size("mamba_expand", EXPAND) * reader.size("hidden_size"), reader.values.get("mamba_d_head")
    dim = columns // heads if given in (None, "auto") else reader.size("mamba_d_head")
    for key, found, expected, is_right in (
        ("mamba_d_head", f"{heads} heads of {dim}", f"mamba_expand * hidden_size = {columns}", heads * dim == columns),
        ("mamba_n_heads", heads, f"a multiple of mamba_n_groups {groups}", heads % groups == 0),
        ("mamba_d_conv", kernel, "2 or more", kernel > 1),
    ):
        if not is_right:
            raise CheckpointError(f"{reader.origin}: {key}: found {found}, expected {expected}")
    sizes = (columns + 2 * groups * size, kernel, heads, size, dim)
    return StateShape(num_layers, *sizes, read_dtype(reader), num_gates=1), groups


def load(config: GraniteConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    layers = (_load_layer(config, checkpoint, index) for index in range(config.num_layers))
    found = load_by_layer(config, checkpoint, layers, _take_norm(config, checkpoint, "norm"))
    head = DividedLogits(found.head, config.of_logits)
    return replace(found, embedding=found.embedding.scaled(config.of_embedding), head=head)


def _take_norm(config: GraniteConfig, checkpoint: Weights, name: str) -> RMSNorm:
    return RMSNorm(checkpoint.take(f"{name}.weight", (config.hidden_size,)), config.rms_norm_eps)


def _load_layer(config: GraniteConfig, checkpoint: Weights, index: int) -> PostNormLayer:
    name, attends = f"layers.{index}", config.attends[index]
    own = refuse_other_kind(checkpoint, name, attends, ("mamba", "self_attn"), ATTENDS if attends else RECURS)
    take, added = _take_attention if attends else _take_mamba, Scaled(config.of_layers)
    return PostNormLayer(
        input_norm=_take_norm(config, checkpoint, f"{name}.input_layernorm"),
        attention=take(config, checkpoint, own),
        attention_norm=added,
        mlp_norm=_take_norm(config, checkpoint, f"{name}.post_attention_layernorm"),
        mlp=_take_mlp(config, checkpoint, name),
        output_norm=added,
    )


def _take_attention(config: GraniteConfig, checkpoint: Weights, name: str) -> Attention:
    shape, hidden = with_kv_scales(checkpoint, name, config.decoder.shapes[0]), config.hidden_size
    qkv, sizes = take_qkv(checkpoint, name, shape, hidden, config.attention_bias)
    output = take_linear(checkpoint, {f"{name}.o_proj": hidden}, sizes[0], config.attention_bias)
    return SelfAttention(qkv, output, shape)


def _take_mamba(config: GraniteConfig, checkpoint: Weights, name: str) -> Attention:
    """Rows are C, B and x, which are convolved, then steps and z."""
    state, wide = config.state, wide_dtype(checkpoint.forms.dtype)
    heads, shared, columns = state.num_heads, config.num_key_heads * state.key_dim, state.num_heads * state.value_dim
    z, x, b, c, steps = torch.arange(columns + state.row_size).split((columns, columns, shared, shared, heads))
    inputs = {f"{name}.in_proj": columns + state.row_size}
    conv = checkpoint.take(f"{name}.conv1d.weight", (state.conv_dim, 1, state.kernel)).squeeze(1)
    mixed = (torch.cat((c, b, x)) - columns).to(conv.device)
    logarithm, offset, skip = (checkpoint.take(f"{name}.{part}", (heads,), wide) for part in ("A_log", "dt_bias", "D"))
    shape = Mamba2Shape(
        *(1, *state.sizes, config.num_key_heads, conv[mixed], logarithm.exp(), offset),
        norm=GatedRowNorm(checkpoint.take(f"{name}.norm.weight", (columns,), wide), config.rms_norm_eps),
        bias=checkpoint.take(f"{name}.conv1d.bias", (state.conv_dim,))[mixed] if config.conv_bias else None,
        skip=skip,
    )
    projected = take_linear(checkpoint, inputs, config.hidden_size, config.proj_bias, torch.cat((c, b, x, steps, z)))
    output = take_linear(checkpoint, {f"{name}.out_proj": config.hidden_size}, columns, config.proj_bias)
    return RecurrentLayer(projected, output, shape)


def _take_mlp(config: GraniteConfig, checkpoint: Weights, layer: str) -> MLP:
    hidden, sizes, name = config.hidden_size, config.experts, f"{layer}.block_sparse_moe"
    inner, count = sizes.shared_size, sizes.num_experts
    gate_up = take_linear(checkpoint, {f"{layer}.shared_mlp.input_linear": 2 * inner}, hidden)
    shared = GatedMLP(gate_up, take_linear(checkpoint, {f"{layer}.shared_mlp.output_linear": hidden}, inner))
    if not count:
        return shared
    refuse_format(checkpoint, f"{name}.input_linear", "experts in one tensor are not supported", "16-bit experts")
    router = Router(take_matrix(checkpoint, f"{name}.router.layer", (count, hidden)), MostProbable(sizes.top_k, True))
    both = checkpoint.take(f"{name}.input_linear.weight", (count, 2 * sizes.inner_size, hidden))
    down = checkpoint.take(f"{name}.output_linear.weight", (count, hidden, sizes.inner_size))
    experts: Experts = StackedExperts(both, down)
    if capability_of(checkpoint.forms.device) is None:
        experts = separated(both, down)
    return MixtureMLP(router, experts, shared=shared)
