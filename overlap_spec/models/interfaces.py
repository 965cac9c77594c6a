"""What the worker and the methods need of a model.

A forward works on T flattened rows. Rows of one request are contiguous, at ascending positions; in
decode every request has W rows, in prefill as many as its chunk. Rows write their K/V first, then row
at position p attends to positions 0..p of its own request; a row of a tree, to what `TreeKeys` says.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from overlap_spec_kernels import MASK_BITS, Normed, normalised
from torch import Tensor

from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.linear import Linear
from overlap_spec.models.work import ForwardWork

Progress = Callable[[int, int], None]  # called with (tensors loaded, tensors in all)


@dataclass(frozen=True)
class TreeKeys:
    """What the rows of trees attend to: the first keys of their request, and their own ancestors among M others."""

    prefix: Tensor  # [B] i64: keys at places 0..prefix - 1, through the page table
    cache_rows: Tensor  # [B, M] i64: where the others' K/V is
    mask: Tensor  # [B, R, ceil(M / 64)] i64: bit i % 64 of word i // 64: row r of the request attends to key i
    positions: Tensor  # [B, M] i64, of the others
    num_levels: int  # a row and its farthest ancestor are less than so many positions apart

    def near(self, positions: Tensor, window: int | None) -> Tensor:
        """The mask of a layer with a window: ancestors may be beyond a very small one. Shapes: positions [B * R]."""
        if window is None or window >= self.num_levels:
            return self.mask
        num_requests, num_rows, num_words = self.mask.shape
        near = positions.view(num_requests, num_rows, 1) - self.positions[:, None] < window
        bits = F.pad(near.long(), (0, num_words * MASK_BITS - near.shape[2])).view(*self.mask.shape, MASK_BITS)
        return self.mask & (bits << torch.arange(MASK_BITS, device=bits.device)).sum(3)


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
    tree: TreeKeys | None = None  # rows that are no sequence; these are uniform, and have no `row_starts`

    def placed(self, page_size: int) -> "RowBatch":
        """Uniform rows, with nothing left out. Sync: never."""
        pages = self.page_table.gather(1, self.positions.view(-1, self.max_rows) // page_size)
        cache_rows = pages.long().reshape(-1) * page_size + self.positions % page_size
        starts = torch.arange(len(self.page_table) + 1, dtype=torch.int32, device=pages.device) * self.max_rows
        return replace(self, cache_rows=cache_rows, row_starts=starts)


@dataclass(frozen=True)
class TargetOutput:
    """What a target's layers give. `aux` holds the residual stream after each tapped layer, concatenated."""

    stream: Tensor | Normed  # [T, H], the final norm's result
    aux: Tensor  # [T, n * H]; n = 0 if nothing is tapped

    @property
    def hidden(self) -> Tensor:
        """Shapes: [T, H], after the final norm."""
        return normalised(self.stream)

    @property
    def aux_hidden(self) -> Tensor:
        """What a draft head reads of a target: what is tapped, or the hidden states. Shapes: [T, n * H]."""
        return self.aux if self.aux.shape[1] else self.hidden


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

    def attach(
        self,
        cache: KVCache,
        num_positions: int,
        aux_layers: tuple[int, ...] = (),
        attention: AttentionChoice = DEFAULT_ATTENTION,
    ) -> TargetModel:
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

    def attach(self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION) -> DraftHead:
        """Make it runnable; it has the page ids of its target, in a cache of its own."""
        ...
