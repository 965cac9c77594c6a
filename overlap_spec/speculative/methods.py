"""The table of drafting methods that draft with a model: beside `config/speculation.py`, it alone knows their names.

A method is a record: what its prefix-cache keys depend on, how its proposer is loaded, and how its guesses may be
judged. Nothing else in the engine asks which method runs. Methods without a model are features', and are given.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from overlap_spec.config import AcceptSettings, SpecSettings, is_own_method
from overlap_spec.errors import ConfigError
from overlap_spec.models.drafts.assistant import is_assistant, load_assistant
from overlap_spec.models.drafts.dflash import load_dflash
from overlap_spec.models.drafts.dspark import load_dspark
from overlap_spec.models.drafts.language_draft import load_language_draft
from overlap_spec.models.interfaces import DraftHead, LoadedDraft, LoadedTarget, Progress
from overlap_spec.models.loading.loader import load_eagle, load_eagle3, load_mtp, load_mtp_layers
from overlap_spec.models.loading.sources import DraftSource
from overlap_spec.speculative.drafts import (
    ChainDraft,
    LoadedProposer,
    MultiLayerDraft,
    NoDraft,
    SharedKVDraft,
    SmallModelDraft,
    TreeDraft,
)
from overlap_spec.speculative.proposers.block import BlockDraft
from overlap_spec.speculative.proposers.parallel import ParallelDraft
from overlap_spec.speculative.proposers.tree import Branching
from overlap_spec.speculative.verification import VERIFICATIONS, Verification, verification_of

Load = Callable[[SpecSettings, LoadedTarget, Progress], LoadedProposer]


@dataclass(frozen=True)
class Method:
    """A drafting method. Whether it drafts without a model is said by its proposer's type (`SelfDrafting`)."""

    name: str
    key_lookahead: int  # tokens after a position that its draft KV depends on; 1: cache keys are bigrams
    load: Load
    verifications: tuple[Verification, ...] = VERIFICATIONS  # the ways in which its guesses may be judged

    def verification(self, accept: AcceptSettings) -> Verification:
        """The way that the flags ask for. Raises: ConfigError naming a flag that this method refuses."""
        return verification_of(self.name, self.verifications, accept)


def _load_nothing(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return NoDraft()


def _head(load_head: Callable[[DraftSource, LoadedTarget], LoadedDraft[DraftHead]]) -> Load:

    def load(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
        head = load_head(_source(spec, target, progress), target)
        return _chain_or_tree(ChainDraft(head, spec.num_steps), spec)

    return load


def _load_eagle3(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    """Of a head, which makes all guesses in one forward if it has a mask row (P-EAGLE)."""
    head = load_eagle3(_source(spec, target, progress), target)
    if head.mask is None:
        return _chain_or_tree(ChainDraft(head, spec.num_steps), spec)
    return ParallelDraft(head, head.mask, spec.num_steps, _tree_of(spec))


def _load_nextn(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    """Of an MTP layer, or of an assistant, which guesses chains. Raises: as `load_mtp`, ConfigError."""
    source = _source(spec, target, progress)
    if not is_assistant(source.config()):
        return _chain_or_tree(ChainDraft(load_mtp(source, target), spec.num_steps), spec)
    if spec.topk > 1:
        raise ConfigError("speculative_eagle_topk", f"an assistant guesses chains, got {spec.topk}; use 1")
    return SharedKVDraft(load_assistant(source, target), spec.num_steps)


def _load_standalone(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    draft = load_language_draft(_source(spec, target, progress), target)
    return _chain_or_tree(SmallModelDraft(draft, spec.num_steps), spec)


def _load_mtp_layers(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return MultiLayerDraft(load_mtp_layers(_source(spec, target, progress), target, spec.num_steps))


def _load_dflash(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return BlockDraft(load_dflash(_source(spec, target, progress), target, spec.num_steps + 1), _tree_of(spec))


def _load_dspark(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> LoadedProposer:
    return BlockDraft(load_dspark(_source(spec, target, progress), target, spec.num_steps))


def _source(spec: SpecSettings, target: LoadedTarget, progress: Progress) -> DraftSource:
    """Where the draft is. Raises: ConfigError, of a method of one's own that was given none."""
    if spec.draft_path is None:
        raise ConfigError("speculative_draft_model_path", f"{spec.method} needs a draft model: give its directory")
    formats = spec.draft_load_format, spec.token_map, spec.draft_quantization, spec.divides_draft
    return DraftSource.for_target(spec.draft_path, target, progress, *formats)


def _chain_or_tree(chain: ChainDraft | SmallModelDraft, spec: SpecSettings) -> LoadedProposer:
    tree = _tree_of(spec)
    return chain if tree is None else TreeDraft(chain, tree)


def _tree_of(spec: SpecSettings) -> Branching | None:
    """How trees grow; None: guesses are chains."""
    return None if spec.topk == 1 else Branching(spec.num_steps, spec.topk)


METHODS = (
    Method("NONE", key_lookahead=0, load=_load_nothing),
    Method("EAGLE", key_lookahead=1, load=_head(load_eagle)),
    Method("EAGLE3", key_lookahead=1, load=_load_eagle3),
    Method("NEXTN", key_lookahead=1, load=_load_nextn),
    Method("STANDALONE", key_lookahead=0, load=_load_standalone),
    Method("DFLASH", key_lookahead=0, load=_load_dflash),
    Method("DSPARK", key_lookahead=0, load=_load_dspark),
)


def method_of(spec: SpecSettings, given: Sequence[Method] = ()) -> Method:
    """The record that the settings mean. `given`: those of features. Raises: ConfigError."""
    if spec.multi_layer:  # the last layer's rows depend on the token of its own guess
        return Method(spec.method, key_lookahead=spec.num_steps, load=_load_mtp_layers)
    return method_named(spec.method, given)


def method_named(name: str, given: Sequence[Method] = ()) -> Method:
    """Look a method up, or import it. Raises: ConfigError naming the known ones, or what is wrong with another."""
    if is_own_method(name):
        return _imported(name)
    known = (*METHODS, *given)
    for method in known:
        if method.name == name:
            return method
    raise ConfigError("speculative_algorithm", f"must be one of {', '.join(m.name for m in known)}, got {name!r}")


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
