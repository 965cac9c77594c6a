"""An ordinary language model as draft: any family that can be a target.

Draft and target share token ids, but may have different numbers of them: models of one family pad their vocabularies
differently. The draft guesses only ids that both have. It reads an id that only the target has as its own last id; this
costs acceptance, but the output stays exact.
"""

from dataclasses import dataclass, replace

import torch
from overlap_spec_kernels import Normed
from torch import Tensor

from overlap_spec.config import ModelFiles
from overlap_spec.config.speculation import DraftKind, keeps_states
from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import (
    DraftProfile,
    LazyLogits,
    LoadedTarget,
    RowBatch,
    TargetModel,
    TargetOutput,
)
from overlap_spec.models.kv_cache import KVCache
from overlap_spec.models.layers.attention_choice import DEFAULT_ATTENTION, AttentionChoice
from overlap_spec.models.layers.linear import AnyLinear, HeadLogits
from overlap_spec.models.loading.loader import load_target
from overlap_spec.models.loading.sources import DraftSource


@dataclass(frozen=True)
class LanguageDraftWeights:
    """A loaded draft, before its KV cache exists. `head` and `target_ids` cover the tokens that it may guess."""

    model: LoadedTarget
    head: AnyLinear  # [Vd, H]
    gathered_bytes: int  # memory of `head` if it is a copy of rows of the model's head
    target_ids: Tensor  # [Vd] i64
    knows_all_ids: bool  # the draft has every id of the target

    @classmethod
    def of(cls, model: LoadedTarget, target_vocab_size: int, wanted: Tensor | None = None) -> "LanguageDraftWeights":
        """Keep the rows of the head whose ids the target has and `wanted` names. Shapes: wanted [N] i64."""
        knows_all, device = target_vocab_size <= model.vocab_size, model.embedding.device
        if wanted is not None:
            ids = wanted[wanted < model.vocab_size].to(device)
            head = model.head.rows(ids)
            return cls(model, head, head.num_bytes, ids, knows_all)
        shared = min(model.vocab_size, target_vocab_size)
        head = model.head if shared == model.vocab_size else model.head.rows(slice(shared))
        return cls(model, head, 0, torch.arange(shared, device=device), knows_all)

    @property
    def profile(self) -> DraftProfile:
        """Memory includes gathered rows of the head. Extending over committed tokens is one forward."""
        work, whole, own = self.model.work, self.model.head.work.as_head(), self.head.work.as_head()
        work = replace(
            work,
            weight_bytes=work.weight_bytes - whole.weight_bytes + own.weight_bytes,
            head_flop=work.head_flop - whole.head_flop + own.head_flop,
        )
        return DraftProfile(
            kv_shape=self.model.kv_shape,
            num_bytes=self.model.num_bytes + self.gathered_bytes,
            work=work,
            extend_work=work,
            draft_vocab_size=len(self.target_ids),
            reads_hidden=False,
            reads_roots=True,
        )

    def attach(
        self, cache: KVCache, num_positions: int, attention: AttentionChoice = DEFAULT_ATTENTION
    ) -> "LanguageDraft":
        """Join the weights with a KV cache of the draft's own, which uses the target's page ids."""
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


def load_language_draft(source: DraftSource, target: LoadedTarget) -> LanguageDraftWeights:
    """Load a draft, of any architecture that can be a target.

    Raises: CheckpointError naming file, tensor, found and expected; or what the checkpoint is, if no language model.
    """
    config = source.config()
    if keeps_states(config):
        raise CheckpointError(
            f"{source.origin}: a model with a recurrent state cannot draft yet; give one whose layers all attend"
        )
    source.refuse_unless(DraftKind.LANGUAGE_MODEL)
    files = ModelFiles(
        weights=source.path,
        config=config,
        tokenizer_dir=None,
        eos_token_ids=(),
        context_length=0,  # the target's applies
        vocab_size=0,  # the weights' applies
        load_format=source.load_format,
        quantization=source.quantization,
    )
    wanted = source.target_ids(target)
    return LanguageDraftWeights.of(
        load_target(files, source.dtype, source.device, source.progress), target.vocab_size, wanted
    )
