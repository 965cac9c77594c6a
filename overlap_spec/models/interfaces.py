"""What the worker and the methods need of a model. Not here: any architecture.

A forward works on T flattened rows. Rows of one request are contiguous, at ascending positions; in
decode every request has W rows, in prefill as many as its chunk. Rows write their K/V first, then row
at position p attends to positions 0..p of its own request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers import Linear

Progress = Callable[[int, int], None]  # called with (tensors loaded, tensors in all)


@dataclass(frozen=True)
class RowBatch:
    """Where the rows of one forward stand. `max_rows` bounds the rows of one request, `uniform` says all have it."""

    positions: Tensor  # [T] i64, absolute, also the RoPE position
    cache_rows: Tensor  # [T] i64, page * page_size + offset: where the row's K/V is written
    page_table: Tensor  # [B, P] i32, pages of each request of this forward
    row_starts: Tensor  # [B + 1] i32, first row of each request
    max_rows: int
    uniform: bool  # every request has exactly max_rows rows


@dataclass(frozen=True)
class TargetOutput:
    """What a target's layers give. `aux` holds the residual stream after each tapped layer, concatenated."""

    hidden: Tensor  # [T, H], after the final norm
    aux: Tensor  # [T, n * H]; n = 0 if nothing is tapped


class TargetModel(Protocol):
    """The model being served, with its paged KV cache attached."""

    hidden_size: int
    vocab_size: int

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        """Run all layers. Shapes: tokens [T] i64, in 0..V-1. Sync: never on CUDA."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Shapes: hidden [R, H] -> [R, V], in the model's dtype (float32 or wider where it is narrower)."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens [R] i64 -> [R, H]. Shared with draft heads."""
        ...


class LoadedTarget(Protocol):
    """A target's weights in memory, before its KV cache exists: what is left of the memory decides the cache's size."""

    @property
    def hidden_size(self) -> int:
        """Width H of the residual stream."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows V of the head."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers whose outputs a draft head may tap."""
        ...

    @property
    def kv_shape(self) -> KVShape:
        """What a token takes in the target's cache."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        ...

    @property
    def embedding(self) -> Tensor:
        """[V, H]; draft heads may share it."""
        ...

    @property
    def head(self) -> Linear:
        """[V, H]; draft heads may share it."""
        ...

    def attach(self, cache: KVCache, num_positions: int, aux_layers: tuple[int, ...] = ()) -> TargetModel:
        """Make it runnable. `num_positions` bounds every row's position; the outputs of `aux_layers` are tapped."""
        ...


class DraftHead(Protocol):
    """A trained head that guesses from the target's hidden states (EAGLE family), with its own KV cache."""

    draft_vocab_size: int
    target_ids: Tensor  # [Vd] i64: draft id -> target id (the identity where the vocabulary is shared)

    def fuse(self, output: TargetOutput) -> Tensor:
        """The features a target row hands to the head. Shapes: -> [T, Hd]."""
        ...

    def forward(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Tensor:
        """Row at position p holds (features of p, token of p + 1). Shapes: tokens [T] i64, features [T, Hd] -> [T, Hd].

        Returns the residual sum before the final norm.
        """
        ...

    def next_features(self, output: Tensor) -> Tensor:
        """What the next draft step takes as features. Shapes: [R, Hd] -> [R, Hd]."""
        ...

    def logits(self, output: Tensor) -> Tensor:
        """Shapes: [R, Hd] -> [R, Vd]."""
        ...


class LoadedDraft(Protocol):
    """A draft head's weights in memory, before its KV cache exists."""

    @property
    def hidden_size(self) -> int:
        """Width Hd of the features."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the head can guess."""
        ...

    @property
    def kv_shape(self) -> KVShape:
        """What a token takes in the head's cache."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the weights that are not the target's."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose outputs the target must tap, ascending."""
        ...

    def attach(self, cache: KVCache, num_positions: int) -> DraftHead:
        """Make it runnable; it has the page ids of its target, in a cache of its own."""
        ...
