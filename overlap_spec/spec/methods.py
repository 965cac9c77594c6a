"""The table of drafting methods: the one place, beside `config.py`, that knows their names.

A method is a record: what its prefix-cache keys depend on, and how its proposer is loaded. Nothing else in the
engine asks which method runs. Not here: what the proposers do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from overlap_spec.config import SpecSettings
from overlap_spec.errors import ConfigError
from overlap_spec.models.interfaces import LoadedDraft, LoadedTarget, Progress
from overlap_spec.models.kv_cache import KVCache, KVShape
from overlap_spec.models.language_draft import LanguageDraftWeights, load_language_draft
from overlap_spec.models.loader import load_eagle, load_eagle3, load_mtp
from overlap_spec.models.work import ForwardWork
from overlap_spec.spec.autoregressive import AutoregressiveProposer, DeferredRows
from overlap_spec.spec.coins import DraftProbs
from overlap_spec.spec.interfaces import Proposer
from overlap_spec.spec.plain import NoProposer
from overlap_spec.spec.standalone import RecentTokens, StandaloneProposer


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

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer:
        """Make it runnable."""
        ...


@dataclass(frozen=True)
class Method:
    """A drafting method."""

    name: str
    key_lookahead: int  # 1 if draft KV at a position depends on the next token: cache keys are bigrams
    load: Callable[[SpecSettings, LoadedTarget, Progress], LoadedProposer]


@dataclass(frozen=True)
class NoDraft:
    """Plain decoding loads nothing."""

    kv_shape: KVShape = KVShape(0, 0, 0)
    num_bytes: int = 0
    work: ForwardWork = ForwardWork()
    extend_work: ForwardWork = ForwardWork()
    aux_layers: tuple[int, ...] = ()

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer:
        return NoProposer()


@dataclass(frozen=True)
class ChainDraft:
    """A head that drafts a chain, one step per guess."""

    head: LoadedDraft
    num_steps: int

    @property
    def kv_shape(self) -> KVShape:
        return self.head.kv_shape

    @property
    def num_bytes(self) -> int:
        return self.head.num_bytes

    @property
    def work(self) -> ForwardWork:
        return self.head.work

    @property
    def extend_work(self) -> ForwardWork:
        return self.head.extend_work

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self.head.aux_layers

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer:
        head = self.head.attach(cache, shape.num_positions)
        tap_size = max(1, len(self.head.aux_layers)) * shape.hidden_size
        deferred = DeferredRows.allocate(shape.num_rows, shape.max_deferred, tap_size, shape.dtype, shape.device)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, self.num_steps, head.target_ids)
        return AutoregressiveProposer(head, shape.page_size, deferred, shape.probs)


@dataclass(frozen=True)
class SmallModelDraft:
    """A language model that drafts a chain, one step per guess."""

    draft: LanguageDraftWeights
    num_steps: int
    aux_layers: tuple[int, ...] = ()

    @property
    def kv_shape(self) -> KVShape:
        return self.draft.kv_shape

    @property
    def num_bytes(self) -> int:
        return self.draft.num_bytes

    @property
    def work(self) -> ForwardWork:
        return self.draft.work

    @property
    def extend_work(self) -> ForwardWork:
        """The first draft step, as if it had a window's rows: it has two, in the widest window and any other."""
        work, width = self.draft.work, self.num_steps + 1
        return replace(work, row_flop=2 * work.row_flop // width, pair_flop=2 * work.pair_flop // width)

    def attach(self, cache: KVCache, shape: EngineShape) -> Proposer:
        recent = RecentTokens.allocate(shape.num_rows, shape.max_deferred, shape.device)
        model = self.draft.attach(cache, shape.num_positions)
        if shape.probs is not None:
            shape.probs.allocate(shape.num_rows, self.num_steps, model.target_ids)
        return StandaloneProposer(model, shape.page_size, recent, shape.probs)


def _load_nothing(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return NoDraft()


def _load_eagle3(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() gives every drafting method its path"
    like = target.embedding
    head = load_eagle3(spec.draft_path, target, like.dtype, like.device, progress, spec.draft_load_format)
    return ChainDraft(head, spec.num_steps)


def _load_eagle(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() gives every drafting method its path"
    like = target.embedding
    head = load_eagle(
        spec.draft_path, target, like.dtype, like.device, progress, spec.draft_load_format, spec.token_map
    )
    return ChainDraft(head, spec.num_steps)


def _load_standalone(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() gives every drafting method its path"
    draft = load_language_draft(spec.draft_path, target, progress, spec.draft_load_format, spec.token_map)
    return SmallModelDraft(draft, spec.num_steps)


def _load_mtp(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    assert spec.draft_path is not None, "resolve() names the target's own checkpoint where no other is named"
    like = target.embedding
    head = load_mtp(spec.draft_path, target, like.dtype, like.device, progress, spec.draft_load_format, spec.token_map)
    return ChainDraft(head, spec.num_steps)


METHODS = (
    Method("NONE", key_lookahead=0, load=_load_nothing),
    Method("EAGLE", key_lookahead=1, load=_load_eagle),
    Method("EAGLE3", key_lookahead=1, load=_load_eagle3),
    Method("NEXTN", key_lookahead=1, load=_load_mtp),
    Method("STANDALONE", key_lookahead=0, load=_load_standalone),
)


def method_named(name: str) -> Method:
    """Look a method up. Raises: ConfigError naming the known ones."""
    for method in METHODS:
        if method.name == name:
            return method
    raise ConfigError("speculative_algorithm", f"must be one of {', '.join(m.name for m in METHODS)}, got {name!r}")
