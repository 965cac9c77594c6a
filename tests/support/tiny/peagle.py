"""Tiny P-EAGLE heads for tests, in memory: random, or made to know what the target's head says of a token.

Of a head made with `agree=True`, a committed row finds its own token, as a tiny EAGLE-3 head's does, and a mask the
token whose embedding it has: its guesses are right where the target says what follows that.
"""

from typing import Any

import torch

from overlap_spec.models.drafts.eagle3 import Eagle3Weights
from overlap_spec.models.interfaces import LoadedTarget
from support.reference.peagle import ReferencePEagle
from support.reference.trees import BlockDrafter
from support.tiny.models import TinyCheckpoint, _normal, load_tiny_draft, tiny_eagle3

MASK = 5


def tiny_peagle(
    seed: int, target: TinyCheckpoint, *, agree: bool = True, layers: int = 2, mask_like: int = 60, **changes: Any
) -> TinyCheckpoint:
    """A head for `target` in SpecForge's layout. `mask_like`: the token whose embedding a mask has, if it agrees."""
    head = tiny_eagle3(seed, target, agree=agree, num_hidden_layers=layers)
    random = torch.Generator().manual_seed(seed + 1)
    config = head.config | {"architectures": ["PEagleDraftModel"], "pard_token": MASK}
    tensors = {}
    for name, tensor in head.tensors.items():
        own = name.replace("midlayer.", "layers.0.")
        tensors[own if own.startswith("layers.0.") else own.replace("hidden_norm", "input_layernorm")] = tensor
    embedding, size = target.tensors["model.embed_tokens.weight"], tensors["fc.weight"].shape[1]
    if agree:
        tensors["embed_tokens.weight"] = embedding.clone()
        tensors["embed_tokens.weight"][MASK] = embedding[mask_like]
    else:
        tensors["embed_tokens.weight"] = _normal(random, 1.0, *embedding.shape)
    tensors["mask_hidden"] = _normal(random, 1.0, 1, 1, size)
    return TinyCheckpoint(config | changes, tensors)


def load_tiny_peagle(checkpoint: TinyCheckpoint, target: LoadedTarget) -> Eagle3Weights:
    """Through the real loader, from memory, in the target's dtype."""
    return load_tiny_draft(checkpoint, target)


def reference_of(checkpoint: TinyCheckpoint, dtype: torch.dtype) -> ReferencePEagle:
    """The formula with these tensors."""
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in checkpoint.tensors.items()
    }
    return ReferencePEagle(tensors, checkpoint.config)


def drafter_of(checkpoint: TinyCheckpoint, prompt: list[int]) -> BlockDrafter:
    """The formula, in float64, as what trees are grown from."""
    head = reference_of(checkpoint, torch.float64)
    layers = head.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    return BlockDrafter(layers, lambda tokens, aux, count: head.logits(tokens[1:], aux, count), prompt, head.token)
