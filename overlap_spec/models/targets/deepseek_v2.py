"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434): latent attention; experts by softmax, all of them or those of the groups
with the best one, beside some that all rows share; the first layers stay dense.
"""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.targets.latent import LatentConfig, read_latent
from overlap_spec.models.targets.mixture import dense_first, read_grouped
from overlap_spec.models.targets.reading import ConfigReader

ALL, IN_GROUPS = "greedy", "group_limited_greedy"  # what `topk_method` may be


def read_config(config: Mapping[str, Any], origin: str) -> LatentConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    reader = ConfigReader(config, origin)
    reader.refuse_unless("topk_method", ALL, IN_GROUPS)
    reader.refuse_unless("norm_topk_prob", False)
    grouped = config.get("topk_method") == IN_GROUPS
    experts = read_grouped(reader, ("softmax",), rated_by=1, normalised=False, grouped=grouped)
    return read_latent(config, origin, experts, dense_first(reader, 0))
