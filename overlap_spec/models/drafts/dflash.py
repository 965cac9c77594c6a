"""DFlash: a draft that guesses a whole block in one forward (Chen et al. 2026, arXiv:2602.06036).

Layers read a block of masks beside keys and values made of the target's hidden states.

    the target's aux hidden states --fc--> hidden_norm --> keys and values of every layer, at their positions
    root, mask, mask, ..  --embedding--> layers --> norm --> the target's head

The block is at positions L, L + 1, .. of a request whose root is at L. Each of its rows attends to the context, at
0..L - 1, and to the whole block, so the row at L + i guesses the token at L + i. What a block writes is forgotten: its
keys and values have rows of their own in the draft's cache, outside the pages.

A checkpoint has a config, which is checked against the target's, and these weights:

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

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.config.speculation import DraftKind
from overlap_spec.errors import CheckpointError, ConfigError
from overlap_spec.models.interfaces import (
    BlockShape,
    DraftProfile,
    LazyLogits,
    LoadedTarget,
    MarginalLogits,
    RowBatch,
    TargetOutput,
)
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention, kv_shape_of
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.layer_run import LayerRun
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits, make_linear
from overlap_spec.models.layers.norm import RMSNorm
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import canonical_name, finish, mapped_head
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.models.targets.llama import LlamaConfig, load_layer, load_norm
from overlap_spec.models.targets.reading import FULL
from overlap_spec.models.work import count_bytes, total_work

LAYERS = "Qwen3ForCausalLM"  # whose decoder layers a draft has, whatever its target
OWN = "dflash_config"
NEUTRAL = {"output_multiplier": (None, 1, 1.0), "final_logit_softcapping": (None, 0, 0.0)}
FLAG = "speculative_dflash_block_size"


@dataclass(frozen=True)
class DFlashWeights:
    """A loaded draft (`LoadedDraft`). Embedding and head are the target's."""

    aux_layers: tuple[int, ...]
    mask_token: int
    num_rows: int  # of a block, the root included
    embedding: Embedding  # [V, H]
    fc: AnyLinear  # [H, n * H]
    context_norm: RMSNorm
    layers: tuple[PreNormLayer, ...]
    norm: RMSNorm
    head: AnyLinear  # [Vd, H]
    target_ids: Tensor  # [Vd] i64
    num_bytes: int  # memory of the draft's own weights

    @property
    def profile(self) -> DraftProfile:
        """Absorbing committed tokens is the keys and values of all layers; a draft step is a block."""
        keys_values = total_work(layer.attention.keys_values.work for layer in self.layers)
        layers = total_work(layer.work for layer in self.layers)
        return DraftProfile(
            kv_shape=kv_shape_of([layer.attention.shape for layer in self.layers]),
            num_bytes=self.num_bytes,
            work=layers + self.norm.work + self.head.work.as_head(),
            extend_work=self.fc.work + self.context_norm.work + keys_values,
            aux_layers=self.aux_layers,
            block=BlockShape(self.num_rows, "--speculative-dflash-block-size"),
            draft_vocab_size=len(self.target_ids),
            reads_hidden=False,
        )

    def attach(
        self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION
    ) -> "DFlashHead":
        """Join weights and cache. A block may reach `num_rows` positions past the last."""
        shapes = [layer.attention.shape for layer in self.layers]
        reach = num_positions + self.num_rows
        return DFlashHead(self, PagedAttention(shapes, self.embedding.dtype, cache, reach, attention))


class DFlashHead:
    """A draft with its cache."""

    first_guess = 1

    def __init__(self, weights: DFlashWeights, attention: PagedAttention) -> None:
        device = weights.target_ids.device
        self.num_rows = weights.num_rows
        self.target_ids = weights.target_ids
        self._weights = weights
        self._attention = attention
        self._run_layers = LayerRun(weights.layers, weights.norm, attention)
        self._masks = torch.full((weights.num_rows - 1,), weights.mask_token, device=device)

    def absorb(self, output: TargetOutput, rows: RowBatch) -> None:
        """Write the context of target rows: the K/V of every layer. Shapes: output of T rows. Sync: never on CUDA."""
        weights = self._weights
        context = weights.context_norm(weights.fc(output.aux))
        rows = rows if rows.cache_rows is not None else rows.placed(self._attention.page_size)
        for index, layer in enumerate(weights.layers):
            self._attention.write(index, layer.attention.keys_values(context), rows)

    def run_block(self, roots: Tensor, rows: RowBatch) -> Tensor:
        """Run each slot's root and masks, in rows that see the context and each other.

        Shapes: roots [B] i64 -> [B, R, H], before the final norm. Sync: never.
        """
        weights, count = self._weights, len(roots)
        tokens = torch.cat((roots[:, None], self._masks.expand(count, -1)), 1)
        entered = weights.embedding.entering(weights.layers[0].input_norm, tokens.view(-1))
        output, _ = self._run_layers(entered, rows)
        return output.values.view(count, self.num_rows, -1)

    def logits(self, values: Tensor) -> LazyLogits:
        """Shapes: [R, H], before the final norm -> logits [R, Vd]."""
        entered: Normed = self._weights.norm.enter(values)
        return HeadLogits(self._weights.head, entered)

    def norm(self, values: Tensor) -> Tensor:
        """The final norm. Shapes: [R, H] -> [R, H]."""
        return self._weights.norm(values)

    def normed_logits(self, hidden: Tensor) -> LazyLogits:
        """Shapes: [R, H], after the final norm -> logits [R, Vd]."""
        return HeadLogits(self._weights.head, hidden)

    def guess_logits(self, values: Tensor, roots: Tensor) -> MarginalLogits:
        """Of a block's first K guesses. Shapes: values [K, B, H], before the final norm; roots [B] i64."""
        return MarginalLogits(self.logits, values)


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
