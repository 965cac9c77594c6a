"""The architectures that can be served, by their names in config.json: one line each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.llama_loader import load_llama
from overlap_spec.models.nearest import nearest
from overlap_spec.models.targets import gemma3, mixtral, olmo2, phi3, qwen3_moe
from overlap_spec.models.targets.families import refuse_sparse
from overlap_spec.models.targets.llama_config import LlamaConfig


class TargetConfig(Protocol):
    """The fields that all configs have; only a family's loader reads the others."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        ...


@dataclass(frozen=True)
class Architecture:
    """Readers of config and weights. Both raise CheckpointError naming file and key, or file and tensor."""

    read_config: Callable[[Mapping[str, Any], str], TargetConfig]  # (config.json, its file)
    load: Callable[[Any, Weights], LoadedTarget]  # (what `read_config` returned, tensors)
    is_mixture: bool = False


LLAMA = Architecture(LlamaConfig.from_hf, load_llama)  # also for the families in `families.py`

ARCHITECTURES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "MiMoForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "Gemma3ForCausalLM": Architecture(gemma3.read_config, gemma3.load),
    "Olmo2ForCausalLM": Architecture(olmo2.read_config, olmo2.load),
    "Phi3ForCausalLM": Architecture(phi3.read_config, phi3.load),
    "Qwen3MoeForCausalLM": Architecture(qwen3_moe.read_config, qwen3_moe.load, is_mixture=True),
    "MixtralForCausalLM": Architecture(mixtral.read_config, mixtral.load, is_mixture=True),
}


def architecture_of(config: Mapping[str, Any], origin: str) -> Architecture:
    """The first known architecture of a config.json. Raises: CheckpointError naming the nearest one and all others."""
    found = config.get("architectures") or []
    known = next((ARCHITECTURES[name] for name in found if name in ARCHITECTURES), None)
    try:
        refuse_sparse(config, origin, known is not None and known.is_mixture)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_nearest(found, config)}") from None
    if known is not None:
        return known
    raise CheckpointError(
        f"{origin}: architecture {', '.join(map(str, found)) or 'missing'} is not supported;"
        f" supported: {', '.join(ARCHITECTURES)}; {_nearest(found, config)}"
    )


def _nearest(found: list[str], config: Mapping[str, Any]) -> str:
    return nearest(tuple(map(str, found)), {name: known.read_config for name, known in ARCHITECTURES.items()}, config)
