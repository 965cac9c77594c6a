"""Tiny random EAGLE heads for tests, in memory (see tests/support/tiny/models.py).

A head made with `agree=True` hands on the embedding of its row's token, a little disturbed: it knows the target's
embedding and head but not its layers, so it is right about every second time.
"""

from typing import Any

import torch
from torch import Tensor

from overlap_spec.models.drafts.eagle import EagleConfig, EagleWeights, canonical_name, load_eagle
from overlap_spec.models.interfaces import LoadedTarget
from support.tiny.layouts import final_norm
from support.tiny.models import TinyCheckpoint, _layer, _normal, _open, head_config


def tiny_eagle(seed: int, target: TinyCheckpoint, *, agree: bool = True, **changes: Any) -> TinyCheckpoint:
    """A head for `target` in the common layout: fc with bias, no input_layernorm in the first layer, no norm."""
    random = torch.Generator().manual_seed(seed)
    hidden = target.config["hidden_size"]
    config = head_config(target) | {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1} | changes
    strength = 0.1 if agree else 1.0
    tensors = {
        "fc.weight": _normal(random, strength * (2 * hidden) ** -0.5, hidden, 2 * hidden),
        "fc.bias": _normal(random, strength, hidden),
    }
    if agree:
        tensors["fc.weight"][:, :hidden] += torch.eye(hidden, dtype=torch.float64)
    for index in range(config["num_hidden_layers"]):
        tensors |= _layer(config, f"layers.{index}", hidden, random, strength)
    del tensors["layers.0.input_layernorm.weight"]
    if agree:  # the target's norm multiplies by its weight what the head hands on as it is
        tensors["fc.weight"] *= final_norm(target.config, target.tensors)[:, None]
    return TinyCheckpoint(config, tensors)


def load_tiny_eagle(checkpoint: TinyCheckpoint, target: LoadedTarget, target_ids: Tensor | None = None) -> EagleWeights:
    """Through the real loader, from memory, in the target's dtype."""
    config, like = EagleConfig.from_hf(checkpoint.config, "memory/config.json"), target.embedding
    source = _open(checkpoint, canonical_name, like.dtype, like.device)
    return load_eagle(config, source, target, target_ids)
