"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437), whose name Kimi-K2 has too: latent
attention; experts beside some that all rows share; the first layers stay dense.

V2 scores experts by a softmax, and takes the best of all, or of the groups with the best one. V3 scores them by a
sigmoid, and chooses among groups with a correction of each expert's own.

GLM-4.7-Flash (the transformers' model Glm4MoeLite) has V3's layers; which of them stay dense may be a list.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.errors import CheckpointError
from overlap_spec.models.targets.latent import LatentConfig, read_latent
from overlap_spec.models.targets.mixture import RATED_BY, dense_first, read_grouped
from overlap_spec.models.targets.reading import ConfigReader

ALL, IN_GROUPS = "greedy", "group_limited_greedy"  # what `topk_method` of V2 may be
DENSE, SPARSE = "dense", "sparse"  # what `mlp_layer_types` of GLM-4.7-Flash may hold


def read_v2(config: Mapping[str, Any], origin: str) -> LatentConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("topk_method", ALL, IN_GROUPS)
    reader.refuse_unless("norm_topk_prob", False)
    grouped = config.get("topk_method") == IN_GROUPS
    experts = read_grouped(reader, ("softmax",), rated_by=1, normalised=False, grouped=grouped)
    return read_latent(config, origin, experts, dense_first(reader, 0))


def read_v3(config: Mapping[str, Any], origin: str) -> LatentConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    return read_v3_layers(ConfigReader(config, origin))


def read_v3_layers(
    reader: ConfigReader, dense_by_default: int = 3, sparse: tuple[bool, ...] | None = None
) -> LatentConfig:
    """`sparse`: whether each layer has experts; None: all but the first ones. Raises: see `read_v3`."""
    config = reader.values
    reader.refuse_unless("topk_method", "noaux_tc")
    normalised = bool(config.get("norm_topk_prob", True))
    experts = replace(read_grouped(reader, ("sigmoid", "softmax"), RATED_BY, normalised), corrected=True)
    sparse = dense_first(reader, dense_by_default) if sparse is None else sparse
    interleaved = config.get("rope_interleave") is not False
    return read_latent(config, reader.origin, experts, sparse, interleaved)


def read_glm_flash(config: Mapping[str, Any], origin: str) -> LatentConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader, kinds = ConfigReader(config, origin), config.get("mlp_layer_types")
    if kinds is None:
        return read_v3_layers(reader, dense_by_default=1)
    num_layers = reader.size("num_hidden_layers")
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers or not set(kinds) <= {DENSE, SPARSE}:
        raise CheckpointError(f"{origin}: mlp_layer_types must be {num_layers} times {DENSE!r} or {SPARSE!r}")
    return read_v3_layers(reader, sparse=tuple(kind == SPARSE for kind in kinds))
