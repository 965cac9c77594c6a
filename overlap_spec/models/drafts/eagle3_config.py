"""What an EAGLE-3 checkpoint's config holds, checked against its target.

Layer ids name layer outputs: 1 is the residual after the second layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.targets.llama_config import LlamaConfig


@dataclass(frozen=True)
class Eagle3Config:
    """The head's own Llama-style numbers, and the parts that it takes from the target."""

    llama: LlamaConfig
    aux_layers: tuple[int, ...]  # ascending; empty: the target's final hidden state instead
    target_hidden_size: int
    draft_vocab_size: int | None  # None: the target's head is used
    norm_output: bool  # feed the normed output back instead of the residual sum
    fc_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], num_target_layers: int, origin: str) -> "Eagle3Config":
        """Read a head's config.json.

        Raises: CheckpointError naming `origin` and the key.
        """
        if "transformer_layer_config" in config or "speculators_model_type" in config:
            raise CheckpointError(
                f"{origin}: this is the 'speculators' layout (nested transformer_layer_config), which is not supported;"
                " convert it to the plain EAGLE-3 layout"
            )
        llama = LlamaConfig.from_hf(config, origin)
        return cls(
            llama=llama,
            aux_layers=_aux_layers(config, num_target_layers, origin),
            target_hidden_size=int(config.get("target_hidden_size") or llama.hidden_size),
            draft_vocab_size=config.get("draft_vocab_size"),
            norm_output=bool(config.get("norm_output", False)),
            fc_bias=bool(config.get("bias", False)),
        )

    @property
    def fused_size(self) -> int:
        """Columns of fc: the concatenated aux hidden states."""
        return max(len(self.aux_layers), 1) * self.target_hidden_size


def _aux_layers(config: Mapping[str, Any], num_layers: int, origin: str) -> tuple[int, ...]:
    eagle = config.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        return ()
    given = eagle.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(sorted(given)) if given else _default_layers(num_layers, origin)
    if len(set(layers)) != len(layers) or not all(
        isinstance(layer, int) and 0 <= layer < num_layers for layer in layers
    ):
        raise CheckpointError(
            f"{origin}: eagle_aux_hidden_state_layer_ids must be distinct layers of the target, 0 to {num_layers - 1},"
            f" found {list(layers)}"
        )
    expected = config.get("num_aux_hidden_states")
    if expected is not None and expected != len(layers):
        raise CheckpointError(
            f"{origin}: num_aux_hidden_states is {expected}, but {len(layers)} aux layers are named: {list(layers)}"
        )
    return layers


def _default_layers(num_layers: int, origin: str) -> tuple[int, ...]:
    """A low, a middle and a high layer, as heads without `eagle_config` were trained."""
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if not layers[0] < layers[1] < layers[2]:
        raise CheckpointError(
            f"{origin}: a target of {num_layers} layers has no default aux layers;"
            " give eagle_config.eagle_aux_hidden_state_layer_ids"
        )
    return layers
