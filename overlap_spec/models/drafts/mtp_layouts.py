"""The layouts in which checkpoints store MTP layers: names and conventions of each, as a table.

One layer, which runs once for each guess:

    MiMo      model.mtp_layers.0.*  token_layernorm, hidden_layernorm, input_proj, final_layernorm
    DeepSeek  model.layers.N.*      enorm, hnorm, eh_proj, shared_head.norm; N: one after the target's last layer
    Qwen3-Next mtp.*                pre_fc_norm_embedding, pre_fc_norm_hidden, fc, norm; layers.0.* is the layer

One layer for each guess (`--enable-multi-layer-eagle`), i = 0, 1, ..:

    MiMo-V2   model.mtp.layers.i.*  enorm, hnorm, eh_proj, final_layernorm, pre_mlp_layernorm
    Step-3.5  model.layers.N+i.*    enorm, hnorm, eh_proj, [transformer.]shared_head.norm, and a head: .output
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from overlap_spec.config.speculation import num_own_layers

OF_TARGET = "target."  # prefix of the target's own tensors among those of the layer
OWN_LAYERS = ("mtp_layers.", "mtp.layers.")
BEHIND_LAYERS = "mtp."  # parts of one layer that Qwen3-Next does not count among `mtp.layers`


@dataclass(frozen=True)
class MtpLayout:
    """A layout's names and conventions for the parts that an ordinary layer does not have."""

    token_norm: str
    hidden_norm: str
    fc: str
    norm: str
    hidden_first: bool  # the order of the halves that `fc` reads
    embeds_first: bool  # false: the embedding at position 0 is replaced by zeros
    copies: tuple[str, ...] = ()  # tensors that copy the target's
    head: str | None = None  # the layer's own; None: the target's
    windowed: bool = False  # its attention has the sliding window of the target's windowed layers
    chained: bool = False  # a layer reads the previous layer's output; false: the target's hidden state


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
MIMO_V2 = MtpLayout(
    "enorm", "hnorm", "eh_proj", "final_layernorm", hidden_first=False, embeds_first=True, windowed=True
)
QWEN3_NEXT = MtpLayout(
    "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", hidden_first=False, embeds_first=True
)
STEP = replace(DEEPSEEK, copies=("embed_tokens.weight",), head="shared_head.output", chained=True)


OF_ONE = {  # others are DeepSeek's
    "MiMoForCausalLM": MIMO,
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForConditionalGeneration": QWEN3_NEXT,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_NEXT,
}


def layout_of(config: Mapping[str, Any]) -> MtpLayout:
    """The layout of a checkpoint that has such a layer; `config` is its config.json."""
    names = config.get("architectures") or ()
    return next((OF_ONE[name] for name in names if name in OF_ONE), DEEPSEEK)


def layout_of_layers(names: Iterable[str]) -> MtpLayout:
    """The layout of several layers; `names`: as they are in the checkpoint."""
    return MIMO_V2 if any(name.removeprefix("model.").startswith("mtp.layers.") for name in names) else STEP


def dummy_layout_of_layers(config: Mapping[str, Any]) -> MtpLayout:
    """The layout of several layers whose weights are random: Step-3.5's of that architecture, else MiMo-V2's."""
    return STEP if "Step3p5ForCausalLM" in (config.get("architectures") or ()) else MIMO_V2


def has_layer(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint of this config.json has such a layer."""
    return num_layers(config) > 0


def num_layers(config: Mapping[str, Any]) -> int:
    """How many of them the checkpoint of this config.json has."""
    return num_own_layers(config)


def canonical_names(num_target_layers: int) -> Callable[[str], str]:
    """Rename the MTP layer's tensors to those of an ordinary layer 0, and prefix the target's with `OF_TARGET`."""

    def canonical_name(name: str) -> str:
        short = name.removeprefix("model.")
        for prefix in OWN_LAYERS:
            if short.startswith(prefix):
                index, _, part = short.removeprefix(prefix).partition(".")
                return f"layers.{index}.{_canonical_part(part)}"
        if short.startswith(BEHIND_LAYERS):
            return f"layers.0.{short.removeprefix(BEHIND_LAYERS)}"
        if (layer := _layer_of(short)) is not None and layer >= num_target_layers:
            return f"layers.{layer - num_target_layers}.{_canonical_part(short.split('.', 2)[2])}"
        return f"{OF_TARGET}{name}"

    return canonical_name


def is_draft_part(name: str, num_target_layers: int) -> bool:
    """Whether a tensor of a target's checkpoint belongs to its MTP layers. `name`: without `model.`."""
    index = _layer_of(name)
    return name.startswith((*OWN_LAYERS, BEHIND_LAYERS)) or (index is not None and index >= num_target_layers)


def _canonical_part(part: str) -> str:
    return part.removeprefix("transformer.").replace("pre_mlp_layernorm.", "post_attention_layernorm.")


def _layer_of(name: str) -> int | None:
    stem, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    return int(index) if stem == "layers" and index.isdecimal() else None
