"""The DFlash draft: layers that read a block of masks beside keys and values made of the target's hidden states.

    the target's aux hidden states --fc--> hidden_norm --> keys and values of every layer, at their positions
    root, mask, mask, ..  --embedding--> layers --> norm --> the target's head

The block is at positions L, L + 1, .. of a request whose root is at L. Each of its rows attends to the context, at
0..L - 1, and to the whole block, so the row at L + i guesses the token at L + i. What a block writes is forgotten: its
keys and values have rows of their own in the draft's cache, outside the pages.
"""

from dataclasses import dataclass

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.models.interfaces import (
    BlockShape,
    DraftProfile,
    LazyLogits,
    RowBatch,
    TargetOutput,
)
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import PagedAttention, kv_shape_of
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.layer_run import LayerRun
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits
from overlap_spec.models.layers.norm import RMSNorm
from overlap_spec.models.work import total_work


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

    def guess_logits(self, values: Tensor) -> "MarginalLogits":
        """Of a block's first K guesses. Shapes: values [K, B, H], before the final norm."""
        return MarginalLogits(self, values)


@dataclass(frozen=True)
class MarginalLogits:
    """`GuessLogits`: each guess's own, whatever the others are."""

    head: DFlashHead
    values: Tensor  # [K, B, H]

    def together(self) -> LazyLogits:
        """Shapes: -> logits [K * B, Vd]."""
        return self.head.logits(self.values.flatten(0, 1))

    def following(self, index: int, previous: Tensor) -> LazyLogits:
        """Shapes: previous [B] i64 -> logits [B, Vd]."""
        return self.head.logits(self.values[index])
