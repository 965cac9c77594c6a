"""The table of drafting methods: the one place, beside `config/speculation.py`, that knows their names.

A method is a record: what its prefix-cache keys depend on, and how its proposer is loaded. Nothing else in the engine
asks which method runs.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.config import SpecSettings, is_own_method
from overlap_spec.errors import ConfigError
from overlap_spec.models.drafts.language_draft import LanguageDraftWeights, load_language_draft
from overlap_spec.models.drafts.mtp_layers import MtpLayersWeights
from overlap_spec.models.interfaces import LoadedDraft, LoadedTarget, Progress
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.loading.loader import load_eagle, load_eagle3, load_mtp, load_mtp_layers
from overlap_spec.models.work import ForwardWork
from overlap_spec.spec.interfaces import Proposer
from overlap_spec.spec.proposers.autoregressive import AutoregressiveProposer, DeferredRows
from overlap_spec.spec.proposers.multi_layer import MultiLayerProposer, RecentRows, rows_to_remember
from overlap_spec.spec.proposers.ngram_draft import NgramDraft
from overlap_spec.spec.proposers.none import NoProposer
from overlap_spec.spec.proposers.standalone import LastTokens, RecentTokens, RereadingProposer, StandaloneProposer
from overlap_spec.spec.proposers.tree import Branching, Drafter, TreeProposer
from overlap_spec.spec.types import TreeShape
from overlap_spec.spec.verifiers.rejection import DraftProbs


@dataclass(frozen=True)
class EngineShape:
    """What a proposer's per-slot rows and tables are sized by."""

    num_rows: int  # slots, and the dummy
    num_positions: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    hidden_size: int  # of the target
    max_deferred: int  # draft rows that steps of width 1 may leave behind
    attention: AttentionChoice = DEFAULT_ATTENTION  # of the draft
    scratch_start: int = 0  # first cache row of the draft that is no page's
    probs: DraftProbs | None = None  # guesses are to be drawn, and this is told what from


class LoadedProposer(Protocol):
    """A proposer's weights in memory, before its KV cache exists."""

    @property
    def kv_shape(self) -> KVShape:
        """What a token takes in the proposer's own cache; no layers, no cache."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of the weights that it brings."""
        ...

    @property
    def work(self) -> ForwardWork:
        """What a draft step reads and computes; nothing if it runs no model."""
        ...

    @property
    def extend_work(self) -> ForwardWork:
        """The same of absorbing committed tokens."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers that it needs tapped."""
        ...

    @property
    def tree(self) -> TreeShape | None:
        """What its trees are like; None: it guesses chains."""
        ...

    @property
    def draft_vocab_size(self) -> int:
        """Tokens Vd that it can guess, where it can draw guesses for rejection sampling (`DraftProbs`); else 0."""
        ...

    @property
    def token_bytes(self) -> int:
        """What each token of the KV pool takes beside its KV."""
        ...

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer[Any]:
        """Make it runnable."""
        ...


@dataclass(frozen=True)
class Method:
    """A drafting method."""

    name: str
    key_lookahead: int  # tokens after a position that its draft KV depends on; 1: cache keys are bigrams
    load: Callable[[SpecSettings, LoadedTarget, Progress], LoadedProposer]
    is_self_drafting: bool = False  # its proposer is a `SelfDrafting`


@dataclass(frozen=True)
class NoDraft:
    """Nothing is loaded: plain decoding, or guesses that need no weights."""

    make: Callable[[EngineShape], Proposer[Any]] = lambda shape: NoProposer()
    kv_shape: KVShape = KVShape(0, 0, 0)
    num_bytes: int = 0
    work: ForwardWork = ForwardWork()
    extend_work: ForwardWork = ForwardWork()
    aux_layers: tuple[int, ...] = ()
    tree: TreeShape | None = None
    draft_vocab_size: int = 0
    token_bytes: int = 0

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer[Any]:
        return self.make(shape)


@dataclass(frozen=True)
class ChainDraft:
    """A head that drafts a chain, one step per guess."""

    head: LoadedDraft
    num_steps: int
    tree: TreeShape | None = None
    token_bytes: int = 0

    @property
    def kv_shape(self) -> KVShape:
        return self.head.kv_shape

    @property
    def num_bytes(self) -> int:
        return self.head.num_bytes

    @property
    def draft_vocab_size(self) -> int:
        return self.head.draft_vocab_size

    @property
    def work(self) -> ForwardWork:
        return self.head.work

    @property
    def extend_work(self) -> ForwardWork:
        return self.head.extend_work

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.head.aux_layers

    def attach(self, cache: KVCache, shape: EngineShape) -> AutoregressiveProposer:
        head = self.head.attach(cache, shape.num_positions, shape.attention)
        aux_size = max(1, len(self.head.aux_layers)) * shape.hidden_size
        deferred = DeferredRows.allocate(shape.num_rows, shape.max_deferred, aux_size, shape.dtype, shape.device)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, self.num_steps, head.target_ids)
        return AutoregressiveProposer(head, shape.page_size, deferred, shape.probs)

    def drafter(self, cache: KVCache, shape: EngineShape) -> Drafter[Tensor, Normed]:
        return self.attach(cache, shape)


@dataclass(frozen=True)
class SmallModelDraft:
    """A language model that drafts a chain, one step per guess."""

    draft: LanguageDraftWeights
    num_steps: int
    aux_layers: tuple[int, ...] = ()
    tree: TreeShape | None = None
    token_bytes: int = 0

    @property
    def kv_shape(self) -> KVShape:
        return self.draft.kv_shape

    @property
    def num_bytes(self) -> int:
        return self.draft.num_bytes

    @property
    def draft_vocab_size(self) -> int:
        return len(self.draft.target_ids)

    @property
    def work(self) -> ForwardWork:
        return self.draft.work

    @property
    def extend_work(self) -> ForwardWork:
        """The first draft step, as if it had a window's rows: it has two, in the widest window and any other."""
        work, width = self.draft.work, self.num_steps + 1
        return replace(work, row_flop=2 * work.row_flop // width, pair_flop=2 * work.pair_flop // width)

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
    draft_vocab_size: int = 0  # trees are judged by no draft's probabilities
    token_bytes: int = 0

    @property
    def kv_shape(self) -> KVShape:
        return self.chain.kv_shape

    @property
    def num_bytes(self) -> int:
        return self.chain.num_bytes

    @property
    def work(self) -> ForwardWork:
        return self.chain.work

    @property
    def extend_work(self) -> ForwardWork:
        """Of the rows that a step may commit, which a language model reads as any others."""
        return self.chain.extend_work if isinstance(self.chain, ChainDraft) else self.chain.work

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.chain.aux_layers

    @property
    def tree(self) -> TreeShape:
        return self.branching.shape

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer[Any]:
        drafter: Drafter[Any, Any] = self.chain.drafter(cache, shape)
        if self.branching.topk > len(drafter.target_ids):
            raise ConfigError(
                "speculative_eagle_topk", f"a draft of {len(drafter.target_ids)} tokens has no more children for a node"
            )
        return TreeProposer(drafter, self.branching, shape.scratch_start)


@dataclass(frozen=True)
class MultiLayerDraft:
    """MTP layers that draft a chain, each its own guess."""

    layers: MtpLayersWeights
    aux_layers: tuple[int, ...] = ()
    tree: TreeShape | None = None
    token_bytes: int = 0

    @property
    def kv_shape(self) -> KVShape:
        return self.layers.kv_shape

    @property
    def num_bytes(self) -> int:
        return self.layers.num_bytes

    @property
    def draft_vocab_size(self) -> int:
        return self.layers.layers[0].draft_vocab_size

    @property
    def work(self) -> ForwardWork:
        return self.layers.work

    @property
    def extend_work(self) -> ForwardWork:
        return self.layers.work

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer[Any]:
        layers, num_layers = self.layers.attach(cache, shape.num_positions, shape.attention), len(self.layers.layers)
        num_rows = rows_to_remember(num_layers, num_layers + 1, shape.max_deferred)
        recent = RecentRows.allocate(shape.num_rows, num_rows, shape.hidden_size, shape.dtype, shape.device)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, num_layers, layers.target_ids)
        return MultiLayerProposer(layers, shape.page_size, recent, shape.max_deferred, shape.probs)


def _branching(chain: ChainDraft | SmallModelDraft, spec: SpecSettings) -> LoadedProposer:
    """The same, or trees of it."""
    return chain if spec.topk == 1 else TreeDraft(chain, Branching(spec.num_steps, spec.topk))


def _load_nothing(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return NoDraft()


def _load_eagle3(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() gives every drafting method its path"
    like = target.embedding
    head = load_eagle3(spec.draft_path, target, like.dtype, like.device, progress, spec.draft_load_format)
    return _branching(ChainDraft(head, spec.num_steps), spec)


def _load_eagle(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() gives every drafting method its path"
    like = target.embedding
    head = load_eagle(
        spec.draft_path, target, like.dtype, like.device, progress, spec.draft_load_format, spec.token_map
    )
    return _branching(ChainDraft(head, spec.num_steps), spec)


def _load_standalone(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() gives every drafting method its path"
    draft = load_language_draft(spec.draft_path, target, progress, spec.draft_load_format, spec.token_map)
    return _branching(SmallModelDraft(draft, spec.num_steps), spec)


def _load_mtp(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() names the target's own checkpoint where no other is named"
    like = target.embedding
    head = load_mtp(spec.draft_path, target, like.dtype, like.device, progress, spec.draft_load_format, spec.token_map)
    return _branching(ChainDraft(head, spec.num_steps), spec)


def _load_mtp_layers(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() names the target's own checkpoint where no other is named"
    layers = load_mtp_layers(spec.draft_path, target, spec.num_steps, progress, spec.draft_load_format)
    return MultiLayerDraft(layers)


def _load_ngram(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return NgramDraft.of(spec.ngram, spec.width - 1, target.embedding.device)


METHODS = (
    Method("NONE", key_lookahead=0, load=_load_nothing),
    Method("EAGLE", key_lookahead=1, load=_load_eagle),
    Method("EAGLE3", key_lookahead=1, load=_load_eagle3),
    Method("NEXTN", key_lookahead=1, load=_load_mtp),
    Method("STANDALONE", key_lookahead=0, load=_load_standalone),
    Method("NGRAM", key_lookahead=0, load=_load_ngram, is_self_drafting=True),
)


def method_of(spec: SpecSettings) -> Method:
    """The record that the settings mean. Raises: ConfigError."""
    if spec.multi_layer:  # the last layer's rows depend on the token of its own guess
        return Method(spec.method, key_lookahead=spec.num_steps, load=_load_mtp_layers)
    return method_named(spec.method)


def method_named(name: str) -> Method:
    """Look a method up, or import it. Raises: ConfigError naming the known ones, or what is wrong with another."""
    if is_own_method(name):
        return _imported(name)
    for method in METHODS:
        if method.name == name:
            return method
    raise ConfigError("speculative_algorithm", f"must be one of {', '.join(m.name for m in METHODS)}, got {name!r}")


def _imported(name: str) -> Method:
    """The `Method` that a module outside of this package has by that name."""
    place, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise ConfigError(
            "speculative_algorithm", f"{name}: {error}; install it, or put its directory on PYTHONPATH"
        ) from None
    found = getattr(module, attribute, None)
    if not isinstance(found, Method):
        raise ConfigError("speculative_algorithm", f"{name}: {place} has no {__name__}.Method of that name")
    return found
