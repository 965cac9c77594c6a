"""The attention of a model some of whose layers recur instead."""

from collections.abc import Sequence

import torch
from overlap_spec_kernels import HeadsArgument
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention import LayerShape, PagedAttention
from overlap_spec.models.layers.attention_choice import AttentionChoice
from overlap_spec.models.layers.gated_delta import RecurrentShape, recurred
from overlap_spec.models.layers.latent import paged_attention_of
from overlap_spec.models.recurrent_state import LayerState


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

    def __call__(self, index: int, qkv: Tensor, rows: RowBatch, read_before_wait: bool = False) -> Tensor:
        """See `PagedAttention`; of a layer that recurs `recurred`, whose rows `qkv` are then."""
        if rows.parts:
            pieces = zip(qkv.split([len(part.positions) for part in rows.parts]), rows.parts, strict=True)
            return torch.cat([self(index, piece, part, read_before_wait) for piece, part in pieces])
        if (known := self._recurs.get(index)) is not None:
            return recurred(*known, qkv, rows)
        return super().__call__(self._paged[index], qkv, rows, read_before_wait)


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
