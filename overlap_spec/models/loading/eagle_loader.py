"""Builds an EAGLE head from a checkpoint and its target's weights.

The checkpoint's `fc` and layers are taken; embedding and head are the target's, even if the file has others. Layouts
differ in the prefix `model.`.
"""

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.eagle import EagleConfig, EagleWeights
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.linear import AnyLinear, make_linear
from overlap_spec.models.layers.norm import Norm, RMSNorm
from overlap_spec.models.loading.checkpoint import Weights
from overlap_spec.models.loading.llama_loader import load_layer
from overlap_spec.models.loading.parts import finish, mapped_head
from overlap_spec.models.loading.quantized import take_matrix
from overlap_spec.models.work import count_bytes


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
    finish(checkpoint)
    head, ids = mapped_head(target, target_ids)
    own = count_bytes((fc, layers, ids)) + (0 if head is target.head else head.num_bytes)
    return EagleWeights(target.embedding, fc, layers, unread, head, ids, own)


def _load_fc(config: EagleConfig, checkpoint: Weights) -> AnyLinear:
    hidden = config.llama.hidden_size
    weight = take_matrix(checkpoint, "fc", (hidden, 2 * hidden))
    has_bias = config.fc_bias or "fc.bias" in checkpoint
    return make_linear(weight, checkpoint.take("fc.bias", (hidden,)) if has_bias else None)


def _load_layer(config: EagleConfig, checkpoint: Weights, index: int, unread: RMSNorm) -> PreNormLayer:
    llama = config.llama
    norm: str | Norm = unread if index == 0 else "input_layernorm"
    return load_layer(llama, checkpoint, index, llama.attention_shape(llama.windows[index]), llama.hidden_size, norm)
