"""Gated DeltaNet's recurrence on a GPU (Yang et al. 2025, arXiv:2412.06464), token by token: windows and prompts.

A program has a request, a head, and some columns of its values: their part of the state [dk, columns] stays in
registers. It takes one sequence of tokens, and nothing in its loop depends on where a token comes from:

    inputs [K - 1] | accepted columns of the last window | the rows of this forward
                     no output                             an output each
                                                         ^ the state that is kept of a window, which may be rejected;
                                                           that of a prompt is kept after its last row

Columns read the same addresses and add up in the same order in every batch and width, so a window has plain decoding's
bits. A second kernel moves inputs and windows, which all programs of the first one read. Sync: never.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, ceil_div, next_power_of_2, require

_COLUMNS = 32  # of values, in a program
_CHANNELS = 256  # in a program of the second kernel
_ALIGNMENT = 16  # bytes
_EPS = 1e-6  # beneath the lengths of queries and keys
_COUNTS = ("most", "width")  # plain and drafted steps run one binary, so that they add up alike


class DeltaState(NamedTuple):
    """What a layer keeps of S slots."""

    memory: Tensor  # [S, n, dk, dv], in any floating type
    inputs: Tensor  # [S, K - 1, C]: what was convolved last
    window: Tensor  # [S, W, R]: rows that are not in `memory`
    position: Tensor  # [S] i64: tokens that are in `memory`


class DeltaWeights(NamedTuple):
    """The weights inside the recurrence. A row has R = C + 2 n columns: q, k, v, rates, decays."""

    conv: Tensor  # [C, K]
    steepness: Tensor  # [n] f32
    offset: Tensor  # [n] f32
    num_key_heads: int


class DeltaRows(NamedTuple):
    """The rows of a forward."""

    projected: Tensor  # [T, R]
    slots: Tensor  # [B] i64
    positions: Tensor  # [T] i64
    row_starts: Tensor | None  # [B + 1] i32 of prompts; None: windows of T / B rows each, which may be rejected


def gated_delta(state: DeltaState, weights: DeltaWeights, rows: DeltaRows) -> Tensor:
    """What each row reads; `state` goes on in place. Shapes: -> [T, n dv].

    Raises: ValueError naming the argument. Sync: never.
    """
    num_heads, key_dim, value_dim = state.memory.shape[1:]
    channels, kernel = weights.conv.shape
    projected = _aligned(rows.projected)
    require(projected.shape[1] == channels + 2 * num_heads, "projected", f"[T, {channels + 2 * num_heads}]")
    require(projected.is_contiguous() and weights.conv.is_contiguous(), "projected", "contiguous rows and weights")
    require(state.inputs.shape[1:] == (kernel - 1, channels), "inputs", f"[S, {kernel - 1}, {channels}]")
    require(all(part.is_contiguous() for part in state), "state", "contiguous tensors")
    batch, is_window = len(rows.slots), rows.row_starts is None
    width = len(projected) // max(batch, 1) if is_window else 0
    require(width <= state.window.shape[1], "projected", f"up to {state.window.shape[1]} rows of a window")
    out = projected.new_empty(len(projected), num_heads * value_dim)
    if not batch:
        return out
    counts = torch.empty(batch, dtype=torch.int64, device=projected.device)
    block = min(next_power_of_2(value_dim), _COLUMNS)
    starts = rows.slots if rows.row_starts is None else rows.row_starts  # of windows it is not read
    places = (projected, rows.slots, rows.positions, starts, *state, counts)
    _recur_kernel[(batch, num_heads, ceil_div(value_dim, block))](
        *places, weights.conv, weights.steepness, weights.offset, out, state.window.shape[1], width, key_dim**-0.5,
        C=channels, K=kernel, N=num_heads, M=weights.num_key_heads, DK=key_dim, DV=value_dim,
        BLOCK_K=next_power_of_2(key_dim), BLOCK_V=block, IS_WINDOW=is_window, EPS=_EPS,
    )  # fmt: skip
    _keep_kernel[(batch, ceil_div(projected.shape[1], _CHANNELS))](
        *places, state.window.shape[1], width,
        C=channels, K=kernel, N=num_heads, BLOCK=_CHANNELS, IS_WINDOW=is_window,
    )  # fmt: skip
    return out


def _aligned(rows: Tensor) -> Tensor:
    """Where tensors usually begin. Elsewhere a load takes fewer columns of a thread: sums have another order."""
    return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows


def gated_delta_reference(state: DeltaState, weights: DeltaWeights, rows: DeltaRows) -> Tensor:
    """The same, one request and one token after another. Sync: reads places on the host."""
    num_heads, key_dim, value_dim = state.memory.shape[1:]
    channels, kernel = weights.conv.shape
    batch, num_rows = len(rows.slots), len(rows.projected)
    edges = range(0, num_rows + 1, num_rows // batch) if rows.row_starts is None else rows.row_starts.tolist()
    found = rows.projected.new_empty(num_rows, num_heads * value_dim)
    for slot, begin, end in zip(rows.slots.tolist(), edges[:-1], edges[1:], strict=True):
        if begin == end:
            continue
        start, is_window = int(rows.positions[begin]), rows.row_starts is None
        accepted = min(max(start - int(state.position[slot]), 0), state.window.shape[1]) if is_window else 0
        fresh = not is_window and start == 0
        memory, inputs = state.memory[slot].float(), state.inputs[slot].float()
        if fresh:
            memory, inputs = torch.zeros_like(memory), torch.zeros_like(inputs)
        new = torch.cat((state.window[slot, :accepted], rows.projected[begin:end])).float()
        history = torch.cat((inputs, new[:, :channels]))
        for token in range(len(new)):
            if token == accepted and is_window:
                state.memory[slot] = memory
            mixed = F.silu((history[token : token + kernel] * weights.conv.float().t()).sum(0))
            memory, query = _next(memory, mixed, new[token, channels:], weights)
            memory = memory.to(state.memory.dtype).float()
            if token >= accepted:
                found[begin + token - accepted] = torch.einsum("nkv,nk->nv", memory, query).flatten()
        kept = accepted if is_window else len(new)
        state.inputs[slot] = history[kept : kept + kernel - 1]
        if is_window:
            state.window[slot, : end - begin] = rows.projected[begin:end]
        else:
            state.memory[slot] = memory
        state.position[slot] = start if is_window else start + end - begin
    return found


def _next(memory: Tensor, mixed: Tensor, gates: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """The state after a token, and its query. Shapes: [n, dk, dv], [C], [2 n] -> [n, dk, dv], [n, dk]."""
    num_heads, key_dim, value_dim = memory.shape
    keys = weights.num_key_heads * key_dim
    query, key = (
        (part * torch.rsqrt((part * part).sum(1, keepdim=True) + _EPS)).repeat_interleave(num_heads // len(part), 0)
        for part in (mixed[:keys].view(-1, key_dim), mixed[keys : 2 * keys].view(-1, key_dim))
    )
    rate, step = gates.view(2, num_heads)
    decayed = memory * torch.exp(-weights.steepness * F.softplus(step + weights.offset))[:, None, None]
    known = torch.einsum("nkv,nk->nv", decayed, key)
    learnt = (mixed[2 * keys :].view(num_heads, value_dim) - known) * rate.sigmoid()[:, None]
    return decayed + key[:, :, None] * learnt[:, None, :], query * key_dim**-0.5


@TritonKernel
def _sequence_row(
    projected_ptr: tl.tensor, inputs_ptr: tl.tensor, window_ptr: tl.tensor, row: tl.tensor, accepted: tl.tensor,
    fresh: tl.tensor, column: tl.tensor, inside: tl.tensor, C: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Some columns of a row of a request's sequence, whose tensors begin at these addresses."""
    is_input, is_new = row < K - 1, row >= K - 1 + accepted
    old = tl.load(inputs_ptr + row * C + column, mask=inside & is_input & (fresh == 0), other=0.0).to(tl.float32)
    pending = tl.load(
        window_ptr + (row - (K - 1)) * R + column, mask=inside & (is_input == 0) & (is_new == 0), other=0.0
    )
    new = tl.load(projected_ptr + (row - (K - 1) - accepted) * R + column, mask=inside & is_new, other=0.0)
    return tl.where(is_input, old, tl.where(is_new, new.to(tl.float32), pending.to(tl.float32)))


@TritonKernel
def _convolved(
    projected_ptr: tl.tensor, inputs_ptr: tl.tensor, window_ptr: tl.tensor, conv_ptr: tl.tensor, token: tl.tensor,
    accepted: tl.tensor, fresh: tl.tensor, column: tl.tensor, inside: tl.tensor,
    C: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """SiLU of the causal convolution of some channels."""
    found = tl.zeros(column.shape, tl.float32)
    for offset in tl.static_range(K):
        weight = tl.load(conv_ptr + column * K + offset, mask=inside, other=0.0).to(tl.float32)
        found += weight * _sequence_row(
            projected_ptr, inputs_ptr, window_ptr, token + offset, accepted, fresh, column, inside, C, K, R
        )
    return found / (1.0 + tl.exp(-found))


@TritonKernel.with_options(do_not_specialize=_COUNTS)
def _recur_kernel(
    projected_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor, starts_ptr: tl.tensor,
    memory_ptr: tl.tensor, inputs_ptr: tl.tensor, window_ptr: tl.tensor, position_ptr: tl.tensor,
    counts_ptr: tl.tensor, conv_ptr: tl.tensor, steepness_ptr: tl.tensor, offset_ptr: tl.tensor, out_ptr: tl.tensor,
    most: int, width: int, scale: float, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, IS_WINDOW: tl.constexpr,
    EPS: tl.constexpr,
) -> None:  # fmt: skip
    """One program per request, head and block of value columns."""
    R: tl.constexpr = C + 2 * N
    request, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + request)
    if IS_WINDOW:
        begin, count = (request * width).to(tl.int64), width
        begins_at = tl.load(positions_ptr + begin)
        known = tl.load(position_ptr + slot)
        accepted = tl.minimum(tl.maximum(begins_at - known, 0), most).to(tl.int32)
        fresh = accepted * 0
    else:
        begin = tl.load(starts_ptr + request).to(tl.int64)
        count = tl.load(starts_ptr + request + 1).to(tl.int32) - begin.to(tl.int32)
        accepted = count * 0
        fresh = (tl.load(positions_ptr + begin, mask=count > 0, other=1) == 0).to(tl.int32)
    if (head == 0) & (tl.program_id(2) == 0):
        tl.store(counts_ptr + request, accepted)
    rows_ptr, own_inputs, own_window = (
        projected_ptr + begin * R,
        inputs_ptr + slot * (K - 1) * C,
        window_ptr + slot * most * R,
    )
    lane, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = lane < DK, value < DV
    key_column = (head // (N // M)) * DK + lane
    value_column = 2 * M * DK + head * DV + value
    at = memory_ptr + ((slot * N + head) * DK + lane[:, None]) * DV + value[None, :]
    inside = has_key[:, None] & has_value[None, :]
    memory = tl.load(at, mask=inside & (fresh == 0), other=0.0).to(tl.float32)
    steepness, offset = tl.load(steepness_ptr + head), tl.load(offset_ptr + head)
    for token in range(0, accepted + count):
        if IS_WINDOW:
            tl.store(at, memory.to(memory_ptr.dtype.element_ty), mask=inside & (token == accepted))
        q = _convolved(rows_ptr, own_inputs, own_window, conv_ptr, token, accepted, fresh, key_column, has_key, C, K, R)
        k = _convolved(
            rows_ptr, own_inputs, own_window, conv_ptr, token, accepted, fresh, M * DK + key_column, has_key, C, K, R
        )
        v = _convolved(
            rows_ptr, own_inputs, own_window, conv_ptr, token, accepted, fresh, value_column, has_value, C, K, R
        )
        q = q / tl.sqrt(tl.sum(q * q, 0) + EPS) * scale
        k = k / tl.sqrt(tl.sum(k * k, 0) + EPS)
        gate = C + head + tl.zeros([1], tl.int32)
        rate = tl.sum(
            _sequence_row(rows_ptr, own_inputs, own_window, token + K - 1, accepted, fresh, gate, gate >= 0, C, K, R), 0
        )
        step = (
            tl.sum(
                _sequence_row(
                    rows_ptr, own_inputs, own_window, token + K - 1, accepted, fresh, gate + N, gate >= 0, C, K, R
                ),
                0,
            )
            + offset
        )
        softplus = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
        memory = memory * tl.exp(-steepness * softplus)
        learnt = (v - tl.sum(memory * k[:, None], 0)) / (1.0 + tl.exp(-rate))
        memory = (memory + k[:, None] * learnt[None, :]).to(memory_ptr.dtype.element_ty).to(tl.float32)
        row = begin + token - accepted
        tl.store(
            out_ptr + row * N * DV + head * DV + value,
            tl.sum(memory * q[:, None], 0),
            mask=has_value & (token >= accepted),
        )
    if not IS_WINDOW:
        tl.store(at, memory.to(memory_ptr.dtype.element_ty), mask=inside & (count > 0))


@TritonKernel.with_options(do_not_specialize=_COUNTS)
def _keep_kernel(
    projected_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor, starts_ptr: tl.tensor,
    memory_ptr: tl.tensor, inputs_ptr: tl.tensor, window_ptr: tl.tensor, position_ptr: tl.tensor,
    counts_ptr: tl.tensor, most: int, width: int, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, IS_WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """One program per request and block of channels: inputs and windows go on, row by row in the order of the sequence.

    A row's place is written after all rows that are read from there: inputs move down by at least 0 rows.
    """
    R: tl.constexpr = C + 2 * N
    request = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot, accepted = tl.load(slots_ptr + request), tl.load(counts_ptr + request).to(tl.int32)
    if IS_WINDOW:
        begin, count, kept, fresh = (request * width).to(tl.int64), width, accepted, accepted * 0
        start = tl.load(positions_ptr + begin)
    else:
        begin = tl.load(starts_ptr + request).to(tl.int64)
        count = tl.load(starts_ptr + request + 1).to(tl.int32) - begin.to(tl.int32)
        kept = count
        start = tl.load(positions_ptr + begin, mask=count > 0, other=1)
        fresh = (start == 0).to(tl.int32)
        start += count
    rows_ptr, own_inputs, own_window = (
        projected_ptr + begin * R,
        inputs_ptr + slot * (K - 1) * C,
        window_ptr + slot * most * R,
    )
    for row in range(0, K - 1):
        found = _sequence_row(
            rows_ptr, own_inputs, own_window, row + kept, accepted, fresh, column, column < C, C, K, R
        )
        tl.debug_barrier()
        tl.store(own_inputs + row * C + column, found.to(inputs_ptr.dtype.element_ty), mask=(column < C) & (count > 0))
        tl.debug_barrier()
    if IS_WINDOW:
        for row in range(0, width):
            found = tl.load(rows_ptr + row * R + column, mask=column < R, other=0.0)
            tl.store(own_window + row * R + column, found, mask=column < R)
    if tl.program_id(1) == 0:
        tl.store(position_ptr + slot, start, mask=count > 0)
