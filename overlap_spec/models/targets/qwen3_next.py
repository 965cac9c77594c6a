"""Qwen3-Next: Gated DeltaNet layers (`recurrent.py`), and every fourth one attends; experts with a gated shared one.

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

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.rope import RopeConfig
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import skip_but_text, take_raised_norm
from overlap_spec.models.recurrent_state import StateShape
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.hybrid import NO_EXPERTS, RECURS, HybridConfig, load_layer, read_dtype
from overlap_spec.models.targets.llama_mixtures import sparse_layers
from overlap_spec.models.targets.mixture import load_by_layer, read_sizes
from overlap_spec.models.targets.reading import FULL, ConfigReader

HEAD_DIM, ROTATED, EVERY = 256, 0.25, 4  # where the config does not say, as are the next
KERNEL, KEY_HEADS, VALUE_HEADS, DELTA_DIM = 4, 16, 32, 128
NOT_TEXT = ("visual.",)  # of canonical names
OF_IMAGES = ("mrope_section", "mrope_interleaved")


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


def load(config: HybridConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    kinds = enumerate(zip(config.attends, config.sparse, strict=True))
    layers = (load_layer(config, checkpoint, index, attends, sparse) for index, (attends, sparse) in kinds)
    norm = take_raised_norm(checkpoint, "norm", config.hidden_size, config.rms_norm_eps)
    return load_by_layer(config, checkpoint, layers, norm)


def load_text(config: HybridConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight of the text model. Raises: CheckpointError naming file, tensor, found and expected."""
    skip_but_text(checkpoint, NOT_TEXT)
    return load(config, checkpoint)
