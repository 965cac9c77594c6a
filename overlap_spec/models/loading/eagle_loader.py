"""Builds an EAGLE or EAGLE-3 head from a checkpoint and its target's weights.

**EAGLE.** The checkpoint's `fc` and layers are taken; embedding and head are the target's, even if the file has others.
Layouts differ in the prefix `model.`.

**EAGLE-3.** Published layouts differ in the prefix `model.`, in `midlayer` for `layers.0`, and in the tensors that they
leave out because the target has them. The loader checks that the sizes of checkpoint and target agree.
"""

import torch
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.drafts.eagle import EagleConfig, EagleWeights
from overlap_spec.models.drafts.eagle3 import Eagle3Config, Eagle3Fusion, Eagle3Weights
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.decoder import PreNormLayer
from overlap_spec.models.layers.embedding import DraftInput, Embedding
from overlap_spec.models.layers.linear import AnyLinear, Linear, make_linear
from overlap_spec.models.layers.norm import Norm, RMSNorm
from overlap_spec.models.loading import llama_loader, parts
from overlap_spec.models.loading.checkpoint import Weights, type_name
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
    layers = tuple(_load_eagle_layer(config, checkpoint, index, unread) for index in range(config.llama.num_layers))
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


def _load_eagle_layer(config: EagleConfig, checkpoint: Weights, index: int, unread: RMSNorm) -> PreNormLayer:
    llama = config.llama
    norm: str | Norm = unread if index == 0 else "input_layernorm"
    return load_layer(llama, checkpoint, index, llama.attention_shape(llama.windows[index]), llama.hidden_size, norm)


_AUX_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


def canonical_name(name: str) -> str:
    """The canonical name of a weight in any layout."""
    name = parts.canonical_name(name)
    if name.startswith("midlayer."):
        return f"layers.0.{name.removeprefix('midlayer.')}"
    stem, _, rest = name.partition(".")
    return f"fc_norm.{_AUX_NORMS.index(stem)}.{rest}" if stem in _AUX_NORMS else name


def load_eagle3(config: Eagle3Config, checkpoint: Weights, target: LoadedTarget) -> Eagle3Weights:
    """Take every weight of the head; use the target's embedding and head where the checkpoint has none.

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    _check_against_target(config, checkpoint, target)
    fusion = _load_fusion(config, checkpoint)
    hidden_norm = llama_loader.load_norm(config.llama, checkpoint, "layers.0.hidden_norm")
    token_norm = llama_loader.load_norm(config.llama, checkpoint, "layers.0.input_layernorm")
    layers = tuple(
        _load_eagle3_layer(config, checkpoint, index, token_norm) for index in range(config.llama.num_layers)
    )
    norm = llama_loader.load_norm(config.llama, checkpoint, "norm")
    embedding = _load_embedding(config, checkpoint, target)
    head = _load_head(config, checkpoint, target, embedding)
    target_ids = _load_target_ids(checkpoint, head, target)
    checkpoint.skip("t2d")
    parts.finish(checkpoint)
    inputs = DraftInput(embedding, token_norm, hidden_norm)
    own = count_bytes((fusion, inputs, layers, norm, head, target_ids))
    shared = tuple(part for part, whole in ((embedding, target.embedding), (head, target.head)) if part is whole)
    return Eagle3Weights(config, embedding, fusion, inputs, layers, norm, head, target_ids, own - count_bytes(shared))


def _check_against_target(config: Eagle3Config, checkpoint: Weights, target: LoadedTarget) -> None:
    origin = config.llama.origin
    if config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{origin}: the head expects a target of hidden size {config.target_hidden_size}"
            f" (target_hidden_size, else hidden_size), but the target's is {target.hidden_size}"
        )
    if config.aux_layers and "fc.weight" in checkpoint:
        found = checkpoint.shape("fc.weight")
        if found != (config.llama.hidden_size, config.fused_size):
            raise CheckpointError(
                f"{checkpoint.file_of('fc.weight')}: tensor fc.weight: found shape {list(found)}, expected"
                f" {[config.llama.hidden_size, config.fused_size]}: {len(config.aux_layers)} aux layers x"
                f" the target's hidden size {target.hidden_size}"
            )


def _load_fusion(config: Eagle3Config, checkpoint: Weights) -> Eagle3Fusion:
    width, hidden = config.target_hidden_size, config.llama.hidden_size
    norms: tuple[RMSNorm, ...] = ()
    if "fc_norm.0.weight" in checkpoint:
        indices = range(max(len(config.aux_layers), 1))
        eps = config.llama.rms_norm_eps
        norms = tuple(RMSNorm(checkpoint.take(f"fc_norm.{index}.weight", (width,)), eps) for index in indices)
    if config.fused_size == hidden and "fc.weight" not in checkpoint:
        return Eagle3Fusion(norms, None)
    weight = take_matrix(checkpoint, "fc", (hidden, config.fused_size))
    has_bias = config.fc_bias or "fc.bias" in checkpoint
    return Eagle3Fusion(norms, make_linear(weight, checkpoint.take("fc.bias", (hidden,)) if has_bias else None))


def _load_eagle3_layer(config: Eagle3Config, checkpoint: Weights, index: int, token_norm: RMSNorm) -> PreNormLayer:
    """Take one layer. The first reads embedding and features, concatenated; the others are ordinary.

    Their first norm is called `hidden_norm` or `input_layernorm`; if a layer has both, it is `hidden_norm`.
    """
    llama, hidden = config.llama, config.llama.hidden_size
    shape = llama.attention_shape(llama.windows[index])
    if index == 0:
        return llama_loader.load_layer(llama, checkpoint, index, shape, 2 * hidden, token_norm)
    norm = "hidden_norm" if f"layers.{index}.hidden_norm.weight" in checkpoint else "input_layernorm"
    checkpoint.skip(f"layers.{index}.input_layernorm.weight")
    return llama_loader.load_layer(llama, checkpoint, index, shape, hidden, norm)


def _load_embedding(config: Eagle3Config, checkpoint: Weights, target: LoadedTarget) -> Embedding:
    """The target's embedding, unless the head has another width, or uses its own embedding as output."""
    name, hidden = "embed_tokens.weight", config.llama.hidden_size
    if hidden == target.hidden_size and not config.llama.tie_word_embeddings:
        checkpoint.skip(name)
        return target.embedding
    return parts.take_embedding(checkpoint, target.vocab_size, hidden)


def _load_head(config: Eagle3Config, checkpoint: Weights, target: LoadedTarget, embedding: Embedding) -> AnyLinear:
    name, hidden = "lm_head.weight", config.llama.hidden_size
    if config.llama.tie_word_embeddings:
        checkpoint.skip(name)
        return embedding.tied_head()
    if config.draft_vocab_size is not None:
        return Linear(checkpoint.take(name, (config.draft_vocab_size, hidden)))
    if hidden != target.hidden_size:
        raise CheckpointError(
            f"{config.llama.origin}: draft_vocab_size is null, which means the target's head, but that reads"
            f" hidden states of {target.hidden_size} and this head makes {hidden}"
        )
    checkpoint.skip(name)
    return target.head


def _load_target_ids(checkpoint: Weights, head: AnyLinear, target: LoadedTarget) -> Tensor:
    """Draft id -> target id. The checkpoint stores offsets: target id = draft id + d2t[draft id]."""
    rows, device = head.out_features, head.device
    ids = torch.arange(rows)
    if "d2t" not in checkpoint:
        if rows != target.vocab_size:
            raise CheckpointError(
                f"{checkpoint.origin}: tensor d2t is missing: the head guesses {rows} tokens of the target's"
                f" {target.vocab_size}, expected d2t of shape [{rows}]"
            )
        return ids.to(device)
    found = checkpoint.shape("d2t")
    if found != (rows,):
        raise CheckpointError(
            f"{checkpoint.file_of('d2t')}: tensor d2t: found shape {list(found)}, expected [{rows}], one entry per row"
            " of the head"
        )
    offsets = checkpoint.take_raw("d2t", found)
    if offsets.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(
            f"{checkpoint.file_of('d2t')}: tensor d2t: found type {type_name(offsets.dtype)}, expected int64 or int32"
        )
    if offsets.is_meta:
        return offsets.to(torch.int64)
    ids += offsets.to(torch.int64)
    if ids.min() < 0 or ids.max() >= target.vocab_size:
        raise CheckpointError(
            f"{checkpoint.file_of('d2t')}: tensor d2t: found target ids {int(ids.min())} to {int(ids.max())},"
            f" expected 0 to {target.vocab_size - 1}, the target's vocabulary"
        )
    return ids.to(device)
