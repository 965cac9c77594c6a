"""The interfaces between models and the worker or a method: row batches, targets, draft heads, profiles.

A forward works on T flattened rows. Rows of one request are contiguous, at ascending positions; in
decode every request has W rows, in prefill as many as its chunk. Rows write their K/V first, then row
at position p attends to positions 0..p of its own request; a row of a tree, to the keys of `TreeKeys`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from overlap_spec_kernels import MASK_BITS, NearKeys, Normed, largest_columns, normalised, select_rows
from torch import Tensor

from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.embedding import Embedding
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.work import ForwardWork

Progress = Callable[[int, int], None]  # called with (tensors loaded, tensors in all)

Attached = TypeVar("Attached", covariant=True)  # a draft with its cache: a `DraftHead`, or what its proposer runs

NO_KV = KVShape(0, 0, 0)
NO_WORK = ForwardWork()


@dataclass(frozen=True)
class TreeKeys:
    """The keys that rows of trees attend to: a prefix of their request, and their own ancestors among M other keys."""

    prefix: Tensor  # [B] i64: keys at places 0..prefix - 1, through the page table
    cache_rows: Tensor  # [B, M] i64: the cache rows of the other keys
    mask: Tensor  # [B, R, ceil(M / 64)] i64: bit i % 64 of word i // 64: row r of the request attends to key i
    positions: Tensor  # [B, M] i64: the positions of the other keys
    num_levels: int  # a row and its farthest ancestor are fewer than this many positions apart
    are_rows: bool = False  # the other keys are the rows themselves, at the places after the prefix

    def near(self, positions: Tensor, window: int | None) -> Tensor:
        """The mask of a layer with a sliding window, which may exclude ancestors. Shapes: positions [B * R]."""
        if window is None or window >= self.num_levels:
            return self.mask
        num_requests, num_rows, num_words = self.mask.shape
        near = positions.view(num_requests, num_rows, 1) - self.positions[:, None] < window
        bits = F.pad(near.long(), (0, num_words * MASK_BITS - near.shape[2])).view(*self.mask.shape, MASK_BITS)
        return self.mask & (bits << torch.arange(MASK_BITS, device=bits.device)).sum(3)


@dataclass(frozen=True)
class RowBatch:
    """Places of the rows of one forward. `max_rows` bounds the rows of a request; if `uniform`, all have so many.

    The windows of decode are uniform, short and at consecutive positions; they may leave out `cache_rows` and
    `row_starts`, which follow from the other fields.
    """

    positions: Tensor  # [T] i64, absolute, also the RoPE position
    cache_rows: Tensor | None  # [T] i64, page * page_size + offset: the cache row that a row's K/V is written to
    page_table: Tensor  # [B, P] i32, pages of each request of this forward
    row_starts: Tensor | None  # [B + 1] i32, first row of each request
    max_rows: int
    uniform: bool  # every request has exactly max_rows rows
    tree: TreeKeys | None = None  # for rows of trees, which are uniform and have no `row_starts`
    runs: "tuple[LongChunk | ShortChunks, ...]" = ()  # all rows, in order, if the host knows of a long chunk among them
    read: "RowsRead | None" = None  # the rows whose output of the last layer is read; None: all
    parts: "tuple[RowBatch, ...]" = ()  # all rows, in order, as batches that attend each by itself (`concatenated`)
    shares: Tensor | None = None  # [S] i64, of `TargetModel.divide`: of a GPU's decode
    state: "StateRows | None" = None  # of layers that recur; None: the model has none

    def placed(self, page_size: int) -> "RowBatch":
        """Uniform rows with all fields filled in. Sync: never."""
        pages = self.page_table.gather(1, self.positions.view(-1, self.max_rows) // page_size)
        cache_rows = pages.long().reshape(-1) * page_size + self.positions % page_size
        starts = torch.arange(len(self.page_table) + 1, dtype=torch.int32, device=pages.device) * self.max_rows
        return replace(self, cache_rows=cache_rows, row_starts=starts)

    def read_whole(self) -> "RowBatch":
        """The same rows, all of them read."""
        if self.read is None:
            return self
        return replace(self, read=None, parts=tuple(part.read_whole() for part in self.parts))


@dataclass(frozen=True)
class StateRows:
    """Whose states the rows belong to."""

    slots: Tensor  # [B] i64
    are_final: bool  # the rows of prompts; those of windows may be rejected
    prompt: Tensor | None = None  # [2] i32, where output of one request follows its prompt: the first row, and the end
    drawn: Tensor | None = None  # [2] i64: the same of the output, which layers recur over as over a window


@dataclass(frozen=True)
class RowsRead:
    """Some of the rows. The last layer of a forward only writes K/V of the others, or does not go on with them.

    Of windows a row each is read, whose place in the window is known: all attend, in one launch.
    """

    index: Tensor  # [n] i64, among the rows of the forward; of windows, in each
    rows: RowBatch | None  # these rows alone; None of rows in parts, which have their own, and of windows
    of_windows: bool = False

    def of(self, values: Tensor) -> Tensor:
        """Shapes: [T, C] -> [n, C]."""
        if not self.of_windows:
            return values[self.index]
        return select_rows(values.view(len(self.index), -1, values.shape[1]), self.index)


@dataclass(frozen=True)
class LongChunk:
    """Rows begin..end - 1 of a forward, of one request, at the positions from `start` on."""

    begin: int
    end: int
    start: int
    pages: Tensor  # [P] i32


@dataclass(frozen=True)
class ShortChunks:
    """Rows begin..end - 1 of a forward, of other requests."""

    begin: int
    end: int
    rows: RowBatch


@dataclass(frozen=True)
class TargetOutput:
    """The output of a target's layers. `aux` holds the residual after each aux layer, concatenated."""

    final: Tensor | Normed  # [T, H], the final norm's result; of `RowBatch.read` alone if that is given
    aux: Tensor  # [T, n * H]; n = 0 without aux layers

    @property
    def hidden(self) -> Tensor:
        """Shapes: [T, H], after the final norm."""
        return normalised(self.final)

    def split(self, num_rows: int) -> "tuple[TargetOutput, TargetOutput]":
        """The first rows, and the others. Shapes: [num_rows, ..], [T - num_rows, ..]."""
        final, aux, hidden = self.final, self.aux, self.hidden
        # Without aux layers `aux` may have another number of rows than `final`, and no column.
        firsts, others = (aux[:num_rows], aux[num_rows:]) if aux.shape[1] else (aux, aux)
        if not isinstance(final, Normed):
            return TargetOutput(hidden[:num_rows], firsts), TargetOutput(hidden[num_rows:], others)
        values = final.values
        return (
            TargetOutput(Normed(values[:num_rows], hidden[:num_rows]), firsts),
            TargetOutput(Normed(values[num_rows:], hidden[num_rows:]), others),
        )

    @property
    def aux_hidden(self) -> Tensor:
        """The input of a draft head: aux hidden states, or the final ones without aux layers. Shapes: [T, n * H]."""
        return self.aux if self.aux.shape[1] else self.hidden


class LazyLogits(Protocol):
    """Logits of some rows, computed on demand."""

    def compute(self) -> Tensor:
        """Shapes: -> [R, V], float32 or wider."""

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        """The column of each row's largest logit, mapped through `ids` if given. Shapes: ids [V] i64 -> [R] i64.

        `NO_TOKEN` where that logit is NaN or infinite; with `ids` some id of them.
        """


class TargetModel(Protocol):
    """The model being served, with its paged KV cache attached."""

    hidden_size: int
    vocab_size: int

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        """Run all layers. Shapes: tokens [T] i64, in 0..V-1. Sync: never on CUDA."""

    def divide(self, lengths: Tensor, page_table: Tensor, width: int) -> Tensor | None:
        """How decode's attention divides its programs among requests of these lengths; None: equally.

        Shapes: lengths [B] i64, page_table [B, P] i32 -> [S] i64. Sync: never.
        """

    def logits(self, hidden: Tensor | Normed) -> LazyLogits:
        """Shapes: hidden [R, H] -> logits [R, V]."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Shapes: tokens [R] i64 -> [R, H]. Shared with draft heads."""


class LoadedTarget(Protocol):
    """A target's weights in memory, before its KV cache exists: the memory left over determines the cache's size."""

    @property
    def hidden_size(self) -> int:
        """Width H of the residual."""

    @property
    def vocab_size(self) -> int:
        """Rows V of the head."""

    @property
    def num_layers(self) -> int:
        """Layers whose outputs a draft head may read."""

    @property
    def kv_shape(self) -> KVShape:
        """The size of a token in the target's KV cache."""

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""

    @property
    def work(self) -> ForwardWork:
        """The bytes that a forward reads, and its operations."""

    @property
    def embedding(self) -> Embedding:
        """[V, H], with its scale; draft heads may share it. The model's type and device are its own."""

    @property
    def head(self) -> AnyLinear:
        """[V, H]; draft heads may share it."""

    def attach(
        self,
        cache: KVCache,
        num_positions: int,
        aux_layers: tuple[int, ...] = (),
        attention: AttentionChoice = DEFAULT_ATTENTION,
    ) -> TargetModel:
        """Join weights and KV cache. `num_positions` bounds rows' positions; outputs of `aux_layers` are kept."""


class DraftHead(Protocol):
    """A trained head that guesses from the target's hidden states (EAGLE family), with its own KV cache."""

    draft_vocab_size: int
    target_ids: Tensor  # [Vd] i64: draft id -> target id (the identity where the vocabulary is shared)

    def fuse(self, output: TargetOutput) -> Tensor:
        """The head's features, from the target's output. Shapes: -> [T, Hd]."""

    def forward(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> Normed:
        """Row at position p holds (features of p, token of p + 1). Shapes: tokens [T] i64, features [T, Hd] -> [T, Hd].

        Returns the residual sum, prepared for the final norm.
        """

    def absorb(self, tokens: Tensor, features: Tensor, rows: RowBatch) -> None:
        """Write the K/V that `forward` writes of these rows, and compute no more. `rows` have all fields."""

    def enter(self, output: Tensor) -> Normed:
        """Prepare kept residual sums for the final norm. Shapes: [R, Hd]."""

    def next_features(self, output: Normed) -> Tensor:
        """The features of the next draft step. Shapes: [R, Hd] -> [R, Hd]."""

    def logits(self, output: Normed) -> LazyLogits:
        """Shapes: [R, Hd] -> logits [R, Vd]."""


@dataclass(frozen=True)
class MaskRow:
    """What a P-EAGLE head reads in place of a token and of features that are not known yet."""

    token: int
    features: Tensor  # [Hd]


@dataclass(frozen=True)
class ComputedLogits:
    """`LazyLogits` that are there."""

    values: Tensor  # [R, V]

    def compute(self) -> Tensor:
        return self.values

    def argmax(self, ids: Tensor | None = None) -> Tensor:
        return largest_columns(self.values, ids)


@dataclass(frozen=True)
class MarginalLogits:
    """The logits of a block's guesses, each of which depends on its own row alone, whatever the others are."""

    logits: Callable[[Tensor], LazyLogits]  # of rows: [R, Hd] -> logits [R, Vd]
    values: Tensor  # [K, B, Hd]

    def together(self) -> LazyLogits:
        """Shapes: -> logits [K * B, Vd]."""
        return self.logits(self.values.flatten(0, 1))

    def following(self, guesses: Sequence[Tensor]) -> LazyLogits:
        """Of the guess after these. The head is read once for all. Shapes: guesses [B] i64 each -> logits [B, Vd]."""
        return ComputedLogits(self._computed[len(guesses)])

    @cached_property
    def _computed(self) -> Tensor:
        """Shapes: -> [K, B, Vd]."""
        return self.together().compute().view(*self.values.shape[:2], -1)


@dataclass(frozen=True)
class TreeShape:
    """The static shape of a method's trees."""

    num_levels: int  # levels of guesses: the most that a step can accept
    scratch_rows: int = 0  # rows of each slot in the draft's cache, outside its pages
    level_rows: int = 1  # rows of each slot in a draft step
    drafted_levels: int = 0  # that the draft's forwards guess; 0: all
    branch: int = 0  # guesses beside the draft's chain
    branch_flag: str = ""  # that sets them


@dataclass(frozen=True)
class BlockShape:
    """Of a draft that guesses a block in one forward."""

    num_rows: int  # rows of each slot in that forward, and in the draft's cache outside its pages
    flag: str  # that sets them


@dataclass(frozen=True)
class DraftLog:
    """A log of requests' tokens that a draft looks into."""

    num_bytes: int = 0
    capacity: int = 0  # tokens that it holds
    flag: str = ""  # that sets the capacity

    def of_capacity(self, capacity: int) -> "DraftLog":
        """A log of more or fewer tokens."""
        return replace(self, num_bytes=self.num_bytes * capacity // max(self.capacity, 1), capacity=capacity)


NO_LOG = DraftLog()


@dataclass(frozen=True)
class DraftProfile:
    """The engine's facts about a loaded draft. The defaults are those of a draft that loads nothing."""

    kv_shape: KVShape = NO_KV  # the size of a token in the draft's own KV cache; no layers: no cache
    num_bytes: int = 0  # memory taken at load: weights that are not the target's, and the log
    log: DraftLog = NO_LOG  # it is part of `num_bytes`
    work: ForwardWork = NO_WORK  # work of a draft step, including the target's weights that it reads
    extend_work: ForwardWork = NO_WORK  # work of the extend over committed tokens
    aux_layers: tuple[int, ...] = ()  # layers whose outputs the target keeps for it, ascending
    tree: TreeShape | None = None  # None: it guesses chains
    block: BlockShape | None = None  # None: its chains and trees grow by draft steps
    has_masks: bool = False  # the extend also runs a mask for each guess but the first, and no draft step follows
    draft_vocab_size: int = 0  # tokens Vd that it can guess, if it can draw them for rejection sampling; else 0
    reads_hidden: bool = True  # it reads `TargetOutput.hidden` of every prompt row, not only of chunks' last ones
    reads_roots: bool = False  # a token has its row at its own position: a prompt's step does not write the root's

    @property
    def scratch_rows(self) -> int:
        """Rows of each slot in the draft's cache, outside its pages."""
        if self.block is not None:
            return self.block.num_rows
        return 0 if self.tree is None else self.tree.scratch_rows

    @property
    def step_rows(self) -> int:
        """Rows of each slot in a draft step."""
        if self.block is not None:
            return self.block.num_rows
        return 1 if self.tree is None else self.tree.level_rows

    def features_size(self, hidden_size: int) -> int:
        """How many numbers of the target's a draft row is made of, beside its token. `hidden_size`: of the target."""
        return hidden_size * (len(self.aux_layers) or self.reads_hidden)


class LoadedDraft(Protocol[Attached]):
    """A draft model's weights in memory, before its KV cache exists."""

    @property
    def profile(self) -> DraftProfile:
        """The engine's facts about the draft."""

    def attach(self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION) -> Attached:
        """Join weights and the draft's own KV cache, which uses the target's page ids."""


def starts_on_cpu(rows: RowBatch) -> Tensor:
    """Where each request's rows begin; rows of trees are uniform. Shapes: -> [B + 1] i32."""
    if rows.row_starts is not None:
        return rows.row_starts
    return torch.arange(len(rows.page_table) + 1, dtype=torch.int32) * (len(rows.positions) // len(rows.page_table))


def near_keys(rows: RowBatch) -> NearKeys | None:
    """What rows of trees attend to, for a CPU's kernel; None of sequences."""
    if (tree := rows.tree) is None:
        return None
    parts = (tree.prefix, tree.cache_rows, tree.positions, tree.mask)
    return NearKeys(*(part.contiguous() for part in parts))
