"""The text models of Qwen3.5 and 3.6, dense and with experts: Qwen3-Next's layers. Facts: transformers 5.17,
models/qwen3_5 and models/qwen3_5_moe.

    model.language_model.*                                 the text model; model.visual.* is not read
    linear_attn.in_proj_qkv, in_proj_z, in_proj_b, in_proj_a    of all heads, where Qwen3-Next has them by key head

Positions have three parts for images (mrope). Those of text are all equal, so every pair turns by the one position.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.targets import qwen3_next
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.qwen3_next import HybridConfig
from overlap_spec.models.targets.reading import ConfigReader

VISION = "visual."  # of canonical names
OF_IMAGES = ("mrope_section", "mrope_interleaved")

log = logging.getLogger(__name__)


def read_dense(config: Mapping[str, Any], origin: str) -> HybridConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    return _read(config, origin, {"num_experts": 0})


def read_mixture(config: Mapping[str, Any], origin: str) -> HybridConfig:
    """As `read_dense`. No layer is dense, so the config need not name the size of an MLP."""
    return _read(config, origin, {"intermediate_size": config.get("intermediate_size") or 1})


def _read(config: Mapping[str, Any], origin: str, more: Mapping[str, Any]) -> HybridConfig:
    reader = ConfigReader(config, origin)
    reader.refuse_unless("attn_output_gate", True)
    reader.refuse_unless("mtp_use_dedicated_embeddings", False)
    found = {**config, **more}
    if isinstance(given := config.get("rope_parameters"), Mapping):
        found["rope_parameters"] = {key: value for key, value in given.items() if key not in OF_IMAGES}
    return replace(qwen3_next.read_config(found, origin), is_split=True)


def load(config: HybridConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight of the text model. Raises: CheckpointError naming file, tensor, found and expected."""
    of_images = [name for name in checkpoint.names() if name.startswith(VISION)]
    if of_images:
        log.info("%s: %d tensors of model.visual are not read: only text is served", checkpoint.origin, len(of_images))
        checkpoint.skip(*of_images)
    return qwen3_next.load(config, checkpoint)
