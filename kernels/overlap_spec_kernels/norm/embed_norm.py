"""What the first layer of a target reads: the embeddings of tokens, and their norm, in one launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, lets_next_begin, next_power_of_2, require, runs_triton, warps_for


def embed_norm(tokens: Tensor, embedding: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Look tokens up and normalise the rows: (rows, y), where y is exactly `rms_norm(rows, weight, eps)`.

    On a GPU it is an ordinary launch: what was written before it is there for every kernel after it, at once.
    Shapes: tokens [T] i64 in 0..V - 1, embedding [V, H], weight [H] -> [T, H], [T, H].
    Raises: ValueError naming the argument. Sync: never.
    """
    require(tokens.dim() == 1 and tokens.dtype == torch.int64 and tokens.is_contiguous(), "tokens", "[T] int64")
    require(embedding.dim() == 2 and embedding.stride(1) == 1, "embedding", "[V, H] with a contiguous last dimension")
    require(weight.shape == embedding.shape[1:] and weight.is_contiguous(), "weight", "[H], contiguous")
    require(weight.dtype == embedding.dtype, "weight", "the dtype of embedding")
    run = _embed_norm_triton if runs_triton(embedding) else embed_norm_reference
    return run(tokens, embedding, weight, eps)


def embed_norm_reference(tokens: Tensor, embedding: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows = F.embedding(tokens, embedding)
    return rows, F.rms_norm(rows, weight.shape, weight, eps)


def _embed_norm_triton(tokens: Tensor, embedding: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    num_rows, size = tokens.shape[0], embedding.shape[1]
    rows = torch.empty((num_rows, size), dtype=embedding.dtype, device=embedding.device)
    y = torch.empty_like(rows)
    block = next_power_of_2(size)
    _embed_norm_kernel[(num_rows,)](
        tokens,
        embedding,
        weight,
        rows,
        y,
        embedding.stride(0),
        size,
        eps,
        NEXT_BEGINS=lets_next_begin(embedding.device),
        BLOCK=block,
        num_warps=warps_for(block),
    )
    return rows, y


@TritonKernel
def _embed_norm_kernel(
    tokens_ptr: tl.tensor, embedding_ptr: tl.tensor, weight_ptr: tl.tensor, rows_ptr: tl.tensor, y_ptr: tl.tensor,
    embedding_stride: int, size: int, eps: float, NEXT_BEGINS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One program per token."""
    if NEXT_BEGINS:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    token = tl.load(tokens_ptr + row)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    found = tl.load(embedding_ptr + token * embedding_stride + column, mask=inside, other=0.0)
    tl.store(rows_ptr + row * size + column, found, mask=inside)
    x = found.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    tl.store(y_ptr + row * size + column, x * scale * weight, mask=inside)
