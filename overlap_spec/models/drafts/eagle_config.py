"""What an EAGLE checkpoint's config says.

EAGLE and EAGLE-2 differ in how drafts are grown into trees; their heads are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overlap_spec.models.targets.llama_config import LlamaConfig


@dataclass(frozen=True)
class EagleConfig:
    """The head's own Llama-style numbers, of which the vocabulary and the ties are not used: it has the target's."""

    llama: LlamaConfig
    fc_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str) -> "EagleConfig":
        """Read a head's config.json; without a word about it, `fc` has a bias, as the authors' heads have.

        Raises: CheckpointError naming `origin` and the key.
        """
        return cls(LlamaConfig.from_hf(config, origin), bool(config.get("bias", True)))
