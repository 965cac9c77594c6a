"""Recurrences over prompts, by chunks that multiply matrices (Yang et al. 2025, arXiv:2412.06464, 3.3).

A chunk is 64 positions that begin at a multiple of 64, of which a step may have a part; the rows that it has not add
nothing. So a prompt that is cut at such places keeps its bits, in any company. Of a chunk, with decays g from its
beginning, the values that tokens add solve a triangular system:

    (I + L) u = b (v - e^g S^T k)       L = b (k k^T) e^(g_i - g_j) below its diagonal
    out = e^g S^T q + ((q k^T) e^(g_i - g_j)) u             on and below the diagonal
    S <-- e^g_64 S + (k e^(g_64 - g))^T u

Of Mamba-2 (G is 1) nothing is solved: u is v times its step, and a part of v is added to `out`.

What does not depend on the state is computed for all chunks side by side: a row of each matrix for each token. Then a
program for each block of value columns takes the chunks of a request one after another. Sync: never.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, next_power_of_2

CHUNK = 64  # positions
_COLUMNS = 32  # of values, in a program of the second kernel
_WARPS, _STAGES = 4, 2  # of it
_MIN_DOT = 16  # the smallest side of a product


def recur_over_prompts(
    places: tuple[Tensor, ...], of_layer: tuple[Tensor | None, ...], found: Tensor, longest: int, scale: float,
    sizes: dict[str, int], eps: float,
) -> None:  # fmt: skip
    """Write what each row finds, and the state after the last one. See `gated_delta`, which passes its arguments on.

    `longest`: rows that a request has at most. Shapes: found [T, n dv].
    """
    projected, slots, positions, starts, memory, inputs, counts = (*places[:6], places[8])
    num_rows, num_heads, value_dim = len(projected), sizes["N"], sizes["DV"]
    block_k = max(next_power_of_2(sizes["DK"]), _MIN_DOT)
    block_v = max(min(next_power_of_2(value_dim), _COLUMNS), _MIN_DOT)
    # Of each token: queries and keys of a key head, values, rates and decays; rows of two matrices of its chunk.
    queries, keys = (projected.new_empty(num_rows, sizes["M"], block_k) for _ in range(2))
    values = torch.empty_like(found)
    products = projected.new_empty(num_rows, num_heads, CHUNK)
    inverses = torch.empty_like(products) if sizes["G"] == 2 else products
    rates, decays = (torch.empty(num_rows, num_heads, dtype=torch.float32, device=found.device) for _ in range(2))
    prepared = (queries, keys, values, inverses, products, rates, decays)
    shared = {"N": num_heads, "M": sizes["M"], "DK": sizes["DK"], "DV": value_dim, "BLOCK_K": block_k, "L": CHUNK}
    shared["G"] = sizes["G"]
    *of_rows, skip = of_layer
    exact = "tf32x3" if projected.dtype == torch.float32 else "tf32"  # of 16 bits every product is
    _prepare_kernel[(ceil_div(longest, CHUNK) + 1, num_heads, len(slots))](
        projected, slots, positions, starts, inputs, counts, *of_rows, *prepared, scale, C=sizes["C"], K=sizes["K"],
        BLOCK_V=max(next_power_of_2(value_dim), _MIN_DOT), B=CHUNK // 4, EPS=eps, EXACT=exact,
        num_warps=8, num_stages=1, **shared,
    )  # fmt: skip
    _chunks_kernel[(ceil_div(value_dim, block_v), num_heads, len(slots))](
        slots, positions, starts, memory, skip, *prepared, found, BLOCK_V=block_v, EXACT=exact, num_warps=_WARPS,
        num_stages=_STAGES, **shared,
    )  # fmt: skip


@TritonKernel
def _convolved(
    rows_ptr: tl.tensor, inputs_ptr: tl.tensor, conv_ptr: tl.tensor, bias_ptr: tl.tensor, row: tl.tensor,
    valid: tl.tensor, fresh: tl.tensor, column: tl.tensor, inside: tl.tensor, C: tl.constexpr, K: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """SiLU of the convolution of some rows and columns; zeros of rows that are not valid. Shapes: -> [L, columns]."""
    total = tl.zeros([row.shape[0], column.shape[1]], tl.float32)
    for offset in tl.static_range(K):
        source = row + (offset - (K - 1))
        is_new = valid & (source >= 0) & inside
        is_old = valid & (source < 0) & inside & (fresh == 0)
        new = tl.load(rows_ptr + source.to(tl.int64) * STRIDE + column, mask=is_new, other=0.0).to(tl.float32)
        old = tl.load(inputs_ptr + (source + K - 1) * C + column, mask=is_old, other=0.0).to(tl.float32)
        weight = tl.load(conv_ptr + column * K + offset, mask=inside, other=0.0).to(tl.float32)
        total += (new + old) * weight
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.where(valid, total + bias, 0.0)
    return total / (1.0 + tl.exp(-total))


@TritonKernel
def _gates(
    rows_ptr: tl.tensor, steepness_ptr: tl.tensor, offset_ptr: tl.tensor, row: tl.tensor, valid: tl.tensor,
    head: tl.tensor, C: tl.constexpr, N: tl.constexpr, G: tl.constexpr, STRIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Rates, and logarithms of decays from the chunk's beginning on. Shapes: row, valid [L] -> [L] both."""
    at = rows_ptr + row.to(tl.int64) * STRIDE + C + head
    rate = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    step = tl.load(at + (G - 1) * N, mask=valid, other=0.0).to(tl.float32) + tl.load(offset_ptr + head)
    softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    decay = tl.where(valid, -tl.load(steepness_ptr + head) * softplus, 0.0)
    rate = softplus if G == 1 else 1.0 / (1.0 + tl.exp(-rate))
    return tl.where(valid, rate, 0.0), tl.cumsum(decay, 0)


@TritonKernel
def _inverted(lower: tl.tensor, line: tl.tensor, B: tl.constexpr, EXACT: tl.constexpr) -> tl.tensor:
    """(I + lower)^-1, of a matrix of 4 B rows that has zeros on and above its diagonal.

    First D, the inverse without what lies between blocks of B rows: of all of them row after row. With N, D times what
    lies between, it is (I + N)^-1 D, and the fourth power of N is 0. Shapes: lower [L, L], line [L] 0, 1, .. -> [L, L].
    """
    same = (line // B)[:, None] == (line // B)[None, :]
    within, between = tl.where(same, lower, 0.0), tl.where(same, 0.0, lower)
    inverse = (line[:, None] == line[None, :]).to(tl.float32)
    for index in range(1, B):
        is_row = (line % B)[:, None] == index
        of_rows = tl.sum(tl.where(is_row, within, 0.0), 0)  # a column has that row of its own block
        solved = tl.sum(of_rows[:, None] * inverse, 0)
        inverse = tl.where(is_row & same, inverse - solved[None, :], inverse)
    n = tl.dot(inverse, between, input_precision=EXACT)
    inverse += tl.dot(tl.dot(n, n, input_precision=EXACT), inverse, input_precision=EXACT)
    return inverse - tl.dot(n, inverse, input_precision=EXACT)


@TritonKernel
def _prepare_kernel(
    projected_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor, starts_ptr: tl.tensor,
    inputs_ptr: tl.tensor, counts_ptr: tl.tensor, conv_ptr: tl.tensor, steepness_ptr: tl.tensor, offset_ptr: tl.tensor,
    bias_ptr: tl.tensor, queries_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, inverses_ptr: tl.tensor,
    products_ptr: tl.tensor, rates_ptr: tl.tensor, decays_ptr: tl.tensor, scale: float, C: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, G: tl.constexpr, L: tl.constexpr, B: tl.constexpr, EPS: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk, head and request: what does not depend on the state."""
    STRIDE: tl.constexpr = C + G * N + N * DV
    kind = projected_ptr.dtype.element_ty
    head, request = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1).to(tl.int32) - begin.to(tl.int32)
    start = tl.load(positions_ptr + begin, mask=count > 0, other=0).to(tl.int32)
    if (head == 0) & (tl.program_id(0) == 0):
        tl.store(counts_ptr + request, 0)
    first = tl.program_id(0) * L - start % L  # row of the chunk's first position
    if first < count:
        slot, fresh = tl.load(slots_ptr + request), (start == 0).to(tl.int32)
        rows_ptr, own_inputs = projected_ptr + begin * STRIDE, inputs_ptr + slot * (K - 1) * C
        line, lane, value = tl.arange(0, L), tl.arange(0, BLOCK_K)[None, :], tl.arange(0, BLOCK_V)[None, :]
        row = first + line
        valid = (row >= 0) & (row < count)
        rows, are_valid, own_row = row[:, None], valid[:, None], begin + row[:, None]
        key_head = head // (N // M)
        column = key_head * DK + lane
        v = _convolved(
            rows_ptr, own_inputs, conv_ptr, bias_ptr, rows, are_valid, fresh, 2 * M * DK + head * DV + value,
            value < DV, C, K, STRIDE,
        )  # fmt: skip
        tl.store(values_ptr + own_row * N * DV + head * DV + value, v, mask=are_valid & (value < DV))
        k = _convolved(
            rows_ptr, own_inputs, conv_ptr, bias_ptr, rows, are_valid, fresh, M * DK + column, lane < DK, C, K, STRIDE,
        )  # fmt: skip
        if G == 2:
            k = k / tl.sqrt(tl.sum(k * k, 1) + EPS)[:, None]
        k = k.to(kind)
        q = _convolved(
            rows_ptr, own_inputs, conv_ptr, bias_ptr, rows, are_valid, fresh, column, lane < DK, C, K, STRIDE
        )
        if G == 2:
            q = q / tl.sqrt(tl.sum(q * q, 1) + EPS)[:, None] * scale
        q = q.to(kind)
        own_key = (own_row * M + key_head) * BLOCK_K + lane
        writes = are_valid & (head % (N // M) == 0)  # the first of the heads that share a key
        tl.store(keys_ptr + own_key, k, mask=writes)
        tl.store(queries_ptr + own_key, q, mask=writes)
        rate, decay = _gates(rows_ptr, steepness_ptr, offset_ptr, row, valid, head, C, N, G, STRIDE)
        own_gate = (begin + row) * N + head
        tl.store(rates_ptr + own_gate, rate, mask=valid)
        tl.store(decays_ptr + own_gate, decay, mask=valid)
        own_line = (own_row * N + head) * L + line[None, :]
        above = line[:, None] - line[None, :]  # how many positions a row is behind a column
        between = tl.exp(tl.where(above >= 0, decay[:, None] - decay[None, :], 0.0))
        products = tl.dot(q, tl.trans(k), input_precision=EXACT)
        tl.store(products_ptr + own_line, tl.where(above >= 0, products * between, 0.0), mask=are_valid)
        if G == 2:
            lower = tl.dot(k, tl.trans(k), input_precision=EXACT)
            lower = tl.where(above > 0, lower * between * rate[:, None], 0.0)
            tl.store(inverses_ptr + own_line, _inverted(lower, line, B, EXACT), mask=are_valid)


@TritonKernel
def _chunks_kernel(
    slots_ptr: tl.tensor, positions_ptr: tl.tensor, starts_ptr: tl.tensor, memory_ptr: tl.tensor, skip_ptr: tl.tensor,
    queries_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, inverses_ptr: tl.tensor,
    products_ptr: tl.tensor, rates_ptr: tl.tensor, decays_ptr: tl.tensor, found_ptr: tl.tensor, N: tl.constexpr,
    M: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    G: tl.constexpr, L: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    """One program per block of value columns, head and request."""
    kind = keys_ptr.dtype.element_ty
    head, request = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1).to(tl.int32) - begin.to(tl.int32)
    start = tl.load(positions_ptr + begin, mask=count > 0, other=0).to(tl.int32)
    slot, fresh = tl.load(slots_ptr + request), (start == 0).to(tl.int32)
    line, lane = tl.arange(0, L), tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    at = memory_ptr + ((slot * N + head) * DK + lane[:, None]) * DV + value[None, :]
    inside = (lane < DK)[:, None] & (value < DV)[None, :]
    memory = tl.load(at, mask=inside & (fresh == 0) & (count > 0), other=0.0).to(tl.float32)
    for first in range(-(start % L), count, L):
        row = first + line
        valid = (row >= 0) & (row < count)
        are_valid, own_row = valid[:, None], begin + row[:, None]
        own_key = (own_row * M + head // (N // M)) * BLOCK_K + lane[None, :]
        own_line = (own_row * N + head) * L + line[None, :]
        own_value = own_row * N * DV + head * DV + value[None, :]
        has_value = are_valid & (value < DV)[None, :]
        q = tl.load(queries_ptr + own_key, mask=are_valid, other=0.0)
        k = tl.load(keys_ptr + own_key, mask=are_valid, other=0.0)
        v = tl.load(values_ptr + own_value, mask=has_value, other=0.0).to(tl.float32)
        if G == 2:
            inverse = tl.load(inverses_ptr + own_line, mask=are_valid, other=0.0)
        products = tl.load(products_ptr + own_line, mask=are_valid, other=0.0)
        rate = tl.load(rates_ptr + (begin + row) * N + head, mask=valid, other=0.0)
        # Rows behind the last one add nothing, before the first one nothing has decayed.
        decay = tl.load(decays_ptr + (begin + row) * N + head, mask=valid, other=0.0)
        last = tl.load(decays_ptr + (begin + tl.minimum(first + L, count) - 1) * N + head)
        since = tl.exp(decay)[:, None]
        state = memory.to(kind)
        if G == 2:
            known = tl.dot(k, state, input_precision=EXACT) * since
            target = (rate[:, None] * (v - known)).to(kind)
            added = tl.dot(inverse, target, input_precision=EXACT).to(kind)
        else:
            added = (rate[:, None] * v).to(kind)
        out = tl.dot(q, state, input_precision=EXACT) * since
        out = tl.dot(products, added, out, input_precision=EXACT)
        if skip_ptr is not None:
            out += tl.load(skip_ptr + head) * v
        left = tl.exp(tl.where(valid, last - decay, 0.0))
        kept = (k.to(tl.float32) * left[:, None]).to(kind)
        memory = tl.dot(tl.trans(kept), added, memory * tl.exp(last), input_precision=EXACT)
        memory = memory.to(memory_ptr.dtype.element_ty).to(tl.float32)
        tl.store(found_ptr + own_value, out, mask=has_value)
    tl.store(at, memory.to(memory_ptr.dtype.element_ty), mask=inside & (count > 0))
