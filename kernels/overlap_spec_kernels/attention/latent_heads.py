"""What latent attention attends with, put together in one pass: queries of all heads, then the token's row.

    from the linears  | queries of n heads: not rotated | rotated |      | latent | rotated key |
                            |  absorbed by W_key     | in halves        | norm   | in halves
    result            | n times: `rank` columns | rotated columns |      | latent | rotated key |

Pairs that are rotated are neighbours in some checkpoints; here they go to the same place of the two halves of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_HEADS_PER_PROGRAM = 4
_BLOCK_K, _MOST_FEW = 64, 64  # columns of x that a program multiplies at once; rows that are few
_DTYPES = (torch.bfloat16, torch.float16)


def latent_heads(
    absorbed: Tensor, queries: Tensor, rows: Tensor, weight: Tensor, eps: float, interleaved: bool
) -> Tensor:
    """Absorbed queries beside the rotated columns of queries, head after head; then rows, whose latent is normalised.

    Queries' rotated columns, and rows' after the latent, are not rotated yet. interleaved: their pairs are neighbours.
    Shapes: absorbed [T, n, rank], queries [T, n, rope], rows [T, rank + rope], weight [rank], of the norm (`rms_norm`)
    -> [T, (n + 1) (rank + rope)]. Raises: ValueError naming the argument. Sync: never.
    """
    num_rows, num_heads, rope = queries.shape
    rank = weight.shape[0]
    require(rope % 2 == 0 and queries.stride(2) == 1, "queries", "[T, n, rope], rope even, a contiguous last dimension")
    fits = absorbed.shape == (num_rows, num_heads, rank) and absorbed.stride(2) == 1
    require(fits, "absorbed", "[T, n, rank] with a contiguous last dimension")
    require(rows.shape == (num_rows, rank + rope) and rows.stride(1) == 1, "rows", "[T, rank + rope], dense columns")
    require(weight.dim() == 1 and weight.is_contiguous(), "weight", "[rank], contiguous")
    alike = {each.dtype for each in (absorbed, queries, rows, weight)} == {rows.dtype}
    require(alike, "absorbed", "the dtype of rows, as queries and weight have")
    run = _latent_heads_triton if runs_triton(rows) else latent_heads_reference
    return run(absorbed, queries, rows, weight, eps, interleaved)


def latent_heads_reference(
    absorbed: Tensor, queries: Tensor, rows: Tensor, weight: Tensor, eps: float, interleaved: bool
) -> Tensor:
    rank = weight.shape[0]
    heads = torch.cat((absorbed, in_halves(queries, interleaved)), dim=2)
    latent = F.rms_norm(rows[:, :rank], weight.shape, weight, eps)
    return torch.cat((heads.flatten(1), latent, in_halves(rows[:, rank:], interleaved)), dim=1)


def in_halves(columns: Tensor, interleaved: bool) -> Tensor:
    """The first of each pair, then the second ones. Shapes: [..., rope] -> the same."""
    return columns.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if interleaved else columns


def _latent_heads_triton(
    absorbed: Tensor, queries: Tensor, rows: Tensor, weight: Tensor, eps: float, interleaved: bool
) -> Tensor:
    (num_rows, num_heads, rope), rank = queries.shape, weight.shape[0]
    out = torch.empty((num_rows, (num_heads + 1) * (rank + rope)), dtype=rows.dtype, device=rows.device)
    _latent_heads_kernel[(num_rows, ceil_div(num_heads, _HEADS_PER_PROGRAM) + 1)](
        *(absorbed, queries, rows, weight, out, eps),
        *(*absorbed.stride()[:2], *queries.stride()[:2], rows.stride(0), num_heads),
        RANK=rank,
        ROPE=rope,
        INTERLEAVED=interleaved,
        BLOCK_R=next_power_of_2(rank),
        BLOCK_T=next_power_of_2(rope),
        BLOCK_HEADS=_HEADS_PER_PROGRAM,
        num_warps=4,
        **dependent_launch(rows.device, num_rows),
    )
    return out


@TritonKernel
def _latent_heads_kernel(
    absorbed_ptr: tl.tensor, queries_ptr: tl.tensor, rows_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor,
    eps: float, absorbed_row_stride: int, absorbed_head_stride: int, query_row_stride: int, query_head_stride: int,
    row_stride: int, num_heads: int, RANK: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_HEADS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and group of heads; the last group is the token's row."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    latent, column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    source = column
    if INTERLEAVED:
        source = column % (ROPE // 2) * 2 + column // (ROPE // 2)
    known, turned = latent < RANK, column < ROPE
    wait_for_inputs(PDL)
    target_ptr = out_ptr + row * ((num_heads + 1) * (RANK + ROPE))
    if group == tl.num_programs(1) - 1:
        x = tl.load(rows_ptr + row * row_stride + latent, mask=known, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + latent, mask=known, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / RANK + eps)
        key = tl.load(rows_ptr + row * row_stride + RANK + source, mask=turned, other=0.0)
        place = target_ptr + num_heads * (RANK + ROPE)
        tl.store(place + latent, x * scale * weight, mask=known)
        tl.store(place + RANK + column, key, mask=turned)
    else:
        head = group * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
        live = head < num_heads
        places = absorbed_ptr + row * absorbed_row_stride + head * absorbed_head_stride
        absorbed = tl.load(places + latent[None, :], mask=live & known[None, :])
        places = queries_ptr + row * query_row_stride + head * query_head_stride
        query = tl.load(places + source[None, :], mask=live & turned[None, :])
        places = target_ptr + head * (RANK + ROPE)
        tl.store(places + latent[None, :], absorbed, mask=live & known[None, :])
        tl.store(places + RANK + column[None, :], query, mask=live & turned[None, :])


def head_products(x: Tensor, weight: Tensor) -> Tensor:
    """Rows of each head times its matrix, which add up the columns in one order, whatever rows are beside them.

    Shapes: x [T, n, I], weight [n, I, O] -> [T, n, O]. Raises: ValueError naming the argument. Sync: never.
    """
    require(x.dim() == 3 and x.stride(2) == 1, "x", "[T, n, I] with a contiguous last dimension")
    require(weight.shape[:2] == x.shape[1:] and weight.is_contiguous(), "weight", "[n, I, O], contiguous")
    require(weight.dtype == x.dtype, "weight", "the dtype of x")
    if not runs_triton(x):
        return (x.transpose(0, 1) @ weight).transpose(0, 1)
    require(x.dtype in _DTYPES, "x", "16 bits: other products have no fixed order")
    return _head_products_triton(x, weight)


def _head_products_triton(x: Tensor, weight: Tensor) -> Tensor:
    (num_rows, num_heads, size_k), size_n = x.shape, weight.shape[2]
    out = torch.empty((num_rows, num_heads, size_n), dtype=x.dtype, device=x.device)
    are_few = num_rows <= _MOST_FEW
    block_m, block_n = max(next_power_of_2(num_rows), 16) if are_few else 128, 64 if are_few else 128
    _head_products_kernel[(ceil_div(size_n, block_n), ceil_div(num_rows, block_m), num_heads)](
        *(x, weight, out, *x.stride()[:2], num_rows, num_heads),
        SIZE_K=size_k,
        SIZE_N=size_n,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=_BLOCK_K,
        num_warps=4 if are_few else 8,
        num_stages=3,
        **dependent_launch(x.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows", "num_heads"))
def _head_products_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, row_stride: int, head_stride: int, num_rows: int,
    num_heads: int, SIZE_K: tl.constexpr, SIZE_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per tile of rows and columns of a head, which walks all of K."""
    head = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row, live, known = m.to(tl.int64), m < num_rows, n < SIZE_N
    x_rows = x_ptr + row[:, None] * row_stride + head * head_stride
    weight_ptr += head * (SIZE_K * SIZE_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    wait_for_inputs(PDL)
    for first in range(0, SIZE_K, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < SIZE_K
        x = tl.load(x_rows + k[None, :], mask=live[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_ptr + k[:, None] * SIZE_N + n[None, :], mask=inside[:, None] & known[None, :], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    places = out_ptr + (row * num_heads + head)[:, None] * SIZE_N + n[None, :]
    tl.store(places, acc, mask=live[:, None] & known[None, :])
