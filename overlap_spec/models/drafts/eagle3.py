"""The EAGLE-3 draft head (Li et al. 2025, arXiv:2503.01840).

    the target's aux hidden states --fc--> h --hidden_norm--.
                 embed(token) --input_layernorm--+--> 2H-wide attention --> + --> mlp --> + --> output
                                             h ------------------------------'

The row at position p holds (features of p, token of p + 1). Features come from the target's aux hidden states through
`fc`, or from the head's own output of the draft step before, which is as wide and skips `fc`.
"""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import Normed, draft_input
from torch import Tensor

from overlap_spec.models.drafts.eagle3_config import Eagle3Config
from overlap_spec.models.interfaces import DraftProfile, LazyLogits, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits, Linear, RMSNorm
from overlap_spec.models.targets.llama import LlamaLayer, count_bytes, paged_attention_for
from overlap_spec.models.work import ForwardWork, llama_work


@dataclass(frozen=True)
class Eagle3Fusion:
    """How the target's aux hidden states become features: a norm each (or none), then one linear (or none: as wide
    already).
    """

    norms: tuple[RMSNorm, ...]
    fc: AnyLinear | None  # [Hd, n * H]

    def __call__(self, output: TargetOutput) -> Tensor:
        """Shapes: -> [T, Hd]."""
        aux_hidden = output.aux if output.aux.shape[1] else output.hidden
        if self.norms:
            parts = aux_hidden.chunk(len(self.norms), dim=1)
            aux_hidden = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self.norms, parts, strict=True)], dim=1
            )
        return aux_hidden if self.fc is None else self.fc(aux_hidden)


@dataclass(frozen=True)
class Eagle3Weights:
    """A loaded head (`LoadedDraft`). Embedding and head may be the target's own tensors."""

    config: Eagle3Config
    embedding: Tensor  # [V, Hd]
    fusion: Eagle3Fusion
    hidden_norm: RMSNorm  # on the features; the first layer's `input_norm` is on the embedding
    layers: tuple[LlamaLayer, ...]  # the first one's qkv is [(n + 2 nkv) d, 2 Hd]
    norm: RMSNorm
    head: Linear  # [Vd, Hd]
    target_ids: Tensor  # [Vd] i64
    num_bytes: int  # of what the head brings itself

    @property
    def profile(self) -> DraftProfile:
        """Absorbing committed tokens is a draft step, and the fusion; the embedding is only gathered from."""
        every_step = (self.hidden_norm, self.layers, self.norm, self.head)
        return DraftProfile(
            kv_shape=self.config.llama.kv_shape,
            num_bytes=self.num_bytes,
            work=self._work(count_bytes(every_step)),
            extend_work=self._work(count_bytes((self.fusion, *every_step))),
            aux_layers=self.config.aux_layers,
            draft_vocab_size=len(self.target_ids),
        )

    def attach(
        self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION
    ) -> "Eagle3Head":
        """Join weights, cache and the head's own rotary table of `num_positions` rows."""
        return Eagle3Head(self, paged_attention_for(self.config.llama, self.embedding, cache, num_positions, attention))

    def _work(self, read: int) -> ForwardWork:
        config, attention = self.config.llama, self.config.llama.num_heads * self.config.llama.head_dim
        return llama_work(read, self.head.weight.nbytes, self.embedding.itemsize, attention, config.num_layers)


class Eagle3Head:
    """`DraftHead` of EAGLE-3."""

    def __init__(self, weights: Eagle3Weights, attention: PagedAttention) -> None:
        self.draft_vocab_size = len(weights.target_ids)
        self.target_ids = weights.target_ids
        self._weights = weights
        self._attention = attention

    def fuse(self, output: TargetOutput) -> Tensor:
        """Shapes: -> [T, Hd]."""
        return self._weights.fusion(output)

    def forward(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        """Shapes: tokens [T] i64, features [T, Hd] -> [T, Hd], before the final norm. Sync: never on CUDA."""
        weights, layers = self._weights, self._weights.layers
        embed_norm, feature_norm = layers[0].input_norm, weights.hidden_norm
        x: Tensor | Normed = draft_input(
            tokens, weights.embedding, embed_norm.weight, features, feature_norm.weight, feature_norm.eps
        )
        stream = features
        next_norms = [layer.input_norm for layer in layers[1:]] + [weights.norm]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attended = self._attention(index, layer.qkv(x), rows)
            x = layer.mlp.add(layer.output.add(attended, stream, layer.post_norm), next_norm)
            stream = x.values
        assert isinstance(x, Normed), "a head has layers"
        return x

    def enter(self, output: Tensor) -> Normed:
        """Shapes: [R, Hd]."""
        return self._weights.norm.enter(output)

    def next_features(self, output: Normed) -> Tensor:
        """Shapes: [R, Hd] -> [R, Hd]."""
        return output.normalised() if self._weights.config.norm_output else output.values

    def logits(self, output: Normed) -> LazyLogits:
        """Shapes: [R, Hd] -> logits [R, Vd]."""
        return HeadLogits(self._weights.head, output)
