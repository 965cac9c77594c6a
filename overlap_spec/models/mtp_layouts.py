"""How checkpoints hold the MTP layer that drafts for them: names and conventions of each layout, as a table.

    MiMo      model.mtp_layers.0.*  token_layernorm, hidden_layernorm, input_proj, final_layernorm
    DeepSeek  model.layers.N.*      enorm, hnorm, eh_proj, shared_head.norm; N: one after the target's last layer

Not here: reading them (`mtp_loader.py`), and what the parts do (`mtp.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OF_TARGET = "target."  # what the target's own tensors are called among those of the layer
OWN_LAYERS = "mtp_layers."


@dataclass(frozen=True)
class MtpLayout:
    """What a layout calls the parts that an ordinary layer does not have."""

    token_norm: str
    hidden_norm: str
    input_map: str
    norm: str
    hidden_first: bool  # the order of the halves that `input_map` reads
    embeds_first: bool  # false: the embedding at position 0 counts for nothing
    copies: tuple[str, ...] = ()  # of the target's tensors


MIMO = MtpLayout(
    "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", hidden_first=True, embeds_first=False
)
DEEPSEEK = MtpLayout(
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    hidden_first=False,
    embeds_first=True,
    copies=("embed_tokens.weight", "shared_head.head.weight"),
)


def layout_of(config: Mapping[str, Any]) -> MtpLayout:
    """The layout of a checkpoint that has such a layer; `config` is its config.json."""
    return MIMO if "MiMoForCausalLM" in (config.get("architectures") or ()) else DEEPSEEK


def has_layer(config: Mapping[str, Any]) -> bool:
    """Whether a config.json says that the checkpoint has such a layer."""
    return bool(config.get("num_nextn_predict_layers"))


def canonical_names(num_target_layers: int) -> Callable[[str], str]:
    """Names for the layer's tensors, as those of an ordinary layer 0, and for the target's, out of their way."""

    def canonical_name(name: str) -> str:
        short = name.removeprefix("model.")
        if short.startswith(OWN_LAYERS):
            return f"layers.{short.removeprefix(OWN_LAYERS)}"
        if (index := _layer_of(short)) is not None and index >= num_target_layers:
            return f"layers.{index - num_target_layers}.{short.split('.', 2)[2]}"
        return f"{OF_TARGET}{name}"

    return canonical_name


def is_draft_part(name: str, num_target_layers: int) -> bool:
    """Whether a tensor of a target's checkpoint is of no use to the target itself. `name`: without `model.`."""
    index = _layer_of(name)
    return name.startswith(OWN_LAYERS) or (index is not None and index >= num_target_layers)


def _layer_of(name: str) -> int | None:
    stem, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    return int(index) if stem == "layers" and index.isdecimal() else None
