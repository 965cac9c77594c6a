"""Qwen3-MoE (arXiv:2505.09388): Qwen 3's attention; an MLP's place has many small experts, but in layers that stay
dense.
"""

from collections.abc import Mapping
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.models.targets.mixture import MixtureConfig, load_mixture, read_sizes
from overlap_spec.models.targets.reading import ConfigReader


def read_config(config: Mapping[str, Any], origin: str) -> MixtureConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    experts = "num_experts" if config.get("num_experts") is not None else "num_local_experts"  # transformers has both
    normalised = bool(config.get("norm_topk_prob", False))
    sizes = read_sizes(reader, experts, "moe_intermediate_size", normalised)
    return MixtureConfig(LlamaConfig.from_hf(config, origin), sizes, sparse_layers(reader))


def sparse_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """By layer, whether it has experts: every `decoder_sparse_step`-th, unless `mlp_only_layers` names it."""
    num_layers, step = reader.size("num_hidden_layers"), reader.size("decoder_sparse_step", 1)
    dense = reader.values.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple) or not all(index in range(num_layers) for index in dense):
        raise CheckpointError(
            f"{reader.origin}: mlp_only_layers: found {dense!r}, expected indices of {num_layers} layers"
        )
    return tuple((index + 1) % step == 0 and index not in dense for index in range(num_layers))


def load(config: MixtureConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    return load_mixture(config, checkpoint)
