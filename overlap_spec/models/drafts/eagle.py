"""The draft head of EAGLE and EAGLE-2 (Li et al. 2024, arXiv:2401.15077, arXiv:2406.16858).

    embed(token) --.
                   +--> fc --> x --> attention --> + --> norm --> mlp --> + --> output --> the target's head
    hidden --------'           '-------------------'     '----------------'

The row at position p holds (the target's hidden state of p after its final norm, token of p + 1). The first layer has
no norm in front of its attention, and there is none behind the last: what comes out is guessed from as it is, and is
the hidden state of the draft step that follows.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.models.drafts.eagle_config import EagleConfig
from overlap_spec.models.interfaces import DraftProfile, LazyLogits, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits, Linear, RMSNorm
from overlap_spec.models.targets.llama import LlamaLayer, count_bytes, paged_attention_for
from overlap_spec.models.work import llama_work


@dataclass(frozen=True)
class EagleWeights:
    """A loaded head (`LoadedDraft`). The embedding is the target's; so is the head, or those rows that a map names."""

    config: EagleConfig
    embedding: Tensor  # [V, H]
    fc: AnyLinear  # [H, 2 H], embedding first
    layers: tuple[LlamaLayer, ...]  # the first one's `input_norm` is `unread`
    unread: RMSNorm  # where no norm follows: a map that adds to the stream wants one
    head: Linear  # [Vd, H]
    target_ids: Tensor  # [Vd] i64
    num_bytes: int  # of what the head brings itself

    @property
    def profile(self) -> DraftProfile:
        """Absorbing committed tokens is a draft step; the embedding is only gathered from."""
        config = self.config.llama
        read, attention = count_bytes((self.fc, self.layers, self.head)), config.num_heads * config.head_dim
        work = llama_work(read, self.head.weight.nbytes, self.embedding.itemsize, attention, config.num_layers)
        return DraftProfile(
            kv_shape=config.kv_shape,
            num_bytes=self.num_bytes,
            work=work,
            extend_work=work,
            draft_vocab_size=len(self.target_ids),
        )

    def attach(self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION) -> "EagleHead":
        """Join weights, cache and the head's own rotary table of `num_positions` rows."""
        return EagleHead(self, paged_attention_for(self.config.llama, self.embedding, cache, num_positions, attention))


class EagleHead:
    """`DraftHead` of EAGLE and EAGLE-2."""

    def __init__(self, weights: EagleWeights, attention: PagedAttention) -> None:
        self.draft_vocab_size = len(weights.target_ids)
        self.target_ids = weights.target_ids
        self._weights = weights
        self._attention = attention

    def fuse(self, output: TargetOutput) -> Tensor:
        """Shapes: -> [T, H]."""
        return output.hidden

    def forward(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        """Shapes: tokens [T] i64, features [T, H] -> [T, H]. Sync: never on CUDA."""
        weights, layers = self._weights, self._weights.layers
        stream = weights.fc(torch.cat((F.embedding(tokens, weights.embedding), features), dim=1))
        x: Tensor | Normed = stream
        next_norms = [layer.input_norm for layer in layers[1:]] + [weights.unread]
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attended = self._attention(index, layer.qkv(x), rows)
            x = layer.mlp.add(layer.output.add(attended, stream, layer.post_norm), next_norm)
            stream = x.values
        return self.enter(stream)

    def enter(self, output: Tensor) -> Normed:
        """There is no norm to enter: both are the output. Shapes: [R, H]."""
        return Normed(output, output)

    def next_features(self, output: Normed) -> Tensor:
        """Shapes: [R, H] -> [R, H]."""
        return output.values

    def logits(self, output: Normed) -> LazyLogits:
        """Shapes: [R, H] -> logits [R, Vd]."""
        return HeadLogits(self._weights.head, output.values)
