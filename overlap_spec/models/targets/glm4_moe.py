"""GLM-4.5, 4.5-Air, 4.6 and 4.7 (arXiv:2508.06471): Llama's attention with biases before it, a part of each head
rotated, and norms of heads in the larger ones; DeepSeek-V3's experts in all but the first layers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.models.targets.llama_config import LlamaConfig
from overlap_spec.models.targets.mixture import RATED_BY, MixtureConfig, dense_first, read_grouped
from overlap_spec.models.targets.reading import ConfigReader


def read_config(config: Mapping[str, Any], origin: str) -> MixtureConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    normalised = bool(config.get("norm_topk_prob", True))
    experts = replace(read_grouped(reader, ("sigmoid",), RATED_BY, normalised), corrected=True)
    return MixtureConfig(LlamaConfig.from_hf(config, origin), experts, dense_first(reader, 1))
