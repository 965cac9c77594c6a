"""Takes the parts that families share from a checkpoint.

Linears with the same input are stacked (query, key and value; gate and up), for fewer and larger products.

Some checkpoints have scales of cached keys and values for each layer. They belong to a cache of 8 bits
(`--kv-cache-dtype`). A cache in the model's dtype needs none, but they are read and checked all the same: a checkpoint
with a broken one is broken.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from overlap_spec_kernels.attention.kv_format import KVScales
from torch import Tensor

from overlap_spec.errors import CheckpointError
from overlap_spec.models.interfaces import LoadedTarget
from overlap_spec.models.layers.attention import AttentionShape
from overlap_spec.models.layers.embedding import DividedEmbedding, DividedHead, Embedding
from overlap_spec.models.layers.linear import AnyLinear, Linear, make_linear
from overlap_spec.models.layers.mlp import GatedMLP, gated_mlp
from overlap_spec.models.layers.norm import WideRMSNorm, wide_dtype
from overlap_spec.models.loading.checkpoint import EMBEDDING, HEAD, Weights
from overlap_spec.models.loading.quantized import is_quantized, is_stored_quantized, take_quantized

log = logging.getLogger(__name__)
DERIVED = ("rotary_emb.inv_freq", "masked_bias")  # buffers that old checkpoints saved; computed from the config


def canonical_name(name: str) -> str:
    """The name without a leading `model.`, which only some checkpoints have, and without what marks the text."""
    return name.removeprefix("model.").removeprefix("language_model.")


def take_embedding(checkpoint: Weights, vocab_size: int, size: int) -> Embedding:
    """The token embedding, or a rank's part of it."""
    if (division := checkpoint.division) is not None:
        weight = checkpoint.take(EMBEDDING, (division.vocabulary.size, size))
        return DividedEmbedding(weight, num_tokens=vocab_size, rank=division.rank)
    return Embedding(checkpoint.take("embed_tokens.weight", (vocab_size, size)))


def take_head(checkpoint: Weights, embedding: Embedding, tied: bool) -> AnyLinear:
    """The head, which shares the embedding's memory if tied."""
    shape = (len(embedding.weight), embedding.size)
    if tied:
        if HEAD in checkpoint:
            _check_tied(checkpoint, checkpoint.take(HEAD, shape), embedding)
        return checkpoint.take_grouped({EMBEDDING: shape}, None) or embedding.tied_head()
    if is_stored_quantized(checkpoint, "lm_head"):
        if checkpoint.division is not None:
            ranks = checkpoint.division.rank.ranks
            raise CheckpointError(f"{checkpoint.origin}: tp_size {ranks}: a head in few bits is not divided yet; use 1")
        return take_quantized(checkpoint, {"lm_head": embedding.vocab_size}, embedding.size)
    try:
        head = checkpoint.take_grouped({HEAD: shape}, None) or Linear(checkpoint.take(HEAD, shape))
    except CheckpointError as error:
        hint = "" if HEAD in checkpoint else ", because tie_word_embeddings is false in config.json"
        raise CheckpointError(f"{error}{hint}") from None
    division = checkpoint.division
    return head if division is None else DividedHead(head, embedding.vocab_size, division.rank)


def _check_tied(checkpoint: Weights, head: Tensor, embedding: Embedding) -> None:
    """A copy of the embedding may be stored beside it. Raises: CheckpointError if it is no copy."""
    if not head.is_meta and not torch.equal(head, embedding.weight):
        raise CheckpointError(
            f"{checkpoint.file_of(HEAD)}: tensor {HEAD}: found other values than those of {EMBEDDING}, expected the"
            " same, because tie_word_embeddings is true in config.json"
        )


def mapped_head(target: LoadedTarget, target_ids: Tensor | None) -> tuple[AnyLinear, Tensor]:
    """The rows of the target's head for the tokens that a draft may guess, gathered once, and those tokens.

    Shapes: target_ids [N] i64, None for all -> head [N, H], ids [N] i64 on its device. FR-Spec: Zhao et al. 2025,
    arXiv:2502.14856.
    """
    if target_ids is None:
        return target.head, torch.arange(target.vocab_size, device=target.head.device)
    ids = target_ids.to(target.head.device)
    return target.head.rows(ids), ids


def take_linear(
    checkpoint: Weights, sizes: dict[str, int], input_size: int, bias: bool = False, order: Tensor | None = None
) -> AnyLinear:
    """Stack linears with the same input. `sizes`: output rows by name. `order`: of all rows; None: as stored.

    Of several ranks sizes are those of this one's part.
    """
    linear = _take_linear(checkpoint, sizes, input_size, bias, order)
    return linear if checkpoint.division is None else checkpoint.division.joined(linear, tuple(sizes))


def _take_linear(
    checkpoint: Weights, sizes: dict[str, int], input_size: int, bias: bool, order: Tensor | None
) -> AnyLinear:
    biases = _biases(checkpoint, sizes) if bias else None
    if is_quantized(checkpoint, sizes):
        linear = take_quantized(checkpoint, sizes, input_size, biases)
        return linear if order is None else linear.rows(order.to(linear.device))
    shapes = {f"{name}.weight": (size, input_size) for name, size in sizes.items()}
    if order is None and (kept := checkpoint.take_grouped(shapes, biases)) is not None:
        return kept
    stacked = _stacked([checkpoint.take(name, shape) for name, shape in shapes.items()])
    if order is not None:
        order = order.to(stacked.device)
        stacked, biases = stacked[order], None if biases is None else biases[order]
    return make_linear(stacked, biases)


def take_qkv(
    checkpoint: Weights, attention: str, shape: AttentionShape, input_size: int, bias: bool = False
) -> tuple[AnyLinear, tuple[int, int, int]]:
    """Stack the projections of queries, keys and values. Returns the output rows of each as well.

    Heads of which a part is rotated have their columns in the order of `rotated_head`.
    """
    keys = shape.num_kv_heads * shape.head_dim
    sizes = (shape.num_heads * shape.head_dim, keys, keys)
    named = {f"{attention}.{part}_proj": size for part, size in zip("qkv", sizes, strict=True)}
    return take_linear(checkpoint, named, input_size, bias, rotated_first(shape)), sizes


def rotated_head(shape: AttentionShape) -> Tensor:
    """The columns of a head in the order in which they are here, as places in the file. Shapes: -> [d] i64.

    Kernels rotate pairs that are half a head apart, over the whole head. So where a part of a head is rotated its pairs
    come first, and the others have angle 0. Queries and keys have the same order, and so the same products:

        in the file   r0 r1 r2 r3 | f0 f1 f2 f3     pairs (r0, r2), (r1, r3); f are fixed
        here          r0 r1 f0 f1 | r2 r3 f2 f3     pairs half a head apart
    """
    half, fixed = shape.rope.head_dim // 2, shape.rope.num_fixed
    first, second, fixed_first, fixed_second = torch.arange(shape.head_dim).split((half, half, fixed, fixed))
    return torch.cat((first, fixed_first, second, fixed_second))


def rotated_first(shape: AttentionShape) -> Tensor | None:
    """The rows of queries, keys and values: heads of the first two as `rotated_head`; None: as they are in the file.

    Shapes: -> [(n + 2 nkv) d] i64.
    """
    if not shape.rope.num_fixed:
        return None
    order, rotated = rotated_head(shape), shape.num_heads + shape.num_kv_heads
    heads = torch.arange((rotated + shape.num_kv_heads) * shape.head_dim).unflatten(0, (-1, shape.head_dim))
    return torch.cat((heads[:rotated, order], heads[rotated:])).flatten()


def take_gate_up(checkpoint: Weights, mlp: str, input_size: int, size: int, bias: bool = False) -> AnyLinear:
    """Stack the gate and up projections of a gated MLP."""
    return take_linear(checkpoint, {f"{mlp}.gate_proj": size, f"{mlp}.up_proj": size}, input_size, bias)


def take_mlp(
    checkpoint: Weights, mlp: str, input_size: int, size: int, bias: bool = False, limit: float | None = None
) -> GatedMLP:
    """Take a gated MLP with SiLU. `limit`: see `BoundedMLP`."""
    gate_up = take_gate_up(checkpoint, mlp, input_size, size, bias)
    return gated_mlp(gate_up, take_linear(checkpoint, {f"{mlp}.down_proj": input_size}, size, bias), limit)


def take_raised_norm(checkpoint: Weights, name: str, size: int, eps: float) -> WideRMSNorm:
    """Take a norm, which is stored as what is added to one."""
    weight = checkpoint.take(f"{name}.weight", (size,))
    return WideRMSNorm(1 + weight.to(wide_dtype(weight.dtype)), eps)


def take_raised_head_norms(
    checkpoint: Weights, attention: str, shape: AttentionShape, eps: float
) -> tuple[WideRMSNorm, WideRMSNorm]:
    """Take those of heads of queries and keys, whose columns are in the order of `rotated_head`."""
    query, key = (take_raised_norm(checkpoint, f"{attention}.{part}_norm", shape.head_dim, eps) for part in "qk")
    order = rotated_head(shape).to(query.weight.device)
    return replace(query, weight=query.weight[order]), replace(key, weight=key.weight[order])


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One below the other. For tensors without values torch.cat would load a compiler, which takes seconds."""
    first = tensors[0]
    if first.is_meta:
        return first.new_empty(sum(map(len, tensors)), *first.shape[1:])
    return torch.cat(tuple(tensors))


def _biases(checkpoint: Weights, sizes: dict[str, int]) -> Tensor | None:
    """The stacked biases; None if all stored ones are zero, because a bias prevents fusion on a GPU.

    A random model keeps its zeros, so that it costs as much as the real one.
    """
    biases = _stacked([checkpoint.take(f"{name}.bias", (size,)) for name, size in sizes.items()])
    is_known = not biases.is_meta and all(f"{name}.bias" in checkpoint for name in sizes)
    return None if is_known and not biases.any() else biases


def skip_but_text(checkpoint: Weights, others: tuple[str, ...]) -> None:
    """Skip tensors of vision and audio, whose canonical names begin with one of `others`."""
    found = [name for name in checkpoint.names() if name.startswith(others)]
    if found:
        log.info("%s: %d tensors of vision and audio are skipped: requests are text", checkpoint.origin, len(found))
        checkpoint.skip(*found)


def finish(checkpoint: Weights) -> None:
    """Raises: CheckpointError naming tensors that no part of the model took."""
    checkpoint.skip(*(name for name in checkpoint.names() if name.endswith(DERIVED)))
    checkpoint.finish()


BOTH = "kv_scale"  # one for keys and values, in older checkpoints
SCALARS = ((), (1,))


def with_kv_scales(checkpoint: Weights, attention: str, shape: AttentionShape) -> AttentionShape:
    """`shape` with the scales that the checkpoint has for this layer's attention; 1 where it has none.

    Raises: CheckpointError naming file, tensor, found and expected.
    """
    k, v = _found(checkpoint, attention, "k"), _found(checkpoint, attention, "v")
    if k is None and v is None:
        both = f"{attention}.{BOTH}"
        k = v = both if both in checkpoint else None
    if k is None and v is None:
        return shape
    if k is None or v is None:
        have, lack = (k, "v") if v is None else (v, "k")
        assert have is not None
        raise CheckpointError(
            f"{checkpoint.file_of(have)}: tensor {have} has no counterpart: expected {attention}.{lack}_scale"
        )
    return replace(shape, kv_scales=KVScales(_scale(checkpoint, k), _scale(checkpoint, v)))


def _found(checkpoint: Weights, attention: str, part: str) -> str | None:
    """The name of the scale of k or v: compressed-tensors', vLLM's, ModelOpt's or Quark's."""
    names = (f"{part}_scale", f"attn.{part}_scale", f"{part}_proj.{part}_scale", f"{part}_proj.output_scale")
    return next((name for name in (f"{attention}.{end}" for end in names) if name in checkpoint), None)


def _scale(checkpoint: Weights, name: str) -> float:
    shape, place = checkpoint.shape(name), f"{checkpoint.file_of(name)}: tensor {name}"
    stored = checkpoint.take_raw(name, shape if shape in SCALARS else ())
    if stored.is_meta:
        return 1.0
    scale = float(stored)
    if not (math.isfinite(scale) and scale > 0):
        raise CheckpointError(f"{place}: found {scale:g}, expected a positive finite number")
    return scale
