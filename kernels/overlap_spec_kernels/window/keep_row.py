"""Keeps rows of requests in rings, in one launch: what a draft absorbs later, or learns from."""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.norm.normed import Normed, normalised

_COLUMNS_PER_PROGRAM = 2048


def keep_row(
    kept_rows: Tensor, kept_tokens: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    """Write row and token of each request at its position modulo N, in place.

    Several requests may have the slot of padding, of which one is kept.
    Shapes: kept_rows [S, N, H], kept_tokens [S, N] i64, slots, positions, tokens [B] i64, rows [B, H].
    Raises: ValueError naming the argument. Sync: never.
    """
    require(kept_rows.dim() == 3 and kept_rows.is_contiguous(), "kept_rows", "[S, N, H], contiguous")
    require(kept_tokens.shape == kept_rows.shape[:2] and kept_tokens.is_contiguous(), "kept_tokens", "[S, N]")
    require(slots.dim() == 1, "slots", "[B]")
    for name, value in {"slots": slots, "positions": positions, "tokens": tokens}.items():
        require(value.shape == slots.shape and value.is_contiguous(), name, "[B], contiguous")
        require(value.dtype == torch.int64, name, "int64")
    require(rows.shape == (len(slots), kept_rows.shape[2]) and rows.stride(1) == 1, "rows", "[B, H]")
    require(rows.dtype == kept_rows.dtype, "rows", "the dtype of kept_rows")
    run = _keep_row_triton if runs_triton(kept_rows) else keep_row_reference
    run(kept_rows, kept_tokens, slots, positions, rows, tokens)


def keep_row_reference(
    kept_rows: Tensor, kept_tokens: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    places = positions % kept_tokens.shape[1]
    kept_rows[slots, places] = rows
    kept_tokens[slots, places] = tokens


def _keep_row_triton(
    kept_rows: Tensor, kept_tokens: Tensor, slots: Tensor, positions: Tensor, rows: Tensor, tokens: Tensor
) -> None:
    num_requests, size = rows.shape
    block = min(next_power_of_2(size), _COLUMNS_PER_PROGRAM)
    _keep_row_kernel[(num_requests, ceil_div(size, block))](
        kept_rows,
        kept_tokens,
        slots,
        positions,
        rows,
        tokens,
        rows.stride(0),
        kept_tokens.shape[1],
        size,
        BLOCK=block,
        num_warps=4,
        **dependent_launch(rows.device),
    )


@TritonKernel
def _keep_row_kernel(
    kept_rows_ptr: tl.tensor, kept_tokens_ptr: tl.tensor, slots_ptr: tl.tensor, positions_ptr: tl.tensor,
    rows_ptr: tl.tensor, tokens_ptr: tl.tensor, row_stride: int, num_kept: int, size: int, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (request, part of its columns)."""
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_inputs(PDL)
    place = tl.load(slots_ptr + request) * num_kept + tl.load(positions_ptr + request) % num_kept
    row = tl.load(rows_ptr + request * row_stride + column, mask=inside)
    tl.store(kept_rows_ptr + place * size + column, row, mask=inside)
    if tl.program_id(1) == 0:
        tl.store(kept_tokens_ptr + place, tl.load(tokens_ptr + request))


def keep_states(
    kept: tuple[Tensor, Tensor], places: Tensor, slots: Tensor, positions: Tensor, aux: Tensor, final: Tensor | Normed
) -> None:
    """Write each row's aux states, and its final one with the norm's scale, to its place, in place.

    A place is the position, within the slot's bounds `places[slot, :2]`, and `places[slot, 2]` more. Of rows with one
    place, one is kept.
    Shapes: kept ([N, A], [N, H]), places [S, 3] i64, slots [B] i64, positions [B, R] i64, aux [B * R, A],
    final [B * R, H]. Raises: ValueError naming the argument. Sync: never.
    """
    values = final.weighted if isinstance(final, Normed) else final
    for name, rows, ring in (("aux", aux, kept[0]), ("final", values, kept[1])):
        require(ring.dim() == 2 and ring.is_contiguous(), f"kept: {name}", "[N, columns], contiguous")
        require(rows.shape == (positions.numel(), ring.shape[1]) and rows.stride(1) == 1, name, "[B * R, columns]")
        require(rows.dtype == ring.dtype, name, "the dtype of what is kept")
    require(places.shape[1:] == (3,) and places.is_contiguous(), "places", "[S, 3], contiguous")
    require(positions.shape[:1] == slots.shape and positions.is_contiguous(), "positions", "[B, R], contiguous")
    require(slots.is_contiguous(), "slots", "[B], contiguous")
    for name, index in {"places": places, "slots": slots, "positions": positions}.items():
        require(index.dtype == torch.int64, name, "int64")
    run = _keep_states_triton if runs_triton(kept[0]) else keep_states_reference
    run(kept, places, slots, positions, aux, final)


def keep_states_reference(
    kept: tuple[Tensor, Tensor], places: Tensor, slots: Tensor, positions: Tensor, aux: Tensor, final: Tensor | Normed
) -> None:
    least, most, added = places[slots].split(1, dim=1)
    index = (positions.clamp(min=least, max=most) + added).view(-1)
    kept[0].index_copy_(0, index, aux)
    kept[1].index_copy_(0, index, normalised(final))


def _keep_states_triton(
    kept: tuple[Tensor, Tensor], places: Tensor, slots: Tensor, positions: Tensor, aux: Tensor, final: Tensor | Normed
) -> None:
    squares = final.squares if isinstance(final, Normed) else None
    rows, num_parts = final.weighted if isinstance(final, Normed) else final, 0 if squares is None else len(squares)
    block = min(next_power_of_2(max(aux.shape[1], rows.shape[1])), _COLUMNS_PER_PROGRAM)
    of_aux = ceil_div(aux.shape[1], block)
    _keep_states_kernel[(positions.numel(), of_aux + ceil_div(rows.shape[1], block))](
        *kept,
        places,
        slots,
        positions,
        aux,
        rows,
        rows if squares is None else squares,
        aux.stride(0),
        rows.stride(0),
        0 if squares is None else squares.stride(0),
        aux.shape[1],
        rows.shape[1],
        positions.shape[1],
        of_aux,
        num_parts,
        final.eps if isinstance(final, Normed) else 0.0,
        BLOCK=block,
        BLOCK_P=next_power_of_2(num_parts) if num_parts else 0,
        num_warps=4,
        **dependent_launch(aux.device),
    )


@TritonKernel.with_options(do_not_specialize=("squares_stride", "num_rows", "of_aux", "num_parts"))
def _keep_states_kernel(
    kept_aux_ptr: tl.tensor, kept_final_ptr: tl.tensor, places_ptr: tl.tensor, slots_ptr: tl.tensor,
    positions_ptr: tl.tensor, aux_ptr: tl.tensor, final_ptr: tl.tensor, squares_ptr: tl.tensor, aux_stride: int,
    final_stride: int, squares_stride: int, aux_size: int, size: int, num_rows: int, of_aux: int, num_parts: int,
    eps: float, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part of its aux columns; behind those, of its final ones). BLOCK_P: 0 without a scale."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    wait_for_inputs(PDL)
    bounds = places_ptr + tl.load(slots_ptr + row // num_rows) * 3
    position = tl.minimum(tl.maximum(tl.load(positions_ptr + row), tl.load(bounds)), tl.load(bounds + 1))
    place = position + tl.load(bounds + 2)
    if part < of_aux:
        column = part * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(aux_ptr + row * aux_stride + column, mask=column < aux_size)
        tl.store(kept_aux_ptr + place * aux_size + column, x, mask=column < aux_size)
    else:
        last = (part - of_aux) * BLOCK + tl.arange(0, BLOCK)
        final = tl.load(final_ptr + row * final_stride + last, mask=last < size)
        if BLOCK_P > 0:
            of_parts = tl.arange(0, BLOCK_P)
            at = squares_ptr + of_parts * squares_stride + row
            squares = tl.load(at, mask=of_parts < num_parts, other=0.0)
            scaled = final.to(tl.float32) * (1.0 / tl.sqrt(tl.sum(squares, axis=0) / size + eps))
            tl.store(kept_final_ptr + place * size + last, scaled, mask=last < size)
        else:
            tl.store(kept_final_ptr + place * size + last, final, mask=last < size)
