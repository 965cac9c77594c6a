"""The input of an EAGLE-3 head's first layer: norm(embedding of the token) and norm(features), concatenated.

One launch does a gather, two norms and a concatenation (Li et al. 2025, arXiv:2503.01840).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import (
    TritonKernel,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
    warps_for,
)


def draft_input(
    tokens: Tensor, embedding: Tensor, embed_norm: Tensor, features: Tensor, feature_norm: Tensor, eps: float
) -> Tensor:
    """Concatenate the two norms; each half is exactly `rms_norm` of its row, computed in float32 and rounded once.

    Shapes: tokens [T] i64 in 0..V - 1, embedding [V, H], features [T, H], embed_norm and feature_norm [H] -> [T, 2 H].
    Raises: ValueError naming the argument. Sync: never.
    """
    require(tokens.dim() == 1 and tokens.dtype == torch.int64 and tokens.is_contiguous(), "tokens", "[T] int64")
    require(embedding.dim() == 2 and embedding.stride(1) == 1, "embedding", "[V, H] with a contiguous last dimension")
    size = embedding.shape[1]
    require(
        features.shape == (tokens.shape[0], size) and features.stride(1) == 1, "features", "[T, H], contiguous rows"
    )
    require(features.dtype == embedding.dtype, "features", "the dtype of embedding")
    for name, norm in (("embed_norm", embed_norm), ("feature_norm", feature_norm)):
        require(norm.shape == (size,) and norm.is_contiguous(), name, "[H], contiguous")
        require(norm.dtype == embedding.dtype, name, "the dtype of embedding")
    run = _draft_input_triton if runs_triton(features) else draft_input_reference
    return run(tokens, embedding, embed_norm, features, feature_norm, eps)


def draft_input_reference(
    tokens: Tensor, embedding: Tensor, embed_norm: Tensor, features: Tensor, feature_norm: Tensor, eps: float
) -> Tensor:
    embedded = F.rms_norm(F.embedding(tokens, embedding), embed_norm.shape, embed_norm, eps)
    return torch.cat((embedded, F.rms_norm(features, feature_norm.shape, feature_norm, eps)), dim=1)


def _draft_input_triton(
    tokens: Tensor, embedding: Tensor, embed_norm: Tensor, features: Tensor, feature_norm: Tensor, eps: float
) -> Tensor:
    num_rows, size = features.shape
    out = torch.empty((num_rows, 2 * size), dtype=features.dtype, device=features.device)
    block = next_power_of_2(size)
    _draft_input_kernel[(num_rows, 2)](
        tokens,
        embedding,
        embed_norm,
        features,
        feature_norm,
        out,
        embedding.stride(0),
        features.stride(0),
        size,
        eps,
        BLOCK=block,
        num_warps=warps_for(block),
        **dependent_launch(features.device, num_rows),
    )
    return out


@TritonKernel
def _draft_input_kernel(
    tokens_ptr: tl.tensor, embedding_ptr: tl.tensor, embed_norm_ptr: tl.tensor, features_ptr: tl.tensor,
    feature_norm_ptr: tl.tensor, out_ptr: tl.tensor, embedding_stride: int, features_stride: int, size: int, eps: float,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, half): half 0 is the embedding, half 1 the features."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    norm_ptr = embed_norm_ptr
    if half == 1:
        norm_ptr = feature_norm_ptr
    weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    source = features_ptr + row * features_stride
    if half == 0:
        source = embedding_ptr + tl.load(tokens_ptr + row) * embedding_stride
    x = tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(out_ptr + (row * 2 + half) * size + column, x * scale * weight, mask=inside)
