"""Tiny checkpoints whose every tensor is drawn at random, and the logits of a prompt by a target."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overlap_spec.config import EngineConfig
from overlap_spec.hub import resolve_model
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.loader import load_target
from support.paged_rows import Paged
from support.tiny.families import TINY_FAMILIES
from support.tiny.layouts import is_added_to_one
from support.tiny.models import CPU, TinyCheckpoint, load_tiny_target, tiny_target

TOKENS = (torch.arange(30) * 37 + 5) % 128  # longer than windows and yarn's original lengths in `TINY_FAMILIES`


def random_checkpoint(family: str, **changes: Any) -> TinyCheckpoint:
    """Every tensor is drawn at random, norms around 1 with a deviation of 0.3; layers add as much as they are given."""
    found = tiny_target(3, context=1.0, **TINY_FAMILIES[family] | changes)
    random = torch.Generator().manual_seed(11)
    norms = {
        name: 0.3 * torch.randn(tensor.shape, generator=random, dtype=torch.float64)
        for name, tensor in found.tensors.items()
        if name.endswith("norm.weight")
    }
    norms = {name: norm if is_added_to_one(found.config, name) else 1 + norm for name, norm in norms.items()}
    return TinyCheckpoint(found.config, found.tensors | norms)


def loaded(directory: Path, dtype: torch.dtype = torch.float32) -> LoadedTarget:
    files = resolve_model(EngineConfig(model_path=str(directory), skip_tokenizer_init=True))
    return load_target(files, dtype, CPU)


def logits_of(weights: LoadedTarget, dtype: torch.dtype = torch.float32) -> Tensor:
    paged = Paged(num_requests=1)
    cache = paged.cache(weights.kv_shape, dtype)
    target = weights.attach(cache, 64)
    return target.logits(target.forward(TOKENS, paged.rows([len(TOKENS)])).hidden).compute()


def without_effect(checkpoint: TinyCheckpoint, names: Iterable[str] | None = None) -> list[str]:
    """Of its tensors, or of these, those whose zeros change no logit in float64."""
    whole = logits_of(load_tiny_target(checkpoint), torch.float64)

    def without(name: str) -> Tensor:
        tensors = checkpoint.tensors | {name: torch.zeros_like(checkpoint.tensors[name])}
        return logits_of(load_tiny_target(TinyCheckpoint(checkpoint.config, tensors)), torch.float64)

    return [name for name in names or checkpoint.tensors if torch.equal(without(name), whole)]
