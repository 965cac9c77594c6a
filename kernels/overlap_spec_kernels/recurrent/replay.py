"""Output that is computed again, on Hopper: all its rows are known, so only the state goes from one to the next.

It has the bits of windows (`gated_delta.py`), which decoded it. First a program for each row and head computes what
does not depend on the state; it holds a row as a window's program does, so that lengths are added up alike. Then a
program has as many columns of a state as a warp has threads for, where a window's has 16: a thread has the rows of one
column that it has there of several. So what a column finds is added up by as many threads, each in the same order.

`THREADS` share a column. Row THREADS i + t is the i-th of thread t: those of a thread are apart in a state, and side by
side in queries and keys here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import gl, tl
from overlap_spec_kernels.launch import GluonKernel, TritonKernel, next_power_of_2, runs_gluon
from overlap_spec_kernels.recurrent.row import ADDS_UP, COLUMNS, new_row, silu_sum, softplus, weights_of

_BYTES = 16  # of a state that a thread of a window's program loads at once
_KEYS = (64, 128, 256)  # rows of states that are divided as above


def replays(memory: Tensor) -> bool:
    """Whether `replay` takes states of this shape. Shapes: [S, n, dk, dv]."""
    return memory.shape[2] in _KEYS and memory.shape[3] % COLUMNS == 0 and runs_gluon(memory.device)


def replay(
    places: tuple[Tensor, ...], of_gates: Tensor, of_layer: tuple[Tensor | None, ...], found: Tensor, scale: float,
    sizes: dict[str, int], eps: float, are_apart: bool,
) -> None:  # fmt: skip
    """Write what each row of one request finds, and the state after the last one. See `gated_delta`.

    Where its rows begin and end is read on the device. Shapes: found [T, n dv]. Sync: never.
    """
    projected, slots, drawn, memory, inputs, counts = (*places[:2], *places[3:6], places[8])
    num_rows, num_heads, value_dim = len(projected), sizes["N"], sizes["DV"]
    threads = 32 * _BYTES // memory.element_size() // COLUMNS  # of a warp, that share a column
    columns = 32 // threads
    queries, keys = (memory.new_empty(num_rows, sizes["M"], sizes["DK"], dtype=torch.float32) for _ in range(2))
    values = memory.new_empty(num_rows, num_heads, value_dim, dtype=torch.float32)
    rates, decays = (memory.new_empty(num_rows, num_heads, dtype=torch.float32) for _ in range(2))
    prepared = (queries, keys, values, rates, decays)
    conv, steepness, offset, bias, skip = of_layer
    _prepare_kernel[(num_rows, num_heads)](
        projected, of_gates, slots, drawn, inputs, counts, conv, steepness, offset, bias, *prepared, scale,
        BLOCK_V=next_power_of_2(value_dim), APART=are_apart, EPS=eps, THREADS=threads, **sizes, **ADDS_UP,
    )  # fmt: skip
    _replay_kernel[(value_dim // columns, num_heads)](
        slots, drawn, memory, skip, *prepared, found, N=num_heads, M=sizes["M"], DK=sizes["DK"], DV=value_dim,
        G=sizes["G"], THREADS=threads, VALUES=columns, **ADDS_UP,
    )  # fmt: skip


@TritonKernel
def _convolved(
    rows_ptr: tl.tensor, inputs_ptr: tl.tensor, conv_ptr: tl.tensor, bias_ptr: tl.tensor, token: tl.tensor,
    column: tl.tensor, inside: tl.tensor, C: tl.constexpr, K: tl.constexpr, STRIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """SiLU of a row's convolution in some columns. Rows follow those that were convolved before, K - 1."""
    first, last = token + (K - 4), token + (K - 1)
    has_first = inside & (first >= 0)
    x0 = new_row(rows_ptr, inputs_ptr, first, K - 1, last + 1, column, column, has_first, C, STRIDE)
    x1 = new_row(rows_ptr, inputs_ptr, last - 2, K - 1, last + 1, column, column, inside & (last >= 2), C, STRIDE)
    x2 = new_row(rows_ptr, inputs_ptr, last - 1, K - 1, last + 1, column, column, inside, C, STRIDE)
    x3 = new_row(rows_ptr, inputs_ptr, last, K - 1, last + 1, column, column, inside, C, STRIDE)
    weight0, weight1, weight2, weight3 = (
        weights_of(conv_ptr, K - 4, column, inside, K), weights_of(conv_ptr, K - 3, column, inside, K),
        weights_of(conv_ptr, K - 2, column, inside, K), weights_of(conv_ptr, K - 1, column, inside, K),
    )  # fmt: skip
    return silu_sum(bias_ptr, column, inside, weight0 * x0 + weight1 * x1 + weight2 * x2 + weight3 * x3)


@TritonKernel
def _prepare_kernel(
    projected_ptr: tl.tensor, gates_ptr: tl.tensor, slots_ptr: tl.tensor, drawn_ptr: tl.tensor, inputs_ptr: tl.tensor,
    counts_ptr: tl.tensor, conv_ptr: tl.tensor, steepness_ptr: tl.tensor, offset_ptr: tl.tensor, bias_ptr: tl.tensor,
    queries_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, rates_ptr: tl.tensor, decays_ptr: tl.tensor,
    scale: float, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_V: tl.constexpr, G: tl.constexpr, APART: tl.constexpr, EPS: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:  # fmt: skip
    """One program per row and head; the first head that reads a key head has its query and its key, too."""
    STRIDE: tl.constexpr = C + N * DV + (0 if APART else G * N)
    PITCH: tl.constexpr = G * N if APART else STRIDE
    row, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(drawn_ptr), tl.load(drawn_ptr + 1)
    if (row == 0) & (head == 0):
        tl.store(counts_ptr, 0)
    if (row >= begin) & (row < end):
        token = row - begin.to(tl.int32)
        own_inputs = inputs_ptr + tl.load(slots_ptr) * (K - 1) * C
        rows_ptr = projected_ptr + begin * STRIDE
        value = tl.arange(0, BLOCK_V)
        v_column, has_value = 2 * M * DK + head * DV + value, value < DV
        v = _convolved(rows_ptr, own_inputs, conv_ptr, bias_ptr, token, v_column, has_value, C, K, STRIDE)
        own = row.to(tl.int64) * N + head
        tl.store(values_ptr + own * DV + value, v, mask=has_value)
        own_gates = gates_ptr + row.to(tl.int64) * PITCH + head
        size = softplus(tl.load(own_gates + (G - 1) * N).to(tl.float32) + tl.load(offset_ptr + head))
        tl.store(decays_ptr + own, tl.exp(-tl.load(steepness_ptr + head) * size))
        tl.store(rates_ptr + own, 1.0 + tl.exp(-tl.load(own_gates).to(tl.float32)) if G == 2 else size)
        if head % (N // M) == 0:
            lane = tl.arange(0, DK)
            q_column, has_key = head // (N // M) * DK + lane, lane < DK
            k_column = M * DK + q_column
            q = _convolved(rows_ptr, own_inputs, conv_ptr, bias_ptr, token, q_column, has_key, C, K, STRIDE)
            k = _convolved(rows_ptr, own_inputs, conv_ptr, bias_ptr, token, k_column, has_key, C, K, STRIDE)
            if G == 2:
                q = q / tl.sqrt(tl.sum(q * q, 0) + EPS) * scale
                k = k / tl.sqrt(tl.sum(k * k, 0) + EPS)
            own_key = (row.to(tl.int64) * M + head // (N // M)) * DK
            place = lane % THREADS * (DK // THREADS) + lane // THREADS
            tl.store(queries_ptr + own_key + place, q)
            tl.store(keys_ptr + own_key + place, k)


@GluonKernel
def _replay_kernel(
    slots_ptr: gl.tensor, drawn_ptr: gl.tensor, memory_ptr: gl.tensor, skip_ptr: gl.tensor, queries_ptr: gl.tensor,
    keys_ptr: gl.tensor, values_ptr: gl.tensor, rates_ptr: gl.tensor, decays_ptr: gl.tensor, found_ptr: gl.tensor,
    N: gl.constexpr, M: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, G: gl.constexpr, THREADS: gl.constexpr,
    VALUES: gl.constexpr,
) -> None:  # fmt: skip
    """One program, which is a warp, per block of value columns and head."""
    ROWS: gl.constexpr = DK // THREADS  # of a thread
    layout: gl.constexpr = gl.BlockedLayout([ROWS, 1], [THREADS, VALUES], [1, 1], [1, 0])
    head, slot, begin = gl.program_id(1), gl.load(slots_ptr), gl.load(drawn_ptr)
    count = (gl.load(drawn_ptr + 1) - begin).to(gl.int32)
    if count > 0:
        place = gl.arange(0, DK, gl.SliceLayout(1, layout))
        value = gl.program_id(0) * VALUES + gl.arange(0, VALUES, gl.SliceLayout(0, layout))
        lane = place % ROWS * THREADS + place // ROWS
        at = memory_ptr + (slot * N + head) * DK * DV + gl.expand_dims(lane * DV, 1) + gl.expand_dims(value, 0)
        memory = gl.load(at).to(gl.float32)
        own_q = queries_ptr + (begin * M + head // (N // M)) * DK + place
        own_k = keys_ptr + (begin * M + head // (N // M)) * DK + place
        own_v = values_ptr + (begin * N + head) * DV + value
        own_rate, own_decay = rates_ptr + begin * N + head, decays_ptr + begin * N + head
        own_found = found_ptr + (begin * N + head) * DV + value
        if skip_ptr is not None:
            skip = gl.load(skip_ptr + head)
        q, k, v, rate, decay = gl.load(own_q), gl.load(own_k), gl.load(own_v), gl.load(own_rate), gl.load(own_decay)
        for token in range(count):
            after = gl.minimum(token + 1, count - 1)  # is on its way while this one is computed
            next_q, next_k = gl.load(own_q + after * M * DK), gl.load(own_k + after * M * DK)
            next_v = gl.load(own_v + after * N * DV)
            next_rate, next_decay = gl.load(own_rate + after * N), gl.load(own_decay + after * N)
            memory = memory * decay
            key = gl.expand_dims(k, 1)
            learnt = (v - gl.sum(memory * key, axis=0)) / rate if G == 2 else v * rate
            memory = (memory + key * gl.expand_dims(learnt, 0)).to(memory_ptr.dtype.element_ty).to(gl.float32)
            out = gl.sum(memory * gl.expand_dims(q, 1), axis=0)
            gl.store(own_found + token * N * DV, out if skip_ptr is None else out + skip * v)
            q, k, v, rate, decay = next_q, next_k, next_v, next_rate, next_decay
        gl.store(at, memory.to(memory_ptr.dtype.element_ty))
