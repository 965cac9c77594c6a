"""The draft head of EAGLE and EAGLE-2 (Li et al. 2024, arXiv:2401.15077, arXiv:2406.16858).

    embed(token) --.
                   +--> fc --> x --> attention --> + --> norm --> mlp --> + --> output --> the target's head
    hidden --------'           '-------------------'     '----------------'

The row at position p holds (the target's hidden state of p after its final norm, token of p + 1). The first layer has
no norm before its attention, and the last layer has none after it: its output goes to the target's head as it is, and
is the hidden state of the next draft step. EAGLE and EAGLE-2 differ in how they build trees; their heads are the same.

Of a checkpoint `fc` and layers are taken; embedding and head are the target's, even if the file has others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import DraftProfile, LazyLogits, LoadedTarget, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention, kv_shape_of
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import PreNormLayer, run_layers
from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.layer_run import KVRun
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits, make_linear
from overlap_spec.models.layers.norm import Norm, RMSNorm
from overlap_spec.models.loading import parts
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.parts import finish, mapped_head
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.targets.llama import LlamaConfig, load_layer
from overlap_spec.models.work import count_bytes, total_work


@dataclass(frozen=True)
class EagleConfig:
    """The head's own Llama-style numbers. Vocabulary size and tied embeddings are not used: they are the target's."""

    llama: LlamaConfig
    fc_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], origin: str) -> "EagleConfig":
        """Read a head's config.json. By default `fc` has a bias, as in the authors' heads.

        Raises: CheckpointError naming `origin` and the key.
        """
        return cls(LlamaConfig.from_hf(config, origin), bool(config.get("bias", True)))


@dataclass(frozen=True)
class EagleWeights:
    """A loaded head (`LoadedDraft`). Embedding and head are the target's, or its rows that a token map names."""

    embedding: Embedding  # [V, H]
    fc: AnyLinear  # [H, 2 H], embedding first
    layers: tuple[PreNormLayer, ...]  # the first one's `input_norm` is `unread`
    unread: RMSNorm  # a placeholder where no norm follows: `AnyLinear.add` takes a norm
    head: AnyLinear  # [Vd, H]
    target_ids: Tensor  # [Vd] i64
    num_bytes: int  # memory of the head's own weights

    @property
    def profile(self) -> DraftProfile:
        """Absorbing committed tokens is a draft step; the embedding is only gathered from."""
        work = self.fc.work + total_work(layer.work for layer in self.layers) + self.head.work.as_head()
        return DraftProfile(
            kv_shape=kv_shape_of([layer.attention.shape for layer in self.layers]),
            num_bytes=self.num_bytes,
            work=work,
            extend_work=work,
            draft_vocab_size=len(self.target_ids),
        )

    def attach(self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION) -> "EagleHead":
        """Join weights, cache and the head's own rotary table of `num_positions` rows."""
        shapes = [layer.attention.shape for layer in self.layers]
        return EagleHead(self, PagedAttention(shapes, self.embedding.dtype, cache, num_positions, attention))


class EagleHead:
    """`DraftHead` of EAGLE and EAGLE-2."""

    def __init__(self, weights: EagleWeights, attention: PagedAttention) -> None:
        self.draft_vocab_size = len(weights.target_ids)
        self.target_ids = weights.target_ids
        self._weights = weights
        self._attention = attention
        self._write_kv = KVRun(weights.layers, attention)

    def fuse(self, output: TargetOutput) -> Tensor:
        """Shapes: -> [T, H]."""
        return output.hidden

    def forward(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        """Shapes: tokens [T] i64, features [T, H] -> [T, H]. Sync: never on CUDA."""
        weights = self._weights
        entered = self._entered(tokens, features)
        output, _ = run_layers(entered, weights.layers, weights.unread, self._attention, rows)
        return self.enter(output.values)

    def absorb(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> None:
        """Shapes: tokens [T] i64, features [T, H]. Sync: never on CUDA."""
        self._write_kv(self._entered(tokens, features), rows)

    def enter(self, output: Tensor) -> Normed:
        """The output itself, as no norm follows. Shapes: [R, H]."""
        return Normed(output, output)

    def next_features(self, output: Normed) -> Tensor:
        """Shapes: [R, H] -> [R, H]."""
        return output.values

    def logits(self, output: Normed) -> LazyLogits:
        """Shapes: [R, H] -> logits [R, Vd]."""
        return HeadLogits(self._weights.head, output.values)

    def _entered(self, tokens: Tensor, features: Tensor) -> Normed:
        """The layers' input. Shapes: -> [T, H]."""
        weights = self._weights
        return self.enter(weights.fc(torch.cat((weights.embedding(tokens), features), dim=1)))


_AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


def canonical_name(name: str) -> str:
    """The canonical name of a weight in any layout, of EAGLE-3's heads too."""
    name = parts.canonical_name(name)
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    stem, _, rest = name.partition(".")
    return f"fc_norm.{_AUX_NORMS.index(stem)}.{rest}" if stem in _AUX_NORMS else name


def load_eagle(
    config: EagleConfig, checkpoint: Weights, target: LoadedTarget, target_ids: Tensor | None = None
) -> EagleWeights:
    """Take every weight of the head. With `target_ids` [N] i64 it guesses among these tokens alone (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    hidden = config.llama.hidden_size
    if hidden != target.hidden_size:
        raise CheckpointError(
            f"{config.llama.origin}: hidden_size {hidden} is not the target's, which is {target.hidden_size}:"
            " the head was trained for another target"
        )
    like = target.embedding
    unread = RMSNorm(torch.ones(hidden, dtype=like.dtype, device=like.device), config.llama.rms_norm_eps)
    fc = _load_fc(config, checkpoint)
    layers = tuple(_load_eagle_layer(config, checkpoint, index, unread) for index in range(config.llama.num_layers))
    checkpoint.skip("embed_tokens.weight", "lm_head.weight")
    finish(checkpoint)
    head, ids = mapped_head(target, target_ids)
    own = count_bytes((fc, layers, ids)) + (0 if head is target.head else head.num_bytes)
    return EagleWeights(target.embedding, fc, layers, unread, head, ids, own)


def _load_fc(config: EagleConfig, checkpoint: Weights) -> AnyLinear:
    hidden = config.llama.hidden_size
    weight = take_matrix(checkpoint, "fc", (hidden, 2 * hidden))
    has_bias = config.fc_bias or "fc.bias" in checkpoint
    return make_linear(weight, checkpoint.take("fc.bias", (hidden,)) if has_bias else None)


def _load_eagle_layer(config: EagleConfig, checkpoint: Weights, index: int, unread: RMSNorm) -> PreNormLayer:
    llama = config.llama
    norm: str | Norm = unread if index == 0 else "input_layernorm"
    return load_layer(llama, checkpoint, index, llama.attention_shape(llama.windows[index]), llama.hidden_size, norm)
