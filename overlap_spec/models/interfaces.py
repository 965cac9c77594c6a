"""What the worker and the methods need of a model. Not here: any architecture.

A forward works on T flattened rows. Rows of one request are contiguous, at ascending positions; in
decode every request has W rows, in prefill as many as its chunk. Rows write their K/V first, then row
at position p attends to positions 0..p of its own request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from overlap_spec_kernels import Normed, normalised
from torch import Tensor

from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers import Linear
from overlap_spec.models.work import ForwardWork

Progress = Callable[[int, int], None]  # called with (tensors loaded, tensors in all)


MOST_WINDOW_ROWS = 16  # of a request whose rows may be a window


@dataclass(frozen=True)
class RowBatch:
    """Where the rows of one forward stand. `max_rows` bounds the rows of one request, `uniform` says all have it.

    Windows, which are uniform, short and at consecutive positions, may leave out what follows from the rest.
    """

    positions: Tensor  # [T] i64, absolute, also the RoPE position
    cache_rows: Tensor | None  # [T] i64, page * page_size + offset: where the row's K/V is written
    page_table: Tensor  # [B, P] i32, pages of each request of this forward
    row_starts: Tensor | None  # [B + 1] i32, first row of each request
    max_rows: int
    uniform: bool  # every request has exactly max_rows rows


@dataclass(frozen=True)
class TargetOutput:
    """What a target's layers give. `aux` holds the residual stream after each tapped layer, concatenated."""

    stream: Tensor | Normed  # [T, H], the final norm's result
    aux: Tensor  # [T, n * H]; n = 0 if nothing is tapped

    @property
    def hidden(self) -> Tensor:
        """Shapes: [T, H], after the final norm."""
        return normalised(self.stream)


class Scores(Protocol):
    """Logits of some rows, computed when asked for."""

    def logits(self) -> Tensor:
        """Shapes: -> [R, V], float32 or wider."""
        ...

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """The column of each row's largest logit, looked up in `ids` if given. Shapes: ids [V] i64 -> [R] i64."""
        ...


class TargetModel(Protocol):
    """The model being served, with its paged KV cache attached."""

    hidden_size: int
    vocab_size: int

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        """Run all layers. Shapes: tokens [T] i64, in 0..V-1. Sync: never on CUDA."""
        ...

    def scores(self, hidden: Tensor | Normed) -> Scores:
        """Shapes: hidden [R, H] -> logits [R, V]."""
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
    def work(self) -> ForwardWork:
        """What a forward reads and computes."""
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

    def forward(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        """Row at position p holds (features of p, token of p + 1). Shapes: tokens [T] i64, features [T, Hd] -> [T, Hd].

        Returns the residual sum, on its way into the final norm.
        """
        ...

    def enter(self, output: Tensor) -> Normed:
        """Residual sums that were kept. Shapes: [R, Hd]."""
        ...

    def next_features(self, output: Normed) -> Tensor:
        """What the next draft step takes as features. Shapes: [R, Hd] -> [R, Hd]."""
        ...

    def scores(self, output: Normed) -> Scores:
        """Shapes: [R, Hd] -> logits [R, Vd]."""
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
    def work(self) -> ForwardWork:
        """What a draft step reads and computes, what it borrows of the target included."""
        ...

    @property
    def extend_work(self) -> ForwardWork:
        """The same of absorbing committed tokens."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Layers whose outputs the target must tap, ascending."""
        ...

    def attach(self, cache: KVCache, num_positions: int) -> DraftHead:
        """Make it runnable; it has the page ids of its target, in a cache of its own."""
        ...
