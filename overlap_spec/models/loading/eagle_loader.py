"""Builds an EAGLE head from a checkpoint and its target's weights.

Checkpoints bring `fc` and layers; embedding and head are the target's, whatever else is in the file. Layouts differ in
the prefix `model.`.
"""

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.eagle import EagleWeights
from overlap_spec.models.drafts.eagle_config import EagleConfig
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.linear import AnyLinear, Linear, RMSNorm, linear_map
from overlap_spec.models.loading import llama_loader
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.targets.llama import LlamaLayer, count_bytes


def load_eagle(
    config: EagleConfig, checkpoint: Weights, target: LoadedTarget, target_ids: Tensor | None = None
) -> EagleWeights:
    """Take every weight of the head. With `target_ids` [N] i64 it guesses among these tokens alone (FR-Spec).

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    hidden = config.llama.hidden_size
    if hidden != target.hidden_size:
        raise CheckpointError(
            f"{config.llama.origin}: hidden_size {hidden} is not the target's, which is {target.hidden_size}:"
            " the head was trained for another target"
        )
    like = target.embedding
    unread = RMSNorm(torch.ones(hidden, dtype=like.dtype, device=like.device), config.llama.rms_norm_eps)
    fc = _load_fc(config, checkpoint)
    layers = tuple(_load_layer(config, checkpoint, index, unread) for index in range(config.llama.num_layers))
    checkpoint.skip("embed_tokens.weight", "lm_head.weight")
    llama_loader.skip_derived(checkpoint)
    checkpoint.finish()
    head, ids = mapped_head(target, target_ids)
    shared = head.weight is target.head.weight
    own = count_bytes((fc, layers, ids)) + (0 if shared else head.weight.nbytes)
    return EagleWeights(config, target.embedding, fc, layers, unread, head, ids, own)


def mapped_head(target: LoadedTarget, target_ids: Tensor | None) -> tuple[Linear, Tensor]:
    """The rows of the target's head that guesses are made with, gathered once, and the tokens that they stand for.

    Shapes: target_ids [N] i64, None for all -> head [N, H], ids [N] i64 on its device. FR-Spec: Zhao et al. 2025,
    arXiv:2502.14856.
    """
    head, device = target.head, target.head.weight.device
    if target_ids is None:
        return head, torch.arange(target.vocab_size, device=device)
    ids = target_ids.to(device)
    return Linear(head.weight[ids], None if head.bias is None else head.bias[ids]), ids


def _load_fc(config: EagleConfig, checkpoint: Weights) -> AnyLinear:
    hidden = config.llama.hidden_size
    weight = checkpoint.take("fc.weight", (hidden, 2 * hidden))
    has_bias = config.fc_bias or "fc.bias" in checkpoint
    return linear_map(weight, checkpoint.take("fc.bias", (hidden,)) if has_bias else None)


def _load_layer(config: EagleConfig, checkpoint: Weights, index: int, unread: RMSNorm) -> LlamaLayer:
    hidden = config.llama.hidden_size
    if index == 0:
        return llama_loader.load_layer(config.llama, checkpoint, index, hidden, unread)
    return llama_loader.load_layer(config.llama, checkpoint, index, hidden, "input_layernorm")
