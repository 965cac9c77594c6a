"""Mixtral (arXiv:2401.04088): Mistral's attention; each layer has experts, of which a row's two have weights that are
the softmax of their logits alone.
"""

from collections.abc import Mapping
from typing import Any

from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.targets.decoder import DecoderWeights
from overlap_spec.models.targets.llama import LlamaConfig
from overlap_spec.models.targets.mixture import ExpertNames, MixtureConfig, load_mixture, read_sizes
from overlap_spec.models.targets.reading import ConfigReader

NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")


def read_config(config: Mapping[str, Any], origin: str) -> MixtureConfig:
    """Raises: CheckpointError naming `origin` and the key that is missing, wrong or not supported."""
    sizes = read_sizes(ConfigReader(config, origin), "num_local_experts", "intermediate_size", normalised=True)
    llama = LlamaConfig.from_hf(config, origin)
    return MixtureConfig(llama, sizes, (True,) * llama.num_layers)


def load(config: MixtureConfig, checkpoint: Weights) -> DecoderWeights:
    """Take every weight. Raises: CheckpointError naming file, tensor, found and expected."""
    return load_mixture(config, checkpoint, NAMES)
