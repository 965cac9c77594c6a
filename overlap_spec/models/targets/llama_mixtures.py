"""Mixtures whose attention is one of Llama's families; they differ in how a row's experts are chosen and named.

Mixtral (arXiv:2401.04088)      Mistral's attention; each layer has experts, of which a row's two have weights that are
                                the softmax of their logits alone
Qwen3-MoE (arXiv:2505.09388)    Qwen 3's attention; many small experts, but in layers that stay dense
GLM-4.5 to 4.7 (arXiv:2508.06471), 4.5-Air
                                biases before the attention, a part of each head rotated, norms of heads in the larger
                                ones; DeepSeek-V3's experts in all but the first layers
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.models.targets.mixture import (
    RATED_BY,
    ExpertNames,
    MixtureConfig,
    dense_first,
    load_mixture,
    read_grouped,
    read_sizes,
)
from overlap_spec.models.targets.reading import ConfigReader

MIXTRAL = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def read_mixtral(config: Mapping[str, Any], origin: str) -> MixtureConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    sizes = read_sizes(ConfigReader(config, origin), "num_local_experts", "intermediate_size", normalised=True)
    llama = LlamaConfig.from_hf(config, origin)
    return MixtureConfig(llama, sizes, (True,) * llama.num_layers)


def load_mixtral(config: MixtureConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    return load_mixture(config, checkpoint, MIXTRAL)


def read_qwen3(config: Mapping[str, Any], origin: str) -> MixtureConfig:
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


def read_glm4(config: Mapping[str, Any], origin: str) -> MixtureConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    normalised = bool(config.get("norm_topk_prob", True))
    experts = replace(read_grouped(reader, ("sigmoid",), RATED_BY, normalised), corrected=True)
    return MixtureConfig(LlamaConfig.from_hf(config, origin), experts, dense_first(reader, 1))
