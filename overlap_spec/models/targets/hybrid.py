"""Decoders some of whose layers recur (`recurrent.py`): what their families share, and how layers of Qwen's are taken.

Granite 4 has layers of its own (`granite_hybrid.py`). Those of Qwen3-Next, 3.5 and 3.6 (`qwen3_next.py`) are here: MTP
drafts have them, too.
"""

from dataclasses import dataclass

import torch
from overlap_spec_kernels.recurrent.gated_delta import MAX_KERNEL
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.decoder import Attention, GatedAttention, PreNormLayer
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.mlp import MLP
from overlap_spec.models.layers.norm import HeadNormLinear, wide_dtype
from overlap_spec.models.layers.recurrent import DeltaShape, GatedHeadNorm, RecurrentLayer
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
from overlap_spec.models.targets.mixture import ByLayerConfig, ExpertNames, ExpertSizes, take_mixture
from overlap_spec.models.targets.reading import FULL, ConfigReader

RECURS = "linear_attention"  # what `layer_types` calls layers that do not attend
NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj", "shared_expert", "shared_expert_gate")
NO_EXPERTS = ExpertSizes(0, 0, 0, normalised=True)
STATE_DTYPES = ("float32", "bfloat16", "float16")


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


def read_dtype(reader: ConfigReader) -> torch.dtype | None:
    """What states are stored in. Raises: CheckpointError naming file and key."""
    dtype = reader.values.get("mamba_ssm_dtype")
    if dtype not in (None, *STATE_DTYPES):
        raise CheckpointError(
            f"{reader.origin}: mamba_ssm_dtype: found {dtype!r}, expected one of {', '.join(STATE_DTYPES)}"
        )
    return None if dtype is None else getattr(torch, dtype)


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
