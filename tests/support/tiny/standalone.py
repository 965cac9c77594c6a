"""A tiny language model that drafts for a tiny target (see tests/support/tiny/models.py).

It has the target's embedding, norm and head, and one layer of its own, narrower: it is right about every second time.
"""

from typing import Any

from torch import Tensor

from overlap_spec.models.drafts.language_draft import LanguageDraftWeights
from overlap_spec.models.interfaces import LoadedTarget
from support.tiny.layouts import final_norm
from support.tiny.models import TinyCheckpoint, load_tiny_target, tiny_target

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def tiny_language_draft(
    seed: int, target: TinyCheckpoint, *, vocab: int | None = None, **config: Any
) -> TinyCheckpoint:
    """`vocab`: ids that the draft has, if not the target's; more of them mean nothing."""
    size, hidden = target.config["vocab_size"], target.config["hidden_size"]
    narrow = {"num_attention_heads": 2, "num_key_value_heads": 1}
    draft = tiny_target(seed, hidden=hidden, vocab=vocab or size, layers=1, **(narrow | config))
    head = target.tensors.get(HEAD, target.tensors[EMBEDDING])
    draft.tensors[NORM] = final_norm(target.config, target.tensors)
    for name, known in ((EMBEDDING, target.tensors[EMBEDDING]), (HEAD, head)):
        shared = min(size, len(draft.tensors[name]))
        draft.tensors[name][:shared] = known[:shared]
    return draft


def load_tiny_language_draft(
    checkpoint: TinyCheckpoint, target: LoadedTarget, target_ids: Tensor | None = None
) -> LanguageDraftWeights:
    """Through the real loader of targets, from memory, in the target's dtype."""
    like = target.embedding
    model = load_tiny_target(checkpoint, like.dtype, like.device)
    return LanguageDraftWeights.of(model, target.vocab_size, target_ids)
