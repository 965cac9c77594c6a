"""Reads a DSpark checkpoint: what DFlash's has (`dflash/checkpoint.py`), and

    markov_head.markov_w1.weight [V, r]    by the token before a guess
    markov_head.markov_w2.weight [V, r]    makes a bias of it
    markov_head.gate_proj.weight [r, H + r], .bias [r]             of type gated
    markov_head.joint_proj.weight [3 r, 2 r + H], .bias [3 r]      of type rnn
    confidence_head.proj.weight [1, H (+ r)], .bias [1]            checked, and not used: see docs/flags.md

DeepSpec's layout names mask token, target layers and the Markov head's numbers in config.json itself, and has copies of
the target's embedding and head, which are frozen in its training: the target's own are read. SpecForge's layout has all
of that in `dflash_config`, and no copies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overlap_spec.config.speculation import DraftKind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.dflash.checkpoint import OWN, DFlashConfig, load_weights as load_backbone
from overlap_spec.models.drafts.dspark.head import DSparkWeights
from overlap_spec.models.drafts.dspark.markov import GatedMarkov, MarkovHead, RNNMarkov, VanillaMarkov
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.linear import AnyLinear, make_linear
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import canonical_name
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.loading.sources import DraftSource

ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
TYPES = ("vanilla", "gated", "rnn")
SPECULATORS = "speculators_model_type"
BLOCK_SIZE = 7  # where a config names none
FIELD = "speculative_dspark_block_size"


@dataclass(frozen=True)
class DSparkConfig:
    """A draft's numbers. `confidence_inputs`: columns of the confidence head; 0: there is none."""

    backbone: DFlashConfig
    markov_type: str
    markov_rank: int
    confidence_inputs: int

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str, target: LoadedTarget) -> "DSparkConfig":
        """Read a draft's config.json. Raises: CheckpointError naming `origin`, the key, found and expected."""
        _refuse_other_layouts(config, origin)
        own = {**config, **(config.get(OWN) or {})}
        rank, kind = own.get("markov_rank"), str(own.get("markov_head_type", TYPES[0])).lower()
        if type(rank) is not int or rank < 1:
            raise CheckpointError(f"{origin}: markov_rank: found {rank!r}, expected at least 1")
        if kind not in TYPES:
            raise CheckpointError(f"{origin}: markov_head_type: found {kind!r}, expected one of {', '.join(TYPES)}")
        backbone = DFlashConfig.from_hf({"block_size": BLOCK_SIZE} | dict(config), origin, target)
        inputs = target.hidden_size + (rank if own.get("confidence_head_with_markov") else 0)
        return cls(backbone, kind, rank, inputs if own.get("enable_confidence_head") else 0)


def _refuse_other_layouts(config: Mapping[str, Any], origin: str) -> None:
    if SPECULATORS in config:
        raise CheckpointError(
            f"{origin}: {SPECULATORS}: found {config[SPECULATORS]!r}, expected DeepSpec's or SpecForge's layout: in"
            " that of speculators the row of each guess is another"
        )
    found = config.get("architectures") or ARCHITECTURES[:1]
    if found[0] not in ARCHITECTURES:
        raise CheckpointError(f"{origin}: architectures: found {found[0]!r}, expected {' or '.join(ARCHITECTURES)}")


def load_dspark(source: DraftSource, target: LoadedTarget, num_rows: int) -> DSparkWeights:
    """Load a draft that guesses blocks of `num_rows`.

    Raises: CheckpointError naming file, tensor, found and expected; ConfigError if its blocks are smaller.
    """
    wanted = source.target_ids(target)
    source.refuse_unless(DraftKind.DSPARK)
    config = DSparkConfig.from_hf(source.config(), source.origin, target)
    if num_rows > (most := config.backbone.block_size):
        raise ConfigError(
            FIELD, f"{source.origin}: the draft was trained on blocks of {most}, got {num_rows}; use less"
        )
    return load_weights(config, source.weights(canonical_name), target, num_rows, wanted)


def load_weights(
    config: DSparkConfig, checkpoint: Weights, target: LoadedTarget, num_rows: int, wanted: Tensor | None = None
) -> DSparkWeights:
    """Take every weight. With `wanted` [N] i64 it guesses among these tokens alone (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    markov = _load_markov(config, checkpoint, target, wanted)
    if config.confidence_inputs:
        _take_linear(checkpoint, "confidence_head.proj", (1, config.confidence_inputs))
    return DSparkWeights(load_backbone(config.backbone, checkpoint, target, num_rows, wanted), markov)


def _load_markov(config: DSparkConfig, checkpoint: Weights, target: LoadedTarget, wanted: Tensor | None) -> MarkovHead:
    rank, hidden, size = config.markov_rank, target.hidden_size, (target.vocab_size, config.markov_rank)
    tokens = checkpoint.take("markov_head.markov_w1.weight", size)
    bias = make_linear(take_matrix(checkpoint, "markov_head.markov_w2", size))
    bias = bias if wanted is None else bias.rows(wanted.to(bias.device))
    if config.markov_type == "gated":
        return GatedMarkov(tokens, bias, _take_linear(checkpoint, "markov_head.gate_proj", (rank, hidden + rank)))
    if config.markov_type == "rnn":
        joint = _take_linear(checkpoint, "markov_head.joint_proj", (3 * rank, 2 * rank + hidden))
        return RNNMarkov(tokens, bias, joint)
    return VanillaMarkov(tokens, bias)


def _take_linear(checkpoint: Weights, name: str, shape: tuple[int, int]) -> AnyLinear:
    return make_linear(take_matrix(checkpoint, name, shape), checkpoint.take(f"{name}.bias", shape[:1]))
