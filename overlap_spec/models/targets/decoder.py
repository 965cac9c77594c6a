"""A target that is a stack of decoder layers: embedding, layers, final norm, head. Families differ in their layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from overlap_spec_kernels import HeadsArgument, Normed
from overlap_spec_kernels.norm.norm_heads import UnnormedHeads
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention import LayerShape, PagedAttention, kv_shape_of
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import DecoderLayer
from overlap_spec.models.layers.embedding import Embedding, LayerInputs
from overlap_spec.models.layers.experts import ExpertReads, MixtureMLP
from overlap_spec.models.layers.latent import paged_attention_of
from overlap_spec.models.layers.layer_run import LayerRun
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.layers.recurrent import RecurrentShape, recurred
from overlap_spec.models.recurrent_state import LayerState
from overlap_spec.models.work import ForwardWork, count_bytes, total_work


class HybridAttention(PagedAttention):
    """Pages for the layers that attend, a state of each slot for those that recur. Layers count together."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        dtype: torch.dtype,
        cache: KVCache,
        num_positions: int,
        choice: AttentionChoice,
    ) -> None:
        """See `PagedAttention`."""
        super().__init__(shapes, dtype, cache, num_positions, choice)
        recurring = [(index, shape) for index, shape in enumerate(shapes) if isinstance(shape, RecurrentShape)]
        states = zip(recurring, cache.state.layers, strict=True)
        self._recurs: dict[int, tuple[RecurrentShape, LayerState]] = {
            index: (shape, own) for (index, shape), own in states
        }
        others = (index for index in range(len(shapes)) if index not in self._recurs)
        self._paged = {index: place for place, index in enumerate(others)}  # by layer: its place among those with pages

    def constants(self, index: int) -> tuple[object, ...]:
        return self._recurs[index] if index in self._recurs else super().constants(self._paged[index])

    def heads_on_cpu(self, index: int) -> HeadsArgument | None:
        return None if index in self._recurs else super().heads_on_cpu(self._paged[index])

    def __call__(
        self, index: int, qkv: Tensor | UnnormedHeads, rows: RowBatch, read_before_wait: bool = False
    ) -> Tensor:
        if rows.parts:
            qkv = qkv.normed() if isinstance(qkv, UnnormedHeads) else qkv
            pieces = zip(qkv.split([len(part.positions) for part in rows.parts]), rows.parts, strict=True)
            return torch.cat([self(index, piece, part, read_before_wait) for piece, part in pieces])
        return super().__call__(self._paged[index], qkv, rows, read_before_wait)

    def recurred(self, index: int, projected: Tensor, gates: Tensor | None, rows: RowBatch) -> Tensor:
        if not rows.parts:
            return recurred(*self._recurs[index], projected, rows, gates)
        counts = [len(part.positions) for part in rows.parts]
        of_gates = [None] * len(counts) if gates is None else gates.split(counts)
        pieces = zip(projected.split(counts), of_gates, rows.parts, strict=True)
        return torch.cat([self.recurred(index, *piece) for piece in pieces])


def attention_of(
    shapes: Sequence[LayerShape],
    dtype: torch.dtype,
    cache: KVCache,
    num_positions: int,
    choice: AttentionChoice,
) -> PagedAttention:
    """That of layers with these shapes. `num_positions` bounds the rows' positions; `dtype`: the model's."""
    recurs = any(isinstance(shape, RecurrentShape) for shape in shapes)
    return (HybridAttention if recurs else paged_attention_of)(shapes, dtype, cache, num_positions, choice)


@dataclass(frozen=True)
class DecoderWeights:
    """A loaded target (`LoadedTarget`): everything but a cache and positions."""

    embedding: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    head: AnyLinear  # [V, H]; shares the embedding's memory where the checkpoint ties them
    by_layer: LayerInputs | None = None  # what layers get of the tokens beside the residual

    @property
    def hidden_size(self) -> int:
        """Width H of the residual."""
        return self.embedding.size

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.head.out_features

    @property
    def num_layers(self) -> int:
        """Layers whose outputs a draft head may read."""
        return len(self.layers)

    @property
    def kv_shape(self) -> KVShape:
        """What a token takes in the target's cache."""
        return kv_shape_of([layer.attention.shape for layer in self.layers])

    @property
    def num_bytes(self) -> int:
        """Memory of the weights; shared tensors count once."""
        return count_bytes(self)

    @property
    def work(self) -> ForwardWork:
        """What a forward reads and computes; the embedding is only gathered from."""
        layers = total_work(layer.work for layer in self.layers) + self.norm.work + self.head.work.as_head()
        return layers if self.by_layer is None else layers + self.by_layer.work

    def attach(
        self,
        cache: KVCache,
        num_positions: int,
        aux_layers: tuple[int, ...] = (),
        attention: AttentionChoice = DEFAULT_ATTENTION,
    ) -> "DecoderTarget":
        """Join weights, cache and rotary tables of `num_positions` rows."""
        shapes = [layer.attention.shape for layer in self.layers]
        paged = attention_of(shapes, self.embedding.dtype, cache, num_positions, attention)
        return DecoderTarget(self, paged, aux_layers)


class DecoderTarget:
    """`TargetModel` of any such weights."""

    def __init__(self, weights: DecoderWeights, attention: PagedAttention, aux_layers: tuple[int, ...]) -> None:
        assert list(aux_layers) == sorted(set(aux_layers)), "aux layers are distinct and ascending"
        assert all(0 <= layer < weights.num_layers for layer in aux_layers), "an aux hidden state is a layer's output"
        self.hidden_size = weights.hidden_size
        self.vocab_size = weights.vocab_size
        self._weights = weights
        self._attention = attention
        self._run_layers = LayerRun(weights.layers, weights.norm, attention, frozenset(aux_layers))
        self._reads: ExpertReads | None = None

    def count_experts(self) -> ExpertReads | None:
        """Count from now on how many experts decode steps read; None where no layer has some."""
        mixtures = [mlp for each in self._weights.layers if isinstance(mlp := getattr(each, "mlp", None), MixtureMLP)]
        if mixtures:
            router, noted = mixtures[0].router, [mixture.noted for mixture in mixtures]
            self._reads = ExpertReads(router.num_experts, noted, router.weight.device)
        return self._reads

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        """Run all layers. Shapes: tokens [T] i64. Sync: never on CUDA."""
        weights = self._weights
        embedded = weights.embedding.entering(weights.layers[0].input_norm, tokens)
        # The embedding's lookup is an ordinary launch: what was written before it is there.
        if self._reads is not None:
            self._reads.begin(is_counted=rows.uniform and rows.read is None)
        added = None if weights.by_layer is None else weights.by_layer(tokens, embedded.values)
        final, aux_hidden = self._run_layers(embedded, rows, read_before_wait=True, added=added)
        if self._reads is not None:
            self._reads.add_up()
        aux = torch.cat(aux_hidden, dim=1) if aux_hidden else final.values.new_empty(len(tokens), 0)
        return TargetOutput(final, aux)

    def divide(self, lengths: Tensor, page_table: Tensor, width: int) -> Tensor | None:
        return self._attention.divide(lengths, page_table, width)

    def logits(self, hidden: Tensor | Normed) -> LazyLogits:
        """Shapes: hidden [R, H] -> logits [R, V]."""
        return HeadLogits(self._weights.head, hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens [R] i64 -> [R, H]."""
        return self._weights.embedding(tokens)
