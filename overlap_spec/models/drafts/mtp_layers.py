"""Several multi-token-prediction layers, one for each guess (DeepSeek-V3, arXiv:2412.19437; MiMo-V2, Step-3.5).

Layer i guesses the token at position p + 2 + i: its row at position p holds (features of p, token of p + 1 + i). Each
layer has a KV cache of its own. The features of layer 0 are the target's hidden state before its final norm. In chained
layers (Step-3.5), the features of layer i + 1 are the output of layer i at the same row, before its norm; otherwise
(MiMo-V2) every layer reads the target's hidden state.
"""

from dataclasses import dataclass, replace

from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.models.drafts.mtp import MtpHead, MtpWeights
from overlap_spec.models.interfaces import DraftProfile, LazyLogits, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice


@dataclass(frozen=True)
class MtpLayersWeights:
    """Loaded layers, in the order of the guesses."""

    layers: tuple[MtpWeights, ...]
    chained: bool

    @property
    def profile(self) -> DraftProfile:
        """Caches are those of all layers. A draft step runs one layer."""
        profiles = [layer.profile for layer in self.layers]
        return replace(
            profiles[0],
            kv_shape=replace(profiles[0].kv_shape, num_layers=len(profiles)),
            num_bytes=sum(profile.num_bytes for profile in profiles),
        )

    def attach(
        self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION
    ) -> "MtpLayersHead":
        """Join weights, cache and a rotary table of `num_positions` rows."""
        shapes = [each.layer.attention.shape for each in self.layers]
        shared = PagedAttention(shapes, self.layers[0].embedding.dtype, cache, num_positions, attention)
        return MtpLayersHead(tuple(MtpHead(layer, shared, i) for i, layer in enumerate(self.layers)), self.chained)


class MtpLayersHead:
    """The layers with their caches; each forward runs one of them."""

    def __init__(self, heads: tuple[MtpHead, ...], chained: bool) -> None:
        self.num_layers = len(heads)
        self.target_ids = heads[0].target_ids
        self._heads = heads
        self._chained = chained

    def features(self, output: TargetOutput) -> Tensor:
        """The target's hidden state before its final norm. Shapes: -> [T, H]."""
        assert isinstance(output.final, Normed), "a target hands on its residual with the norm"
        return output.final.values

    def forward(self, layer: int, tokens: Tensor, features: Tensor, rows: RowBatch) -> Tensor:
        """Shapes: tokens [T] i64, features [T, H] -> [T, H], before the layer's final norm. Sync: never on CUDA."""
        return self._heads[layer].forward(tokens, features, rows).values

    def next_features(self, features: Tensor, output: Tensor) -> Tensor:
        """The features of the next layer, from this layer's features and output. Shapes: [T, H] each -> [T, H]."""
        return output if self._chained else features

    def logits(self, layer: int, output: Tensor) -> LazyLogits:
        """Shapes: [R, H] -> logits [R, V]."""
        head = self._heads[layer]
        return head.logits(head.enter(output))
