"""Every drafting method on tiny models: what a ring and a storm run, by name. A method is added by one line."""

from collections.abc import Callable

import torch
from tiny_eagle import load_tiny_eagle, tiny_eagle
from tiny_models import TinyCheckpoint, load_tiny_draft, tiny_eagle3
from tiny_mtp import in_deepseek_layout, load_tiny_mtp, tiny_mtp
from tiny_standalone import load_tiny_language_draft, tiny_language_draft

from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.spec.methods import ChainDraft, LoadedProposer, SmallModelDraft

TinyMethod = Callable[[int, TinyCheckpoint, LoadedTarget, int], LoadedProposer]  # seed, target twice, draft steps


def _eagle3(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return ChainDraft(load_tiny_draft(tiny_eagle3(seed, checkpoint), target), num_steps)


def _eagle(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return ChainDraft(load_tiny_eagle(tiny_eagle(seed, checkpoint), target), num_steps)


def _mapped_eagle(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    random = torch.Generator().manual_seed(seed)
    ids = torch.randperm(target.vocab_size, generator=random)[: target.vocab_size * 3 // 4]  # in no order
    return ChainDraft(load_tiny_eagle(tiny_eagle(seed, checkpoint), target, ids), num_steps)


def _mtp(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return ChainDraft(load_tiny_mtp(tiny_mtp(seed, checkpoint), target), num_steps)


def _standalone(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return SmallModelDraft(load_tiny_language_draft(tiny_language_draft(seed, checkpoint), target), num_steps)


def _smaller_standalone(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    """Of a vocabulary that is padded less than the target's."""
    draft = tiny_language_draft(seed, checkpoint, vocab=target.vocab_size * 7 // 8)
    return SmallModelDraft(load_tiny_language_draft(draft, target), num_steps)


def _nextn(seed: int, checkpoint: TinyCheckpoint, target: LoadedTarget, num_steps: int) -> LoadedProposer:
    return ChainDraft(load_tiny_mtp(in_deepseek_layout(tiny_mtp(seed, checkpoint)), target), num_steps)


# The name of its record in `spec/methods.py`, and how it is made.
TINY_METHODS: dict[str, tuple[str, TinyMethod]] = {
    "EAGLE3": ("EAGLE3", _eagle3),
    "EAGLE": ("EAGLE", _eagle),
    "EAGLE with a token map": ("EAGLE", _mapped_eagle),
    "NEXTN": ("NEXTN", _mtp),
    "NEXTN in DeepSeek's layout": ("NEXTN", _nextn),
    "STANDALONE": ("STANDALONE", _standalone),
    "STANDALONE of fewer tokens": ("STANDALONE", _smaller_standalone),
}
