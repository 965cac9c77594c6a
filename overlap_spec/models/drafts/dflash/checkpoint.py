"""Reads a DFlash checkpoint: its config, checked against the target's, and its weights.

    fc.weight [H, n * H]      joins the outputs of n target layers
    hidden_norm.weight [H]    the norm of that: what every layer makes keys and values of
    layers.<i>. ..            Qwen3's decoder layers, with norms of query and key heads
    norm.weight [H]           before the target's head

Embedding and head are the target's. The layers of the target are named in `dflash_config.target_layer_ids`, by their
outputs: 0 is the residual after the first layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overlap_spec.config.speculation import DraftKind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.drafts.dflash.head import DFlashWeights
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.linear import make_linear
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import canonical_name, finish, mapped_head
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.targets.llama import LlamaConfig, load_layer, load_norm
from overlap_spec.models.targets.reading import FULL
from overlap_spec.models.work import count_bytes

LAYERS = "Qwen3ForCausalLM"  # whose decoder layers a draft has, whatever its target
OWN = "dflash_config"
NEUTRAL = {"output_multiplier": (None, 1, 1.0), "final_logit_softcapping": (None, 0, 0.0)}
FLAG = "speculative_dflash_block_size"


@dataclass(frozen=True)
class DFlashConfig:
    """A draft's numbers."""

    llama: LlamaConfig
    aux_layers: tuple[int, ...]  # ascending
    mask_token: int
    block_size: int  # rows of a block in training: the root and its masks
    embedding_scale: float  # of the target's rows, which the draft reads without the target's own scale

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str, target: LoadedTarget) -> "DFlashConfig":
        """Read a draft's config.json. Raises: CheckpointError naming `origin`, the key, found and expected."""
        own = {**config, **(config.get(OWN) or {})}
        _refuse_other_attention(own, origin)
        llama = LlamaConfig.from_hf({**config, "architectures": [LAYERS]}, origin)
        for key, ours in {
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "num_target_layers": target.num_layers,
        }.items():
            if config.get(key, ours) != ours:
                raise CheckpointError(
                    f"{origin}: {key}: found {config[key]}, expected {ours}, the target's:"
                    " the draft was trained for another target"
                )
        mask = _whole(own, "mask_token_id", 0, target.vocab_size - 1, "a token of the target's vocabulary", origin)
        block_size = _whole({"block_size": 16} | own, "block_size", 2, None, "a root and at least one mask", origin)
        scale = float(own.get("input_embedding_scale", 1.0))
        return cls(llama, _aux_layers(own, target.num_layers, origin), mask, block_size, scale)


def _refuse_other_attention(own: Mapping[str, Any], origin: str) -> None:
    kinds = set(own.get("layer_types") or (FULL,))
    if kinds != {FULL}:
        raise CheckpointError(f"{origin}: layer_types: found {sorted(kinds)}, expected {FULL} in every layer")
    if own.get("is_causal"):
        raise CheckpointError(f"{origin}: is_causal: found {own['is_causal']}, expected a block whose rows see it all")
    for key, neutral in NEUTRAL.items():
        if own.get(key) not in neutral:
            raise CheckpointError(f"{origin}: {key}: found {own[key]}, which is not supported")


def _whole(own: Mapping[str, Any], key: str, least: int, most: int | None, what: str, origin: str) -> int:
    found = own.get(key)
    if type(found) is not int or found < least or (most is not None and found > most):
        upto = "" if most is None else f" to {most}"
        raise CheckpointError(f"{origin}: {key}: found {found!r}, expected {least}{upto}: {what}")
    return found


def _aux_layers(own: Mapping[str, Any], num_layers: int, origin: str) -> tuple[int, ...]:
    found = own.get("target_layer_ids")
    layers = tuple(found) if isinstance(found, list) else ()
    known = all(type(layer) is int and 0 <= layer < num_layers for layer in layers)
    if not layers or not known or list(layers) != sorted(set(layers)):
        raise CheckpointError(
            f"{origin}: {OWN}.target_layer_ids: found {found}, expected ascending layers of the target,"
            f" 0 to {num_layers - 1}"
        )
    return layers


def load_dflash(source: DraftSource, target: LoadedTarget, num_rows: int) -> DFlashWeights:
    """Load a draft that guesses blocks of `num_rows`, the root included.

    Raises: CheckpointError naming file, tensor, found and expected; ConfigError if its blocks are smaller.
    """
    wanted = source.target_ids(target)
    source.refuse_unless(DraftKind.DFLASH)
    config = DFlashConfig.from_hf(source.config(), source.origin, target)
    if num_rows > config.block_size:
        raise ConfigError(
            FLAG, f"{source.origin}: the draft was trained on blocks of {config.block_size}, got {num_rows}; use less"
        )
    return load_weights(config, source.weights(canonical_name), target, num_rows, wanted)


def load_weights(
    config: DFlashConfig, checkpoint: Weights, target: LoadedTarget, num_rows: int, wanted: Tensor | None = None
) -> DFlashWeights:
    """Take every weight. With `wanted` [N] i64 it guesses among these tokens alone (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    llama, hidden = config.llama, config.llama.hidden_size
    fc = make_linear(take_matrix(checkpoint, "fc", (hidden, len(config.aux_layers) * hidden)))
    context_norm = load_norm(llama, checkpoint, "hidden_norm")
    layers = tuple(
        load_layer(llama, checkpoint, index, llama.attention_shape(None), hidden, "input_layernorm")
        for index in range(llama.num_layers)
    )
    norm = load_norm(llama, checkpoint, "norm")
    checkpoint.skip("embed_tokens.weight", "lm_head.weight")
    finish(checkpoint)
    head, ids = mapped_head(target, wanted)
    own = count_bytes((fc, context_norm, layers, norm, ids)) + (0 if head is target.head else head.num_bytes)
    embedding, scale = target.embedding, config.embedding_scale
    embedding = embedding if embedding.scale == scale else embedding.scaled(scale)
    return DFlashWeights(
        config.aux_layers, config.mask_token, num_rows, embedding, fc, context_norm, layers, norm, head, ids, own
    )
