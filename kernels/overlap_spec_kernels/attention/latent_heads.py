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
