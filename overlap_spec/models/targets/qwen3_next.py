"""Qwen3-Next: Gated DeltaNet layers (`gated_delta.py`), and every fourth one attends; experts with a gated shared one.

Heads that attend are 256 columns wide, a quarter of which is rotated, and what they find is multiplied by the sigmoid
of a gate. Norms are stored as what is added to one. Facts: transformers 5.17, models/qwen3_next.

    self_attn.q_proj [n 2 d, H]               of each head its query, then its gate; q_norm and k_norm [d]
    linear_attn.in_proj_qkvz [.., H]          of each key head: its query, key, the values of its heads, and their z
    linear_attn.in_proj_ba [2 v, H]           of each key head: the rates of its value heads, then their decays
    linear_attn.conv1d.weight [C, 1, K], dt_bias [v], A_log [v], norm.weight [dv], out_proj [H, v dv]
    mlp.gate, mlp.experts as elsewhere (`mixture.py`), mlp.shared_expert, mlp.shared_expert_gate.weight [1, H]

The text models of Qwen3.5 and 3.6, dense and with experts, have its layers. Facts: models/qwen3_5 and qwen3_5_moe.

    model.language_model.*                                 the text model; model.visual.* is not read
    linear_attn.in_proj_qkv, in_proj_z, in_proj_b, in_proj_a    of all heads, where Qwen3-Next has them by key head

Positions have three parts for images (mrope). Those of text are all equal, so every pair turns by the one position.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from overlap_spec_kernels.recurrent.gated_delta import MAX_KERNEL
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import Attention, GatedAttention, PreNormLayer
from overlap_spec.models.layers.gated_delta import DeltaShape, GatedHeadNorm, RecurrentLayer
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.mlp import MLP
from overlap_spec.models.layers.norm import HeadNormLinear, wide_dtype
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import (
    rotated_head,
    take_linear,
    take_mlp,
    take_raised_head_norms,
    take_raised_norm,
    with_kv_scales,
)
from overlap_spec.models.recurrent_state import StateShape
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.llama_mixtures import sparse_layers
from overlap_spec.models.targets.mixture import (
    ByLayerConfig,
    ExpertNames,
    ExpertSizes,
    load_by_layer,
    read_sizes,
    take_mixture,
)
from overlap_spec.models.targets.reading import FULL, ConfigReader

RECURS = "linear_attention"  # what `layer_types` calls the others
NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "shared_expert", "shared_expert_gate")
NO_EXPERTS = ExpertSizes(0, 0, 0, normalised=True)
HEAD_DIM, ROTATED, EVERY = 256, 0.25, 4  # where the config does not say, as are the next
KERNEL, KEY_HEADS, VALUE_HEADS, DELTA_DIM = 4, 16, 32, 128
STATE_DTYPES = ("float32", "bfloat16", "float16")
VISION = "visual."  # of canonical names
OF_IMAGES = ("mrope_section", "mrope_interleaved")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HybridConfig(ByLayerConfig):
    """A decoder some layers of which attend."""

    attends: tuple[bool, ...]  # by layer
    attention_bias: bool
    state: StateShape  # of the others
    num_key_heads: int  # of theirs
    is_split: bool = False  # their inputs have linears of their own (Qwen3.5)
    kernel_key: str = "linear_conv_kernel_dim"

    def refuse_on_gpu(self) -> None:
        """Raises: CheckpointError naming the key, where a convolution is longer than a GPU's kernels take."""
        if self.state.kernel > MAX_KERNEL:
            raise CheckpointError(
                f"{self.origin}: {self.kernel_key}: found {self.state.kernel}, expected at most {MAX_KERNEL} on a GPU;"
                " use --device cpu"
            )


def read_config(config: Mapping[str, Any], origin: str) -> HybridConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("hidden_act", "silu", "swish")
    heads = reader.heads(HEAD_DIM)
    rope = RopeConfig.from_hf(config, heads[2], origin, ROTATED)
    attends = _attends(reader)
    sparse, experts = (False,) * len(attends), NO_EXPERTS
    if config.get("num_experts") != 0:
        sizes = read_sizes(reader, "num_experts", "moe_intermediate_size", bool(config.get("norm_topk_prob", True)))
        experts = replace(sizes, shared_size=reader.size("shared_expert_intermediate_size"))
        sparse = sparse_layers(reader)
    state, num_key_heads = _read_state(reader, attends.count(False))
    return HybridConfig(
        decoder=reader.decoder((AttentionShape(*heads, heads[2] ** -0.5, None, rope),) * len(attends)),
        experts=experts,
        sparse=sparse,
        origin=origin,
        attends=attends,
        attention_bias=bool(config.get("attention_bias", False)),
        state=state,
        num_key_heads=num_key_heads,
    )


def _attends(reader: ConfigReader) -> tuple[bool, ...]:
    num_layers, every = reader.size("num_hidden_layers"), reader.size("full_attention_interval", EVERY)
    regular = tuple((index + 1) % every == 0 for index in range(num_layers))
    listed = reader.by_layer("layer_types", (RECURS, FULL))
    if listed is not None and reader.values.get("full_attention_interval") is not None and listed != regular:
        found = next(index for index, pair in enumerate(zip(listed, regular, strict=True)) if pair[0] != pair[1])
        raise CheckpointError(
            f"{reader.origin}: layer_types: found {reader.values['layer_types'][found]!r} for layer {found}, expected"
            f" that {FULL!r} is every layer of full_attention_interval {every}"
        )
    attends = regular if listed is None else listed
    if not any(attends):
        raise CheckpointError(f"{reader.origin}: layer_types: found no {FULL!r}, expected at least one")
    return attends


def _read_state(reader: ConfigReader, num_layers: int) -> tuple[StateShape, int]:
    """The state of layers that recur, and their key heads."""
    keys = reader.size("linear_num_key_heads", KEY_HEADS)
    values = reader.size("linear_num_value_heads", VALUE_HEADS)
    key_dim, value_dim = (reader.size(f"linear_{part}_head_dim", DELTA_DIM) for part in ("key", "value"))
    kernel = reader.size("linear_conv_kernel_dim", KERNEL)
    if values % keys:
        raise CheckpointError(
            f"{reader.origin}: linear_num_value_heads: found {values}, expected a multiple of linear_num_key_heads"
            f" {keys}"
        )
    if kernel < 2:
        raise CheckpointError(f"{reader.origin}: linear_conv_kernel_dim: found {kernel}, expected 2 or more")
    conv_dim = 2 * keys * key_dim + values * value_dim
    return StateShape(num_layers, conv_dim, kernel, values, key_dim, value_dim, read_dtype(reader)), keys


def read_dtype(reader: ConfigReader) -> torch.dtype | None:
    """What states are stored in. Raises: CheckpointError naming file and key."""
    dtype = reader.values.get("mamba_ssm_dtype")
    if dtype not in (None, *STATE_DTYPES):
        raise CheckpointError(
            f"{reader.origin}: mamba_ssm_dtype: found {dtype!r}, expected one of {', '.join(STATE_DTYPES)}"
        )
    return None if dtype is None else getattr(torch, dtype)


def load(config: HybridConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    kinds = enumerate(zip(config.attends, config.sparse, strict=True))
    layers = (load_layer(config, checkpoint, index, attends, sparse) for index, (attends, sparse) in kinds)
    norm = take_raised_norm(checkpoint, "norm", config.hidden_size, config.rms_norm_eps)
    return load_by_layer(config, checkpoint, layers, norm)


def load_layer(config: HybridConfig, checkpoint: Weights, index: int, attends: bool, sparse: bool) -> PreNormLayer:
    """Take one layer, which attends or recurs. `sparse`: it has experts."""
    name, sizes = f"layers.{index}", (config.hidden_size, config.rms_norm_eps)
    own = refuse_other_kind(checkpoint, name, attends, ("linear_attn", "self_attn"), FULL if attends else RECURS)
    take = _take_attention if attends else _take_delta
    attention: Attention = take(config, checkpoint, own)
    return PreNormLayer(
        input_norm=take_raised_norm(checkpoint, f"{name}.input_layernorm", *sizes),
        attention=attention,
        mlp_norm=take_raised_norm(checkpoint, f"{name}.post_attention_layernorm", *sizes),
        mlp=_take_mlp(config, checkpoint, name, sparse),
    )


def refuse_other_kind(checkpoint: Weights, layer: str, attends: bool, names: tuple[str, str], kind: str) -> str:
    """The prefix of a layer's tensors. `names`: of what recurs and of what attends; `kind`: in `layer_types`.

    Raises: CheckpointError naming layer and kind, where the layer has tensors of the other one.
    """
    own, other = names[attends], names[not attends]
    if any(tensor.startswith(f"{layer}.{other}.") for tensor in checkpoint.names()):
        raise CheckpointError(
            f"{checkpoint.origin}: {layer}: found tensors of {other}, expected {own}: layer_types of config.json names"
            f" {kind!r}"
        )
    return f"{layer}.{own}"


def _take_mlp(config: HybridConfig, checkpoint: Weights, name: str, sparse: bool) -> MLP:
    hidden, inner = config.hidden_size, config.decoder.intermediate_size
    if sparse:
        return take_mixture(checkpoint, name, NAMES, hidden, config.experts)
    return take_mlp(checkpoint, f"{name}.mlp", hidden, inner)


def _take_attention(config: HybridConfig, checkpoint: Weights, name: str) -> GatedAttention:
    shape, hidden = with_kv_scales(checkpoint, name, config.decoder.shapes[0]), config.hidden_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    named = {f"{name}.q_proj": 2 * queries, f"{name}.k_proj": keys, f"{name}.v_proj": keys}
    whole = take_linear(checkpoint, named, hidden, config.attention_bias, _gates_first(shape))
    query, key = take_raised_head_norms(checkpoint, name, shape, config.rms_norm_eps)
    projection = HeadNormLinear(whole, query.weight, key.weight, shape.num_kv_heads, config.rms_norm_eps, queries)
    output = take_linear(checkpoint, {f"{name}.o_proj": hidden}, queries, config.attention_bias)
    return GatedAttention(projection, output, shape, None)


def _gates_first(shape: AttentionShape) -> Tensor:
    """The rows of the linear: gates, queries, keys, values; heads of the next two as `rotated_head` has them."""
    both = torch.arange(2 * shape.num_heads * shape.head_dim).view(shape.num_heads, 2, shape.head_dim)
    others = both.numel() + torch.arange(2 * shape.num_kv_heads * shape.head_dim).view(2, -1, shape.head_dim)
    order = rotated_head(shape)
    return torch.cat([part.flatten() for part in (both[:, 1], both[:, 0, order], others[0][:, order], others[1])])


def _take_delta(config: HybridConfig, checkpoint: Weights, name: str) -> RecurrentLayer:
    state, keys, hidden = config.state, config.num_key_heads, config.hidden_size
    values, wide = state.num_heads * state.value_dim, wide_dtype(checkpoint.forms.dtype)
    inputs, gates = _take_projected(config, checkpoint, name)
    conv = checkpoint.take(f"{name}.conv1d.weight", (state.conv_dim, 1, state.kernel)).squeeze(1)
    offset, steepness = (checkpoint.take(f"{name}.{part}", (state.num_heads,), wide) for part in ("dt_bias", "A_log"))
    norm = GatedHeadNorm(checkpoint.take(f"{name}.norm.weight", (state.value_dim,), wide), config.rms_norm_eps)
    output = take_linear(checkpoint, {f"{name}.out_proj": hidden}, values)
    shape = DeltaShape(
        1, *state.sizes, num_key_heads=keys, conv=conv, steepness=steepness.exp(), offset=offset, norm=norm
    )
    return RecurrentLayer(inputs, output, shape, gates)


def _take_projected(config: HybridConfig, checkpoint: Weights, name: str) -> tuple[AnyLinear, AnyLinear | None]:
    """The linear of [q, k, v, rates, decays, z]; that of rates and decays apart where others are stored in few bits."""
    state, keys, hidden = config.state, config.num_key_heads, config.hidden_size
    copies, values, others = state.num_heads // keys, state.num_heads * state.value_dim, 2 * state.num_heads
    if config.is_split:
        mixed = {f"{name}.in_proj_qkv": state.conv_dim, f"{name}.in_proj_z": values}
        rates = {f"{name}.in_proj_{part}": state.num_heads for part in "ba"}
        orders = torch.arange(state.conv_dim + values), torch.arange(others)
    else:
        mixed, rates = {f"{name}.in_proj_qkvz": state.conv_dim + values}, {f"{name}.in_proj_ba": others}
        blocks = (state.key_dim, state.key_dim, copies * state.value_dim, copies * state.value_dim)
        orders = _by_kind(keys, blocks), _by_kind(keys, (copies, copies))
    if any(checkpoint.covers(each) for each in mixed):
        whole, own = (None, None) if config.is_split else orders
        return take_linear(checkpoint, mixed, hidden, order=whole), take_linear(checkpoint, rates, hidden, order=own)
    convolved, gate = orders[0].split((state.conv_dim, values))
    order = torch.cat((convolved, state.conv_dim + values + orders[1], gate))
    return take_linear(checkpoint, mixed | rates, hidden, order=order), None


def _by_kind(heads: int, sizes: tuple[int, ...]) -> Tensor:
    """The rows of a linear that is stored head by head, each with parts of these sizes; here part by part."""
    of_heads = torch.arange(heads * sum(sizes)).view(heads, -1)
    return torch.cat([part.flatten() for part in of_heads.split(sizes, dim=1)])


def read_qwen3_5(config: Mapping[str, Any], origin: str) -> HybridConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    return _read_qwen3_5(config, origin, {"num_experts": 0})


def read_qwen3_5_moe(config: Mapping[str, Any], origin: str) -> HybridConfig:
    """As `read_qwen3_5`. No layer is dense, so the config need not name the size of an MLP."""
    return _read_qwen3_5(config, origin, {"intermediate_size": config.get("intermediate_size") or 1})


def _read_qwen3_5(config: Mapping[str, Any], origin: str, more: Mapping[str, Any]) -> HybridConfig:
    reader = ConfigReader(config, origin)
    reader.refuse_unless("attn_output_gate", True)
    reader.refuse_unless("mtp_use_dedicated_embeddings", False)
    found = {**config, **more}
    if isinstance(given := config.get("rope_parameters"), Mapping):
        found["rope_parameters"] = {key: value for key, value in given.items() if key not in OF_IMAGES}
    return replace(read_config(found, origin), is_split=True)


def load_text(config: HybridConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight of the text model. Raises: CheckpointError naming file, tensor, found and expected."""
    of_images = [name for name in checkpoint.names() if name.startswith(VISION)]
    if of_images:
        log.info("%s: %d tensors of model.visual are not read: only text is served", checkpoint.origin, len(of_images))
        checkpoint.skip(*of_images)
    return load(config, checkpoint)
