"""What latent attention attends with, put together in one pass: queries of all heads, then the token's row.

    from the linears  | queries of n heads: not rotated | rotated |      | latent | rotated key |
                            |  absorbed by W_key     | in halves        | norm   | in halves
    result            | n times: `rank` columns | rotated columns |      | latent | rotated key |

Pairs that are rotated are neighbours in some checkpoints; here they go to the same place of the two halves of a head.

Weights of the heads are small, so with few rows products by them take as long as they wait. Then a program asks for
its columns of a head's matrix before the kernel that writes x has ended, and multiplies all of K in one chain: the bits
are those of programs for more rows, which walk K. The rest is put beside absorbed queries by the same launch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import let_next_begin, tl, wait, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton

_HEADS_PER_PROGRAM = 4
_BLOCK_K, _MOST_FEW = 64, 64  # columns of x that a program multiplies at once; rows that are few
_HELD_ROWS, _HELD_K = 16, 512  # most rows, and columns of x, of programs that multiply all of K at once
_HELD_N, _HELD_WARPS = 64, 8  # columns of the result of such a program: 4 warps ask for too little at once
_TOKEN_WARPS = 4  # where some have tokens' rows, whose norms are sums in the order of as many
_DTYPES = (torch.bfloat16, torch.float16)


class _TokenRows(NamedTuple):
    """What is written beside absorbed queries: see `latent_heads`."""

    turned: Tensor  # [T, n, rope], columns of the queries that are rotated
    rows: Tensor  # [T, rank + rope]
    weight: Tensor  # [rank], of the norm of rows' latents
    eps: float
    interleaved: bool


def absorbed_heads(
    queries: Tensor, key: Tensor, rows: Tensor, weight: Tensor, eps: float, interleaved: bool, in_order: bool
) -> Tensor:
    """`latent_heads` of queries whose first columns are absorbed by each head's `key`: one launch for few rows.

    `in_order`: products have one order of sums, whatever rows are beside a row. Shapes: queries [T, n, I + rope],
    key [n, I, rank], others as in `latent_heads`. Raises: ValueError naming the argument. Sync: never.
    """
    size = key.shape[1]
    whole, turned = queries[:, :, :size], queries[:, :, size:]
    if not _takes_few(whole, key):
        return latent_heads(head_products(whole, key, in_order), turned, rows, weight, eps, interleaved)
    _check_products(whole, key)
    _check_rows(turned, rows, weight)
    return _few_head_products(whole, key, _TokenRows(turned, rows, weight, eps, interleaved))


def latent_heads(
    absorbed: Tensor, queries: Tensor, rows: Tensor, weight: Tensor, eps: float, interleaved: bool
) -> Tensor:
    """Absorbed queries beside the rotated columns of queries, head after head; then rows, whose latent is normalised.

    Queries' rotated columns, and rows' after the latent, are not rotated yet. interleaved: their pairs are neighbours.
    Shapes: absorbed [T, n, rank], queries [T, n, rope], rows [T, rank + rope], weight [rank], of the norm (`rms_norm`)
    -> [T, (n + 1) (rank + rope)]. Raises: ValueError naming the argument. Sync: never.
    """
    _check_rows(queries, rows, weight)
    fits = absorbed.shape == (*queries.shape[:2], len(weight)) and absorbed.stride(2) == 1
    require(fits, "absorbed", "[T, n, rank] with a contiguous last dimension")
    require(absorbed.dtype == rows.dtype, "absorbed", "the dtype of rows")
    run = _latent_heads_triton if runs_triton(rows) else latent_heads_reference
    return run(absorbed, queries, rows, weight, eps, interleaved)


def _check_rows(queries: Tensor, rows: Tensor, weight: Tensor) -> None:
    """Raises: ValueError naming the argument."""
    (num_rows, _, rope), rank = queries.shape, len(weight)
    require(rope % 2 == 0 and queries.stride(2) == 1, "queries", "[T, n, rope], rope even, a contiguous last dimension")
    require(rows.shape == (num_rows, rank + rope) and rows.stride(1) == 1, "rows", "[T, rank + rope], dense columns")
    require(weight.dim() == 1 and weight.is_contiguous(), "weight", "[rank], contiguous")
    require(queries.dtype == weight.dtype == rows.dtype, "rows", "the dtype of queries and weight")


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
        norm = tl.load(weight_ptr + latent, mask=known, other=0.0).to(tl.float32)
        place_ptr = target_ptr + num_heads * (RANK + ROPE)
        _write_token(rows_ptr + row * row_stride, place_ptr, norm, eps, source, RANK, ROPE, BLOCK_R, BLOCK_T)
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


def head_products(x: Tensor, weight: Tensor, in_order: bool = True) -> Tensor:
    """Rows of each head times its matrix; `in_order`: columns are added in one order, whatever rows are beside a row.

    Shapes: x [T, n, I], weight [n, I, O] -> [T, n, O]. Raises: ValueError naming the argument. Sync: never.
    """
    _check_products(x, weight)
    if _takes_few(x, weight):
        return _few_head_products(x, weight)
    is_fast = len(x) <= _MOST_FEW and x.dtype in _DTYPES  # a BLAS leaves several rows to be copied into their order
    if not (in_order or is_fast) or not runs_triton(x):
        return (x.transpose(0, 1) @ weight).transpose(0, 1)
    require(x.dtype in _DTYPES, "x", "16 bits: other products have no fixed order")
    return _head_products_triton(x, weight)


def _check_products(x: Tensor, weight: Tensor) -> None:
    """Raises: ValueError naming the argument."""
    require(x.dim() == 3 and x.stride(2) == 1, "x", "[T, n, I] with a contiguous last dimension")
    require(weight.shape[:2] == x.shape[1:] and weight.is_contiguous(), "weight", "[n, I, O], contiguous")
    require(weight.dtype == x.dtype, "weight", "the dtype of x")


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


def _takes_few(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel multiplies so many rows of x by such matrices. Shapes: x [T, n, I], weight [n, I, O]."""
    return runs_triton(x) and x.dtype in _DTYPES and len(x) <= _HELD_ROWS and weight.shape[1] <= _HELD_K


def _few_head_products(x: Tensor, weight: Tensor, beside: _TokenRows | None = None) -> Tensor:
    """Each head's columns times its matrix; with `beside`, what `latent_heads` gives. Sync: never.

    Shapes: x [T, n, I], weight [n, I, O] -> [T, n, O], or [T, (n + 1) (O + rope)].
    """
    (num_rows, num_heads, size_k), size_n = x.shape, weight.shape[2]
    rope = 0 if beside is None else beside.turned.shape[2]
    all_heads = num_heads + (beside is not None)
    out = torch.empty((num_rows, all_heads, size_n + rope), dtype=x.dtype, device=x.device)
    turned, rows, norm, eps, interleaved = beside or _TokenRows(x, x, x, 0.0, False)
    _held_heads_kernel[(ceil_div(size_n, _HELD_N), all_heads)](
        *(x, weight, turned, rows, norm, out, eps),
        *(*x.stride()[:2], *turned.stride()[:2], rows.stride(0), num_rows, num_heads),
        SIZE_K=size_k,
        SIZE_N=size_n,
        ROPE=rope,
        INTERLEAVED=interleaved,
        BLOCK_M=_HELD_ROWS,
        BLOCK_N=_HELD_N,
        BLOCK_K=max(next_power_of_2(size_k), 16),
        BLOCK_R=next_power_of_2(size_n),
        BLOCK_T=next_power_of_2(rope),
        num_warps=_HELD_WARPS if beside is None else _TOKEN_WARPS,
        **dependent_launch(x.device),
    )
    return out if beside is None else out.flatten(1)


@TritonKernel.with_options(do_not_specialize=("num_rows", "num_heads"))
def _held_heads_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, turned_ptr: tl.tensor, rows_ptr: tl.tensor, norm_ptr: tl.tensor,
    out_ptr: tl.tensor, eps: float, row_stride: int, head_stride: int, turned_row_stride: int,
    turned_head_stride: int, token_stride: int, num_rows: int, num_heads: int,
    SIZE_K: tl.constexpr, SIZE_N: tl.constexpr, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per block of columns of a head; those of the last head, if there is a ROPE, have the tokens' rows."""
    let_next_begin(PDL)
    head = tl.program_id(1)
    place_ptr = out_ptr + head * (SIZE_N + ROPE)
    out_stride = tl.num_programs(1) * (SIZE_N + ROPE)
    source = tl.arange(0, BLOCK_T)
    if INTERLEAVED:
        source = source % (ROPE // 2) * 2 + source // (ROPE // 2)
    if head == num_heads:
        latent = tl.arange(0, BLOCK_R)
        norm = tl.load(norm_ptr + latent, mask=latent < SIZE_N, other=0.0).to(tl.float32)
        wait(PDL)
        for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            _write_token(
                rows_ptr + row * token_stride, place_ptr + row * out_stride, norm, eps, source, SIZE_N, ROPE, BLOCK_R,
                BLOCK_T
            )  # fmt: skip
    else:
        m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        live, inside, known = m < num_rows, k < SIZE_K, n < SIZE_N
        w_places = weight_ptr + head * (SIZE_K * SIZE_N) + k[:, None] * SIZE_N + n[None, :]
        w = tl.load(w_places, mask=inside[:, None] & known[None, :], other=0.0)
        wait(PDL)
        x_places = x_ptr + m[:, None] * row_stride + head * head_stride + k[None, :]
        x = tl.load(x_places, mask=live[:, None] & inside[None, :], other=0.0)
        if ROPE > 0 and tl.program_id(0) == 0:
            column = tl.arange(0, BLOCK_T)
            mask = live[:, None] & (column < ROPE)[None, :]
            places = turned_ptr + m[:, None] * turned_row_stride + head * turned_head_stride + source[None, :]
            turned = tl.load(places, mask=mask)
            tl.store(place_ptr + m[:, None] * out_stride + SIZE_N + column[None, :], turned, mask=mask)
        acc = tl.dot(x, w, input_precision="ieee")
        tl.store(place_ptr + m[:, None] * out_stride + n[None, :], acc, mask=live[:, None] & known[None, :])


@TritonKernel
def _write_token(
    row_ptr: tl.tensor, place_ptr: tl.tensor, norm: tl.tensor, eps: float, source: tl.tensor, RANK: tl.constexpr,
    ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr,
) -> None:  # fmt: skip
    """A token's latent, normalised, and the columns that are rotated, in halves."""
    latent, column = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_T)
    known, turned = latent < RANK, column < ROPE
    x = tl.load(row_ptr + latent, mask=known, other=0.0).to(tl.float32)
    key = tl.load(row_ptr + RANK + source, mask=turned, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / RANK + eps)
    tl.store(place_ptr + latent, x * scale * norm, mask=known)
    tl.store(place_ptr + RANK + column, key, mask=turned)
