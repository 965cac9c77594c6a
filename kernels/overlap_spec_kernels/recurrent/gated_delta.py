"""Layers that recur, on a GPU: windows token by token, prompts by chunks.

Gated DeltaNet (Yang et al. 2025, arXiv:2412.06464), and Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), which takes
nothing away from what a state knows: its C, B and x are q, k and v here, and G, the gates of a head, is 1 and not 2.

**A window.** A program, which is one warp, has a request, a head, and some columns of its values: their part of the
state [dk, columns] stays in registers. It takes one sequence of tokens, and nothing in its loop depends on where a
token comes from:

    inputs [K - 1] | accepted columns of the last window | the rows of this forward
                     no output                             an output each
                                                         ^ the state that is kept: what follows may be rejected

The last rows that are convolved stay in registers, and the next one is loaded while a token is computed. Columns read
the same addresses and add up in the same order in every batch and width, so a window has plain decoding's bits.
Gated DeltaNet's on Hopper has one launch with these bits (`delta_window.py`).

Output that is computed again is such a sequence, too: of any length, and all of it is in the state that is kept. All
its rows are known, which makes it shorter on Hopper (`replay.py`).

**A prompt** goes by chunks that multiply matrices (`prompt_chunks.py`). Output that follows it goes on from the state
that they leave. How long both are is read on the device, so a captured step has any prompt and any output.

**What follows.** Programs of the last kernel normalise heads of rows and multiply by their gates (Mamba-2: first the
gates, then whole rows); others move inputs and windows, which all programs of the first one read. Sync: never.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import let_next_begin, tl, wait
from overlap_spec_kernels.launch import (
    TritonKernel,
    ceil_div,
    dependent_launch,
    next_power_of_2,
    require,
)
from overlap_spec_kernels.recurrent import delta_window
from overlap_spec_kernels.recurrent.prompt_chunks import recur_over_prompts
from overlap_spec_kernels.recurrent.replay import replay, replays
from overlap_spec_kernels.recurrent.row import ADDS_UP, COLUMNS, new_row, old_row, silu, silu_sum, softplus, weights_of

MAX_KERNEL = 4  # rows of the convolution, which registers hold
_CHANNELS = 128  # in a program of the second kernel that moves rows
_HEADS = 4  # in one that normalises
_ALIGNMENT = 16  # bytes
_EPS = 1e-6  # beneath the lengths of queries and keys
# Not specialised: plain and drafted steps run one binary, so that they add up alike.
_COUNTS = ("most", "width")


class DeltaState(NamedTuple):
    """What a layer keeps of S slots."""

    memory: Tensor  # [S, n, dk, dv], in any floating type
    inputs: Tensor  # [S, K - 1, C]: what was convolved last
    window: Tensor  # [S, W, R]: rows that are not in `memory`
    position: Tensor  # [S] i64: tokens that are in `memory`


class DeltaWeights(NamedTuple):
    """The weights between the linears. A row has R = C + 2 n columns, which are q, k, v, rates, decays, then z.

    Of Mamba-2 it has R = C + n: q, k, v, steps, then z.
    """

    conv: Tensor  # [C, K]
    steepness: Tensor  # [n] f32
    offset: Tensor  # [n] f32
    norm: Tensor  # [dv] f32; of Mamba-2 [n dv]
    eps: float  # the norm's
    num_key_heads: int
    bias: Tensor | None = None  # [C], of the convolution
    skip: Tensor | None = None  # [n] f32: Mamba-2's D, how much of v a row finds beside; None: Gated DeltaNet

    @property
    def num_gates(self) -> int:
        """G, of each head."""
        return 2 if self.skip is None else 1


class DeltaRows(NamedTuple):
    """The rows of a forward."""

    projected: Tensor  # [T, R + n dv]; without rates and decays where `gates` are
    slots: Tensor  # [B] i64
    positions: Tensor  # [T] i64
    row_starts: Tensor | None  # [B + 1] i32 of prompts; None: windows of T / B rows each, which may be rejected
    longest: int = 0  # rows that a prompt has at most
    gates: Tensor | None = None  # [T, G n], from a linear of their own
    drawn: Tensor | None = None  # [2] i64, with `row_starts` of one request: its output's first row, and the end


def gated_delta(state: DeltaState, weights: DeltaWeights, rows: DeltaRows) -> Tensor:
    """What each row reads, normalised by head and gated by SiLU(z); `state` goes on in place. Shapes: -> [T, n dv].

    Raises: ValueError naming the argument. Sync: never.
    """
    num_heads, key_dim, value_dim = state.memory.shape[1:]
    channels, kernel = weights.conv.shape
    gates, projected = weights.num_gates, _aligned(rows.projected)
    size, batch, is_window = channels + gates * num_heads, len(rows.slots), rows.row_starts is None
    require(batch == 1 or rows.drawn is None, "slots", "one request, some of whose rows were drawn")
    columns = size + num_heads * value_dim - (0 if rows.gates is None else gates * num_heads)
    require(projected.shape[1] == columns, "projected", f"[T, {columns}]")
    if rows.gates is not None:
        fits = rows.gates.shape == (len(projected), gates * num_heads) and rows.gates.is_contiguous()
        require(fits, "gates", "[T, G n], contiguous")
    of_gates = projected[:, channels:] if rows.gates is None else rows.gates
    require(projected.is_contiguous() and weights.conv.is_contiguous(), "projected", "contiguous rows and weights")
    require(2 <= kernel <= MAX_KERNEL, "conv", f"[C, 2 to {MAX_KERNEL}]")
    require(state.inputs.shape[1:] == (kernel - 1, channels), "inputs", f"[S, {kernel - 1}, {channels}]")
    require(all(part.is_contiguous() for part in state), "state", "contiguous tensors")
    most = state.window.shape[1]
    width = len(projected) // max(batch, 1) if is_window else 0
    require(width <= most or not is_window, "projected", f"up to {most} rows of a window")
    sizes = {"C": channels, "K": kernel, "N": num_heads, "M": weights.num_key_heads, "DK": key_dim, "DV": value_dim}
    sizes["G"] = gates
    if (out := _in_one_launch(state, weights, rows._replace(projected=projected), of_gates, sizes)) is not None:
        return out
    new = projected.new_empty if rows.drawn is None else projected.new_zeros  # other rows have no request
    found = new(len(projected), num_heads * value_dim)
    if not batch:
        return found
    counts = torch.empty(batch, dtype=torch.int64, device=projected.device)
    block, pdl = min(next_power_of_2(value_dim), COLUMNS), dependent_launch(projected.device, len(projected))
    heads = _HEADS if gates == 2 else next_power_of_2(num_heads)
    out, runs = torch.empty_like(found), [rows.slots if rows.row_starts is None else rows.row_starts]
    runs += [] if rows.drawn is None else [rows.drawn]
    of_layer = (weights.conv, weights.steepness, weights.offset, weights.bias, weights.skip)
    for starts in runs:  # of windows they are not read
        places = (projected, rows.slots, rows.positions, starts, *state, counts)
        if starts is rows.drawn and replays(state.memory):
            replay(places, of_gates, of_layer, found, key_dim**-0.5, sizes, _EPS, rows.gates is not None)
        elif is_window or starts is rows.drawn:
            # Of output an ordinary launch: it reads at once the state that the launch before it leaves.
            _recur_kernel[(ceil_div(value_dim, block), num_heads, batch)](
                projected, of_gates, *places[1:], *of_layer, found, most, width, int(not is_window), key_dim**-0.5,
                BLOCK_K=next_power_of_2(key_dim), BLOCK_V=block, APART=rows.gates is not None, EPS=_EPS,
                **sizes, **ADDS_UP, **(pdl if is_window else {"PDL": False}),
            )  # fmt: skip
        else:
            recur_over_prompts(
                places, of_gates, of_layer, found, rows.longest, key_dim**-0.5, sizes, _EPS, rows.gates is not None
            )
        of_norms = len(projected) * ceil_div(num_heads, heads) if starts is runs[-1] else 0
        _finish_kernel[(of_norms + batch * ceil_div(size, _CHANNELS),)](
            projected, of_gates, *places[1:], found, weights.norm, out, most, width, of_norms, weights.eps,
            BLOCK_H=heads, BLOCK_V=next_power_of_2(value_dim), BLOCK_W=next_power_of_2(most), BLOCK=_CHANNELS,
            C=channels, K=kernel, N=num_heads, DV=value_dim, G=gates, APART=rows.gates is not None,
            IS_WINDOW=is_window, **pdl,
        )  # fmt: skip
    return out


def _in_one_launch(
    state: DeltaState, weights: DeltaWeights, rows: DeltaRows, of_gates: Tensor, sizes: dict[str, int]
) -> Tensor | None:  # fmt: skip
    """What `gated_delta` returns, of windows that `delta_window` takes."""
    if rows.row_starts is not None or weights.bias is not None:
        return None
    given = delta_window.Windows(rows.projected, of_gates, rows.slots, rows.positions, *state, *weights[:4])
    if not delta_window.takes(given, sizes):
        return None
    return delta_window.run(given, sizes, weights.eps, rows.gates is not None)


def _aligned(rows: Tensor) -> Tensor:
    """Where tensors usually begin. Elsewhere a load takes fewer columns of a thread: sums have another order."""
    return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows


def gated_delta_reference(state: DeltaState, weights: DeltaWeights, rows: DeltaRows) -> Tensor:
    """The same, one request and one token after another. Sync: reads places on the host."""
    num_heads, key_dim, value_dim = state.memory.shape[1:]
    channels, kernel = weights.conv.shape
    batch, num_rows = len(rows.slots), len(rows.projected)
    gates = weights.num_gates * num_heads
    whole = rows.projected
    if rows.gates is not None:
        whole = torch.cat((whole[:, :channels], rows.gates, whole[:, channels:]), dim=1)
    projected, gate = whole.split((channels + gates, num_heads * value_dim), dim=1)
    edges = range(0, num_rows + 1, num_rows // batch) if rows.row_starts is None else rows.row_starts.tolist()
    found = projected.new_empty(num_rows, num_heads * value_dim)
    for slot, begin, end in zip(rows.slots.tolist(), edges[:-1], edges[1:], strict=True):
        if begin == end:
            continue
        start, is_window = int(rows.positions[begin]), rows.row_starts is None
        accepted = min(max(start - int(state.position[slot]), 0), state.window.shape[1]) if is_window else 0
        fresh = not is_window and start == 0
        memory, inputs = state.memory[slot].float(), state.inputs[slot].float()
        if fresh:
            memory, inputs = torch.zeros_like(memory), torch.zeros_like(inputs)
        new = torch.cat((state.window[slot, :accepted], projected[begin:end])).float()
        history = torch.cat((inputs, new[:, :channels]))
        for token in range(len(new)):
            if token == accepted and is_window:
                state.memory[slot] = memory
            mixed = (history[token : token + kernel] * weights.conv.float().t()).sum(0)
            mixed = F.silu(mixed if weights.bias is None else mixed + weights.bias.float())
            memory, query = _next(memory, mixed, new[token, channels:], weights)
            memory = memory.to(state.memory.dtype).float()
            if token >= accepted:
                read = torch.einsum("nkv,nk->nv", memory, query)
                if weights.skip is not None:
                    read += weights.skip[:, None] * mixed[-num_heads * value_dim :].view(num_heads, value_dim)
                found[begin + token - accepted] = read.flatten()
        kept = accepted if is_window else len(new)
        state.inputs[slot] = history[kept : kept + kernel - 1]
        if is_window:
            state.window[slot, : end - begin] = projected[begin:end]
        else:
            state.memory[slot] = memory
        state.position[slot] = start if is_window else start + end - begin
    if weights.skip is not None:
        gated = found.float() * F.silu(gate.float())
        return F.rms_norm(gated, weights.norm.shape, weights.norm, weights.eps).to(found.dtype)
    normed = F.rms_norm(found.float().view(num_rows, num_heads, -1), (value_dim,), weights.norm, weights.eps)
    return (normed.flatten(1) * F.silu(gate.float())).to(found.dtype)


def _next(memory: Tensor, mixed: Tensor, gates: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """The state after a token, and its query. Shapes: [n, dk, dv], [C], [G n] -> [n, dk, dv], [n, dk]."""
    num_heads, key_dim, value_dim = memory.shape
    keys = weights.num_key_heads * key_dim
    if weights.skip is not None:
        query, key = (
            part.view(-1, key_dim).repeat_interleave(num_heads // weights.num_key_heads, 0)
            for part in (mixed[:keys], mixed[keys : 2 * keys])
        )
        step = F.softplus(gates + weights.offset)
        learnt = mixed[2 * keys :].view(num_heads, value_dim) * step[:, None]
        return memory * torch.exp(-weights.steepness * step)[:, None, None] + key[:, :, None] * learnt[:, None], query
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
def _own_rows(starts_ptr: tl.tensor, request: tl.tensor, width: int, final: int) -> tuple[tl.tensor, tl.tensor]:
    """The first row of a request, and how many it has. `final` 1: none is rejected, and they are between two starts."""
    begin = tl.load(starts_ptr + request, mask=final > 0, other=0)
    end = tl.load(starts_ptr + request + 1, mask=final > 0, other=0)
    return tl.where(final > 0, begin, request * width).to(tl.int64), width + (end - begin).to(tl.int32)


@TritonKernel.with_options(do_not_specialize=(*_COUNTS, "final"))
def _recur_kernel(
    projected_ptr: tl.tensor, gates_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor,
    starts_ptr: tl.tensor, memory_ptr: tl.tensor, inputs_ptr: tl.tensor, window_ptr: tl.tensor, position_ptr: tl.tensor,
    counts_ptr: tl.tensor, conv_ptr: tl.tensor, steepness_ptr: tl.tensor, offset_ptr: tl.tensor, bias_ptr: tl.tensor,
    skip_ptr: tl.tensor, found_ptr: tl.tensor, most: int, width: int, final: int, scale: float, C: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, M: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, G: tl.constexpr, APART: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per block of value columns, head and request. APART: as `gates`; `final` 1: as `_own_rows`."""
    R: tl.constexpr = C + G * N
    STRIDE: tl.constexpr = C + N * DV + (0 if APART else G * N)
    PITCH: tl.constexpr = G * N if APART else STRIDE  # of gates
    head, request = tl.program_id(1), tl.program_id(2)
    # Places and states were written before the launches that this one may overlap.
    slot = tl.load(slots_ptr + request)
    begin, width = _own_rows(starts_ptr, request, width, final)
    accepted = tl.load(positions_ptr + begin) - tl.load(position_ptr + slot)
    accepted = tl.minimum(tl.maximum(accepted, 0), most).to(tl.int32)
    total, kept = accepted + width, accepted + final * width
    rows_ptr, gates_ptr = projected_ptr + begin * STRIDE, gates_ptr + begin * PITCH
    own_inputs, own_window = inputs_ptr + slot * (K - 1) * C, window_ptr + slot * most * R
    lane, value = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = lane < DK, value < DV
    q_column = (head // (N // M)) * DK + lane
    k_column = M * DK + q_column
    v_column = 2 * M * DK + head * DV + value
    at = memory_ptr + ((slot * N + head) * DK + lane[:, None]) * DV + value[None, :]
    inside = has_key[:, None] & has_value[None, :]
    memory = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    steepness, offset = tl.load(steepness_ptr + head), tl.load(offset_ptr + head)
    q_weight0, q_weight1, q_weight2, q_weight3 = (
        weights_of(conv_ptr, K - 4, q_column, has_key, K), weights_of(conv_ptr, K - 3, q_column, has_key, K),
        weights_of(conv_ptr, K - 2, q_column, has_key, K), weights_of(conv_ptr, K - 1, q_column, has_key, K),
    )  # fmt: skip
    k_weight0, k_weight1, k_weight2, k_weight3 = (
        weights_of(conv_ptr, K - 4, k_column, has_key, K), weights_of(conv_ptr, K - 3, k_column, has_key, K),
        weights_of(conv_ptr, K - 2, k_column, has_key, K), weights_of(conv_ptr, K - 1, k_column, has_key, K),
    )  # fmt: skip
    v_weight0, v_weight1, v_weight2, v_weight3 = (
        weights_of(conv_ptr, K - 4, v_column, has_value, K), weights_of(conv_ptr, K - 3, v_column, has_value, K),
        weights_of(conv_ptr, K - 2, v_column, has_value, K), weights_of(conv_ptr, K - 1, v_column, has_value, K),
    )  # fmt: skip
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head)
    q0, q1 = old_row(own_inputs, K - 4, q_column, has_key, C), old_row(own_inputs, K - 3, q_column, has_key, C)
    q2 = old_row(own_inputs, K - 2, q_column, has_key, C)
    k0, k1 = old_row(own_inputs, K - 4, k_column, has_key, C), old_row(own_inputs, K - 3, k_column, has_key, C)
    k2 = old_row(own_inputs, K - 2, k_column, has_key, C)
    v0, v1 = old_row(own_inputs, K - 4, v_column, has_value, C), old_row(own_inputs, K - 3, v_column, has_value, C)
    v2 = old_row(own_inputs, K - 2, v_column, has_value, C)
    wait(PDL)
    let_next_begin(PDL)  # which reads all but `found` and counts at once
    if (head == 0) & (tl.program_id(0) == 0):
        tl.store(counts_ptr + request, accepted)
    first, last = accepted * 0, (G - 1) * N + head
    q3 = new_row(rows_ptr, own_window, first, accepted, total, q_column, q_column, has_key, R, STRIDE)
    k3 = new_row(rows_ptr, own_window, first, accepted, total, k_column, k_column, has_key, R, STRIDE)
    v3 = new_row(rows_ptr, own_window, first, accepted, total, v_column, v_column, has_value, R, STRIDE)
    rate = new_row(gates_ptr, own_window, first, accepted, total, C + head, head, head >= 0, R, PITCH)
    step = new_row(gates_ptr, own_window, first, accepted, total, C + last, last, head >= 0, R, PITCH)
    for token in range(0, total):
        tl.store(at, memory.to(memory_ptr.dtype.element_ty), mask=inside & (token == kept))
        after = token + 1
        next_q = new_row(rows_ptr, own_window, after, accepted, total, q_column, q_column, has_key, R, STRIDE)
        next_k = new_row(rows_ptr, own_window, after, accepted, total, k_column, k_column, has_key, R, STRIDE)
        next_v = new_row(rows_ptr, own_window, after, accepted, total, v_column, v_column, has_value, R, STRIDE)
        next_rate = new_row(gates_ptr, own_window, after, accepted, total, C + head, head, head >= 0, R, PITCH)
        next_step = new_row(gates_ptr, own_window, after, accepted, total, C + last, last, head >= 0, R, PITCH)
        q = silu_sum(bias_ptr, q_column, has_key, q_weight0 * q0 + q_weight1 * q1 + q_weight2 * q2 + q_weight3 * q3)
        k = silu_sum(bias_ptr, k_column, has_key, k_weight0 * k0 + k_weight1 * k1 + k_weight2 * k2 + k_weight3 * k3)
        v = silu_sum(bias_ptr, v_column, has_value, v_weight0 * v0 + v_weight1 * v1 + v_weight2 * v2 + v_weight3 * v3)
        if G == 2:
            q = q / tl.sqrt(tl.sum(q * q, 0) + EPS) * scale
            k = k / tl.sqrt(tl.sum(k * k, 0) + EPS)
        size = softplus(step + offset)
        memory = memory * tl.exp(-steepness * size)
        learnt = (v - tl.sum(memory * k[:, None], 0)) / (1.0 + tl.exp(-rate)) if G == 2 else v * size
        memory = (memory + k[:, None] * learnt[None, :]).to(memory_ptr.dtype.element_ty).to(tl.float32)
        row = begin + token - accepted
        tl.store(
            found_ptr + row * N * DV + head * DV + value,
            tl.sum(memory * q[:, None], 0) if skip_ptr is None else tl.sum(memory * q[:, None], 0) + skip * v,
            mask=has_value & (token >= accepted),
        )
        q0, q1, q2, q3 = q1, q2, q3, next_q
        k0, k1, k2, k3 = k1, k2, k3, next_k
        v0, v1, v2, v3 = v1, v2, v3, next_v
        rate, step = next_rate, next_step
    tl.store(at, memory.to(memory_ptr.dtype.element_ty), mask=inside & (total == kept))


@TritonKernel
def _normalise(
    projected_ptr: tl.tensor, found_ptr: tl.tensor, norm_ptr: tl.tensor, out_ptr: tl.tensor, program: tl.tensor,
    eps: tl.tensor, N: tl.constexpr, DV: tl.constexpr, G: tl.constexpr, Z: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some heads of a row; of Mamba-2 all, which have one norm. z begins in column Z."""
    per_row: tl.constexpr = (N + BLOCK_H - 1) // BLOCK_H
    row = (program // per_row).to(tl.int64)
    head = (program % per_row) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    value = tl.arange(0, BLOCK_V)[None, :]
    inside, column = (head < N) & (value < DV), head * DV + value
    z = tl.load(projected_ptr + row * STRIDE + Z + column, mask=inside, other=0.0).to(tl.float32)
    if G == 2:
        weight = tl.load(norm_ptr + value, mask=value < DV, other=0.0).to(tl.float32)
    else:
        weight = tl.load(norm_ptr + column, mask=inside, other=0.0).to(tl.float32)
    wait(PDL)
    x = tl.load(found_ptr + row * N * DV + column, mask=inside, other=0.0).to(tl.float32)
    if G == 2:
        normed = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / DV + eps))[:, None] * weight
        tl.store(out_ptr + row * N * DV + column, normed * silu(z), mask=inside)
    else:
        x = x * silu(z)
        normed = x * (1.0 / tl.sqrt(tl.sum(tl.sum(x * x, axis=1), axis=0) / (N * DV) + eps)) * weight
        tl.store(out_ptr + row * N * DV + column, normed, mask=inside)


@TritonKernel
def _keep(
    projected_ptr: tl.tensor, gates_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor,
    starts_ptr: tl.tensor, inputs_ptr: tl.tensor, window_ptr: tl.tensor, position_ptr: tl.tensor,
    counts_ptr: tl.tensor, program: tl.tensor, most: tl.tensor, width: tl.tensor, C: tl.constexpr,
    K: tl.constexpr, R: tl.constexpr, STRIDE: tl.constexpr, PITCH: tl.constexpr, BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr, IS_WINDOW: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Some columns of a request: inputs and window go on, which the kernel before still reads until the wait.

    Row i of the inputs becomes row i + kept of the sequence of inputs, accepted columns and new rows.
    """
    per_request: tl.constexpr = (R + BLOCK - 1) // BLOCK
    request, block = program // per_request, program % per_request
    column = block * BLOCK + tl.arange(0, BLOCK)[None, :]
    slot = tl.load(slots_ptr + request)
    if IS_WINDOW:
        begin, count = (request * width).to(tl.int64), width
        start = tl.load(positions_ptr + begin)
    else:
        begin = tl.load(starts_ptr + request).to(tl.int64)
        count = tl.load(starts_ptr + request + 1).to(tl.int32) - begin.to(tl.int32)
        start = tl.load(positions_ptr + begin, mask=count > 0, other=1)
    rows_ptr = projected_ptr + begin * STRIDE
    own_inputs = inputs_ptr + slot * (K - 1) * C
    own_window = window_ptr + slot * most * R
    if IS_WINDOW:
        line = tl.arange(0, BLOCK_W)[:, None]
        has, row = (line < width) & (column < R), line.to(tl.int64)
        mixed = tl.load(rows_ptr + row * STRIDE + column, mask=has & (column < C), other=0.0)
        gates = tl.load(gates_ptr + (begin + row) * PITCH + column - C, mask=has & (column >= C), other=0.0)
    wait(PDL)
    # Not from `position_ptr`: the request's first program may have written it before another one begins.
    accepted = tl.load(counts_ptr + request).to(tl.int32)
    if IS_WINDOW:
        kept, fresh, position = accepted, accepted * 0, start
    else:
        kept, fresh, position = count, (start == 0).to(tl.int32), start + count
    place = tl.arange(0, 4)[:, None]
    source, moves = place + kept, (place < K - 1) & (column < C) & (count > 0)
    is_input, token = source < K - 1, source - (K - 1)
    is_new = token >= accepted
    old = tl.load(own_inputs + source * C + column, mask=moves & is_input & (fresh == 0), other=0.0)
    pending = tl.load(own_window + token * R + column, mask=moves & (token >= 0) & (token < accepted), other=0.0)
    new = tl.load(
        rows_ptr + (token - accepted).to(tl.int64) * STRIDE + column, mask=moves & (token >= 0) & is_new, other=0.0
    )
    tl.debug_barrier()  # all of them are read before one is written
    tl.store(own_inputs + place * C + column, tl.where(is_input, old, tl.where(is_new, new, pending)), mask=moves)
    if IS_WINDOW:
        tl.store(own_window + line * R + column, tl.where(column < C, mixed, gates), mask=has)
    if block == 0:
        tl.store(position_ptr + slot, position, mask=count > 0)


@TritonKernel.with_options(do_not_specialize=(*_COUNTS, "of_norms"))
def _finish_kernel(
    projected_ptr: tl.tensor, gates_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor,
    starts_ptr: tl.tensor, memory_ptr: tl.tensor, inputs_ptr: tl.tensor, window_ptr: tl.tensor,
    position_ptr: tl.tensor, counts_ptr: tl.tensor, found_ptr: tl.tensor, norm_ptr: tl.tensor, out_ptr: tl.tensor,
    most: int, width: int, of_norms: int, eps: float, C: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    DV: tl.constexpr, G: tl.constexpr, APART: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, IS_WINDOW: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`of_norms` programs, each of some heads of a row; then one per request and block of columns."""
    R: tl.constexpr = C + G * N
    STRIDE: tl.constexpr = C + N * DV + (0 if APART else G * N)
    PITCH: tl.constexpr = G * N if APART else STRIDE
    Z: tl.constexpr = C if APART else R
    let_next_begin(PDL)
    if not IS_WINDOW:  # other kernels than that of windows may let this one begin before they wait
        wait(PDL)
    program = tl.program_id(0)
    if program < of_norms:
        _normalise(
            projected_ptr, found_ptr, norm_ptr, out_ptr, program, eps, N, DV, G, Z, STRIDE, BLOCK_H, BLOCK_V, PDL
        )
    else:
        _keep(
            projected_ptr, gates_ptr, slots_ptr, positions_ptr, starts_ptr, inputs_ptr, window_ptr, position_ptr,
            counts_ptr, program - of_norms, most, width, C, K, R, STRIDE, PITCH, BLOCK_W, BLOCK, IS_WINDOW, PDL,
        )  # fmt: skip
