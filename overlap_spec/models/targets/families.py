"""What sets Llama and its cousins apart, as a table.

All are Llama's decoder: embedding, pre-norm attention with rotary positions, gated SiLU, RMSNorm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.targets.reading import FULL, SLIDING, ConfigReader

Windows = tuple[int | None, ...]  # by layer: how many keys a row sees, its own included; None: all of them


@dataclass(frozen=True, slots=True)
class AttentionBias:
    """Which linears of attention have a bias."""

    qkv: bool
    output: bool


def _never(config: Mapping[str, Any]) -> bool:
    return False


def _always(config: Mapping[str, Any]) -> bool:
    return True


def _where_asked(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_qk_norm", False))


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture departs from the others. Functions take the config, as it is in config.json."""

    attention_bias: Callable[[Mapping[str, Any]], AttentionBias]
    windows: Callable[[ConfigReader], Windows]  # one per layer
    mlp_bias: bool = False  # true: where the config asks for it
    head_norms: Callable[[Mapping[str, Any]], bool] = _never  # heads of q and k, each by itself, before rotation
    head_dim: int | None = None  # where the config names none; None: hidden size / heads
    sinks: bool = False  # every head has one
    rotated: float | None = None  # the part of a head, where the config does not say; None: always all of it


def family_of(config: Mapping[str, Any]) -> Family:
    """That of the first architecture that is known; `...Eagle` and `...Eagle3` heads have the layers of their own.

    Others are Llama's: most heads are, whatever their target.
    """
    names = (str(name).removesuffix("3").removesuffix("Eagle") for name in config.get("architectures") or ())
    return next((FAMILIES[name] for name in names if name in FAMILIES), FAMILIES["LlamaForCausalLM"])


def refuse_sparse(config: Mapping[str, Any], origin: str, is_mixture: bool, is_latent: bool) -> None:
    """`is_mixture`, `is_latent`: its family computes experts, or latent attention.

    Raises: CheckpointError naming model and key of what is not here.
    """
    name = ", ".join(map(str, config.get("architectures") or ())) or "a model without a name"
    if (chosen := config.get("index_topk")) is not None:
        raise CheckpointError(
            f"{origin}: {name} has sparse attention by an indexer (index_topk {chosen}), which is not supported yet"
        )
    for key in () if is_mixture else _EXPERTS:
        if (count := config.get(key)) not in (None, 0, 1):
            raise CheckpointError(
                f"{origin}: {name} is a mixture of experts ({key} {count}), which is not supported yet"
            )
    if (rank := config.get("kv_lora_rank")) is not None and not is_latent:
        raise CheckpointError(
            f"{origin}: {name} has multi-head latent attention (kv_lora_rank {rank}), which is not supported yet"
        )


def _as_configured(config: Mapping[str, Any]) -> AttentionBias:
    asked = bool(config.get("attention_bias", False))
    return AttentionBias(asked, asked)


def _unless_refused(config: Mapping[str, Any]) -> AttentionBias:
    asked = bool(config.get("attention_bias", True))
    return AttentionBias(asked, asked)


def _on_inputs(config: Mapping[str, Any]) -> AttentionBias:
    return AttentionBias(qkv=True, output=False)


def _on_inputs_where_asked(config: Mapping[str, Any]) -> AttentionBias:
    return AttentionBias(qkv=bool(config.get("attention_bias", False)), output=False)


def _nowhere(config: Mapping[str, Any]) -> AttentionBias:
    return AttentionBias(qkv=False, output=False)


def _no_window(config: ConfigReader) -> Windows:
    """Llama has none; with one in the config it is another model."""
    window = config.values.get("sliding_window")
    if window is not None and config.values.get("use_sliding_window", True):
        raise CheckpointError(f"{config.origin}: sliding_window {window} is not supported for this architecture")
    return (None,) * config.size("num_hidden_layers")


def _window_everywhere(config: ConfigReader) -> Windows:
    """Mistral: a window in the config holds for every layer."""
    window = config.window()
    if window is not None and len(set(config.values.get("layer_types") or ())) > 1:
        raise CheckpointError(f"{config.origin}: layer_types that differ are not supported for this architecture")
    return (window,) * config.size("num_hidden_layers")


def _window_everywhere_where_asked(config: ConfigReader) -> Windows:
    """Qwen3-MoE: only with `use_sliding_window`, and then in every layer."""
    window = config.window() if config.values.get("use_sliding_window", False) else None
    return (window,) * config.size("num_hidden_layers")


def _window_where_asked(config: ConfigReader) -> Windows:
    """Qwen: only with `use_sliding_window`, and then in the layers that `layer_types` names, or in the upper ones."""
    num_layers = config.size("num_hidden_layers")
    window = config.window() if config.values.get("use_sliding_window", False) else None
    if window is None:
        return (None,) * num_layers
    if (kinds := config.layer_types()) is not None:
        return tuple(window if kind == SLIDING else None for kind in kinds)
    first = config.values.get("max_window_layers", _QWEN_FULL_LAYERS)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _window_in_turn(config: ConfigReader) -> Windows:
    """gpt-oss: in the layers that `layer_types` names, or in the first of every two."""
    num_layers, window = config.size("num_hidden_layers"), config.window(_GPT_OSS_WINDOW)
    kinds = config.layer_types() or tuple(FULL if index % 2 else SLIDING for index in range(num_layers))
    return tuple(window if kind == SLIDING else None for kind in kinds)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")  # what models call their number
_GPT_OSS_WINDOW = 128
_QWEN_FULL_LAYERS = 28  # below them no layer has a window, where the config does not say

FAMILIES = {
    "LlamaForCausalLM": Family(_as_configured, _no_window, mlp_bias=True),
    "MistralForCausalLM": Family(_nowhere, _window_everywhere),
    "Qwen2ForCausalLM": Family(_on_inputs, _window_where_asked),
    "MiMoForCausalLM": Family(_on_inputs, _window_where_asked),
    "Qwen3ForCausalLM": Family(_as_configured, _window_where_asked, head_norms=_always, head_dim=128),
    "Qwen3MoeForCausalLM": Family(_as_configured, _window_everywhere_where_asked, head_norms=_always),
    "MixtralForCausalLM": Family(_nowhere, _window_everywhere),
    "Glm4MoeForCausalLM": Family(_on_inputs_where_asked, _no_window, head_norms=_where_asked, rotated=0.5),
    "GptOssForCausalLM": Family(_unless_refused, _window_in_turn, head_dim=64, sinks=True),
}
