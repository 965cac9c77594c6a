"""Tiny DFlash drafts for tests, in memory: random, or made to find the root.

A draft made with `agree=True` brings the embedding of the block's root to every mask: it knows the target's embedding
and head but not its layers, so its first guess is right about every second time, and a later one where tokens repeat.
"""

from typing import Any

import torch
from torch import Tensor

from overlap_spec.models.drafts.dflash import DFlashConfig, DFlashWeights, load_weights
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.loading.parts import canonical_name
from support.reference.dflash import ReferenceDFlash
from support.reference.trees import BlockDrafter
from support.tiny.layouts import around_one, final_norm
from support.tiny.models import TinyCheckpoint, _layer, _normal, _open, head_config

MASK = 5
SHARPNESS = 6.0  # of attention to the root
SHARE = 4.0  # of the root's embedding in what a mask becomes


def tiny_dflash(
    seed: int,
    target: TinyCheckpoint,
    *,
    agree: bool = True,
    layers: int = 2,
    block_size: int = 16,
    aux_layers: tuple[int, ...] = (0, 1),
    **changes: Any,
) -> TinyCheckpoint:
    """A draft for `target` in z-lab's layout. `changes` go into config.json."""
    random = torch.Generator().manual_seed(seed)
    hidden = target.config["hidden_size"]
    config = head_config(target) | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "num_target_layers": target.config["num_hidden_layers"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 2,
        "block_size": block_size,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(aux_layers)},
        "sliding_window": None,
        "attention_bias": False,
    }
    config |= changes
    fused = len(aux_layers) * hidden
    tensors = {
        "fc.weight": _normal(random, fused**-0.5, hidden, fused),
        "hidden_norm.weight": around_one(random, hidden),
        "norm.weight": around_one(random, hidden),
    }
    for index in range(layers):
        like = config | {"architectures": ["Qwen3ForCausalLM"]}
        tensors |= _layer(like, f"layers.{index}", hidden, random, 0.05 if agree else 1.0)
    if agree:
        _find_roots(target, tensors, hidden, random)
    return TinyCheckpoint(config, tensors)


def load_tiny_dflash(checkpoint: TinyCheckpoint, target: LoadedTarget, num_rows: int) -> DFlashWeights:
    """Through the real loader, from memory, in the target's dtype."""
    config, like = DFlashConfig.from_hf(checkpoint.config, "memory/config.json", target), target.embedding
    return load_weights(config, _open(checkpoint, canonical_name, like.dtype, like.device), target, num_rows)


def reference_of(checkpoint: TinyCheckpoint, target: TinyCheckpoint, dtype: torch.dtype) -> ReferenceDFlash:
    """The formula with these tensors, and the embedding and head of a Llama."""
    tensors = {name: tensor.to(dtype) for name, tensor in checkpoint.tensors.items()}
    shared = (target.tensors[name].to(dtype) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    return ReferenceDFlash(tensors, checkpoint.config, *shared)


def drafter_of(checkpoint: TinyCheckpoint, target: TinyCheckpoint, prompt: list[int]) -> BlockDrafter:
    """The formula, in float64, as what trees are grown from."""
    draft = reference_of(checkpoint, target, torch.float64)

    def logits_of(tokens: list[int], aux: Tensor, num_guesses: int) -> Tensor:
        root, length = torch.tensor(tokens[-1:]), torch.tensor([len(tokens) - 1])
        return draft.logits(aux[None], length, root, num_guesses + 1)[0, 1:]

    return BlockDrafter(draft.aux_layers, logits_of, prompt)


def _find_roots(target: TinyCheckpoint, tensors: dict[str, Tensor], hidden: int, random: torch.Generator) -> None:
    """Make the first layer attend to the root: of two heads that look in opposite directions, one finds it.

    A mask has no key and no value, and those of the context are small.
    """
    half, name = hidden // 2, "layers.0.self_attn"
    tensors["layers.0.input_layernorm.weight"] = torch.ones(hidden, dtype=torch.float64)
    mask = target.tensors["model.embed_tokens.weight"][MASK]
    mask = mask / mask.norm()
    without_mask = torch.eye(hidden, dtype=torch.float64) - mask[:, None] * mask
    slowest = torch.zeros(half, dtype=torch.float64)
    slowest[-1] = 1.0  # it hardly turns with the position
    seen = without_mask @ _normal(random, 1.0, hidden)
    tensors[f"{name}.k_proj.weight"] = torch.cat([slowest[:, None] * seen] * 2)
    tensors[f"{name}.q_proj.weight"] = torch.cat([sign * slowest[:, None] * mask for sign in (1, -1, 1, -1)])
    tensors[f"{name}.v_proj.weight"] = without_mask
    identity = torch.eye(hidden, dtype=torch.float64) * SHARE
    first, second = identity[:, :half], identity[:, half:]
    tensors[f"{name}.o_proj.weight"] = torch.cat((first, first, second, second), 1)
    tensors[f"{name}.q_norm.weight"] = torch.full((half,), SHARPNESS, dtype=torch.float64)
    tensors["hidden_norm.weight"] = tensors["hidden_norm.weight"] * 2e-3
    tensors["norm.weight"] = final_norm(target.config, target.tensors)
