"""Recurrences over prompts, by chunks that multiply matrices (Yang et al. 2025, arXiv:2412.06464, 3.3).

A chunk is 64 positions that begin at a multiple of 64, of which a step may have a part; the rows that it has not add
nothing. So a prompt that is cut at such places keeps its bits, in any company. Of a chunk, with decays g from its
beginning, the values that tokens add solve a triangular system:

    (I + L) u = b (v - e^g S^T k)       L = b (k k^T) e^(g_i - g_j) below its diagonal
    out = e^g S^T q + ((q k^T) e^(g_i - g_j)) u             on and below the diagonal
    S <-- e^g_64 S + k^T (e^(g_64 - g) u)

Of Mamba-2 (G is 1) nothing is solved: u is v times its step, and a part of v is added to `out`.

A first kernel convolves, each column once. A second one computes what does not depend on the state, for all chunks side
by side: a row of each matrix for each token. Then a program for each block of value columns takes the chunks of a
request one after another. Sync: never.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, next_power_of_2
from overlap_spec_kernels.recurrent.row import softplus

CHUNK = 64  # positions
_COLUMNS = 32  # of values, in a program of the second kernel
_WARPS = 4  # of it, and of the one before it
_STAGES = {2: 3, 4: 2}  # of it, by bytes of a number: shared memory holds three of 4 bytes, which were not timed
_MIN_DOT = 16  # the smallest side of a product
_RUN, _NUMBERS = 8, 1024  # rows that a thread convolves; numbers that a program does at once, eight a thread


def recur_over_prompts(
    places: tuple[Tensor, ...], of_gates: Tensor, of_layer: tuple[Tensor | None, ...], found: Tensor, longest: int,
    scale: float, sizes: dict[str, int], eps: float, are_apart: bool,
) -> None:  # fmt: skip
    """Write what each row finds, and the state after the last one. See `gated_delta`, which passes its arguments on.

    `longest`: rows that a request has at most. Shapes: found [T, n dv].
    """
    projected, slots, positions, starts, memory, inputs, counts = (*places[:6], places[8])
    num_rows, num_heads, num_keys, value_dim = len(projected), sizes["N"], sizes["M"], sizes["DV"]
    block_k = max(next_power_of_2(sizes["DK"]), _MIN_DOT)
    block_v = max(min(next_power_of_2(value_dim), _COLUMNS), _MIN_DOT)
    # Of each token: queries and keys of a key head, values, rates and decays; rows of two matrices of its chunk.
    queries, keys = (projected.new_empty(num_rows, num_keys, block_k) for _ in range(2))
    values = torch.empty_like(found)
    products = projected.new_empty(num_rows, num_heads, CHUNK)
    inverses = torch.empty_like(products) if sizes["G"] == 2 else products
    rates, decays = (torch.empty(num_rows, num_heads, dtype=torch.float32, device=found.device) for _ in range(2))
    prepared = (queries, keys, values, inverses, products, rates, decays)
    shared = {"N": num_heads, "M": num_keys, "DK": sizes["DK"], "DV": value_dim, "BLOCK_K": block_k, "G": sizes["G"]}
    conv, steepness, offset, bias, skip = of_layer
    exact = "tf32x3" if projected.dtype == torch.float32 else "tf32"  # of 16 bits every product is
    of_values, apart = ceil_div(num_heads * value_dim, block_k), {"C": sizes["C"], "APART": are_apart}
    rows = _RUN * max(_NUMBERS // block_k, 1)
    _convolve_kernel[(ceil_div(longest, rows), 2 * num_keys + of_values, len(slots))](
        projected, slots, positions, starts, inputs, counts, conv, bias, *prepared[:3], scale, K=sizes["K"],
        ROWS=rows, RUN=_RUN, EPS=eps, num_warps=4, **apart, **shared,
    )  # fmt: skip
    _prepare_kernel[(ceil_div(longest, CHUNK) + 1, num_heads, len(slots))](
        of_gates, positions, starts, steepness, offset, *prepared[:2], *prepared[3:], B=CHUNK // 4, L=CHUNK,
        EXACT=exact, num_warps=_WARPS, num_stages=1, **apart, **shared,
    )  # fmt: skip
    _chunks_kernel[(ceil_div(value_dim, block_v), num_heads, len(slots))](
        slots, positions, starts, memory, skip, *prepared, found, BLOCK_V=block_v, L=CHUNK, EXACT=exact,
        num_warps=_WARPS, num_stages=_STAGES[projected.element_size()], **shared,
    )  # fmt: skip


@TritonKernel
def _convolve_kernel(
    projected_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor, starts_ptr: tl.tensor,
    inputs_ptr: tl.tensor, counts_ptr: tl.tensor, conv_ptr: tl.tensor, bias_ptr: tl.tensor, queries_ptr: tl.tensor,
    keys_ptr: tl.tensor, values_ptr: tl.tensor, scale: float, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, G: tl.constexpr, APART: tl.constexpr,
    ROWS: tl.constexpr, RUN: tl.constexpr, EPS: tl.constexpr,
) -> None:  # fmt: skip
    """One program per ROWS rows of a request and head of queries or keys, or as many columns of values.

    SiLU of the convolution; of Gated DeltaNet queries and keys have length 1. A thread has RUN rows side
    by side, and reads each row once for all that it is added to.
    """
    STRIDE: tl.constexpr = C + N * DV + (0 if APART else G * N)
    head, request = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1).to(tl.int32) - begin.to(tl.int32)
    if (head == 0) & (tl.program_id(0) == 0):
        tl.store(counts_ptr + request, 0)
    if tl.program_id(0) * ROWS < count:
        first = (tl.program_id(0) * ROWS + tl.arange(0, ROWS // RUN) * RUN)[:, None]
        lane, is_key = tl.arange(0, BLOCK_K), head < 2 * M
        channel = tl.where(is_key, head * DK, 2 * M * DK + (head - 2 * M) * BLOCK_K) + lane
        is_channel = (channel < C) & ((lane < DK) | (head >= 2 * M))
        lane, column, inside = lane[None, :], channel[None, :], is_channel[None, :]
        rows_ptr = projected_ptr + begin * STRIDE + column
        own_inputs = inputs_ptr + tl.load(slots_ptr + request) * (K - 1) * C + column
        has_old = (tl.program_id(0) == 0) & (tl.load(positions_ptr + begin) > 0)
        sources: tl.tuple = ()
        weights: tl.tuple = ()
        for offset in tl.static_range(1 - K, RUN):
            source = first + offset
            is_new = (source >= 0) & (source < count) & inside
            x = tl.load(rows_ptr + source.to(tl.int64) * STRIDE, mask=is_new, other=0.0)
            if offset < 0 and has_old:  # what was convolved last
                x += tl.load(own_inputs + (source + K - 1) * C, mask=(source < 0) & inside, other=0.0)
            sources = sources + (x,)
        for offset in tl.static_range(K):
            weight = tl.load(conv_ptr + channel * K + offset, mask=is_channel, other=0.0)
            weights = weights + (weight.to(tl.float32)[None, :],)
        for index in tl.static_range(RUN):
            row = first + index
            valid, total = row < count, tl.zeros((ROWS // RUN, BLOCK_K), tl.float32)
            for offset in tl.static_range(K):
                total += sources[index + offset].to(tl.float32) * weights[offset]
            if bias_ptr is not None:
                total += tl.load(bias_ptr + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
            total = total / (1.0 + tl.exp(-total))
            own_row = begin + row
            if is_key:
                if G == 2:
                    total = total / tl.sqrt(tl.sum(total * total, 1) + EPS)[:, None]
                own_head = own_row * M * BLOCK_K + head % M * BLOCK_K + lane
                if head < M:
                    tl.store(queries_ptr + own_head, total * scale if G == 2 else total, mask=valid)
                else:
                    tl.store(keys_ptr + own_head, total, mask=valid)
            else:
                tl.store(values_ptr + own_row * N * DV + column - 2 * M * DK, total, mask=valid & inside)


@TritonKernel
def _gates(
    gates_ptr: tl.tensor, steepness_ptr: tl.tensor, offset_ptr: tl.tensor, row: tl.tensor, valid: tl.tensor,
    head: tl.tensor, N: tl.constexpr, G: tl.constexpr, PITCH: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Rates, and logarithms of decays from the chunk's beginning on. Shapes: row, valid [L] -> [L] both."""
    at = gates_ptr + row.to(tl.int64) * PITCH + head
    rate = tl.load(at, mask=valid, other=0.0).to(tl.float32)
    step = tl.load(at + (G - 1) * N, mask=valid, other=0.0).to(tl.float32) + tl.load(offset_ptr + head)
    size = softplus(step)
    decay = tl.where(valid, -tl.load(steepness_ptr + head) * size, 0.0)
    rate = size if G == 1 else 1.0 / (1.0 + tl.exp(-rate))
    return tl.where(valid, rate, 0.0), tl.cumsum(decay, 0)


@TritonKernel
def _inverted(lower: tl.tensor, line: tl.tensor, B: tl.constexpr, EXACT: tl.constexpr) -> tl.tensor:
    """(I + lower)^-1, of a matrix of 4 B rows that has zeros on and above its diagonal.

    First D, the inverse without what lies between blocks of B rows: of all of them row after row. With N, D times what
    lies between, it is (I + N)^-1 D, and the fourth power of N is 0. Shapes: lower [L, L], line [L] 0, 1, .. -> [L, L].
    """
    same = (line // B)[:, None] == (line // B)[None, :]
    between = tl.where(same, 0.0, lower)
    block, row = tl.arange(0, 4), tl.arange(0, B)[:, None, None]  # a thread has all rows of a column
    is_own = block[:, None, None, None] == block[None, None, :, None]
    within = tl.sum(tl.where(is_own, tl.reshape(lower, (4, B, 4, B)), 0.0), 2)
    within = tl.permute(within, (1, 0, 2))  # [B, 4, B]
    solved = tl.broadcast_to((row == tl.arange(0, B)[None, None, :]).to(tl.float32), (B, 4, B))
    for index in range(1, B):
        of_row = tl.trans(tl.sum(tl.where(row == index, within, 0.0), 0))
        solved = tl.where(row == index, solved - tl.sum(of_row[:, :, None] * solved, 0)[None], solved)
    solved = tl.permute(solved, (1, 0, 2))
    inverse = tl.reshape(tl.where(is_own, solved[:, :, None, :], 0.0), (4 * B, 4 * B))
    n = tl.dot(inverse, between, input_precision=EXACT)
    inverse += tl.dot(tl.dot(n, n, input_precision=EXACT), inverse, input_precision=EXACT)
    return inverse - tl.dot(n, inverse, input_precision=EXACT)


@TritonKernel
def _prepare_kernel(
    gates_ptr: tl.tensor, positions_ptr: tl.tensor, starts_ptr: tl.tensor, steepness_ptr: tl.tensor,
    offset_ptr: tl.tensor, queries_ptr: tl.tensor, keys_ptr: tl.tensor, inverses_ptr: tl.tensor,
    products_ptr: tl.tensor, rates_ptr: tl.tensor, decays_ptr: tl.tensor, C: tl.constexpr, N: tl.constexpr,
    M: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, G: tl.constexpr, APART: tl.constexpr,
    L: tl.constexpr, B: tl.constexpr, EXACT: tl.constexpr,
) -> None:  # fmt: skip
    """One program per chunk, head and request: what does not depend on the state."""
    PITCH: tl.constexpr = G * N if APART else C + G * N + N * DV
    head, request = tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts_ptr + request).to(tl.int64)
    count = tl.load(starts_ptr + request + 1).to(tl.int32) - begin.to(tl.int32)
    start = tl.load(positions_ptr + begin, mask=count > 0, other=0).to(tl.int32)
    first = tl.program_id(0) * L - start % L  # row of the chunk's first position
    if first < count:
        line = tl.arange(0, L)
        row = first + line
        valid = (row >= 0) & (row < count)
        are_valid, own_row = valid[:, None], begin + row[:, None]
        own_key = (own_row * M + head // (N // M)) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
        q = tl.load(queries_ptr + own_key, mask=are_valid, other=0.0)
        k = tl.load(keys_ptr + own_key, mask=are_valid, other=0.0)
        rate, decay = _gates(gates_ptr + begin * PITCH, steepness_ptr, offset_ptr, row, valid, head, N, G, PITCH)
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
    # Of a chunk's tokens from its first one on, which may be before the step. They are the same in all chunks.
    of_keys = line[:, None] * (M * BLOCK_K) + lane[None, :]
    of_lines = line[:, None] * (N * L) + line[None, :]
    of_values = line[:, None] * (N * DV) + value[None, :]
    for first in range(-(start % L), count, L):
        row = first + line
        valid = (row >= 0) & (row < count)
        are_valid, has_value = valid[:, None], valid[:, None] & (value < DV)[None, :]
        own = (begin + first) * N + head
        own_key = ((begin + first) * M + head // (N // M)) * BLOCK_K
        q = tl.load(queries_ptr + own_key + of_keys, mask=are_valid, other=0.0)
        k = tl.load(keys_ptr + own_key + of_keys, mask=are_valid, other=0.0)
        v = tl.load(values_ptr + own * DV + of_values, mask=has_value, other=0.0).to(tl.float32)
        if G == 2:
            inverse = tl.load(inverses_ptr + own * L + of_lines, mask=are_valid, other=0.0)
        products = tl.load(products_ptr + own * L + of_lines, mask=are_valid, other=0.0)
        rate = tl.load(rates_ptr + own + line * N, mask=valid, other=0.0)
        # Rows behind the last one add nothing, before the first one nothing has decayed.
        decay = tl.load(decays_ptr + own + line * N, mask=valid, other=0.0)
        last = tl.load(decays_ptr + (begin + tl.minimum(first + L, count) - 1) * N + head)
        since = tl.exp(decay)[:, None]
        state = memory.to(kind)
        if G == 2:
            known = tl.dot(k, state, input_precision=EXACT) * since
            target = (rate[:, None] * (v - known)).to(kind)
            added = tl.dot(inverse, target, input_precision=EXACT)
        else:
            added = rate[:, None] * v
        out = tl.dot(q, state, input_precision=EXACT) * since
        out = tl.dot(products, added.to(kind), out, input_precision=EXACT)
        if skip_ptr is not None:
            out += tl.load(skip_ptr + head) * v
        left = tl.exp(tl.where(valid, last - decay, 0.0))
        kept = (added * left[:, None]).to(kind)
        memory = tl.dot(tl.trans(k), kept, memory * tl.exp(last), input_precision=EXACT)
        memory = memory.to(memory_ptr.dtype.element_ty).to(tl.float32)
        tl.store(found_ptr + own * DV + of_values, out, mask=has_value)
    tl.store(at, memory.to(memory_ptr.dtype.element_ty), mask=inside & (count > 0))
