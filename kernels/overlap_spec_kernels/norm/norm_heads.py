"""RMSNorm of every query and key head of a fused projection, in place; or of values too, which have no weight.

A row of qkv has n query heads, nkv key heads and nkv value heads. Queries and keys have a norm weight each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
    runs_triton,
)
from overlap_spec_kernels.norm.rms_norm import OF_NORMS, fits_norm, rms_norm_reference

_HEADS_PER_PROGRAM = 4


class HeadNorms(NamedTuple):
    """Of queries and keys."""

    query: Tensor  # [d]
    key: Tensor  # [d]
    eps: float


class UnnormedHeads(NamedTuple):
    """Heads that get their norms from the attention that reads them first."""

    qkv: Tensor  # [T, (n + 2 nkv) d]
    norms: HeadNorms
    num_kv_heads: int

    def normed(self) -> Tensor:
        """The same tensor, after `norm_heads`. Sync: never."""
        return norm_heads(self.qkv, self.norms.query, self.norms.key, self.num_kv_heads, self.norms.eps)


def norm_heads(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float) -> Tensor:
    """Scale each head of q and k to unit root mean square, then by its weight (Henry et al. 2020, arXiv:2010.04245).

    Overwrites q and k and returns qkv. Accumulates in float32 where qkv is 16-bit, in its own type otherwise.
    Shapes: qkv [T, (n + 2 nkv) d], weights [d] -> qkv. Raises: ValueError naming the argument. Sync: never.
    """
    head_dim = query_weight.shape[0]
    require(qkv.dim() == 2 and qkv.stride(1) == 1, "qkv", "[T, (n + 2 nkv) d], contiguous last dimension")
    num_heads, rest = divmod(qkv.shape[1] - 2 * num_kv_heads * head_dim, head_dim)
    require(rest == 0 and num_heads > 0, "qkv", "query heads beside 2 nkv heads of the weights' size")
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        require(weight.shape == (head_dim,) and weight.is_contiguous(), name, "[d], contiguous")
        require(fits_norm(weight, qkv.dtype), name, OF_NORMS)
    run = _norm_heads_triton if runs_triton(qkv) else norm_heads_reference
    return run(qkv, query_weight, key_weight, num_kv_heads, eps)


def norm_heads_reference(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float
) -> Tensor:
    heads = qkv.view(qkv.shape[0], -1, query_weight.shape[0])
    q, k, _ = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), dim=1)
    q.copy_(rms_norm_reference(q, query_weight, eps))
    k.copy_(rms_norm_reference(k, key_weight, eps))
    return qkv


def _norm_heads_triton(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_kv_heads: int, eps: float) -> Tensor:
    num_rows, head_dim = qkv.shape[0], query_weight.shape[0]
    num_heads = qkv.shape[1] // head_dim - num_kv_heads  # query and key heads
    _norm_heads_kernel[(num_rows, ceil_div(num_heads, _HEADS_PER_PROGRAM))](
        qkv,
        query_weight,
        key_weight,
        qkv.stride(0),
        num_heads - num_kv_heads,
        num_heads,
        eps,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        BLOCK=next_power_of_2(head_dim),
        num_warps=_HEADS_PER_PROGRAM,
        **dependent_launch(qkv.device, num_rows),
    )
    return qkv


@TritonKernel
def _norm_heads_kernel(
    qkv_ptr: tl.tensor, query_weight_ptr: tl.tensor, key_weight_ptr: tl.tensor, row_stride: int, num_query_heads: int,
    num_heads: int, eps: float, HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and group of heads: q's first, then k's."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    is_query, inside = head < num_query_heads, column < HEAD_DIM
    query_weight = tl.load(query_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    head_ptr = qkv_ptr + row * row_stride + head * HEAD_DIM + column
    mask = (head < num_heads) & inside
    x = tl.load(head_ptr, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    tl.store(head_ptr, x * scale[:, None] * tl.where(is_query, query_weight, key_weight), mask=mask)


def norm_all_heads(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> Tensor:
    """Norms of queries, keys and values (Gemma 4). Without value heads of their own, values are what keys are made of.

    Accumulates as `norm_heads`. Shapes: heads [T, (n + 2 nkv) d] or [T, (n + nkv) d], weights [d] ->
    [T, (n + 2 nkv) d]. Raises: ValueError naming the argument. Sync: never.
    """
    head_dim = query_weight.shape[0]
    columns = {(num_heads + parts * num_kv_heads) * head_dim for parts in (1, 2)}
    require(heads.dim() == 2 and heads.stride(1) == 1, "heads", "[T, ..] with a contiguous last dimension")
    require(heads.shape[1] in columns, "heads", "n + nkv or n + 2 nkv heads of the weights' size")
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        require(weight.shape == (head_dim,) and weight.is_contiguous(), name, "[d], contiguous")
        require(fits_norm(weight, heads.dtype), name, OF_NORMS)
    run = _norm_all_heads_triton if runs_triton(heads) else norm_all_heads_reference
    return run(heads, query_weight, key_weight, num_heads, num_kv_heads, eps)


def norm_all_heads_reference(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> Tensor:
    rows = heads.unflatten(1, (-1, query_weight.shape[0]))
    keys, values = rows[:, num_heads : num_heads + num_kv_heads], rows[:, -num_kv_heads:]
    wide = values.to(key_weight.dtype)
    values = F.rms_norm(wide, wide.shape[-1:], None, eps).to(values.dtype)
    queries = rms_norm_reference(rows[:, :num_heads], query_weight, eps)
    return torch.cat((queries, rms_norm_reference(keys, key_weight, eps), values), dim=1).flatten(1)


def _norm_all_heads_triton(
    heads: Tensor, query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> Tensor:
    num_rows, head_dim, total = len(heads), query_weight.shape[0], num_heads + 2 * num_kv_heads
    out = torch.empty((num_rows, total * head_dim), dtype=heads.dtype, device=heads.device)
    _norm_all_heads_kernel[(num_rows, ceil_div(total, _HEADS_PER_PROGRAM))](
        heads,
        query_weight,
        key_weight,
        out,
        heads.stride(0),
        num_heads,
        num_kv_heads,
        heads.shape[1] // head_dim - num_kv_heads,
        eps,
        HEAD_DIM=head_dim,
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        BLOCK=next_power_of_2(head_dim),
        num_warps=_HEADS_PER_PROGRAM,
        **dependent_launch(heads.device, num_rows),
    )
    return out


@TritonKernel
def _norm_all_heads_kernel(
    heads_ptr: tl.tensor, query_weight_ptr: tl.tensor, key_weight_ptr: tl.tensor, out_ptr: tl.tensor, stride: int,
    num_heads: int, num_kv_heads: int, first_value: int, eps: float,
    HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and group of heads that are written. first_value: the head that values begin with."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    total, inside = num_heads + 2 * num_kv_heads, column < HEAD_DIM
    is_value = head >= num_heads + num_kv_heads
    query_weight = tl.load(query_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    key_weight = tl.load(key_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    source = tl.where(is_value, head - num_heads - num_kv_heads + first_value, head)
    mask = (head < total) & inside
    x = tl.load(heads_ptr + row * stride + source * HEAD_DIM + column, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
    weight = tl.where(is_value, 1.0, tl.where(head < num_heads, query_weight, key_weight))
    tl.store(out_ptr + (row * total + head) * HEAD_DIM + column, x * scale[:, None] * weight, mask=mask)
