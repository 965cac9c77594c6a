"""The architectures that can be served, by their names in config.json: one line each.

An unknown architecture is refused with the nearest one, and what that lacks, by keys of config.json.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.targets import (
    deepseek,
    gemma3,
    gemma4,
    gpt_oss,
    granite_hybrid,
    latent,
    llama_mixtures,
    mimo_v2_flash,
    mixture,
    olmo2,
    phi3,
    qwen3_next,
    step3p5,
)
from overlap_spec.models.targets.llama import LlamaConfig, counted_experts, load_llama, refuse_sparse

ReadConfig = Callable[[Mapping[str, Any], str], object]

# Keys that change nothing of what is computed, whether a family reads them or not.
IDLE = frozenset(
    (
        *("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "auto_map", "_name_or_path"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "attention_dropout"),
        *(
            "max_position_embeddings",
            "pretraining_tp",
            "cache_implementation",
            "output_router_logits",
            "router_aux_loss_coef",
        ),
    )
)
OFF: tuple[object, ...] = (None, False, 0, 1, [], {})
MOST_KEYS = 4  # that are named
ORIGIN = "config.json"


class Recorder(Mapping[str, Any]):
    """A config that remembers which keys it was asked for by `get`; a copy of the whole asks for none."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.read: set[str] = set()
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self._values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def nearest(found: Sequence[str], readers: Mapping[str, ReadConfig], config: Mapping[str, Any]) -> str:
    """A clause of a sentence: the nearest architecture by name, and what of the config it does not compute."""
    name = max(readers, key=lambda known: max((_likeness(known, other) for other in found), default=0.0))
    read, refused = _read_by(readers[name], config)
    unread = [key for key, value in config.items() if key not in read | IDLE and (value is True or value not in OFF)]
    more = f" and {len(unread) - MOST_KEYS} more" if len(unread) > MOST_KEYS else ""
    keys = ", ".join(f"{key} {_shown(config[key])}" for key in unread[:MOST_KEYS])
    lacks = f", which does not read {keys}{more}" if unread else ""
    return f"the nearest one is {name}{lacks}" + (f"; of that one {', '.join(refused)}" if refused else "")


def _read_by(reader: ReadConfig, config: Mapping[str, Any]) -> tuple[set[str], list[str]]:
    """The keys that a reader asks for, and what it refuses: one after another, each without what was refused before."""
    read: set[str] = set()
    refused: list[str] = []
    for _ in config:
        recorder = Recorder(config)
        try:
            reader(recorder, ORIGIN)
            return read | recorder.read, refused
        except CheckpointError as error:
            sentence = str(error).removeprefix(f"{ORIGIN}: ")
        read |= recorder.read
        refused.append(sentence.partition(";")[0])
        if not (named := {key for key in config if key in sentence.split()}):
            return {*read, *config}, refused  # what it would have read after that is not known
        config = {key: value for key, value in config.items() if key not in named}
    return read, refused


def _likeness(known: str, other: str) -> float:
    return difflib.SequenceMatcher(None, known, other).ratio()


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else f"{text[:21]}..."


class TargetConfig(Protocol):
    """The fields that all configs have; only a family's loader reads the others."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual."""

    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class Architecture:
    """Readers of config and weights. Both raise CheckpointError naming file and key, or file and tensor."""

    read_config: Callable[[Mapping[str, Any], str], TargetConfig]  # (config.json, its file)
    load: Callable[[Any, Weights], LoadedTarget]  # (what `read_config` returned, tensors)
    is_mixture: bool = False
    is_latent: bool = False  # with multi-head latent attention
    only_on_cpu: str = ""  # what of it has no kernel on a GPU


LLAMA = Architecture(LlamaConfig.from_hf, load_llama)  # also for the families of `FAMILIES`

GEMMA4 = Architecture(gemma4.read_config, gemma4.load, is_mixture=True)

ARCHITECTURES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "MiMoForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "Gemma3ForCausalLM": Architecture(gemma3.read_config, gemma3.load),
    **dict.fromkeys(("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), GEMMA4),
    "Olmo2ForCausalLM": Architecture(olmo2.read_config, olmo2.load),
    "Phi3ForCausalLM": Architecture(phi3.read_config, phi3.load),
    "Qwen3MoeForCausalLM": Architecture(llama_mixtures.read_qwen3, mixture.load_mixture, is_mixture=True),
    "MixtralForCausalLM": Architecture(llama_mixtures.read_mixtral, llama_mixtures.load_mixtral, is_mixture=True),
    "DeepseekV3ForCausalLM": Architecture(deepseek.read_v3, latent.load_latent, is_mixture=True, is_latent=True),
    "MiMoV2FlashForCausalLM": Architecture(
        mimo_v2_flash.read_config,
        mimo_v2_flash.load,
        is_mixture=True,
        only_on_cpu="attention whose values are narrower than its keys",
    ),
    "Step3p5ForCausalLM": Architecture(
        step3p5.read_config, step3p5.load, is_mixture=True, only_on_cpu="attention with gated heads"
    ),
    "GptOssForCausalLM": Architecture(gpt_oss.read_config, gpt_oss.load, is_mixture=True),
    "GraniteMoeHybridForCausalLM": Architecture(granite_hybrid.read_config, granite_hybrid.load, is_mixture=True),
    "Qwen3NextForCausalLM": Architecture(qwen3_next.read_config, qwen3_next.load, is_mixture=True),
    "Qwen3_5ForConditionalGeneration": Architecture(qwen3_next.read_qwen3_5, qwen3_next.load_text),
    "Qwen3_5MoeForConditionalGeneration": Architecture(
        qwen3_next.read_qwen3_5_moe, qwen3_next.load_text, is_mixture=True
    ),
    "Glm4MoeForCausalLM": Architecture(llama_mixtures.read_glm4, mixture.load_mixture, is_mixture=True),
    "DeepseekV2ForCausalLM": Architecture(deepseek.read_v2, latent.load_latent, is_mixture=True, is_latent=True),
    "Glm4MoeLiteForCausalLM": Architecture(
        deepseek.read_glm_flash, latent.load_latent, is_mixture=True, is_latent=True
    ),
}


def architecture_of(config: Mapping[str, Any], origin: str) -> Architecture:
    """The first known architecture of a config.json. Raises: CheckpointError naming the nearest one and all others."""
    found = config.get("architectures") or []
    known = next((ARCHITECTURES[name] for name in found if name in ARCHITECTURES), None)
    try:
        refuse_sparse(config, origin, known is not None and known.is_mixture, known is not None and known.is_latent)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_nearest(found, config)}") from None
    if known is not None:
        return known
    raise CheckpointError(
        f"{origin}: architecture {', '.join(map(str, found)) or 'missing'} is not supported;"
        f" supported: {', '.join(ARCHITECTURES)}; {_nearest(found, config)}"
    )


def _nearest(found: list[str], config: Mapping[str, Any]) -> str:
    """Of a mixture among those that have experts: a dense one would read nothing of them."""
    is_dense = counted_experts(config) is None
    readers = {name: known.read_config for name, known in ARCHITECTURES.items() if is_dense or known.is_mixture}
    return nearest(tuple(map(str, found)), readers, config)
