"""What a method loads, before and after its KV cache exists: `LoadedProposer`, and the ones that methods here use.

LoadedProposer    what it runs                                       attach() makes
NoDraft           nothing                                            whatever its `make` makes
ChainDraft        a draft head (EAGLE, EAGLE-3, one MTP layer)       a chain, one draft step per guess
SmallModelDraft   a language model                                   a chain, one draft step per guess
SharedKVDraft     what attends to the target's KV (Gemma 4)          a chain, one draft step per guess
TreeDraft         one of these two                                   a tree
MultiLayerDraft   MTP layers                                         a chain, one layer per guess
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.errors import ConfigError
from overlap_spec.models.interfaces import DraftHead, DraftProfile, LoadedDraft, RowBatch, TargetOutput
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.sampling.context import TokenPool
from overlap_spec.speculative.interfaces import Guesses, Prompts, Proposer, SlotBatch, Verdict
from overlap_spec.speculative.proposers.autoregressive import AutoregressiveProposer, DeferredRows
from overlap_spec.speculative.proposers.multi_layer import Layers, MultiLayerProposer, RecentRows, rows_to_remember
from overlap_spec.speculative.proposers.standalone import (
    LastTokens,
    RecentTokens,
    RereadingProposer,
    SharedKVModel,
    SharedKVProposer,
    SmallModel,
    StandaloneProposer,
)
from overlap_spec.speculative.proposers.tree import Branching, Drafter, TreeProposer
from overlap_spec.speculative.verifiers import DraftProbs, certainty


class NoProposer:
    """The null proposer."""

    def prefill(self, prompts: Prompts, rows: RowBatch, output: TargetOutput) -> Any:
        """Nothing to learn."""

    def extend(self, batch: SlotBatch, rows: RowBatch, output: TargetOutput, verdict: Verdict) -> Any:
        """Nothing to learn."""

    def defer(self, batch: SlotBatch, output: TargetOutput, verdict: Verdict) -> None:
        """Nothing to learn later."""

    def catch_up(self, batch: SlotBatch, counts: Tensor) -> None:
        """Nothing was missed."""

    def propose(self, batch: SlotBatch, learnt: Any, num_guesses: int) -> Guesses:
        return Guesses(torch.full((num_guesses, len(batch.slots)), -1, dtype=torch.int64, device=batch.slots.device))


@dataclass(frozen=True)
class EngineShape:
    """The sizes that a proposer's tables are made by. The last slot row is the dummy's: padding reads and writes it."""

    num_rows: int  # slots, and the dummy
    num_positions: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    hidden_size: int  # of the target
    max_deferred: int  # draft rows that steps of width 1 may leave behind
    token_pool: TokenPool  # every request's tokens
    attention: AttentionChoice = DEFAULT_ATTENTION  # of the draft
    scratch_start: int = 0  # the first cache row of the draft behind its pages
    probs: DraftProbs | None = None  # given: guesses are to be drawn, and this is told what from
    simulated_accept_lens: tuple[float, ...] = ()  # acceptance is synthetic
    target_cache: KVCache | None = None  # for a draft that reads the target's keys and values


class LoadedProposer(Protocol):
    """What a method has loaded, before its KV cache exists."""

    @property
    def profile(self) -> DraftProfile:
        """What the engine has to know of it: it sizes memory and caches by that."""

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer[Any]:
        """Make it runnable. `cache` has the pages of the target's, and holds `profile.kv_shape` for each token."""


def plain(shape: EngineShape) -> Proposer[Any]:
    """Nothing is proposed."""
    return NoProposer()


@dataclass(frozen=True)
class NoDraft:
    """No weights: plain decoding, or guesses that need none. `make` gives the proposer."""

    make: Callable[[EngineShape], Proposer[Any]] = plain

    @property
    def profile(self) -> DraftProfile:
        return DraftProfile(reads_hidden=self.make is not plain)

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer[Any]:
        return self.make(shape)


@dataclass(frozen=True)
class ChainDraft:
    """A head that drafts a chain, one step per guess."""

    draft: LoadedDraft[DraftHead]
    num_steps: int

    @property
    def profile(self) -> DraftProfile:
        return self.draft.profile

    def attach(self, cache: KVCache, shape: EngineShape) -> AutoregressiveProposer:
        head = self.draft.attach(cache, shape.num_positions, shape.attention)
        size = self.profile.features_size(shape.hidden_size)
        deferred = DeferredRows.allocate(shape.num_rows, shape.max_deferred, size, shape.dtype, shape.device)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, self.num_steps, head.target_ids)
        return AutoregressiveProposer(head, shape.page_size, deferred, shape.probs)

    def drafter(self, cache: KVCache, shape: EngineShape) -> Drafter[Tensor, Normed]:
        return self.attach(cache, shape)


@dataclass(frozen=True)
class SharedKVDraft:
    """A model without keys and values of its own that drafts a chain, one step per guess."""

    draft: LoadedDraft[SharedKVModel]
    num_steps: int

    @property
    def profile(self) -> DraftProfile:
        return self.draft.profile

    def attach(self, cache: KVCache, shape: EngineShape) -> SharedKVProposer:
        assert shape.target_cache is not None, "it has no keys and values of its own"
        model = self.draft.attach(shape.target_cache, shape.num_positions, shape.attention)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, self.num_steps, model.target_ids)
        return SharedKVProposer(model, shape.page_size, shape.probs)


@dataclass(frozen=True)
class SmallModelDraft:
    """A language model that drafts a chain, one step per guess."""

    draft: LoadedDraft[SmallModel]
    num_steps: int

    @property
    def profile(self) -> DraftProfile:
        """Of a chain, the first draft step reads two rows, whatever the window: what is committed is one of them."""
        profile, width = self.draft.profile, self.num_steps + 1
        work = profile.work
        two_rows = replace(work, row_flop=2 * work.row_flop // width, pair_flop=2 * work.pair_flop // width)
        return replace(profile, extend_work=two_rows)

    def attach(self, cache: KVCache, shape: EngineShape) -> StandaloneProposer:
        return self._attach(StandaloneProposer, cache, shape)

    def drafter(self, cache: KVCache, shape: EngineShape) -> Drafter[LastTokens, Tensor | Normed]:
        return self._attach(RereadingProposer, cache, shape)

    def _attach(self, kind: type[StandaloneProposer], cache: KVCache, shape: EngineShape) -> StandaloneProposer:
        recent = RecentTokens.allocate(shape.num_rows, shape.max_deferred, shape.device)
        model = self.draft.attach(cache, shape.num_positions, shape.attention)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, self.num_steps, model.target_ids)
        return kind(model, shape.page_size, recent, shape.probs)


@dataclass(frozen=True)
class TreeDraft:
    """What drafts chains, drafting trees."""

    chain: ChainDraft | SmallModelDraft
    branching: Branching

    @property
    def profile(self) -> DraftProfile:
        """A tree reads every row that a step may commit; its guesses are not drawn for rejection sampling."""
        return replace(self.chain.draft.profile, tree=self.branching.shape, draft_vocab_size=0)

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer[Any]:
        drafter: Drafter[Any, Any] = self.chain.drafter(cache, shape)
        logs = children_logs(shape, self.branching, drafter.target_ids)
        return TreeProposer(drafter, self.branching, shape.scratch_start, logs)


def children_logs(shape: EngineShape, branching: Branching, target_ids: Tensor) -> Tensor | None:
    """Logs of the probabilities of a node's children where acceptance is synthetic; None: the draft's.

    Raises: ConfigError if a node has more children than the draft has tokens. Shapes: -> [topk] f32.
    """
    levels, topk = branching.num_levels, branching.topk
    if topk > len(target_ids):
        why = f"a draft of {len(target_ids)} tokens has no more children for a node"
        raise ConfigError("speculative_eagle_topk", why)
    if not shape.simulated_accept_lens:
        return None
    return torch.tensor(certainty(shape.simulated_accept_lens[0], levels, topk), device=shape.device)


@dataclass(frozen=True)
class MultiLayerDraft:
    """MTP layers that draft a chain, each its own guess."""

    layers: LoadedDraft[Layers]

    @property
    def profile(self) -> DraftProfile:
        return self.layers.profile

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer[Any]:
        layers = self.layers.attach(cache, shape.num_positions, shape.attention)
        num_rows = rows_to_remember(layers.num_layers, layers.num_layers + 1, shape.max_deferred)
        recent = RecentRows.allocate(shape.num_rows, num_rows, shape.hidden_size, shape.dtype, shape.device)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, layers.num_layers, layers.target_ids)
        return MultiLayerProposer(layers, shape.page_size, recent, shape.probs)
