"""An ordinary language model as draft: any family that can be a target.

Draft and target share token ids, but not always the number of them: models of one family pad their vocabularies
differently. The draft guesses ids that both have, and reads an id that only the target has as its own last one, which
costs acceptance where it happens and nothing else.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.config import DUMMY, ModelFiles
from overlap_spec.config.draft_kind import DraftKind, draft_kind
from overlap_spec.errors import CheckpointError
from overlap_spec.hub.json_file import read_json
from overlap_spec.models.drafts.token_map import read_token_map
from overlap_spec.models.interfaces import (
    DraftProfile,
    LazyLogits,
    LoadedTarget,
    Progress,
    RowBatch,
    TargetModel,
    TargetOutput,
)
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.linear import HeadLogits, Linear
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.loading.sources import open_directory


@dataclass(frozen=True)
class LanguageDraftWeights:
    """A loaded draft, before its KV cache exists. `head` and `target_ids` are what it may guess."""

    model: LoadedTarget
    head: Linear  # [Vd, H]
    target_ids: Tensor  # [Vd] i64
    knows_all_ids: bool  # of the target's

    @classmethod
    def of(cls, model: LoadedTarget, target_vocab_size: int, wanted: Tensor | None = None) -> "LanguageDraftWeights":
        """Keep the part of the head that the target knows, and of that what is wanted. Shapes: wanted [N] i64."""
        knows_all, device = target_vocab_size <= model.vocab_size, model.embedding.device
        if wanted is not None:
            ids = wanted[wanted < model.vocab_size].to(device)
            return cls(model, Linear(model.head.weight[ids]), ids, knows_all)
        shared = min(model.vocab_size, target_vocab_size)
        head = model.head if shared == model.vocab_size else Linear(model.head.weight[:shared])
        return cls(model, head, torch.arange(shared, device=device), knows_all)

    @property
    def profile(self) -> DraftProfile:
        """Gathered rows of the head count beside the weights; absorbing committed tokens is a forward."""
        whole, own, work = self.model.head.weight, self.head.weight, self.model.work
        is_gathered = own.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()
        left_out = whole.nbytes - own.nbytes
        work = replace(
            work,
            weight_bytes=work.weight_bytes - left_out,
            head_flop=work.head_flop - 2 * left_out // whole.itemsize,
        )
        return DraftProfile(
            kv_shape=self.model.kv_shape,
            num_bytes=self.model.num_bytes + (own.nbytes if is_gathered else 0),
            work=work,
            extend_work=work,
            draft_vocab_size=len(self.target_ids),
        )

    def attach(
        self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION
    ) -> "LanguageDraft":
        """Make it runnable; it has the page ids of its target, in a cache of its own."""
        return LanguageDraft(self, self.model.attach(cache, num_positions, attention=attention))


class LanguageDraft:
    """`SmallModel` with weights and a cache."""

    def __init__(self, weights: LanguageDraftWeights, model: TargetModel) -> None:
        self.target_ids = weights.target_ids
        self._head = weights.head
        self._knows_all_ids = weights.knows_all_ids
        self._model = model

    def forward(self, tokens: Tensor, rows: RowBatch) -> TargetOutput:
        """Row at position p holds the token of p. Shapes: tokens [T] i64, the target's ids. Sync: never on CUDA."""
        known = tokens if self._knows_all_ids else tokens.clamp(max=self._model.vocab_size - 1)
        return self._model.forward(known, rows)

    def logits(self, hidden: Tensor | Normed) -> LazyLogits:
        """Shapes: hidden [R, H] -> logits [R, Vd]."""
        return HeadLogits(self._head, hidden)


def load_language_draft(
    directory: str,
    target: LoadedTarget,
    progress: Progress,
    load_format: str = "auto",
    token_map: str | None = None,
) -> LanguageDraftWeights:
    """Load a draft in its target's dtype, where that is. `token_map`: file of the tokens that it may guess (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint is, if no language model.
    """
    path, like = Path(directory), target.embedding
    config = read_json(path / "config.json")
    if load_format != DUMMY:
        _refuse_heads(path, load_format)
    files = ModelFiles(
        weights=directory,
        config=config,
        tokenizer_dir=None,
        eos_token_ids=(),
        context_length=0,  # the target's counts
        vocab_size=0,  # the weights' counts
        load_format=load_format,
    )
    wanted = None if token_map is None else read_token_map(token_map, target.vocab_size)
    return LanguageDraftWeights.of(load_target(files, like.dtype, like.device, progress), target.vocab_size, wanted)


def _refuse_heads(path: Path, load_format: str) -> None:
    kind = draft_kind(open_directory(path, load_format).shapes())
    if kind is not DraftKind.LANGUAGE_MODEL:
        raise CheckpointError(f"{path}: expected {DraftKind.LANGUAGE_MODEL.value}, but this looks like {kind.value}")
