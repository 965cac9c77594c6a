"""GLM-4.5, 4.5-Air, 4.6 and 4.7 (arXiv:2508.06471): Llama's attention with biases before it, a part of each head
rotated, and norms of heads in the larger ones; DeepSeek-V3's experts in all but the first layers.

GLM-4.7-Flash (the transformers' model Glm4MoeLite) has DeepSeek-V3's layers; which of them stay dense may be a list.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.targets.deepseek import read_v3_layers
from overlap_spec.models.targets.latent import LatentConfig
from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.models.targets.mixture import RATED_BY, MixtureConfig, dense_first, read_grouped
from overlap_spec.models.targets.reading import ConfigReader

DENSE, SPARSE = "dense", "sparse"  # what `mlp_layer_types` may hold


def read_mixture(config: Mapping[str, Any], origin: str) -> MixtureConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    normalised = bool(config.get("norm_topk_prob", True))
    experts = replace(read_grouped(reader, ("sigmoid",), RATED_BY, normalised), corrected=True)
    return MixtureConfig(LlamaConfig.from_hf(config, origin), experts, dense_first(reader, 1))


def read_flash(config: Mapping[str, Any], origin: str) -> LatentConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader, kinds = ConfigReader(config, origin), config.get("mlp_layer_types")
    if kinds is None:
        return read_v3_layers(reader, dense_by_default=1)
    num_layers = reader.size("num_hidden_layers")
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers or not set(kinds) <= {DENSE, SPARSE}:
        raise CheckpointError(f"{origin}: mlp_layer_types must be {num_layers} times {DENSE!r} or {SPARSE!r}")
    return read_v3_layers(reader, sparse=tuple(kind == SPARSE for kind in kinds))
