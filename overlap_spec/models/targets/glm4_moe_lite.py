"""GLM-4.7-Flash (the transformers' model Glm4MoeLite): DeepSeek-V3's layers; which of them stay dense may be a list."""

from collections.abc import Mapping
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.targets import deepseek_v3
from overlap_spec.models.targets.latent import LatentConfig
from overlap_spec.models.targets.reading import ConfigReader

DENSE, SPARSE = "dense", "sparse"  # what `mlp_layer_types` may hold


def read_config(config: Mapping[str, Any], origin: str) -> LatentConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader, kinds = ConfigReader(config, origin), config.get("mlp_layer_types")
    if kinds is None:
        return deepseek_v3.read_layers(reader, dense_by_default=1)
    num_layers = reader.size("num_hidden_layers")
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers or not set(kinds) <= {DENSE, SPARSE}:
        raise CheckpointError(f"{origin}: mlp_layer_types must be {num_layers} times {DENSE!r} or {SPARSE!r}")
    return deepseek_v3.read_layers(reader, sparse=tuple(kind == SPARSE for kind in kinds))
