"""DeepSeek-V3 (arXiv:2412.19437), whose name Kimi-K2 has too: latent attention; experts in groups, scored by a sigmoid
and chosen with a correction of their own, beside one that all rows share; the first layers stay dense.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.models.targets.latent import LatentConfig, read_latent
from overlap_spec.models.targets.mixture import RATED_BY, dense_first, read_grouped
from overlap_spec.models.targets.reading import ConfigReader


def read_config(config: Mapping[str, Any], origin: str) -> LatentConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    return read_layers(ConfigReader(config, origin))


def read_layers(
    reader: ConfigReader, dense_by_default: int = 3, sparse: tuple[bool, ...] | None = None
) -> LatentConfig:
    """`sparse`: whether each layer has experts; None: all but the first ones. Raises: see `read_config`."""
    config = reader.values
    reader.refuse_unless("topk_method", "noaux_tc")
    normalised = bool(config.get("norm_topk_prob", True))
    experts = replace(read_grouped(reader, ("sigmoid", "softmax"), RATED_BY, normalised), corrected=True)
    sparse = dense_first(reader, dense_by_default) if sparse is None else sparse
    interleaved = config.get("rope_interleave") is not False
    return read_latent(config, reader.origin, experts, sparse, interleaved)
