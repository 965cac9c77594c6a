"""Penalties and biases of every row of a window, in one pass over the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import TritonKernel, ceil_div, require, runs_triton
from overlap_spec_kernels.logits.count_tokens import IN_PROMPT

if TYPE_CHECKING:
    import triton.language as tl

_BLOCK = 2048  # columns per program
_PART = 1 << 22  # logits that the twin changes at once


class Penalized(NamedTuple):
    """What B requests ask for, of which biases are rows of a table."""

    penalties: Tensor  # [B, 3] f64: repetition, presence, frequency
    slots: Tensor  # [B] i64, rows of the other two
    biased: Tensor  # [S, ..] i64, not 0 in the first column where the slot has biases
    bias: Tensor  # [S, V] f32


def penalize(logits: Tensor, asked: Penalized, counts: Tensor, guesses: Tensor, token_ids: Tensor) -> Tensor:
    """New logits: repetition penalty, less frequency and presence penalties, plus the bias.

    A positive logit is divided by the repetition penalty, another multiplied, if the token is in prompt or output. A
    row's output is what `counts` counts (`count_tokens`), and its guesses.
    Shapes: logits [B, R, N], counts [B, V] i32, guesses [B, R, D] i64 (-1: none), token_ids [N] i64 -> [B, R, N].
    Raises: ValueError naming the argument. Sync: never.
    """
    require(logits.dim() == 3 and logits.is_contiguous(), "logits", "[B, R, N], contiguous")
    require(counts.dim() == 2 and counts.dtype == torch.int32 and counts.is_contiguous(), "counts", "[B, V] int32")
    require(guesses.shape[:2] == logits.shape[:2] and guesses.dtype == torch.int64, "guesses", "[B, R, D] int64")
    require(token_ids.shape == logits.shape[2:] and token_ids.is_contiguous(), "token_ids", "[N], contiguous")
    require(asked.penalties.shape == (len(logits), 3), "penalties", "[B, 3]")
    require(asked.bias.is_contiguous() and asked.bias.dtype == torch.float32, "bias", "[S, V] float32")
    return (_penalize_triton if runs_triton(logits) else penalize_reference)(logits, asked, counts, guesses, token_ids)


def penalize_reference(logits: Tensor, asked: Penalized, counts: Tensor, guesses: Tensor, token_ids: Tensor) -> Tensor:
    """In parts, which bounds what the counts of all rows take."""
    new, size = torch.empty_like(logits), max(1, _PART // logits[0].numel())
    for first in range(0, len(logits), size):
        part = slice(first, first + size)
        of_rows = counts[part, None].repeat(1, logits.shape[1], 1)
        of_rows.scatter_add_(2, guesses[part].clamp(min=0), (guesses[part] >= 0).int())
        changed = _penalized(logits[part], of_rows[:, :, token_ids], asked.penalties[part])
        slots = asked.slots[part]
        bias = torch.where(asked.biased[slots, :1] != 0, asked.bias[slots][:, token_ids], 0.0)
        new[part] = changed + bias[:, None]
    return new


def _penalized(logits: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    repetition, presence, frequency = penalties.to(logits.dtype)[:, :, None, None].unbind(1)
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    in_output = counts & (IN_PROMPT - 1)
    return torch.where(counts > 0, scaled, logits) - in_output * frequency - (in_output > 0) * presence


def _penalize_triton(logits: Tensor, asked: Penalized, counts: Tensor, guesses: Tensor, token_ids: Tensor) -> Tensor:
    new, (size, rows, columns) = torch.empty_like(logits), logits.shape
    guesses = guesses.contiguous()
    _penalize_kernel[(ceil_div(columns, _BLOCK), rows, size)](
        logits,
        asked.penalties.contiguous(),
        asked.slots.contiguous(),
        asked.biased,
        asked.bias,
        counts,
        guesses,
        token_ids,
        new,
        asked.biased.stride(0),
        rows,
        columns,
        counts.shape[1],
        DEPTH=guesses.shape[2],
        BLOCK=_BLOCK,
        PROMPT=IN_PROMPT,
        num_warps=8,
    )
    return new


@TritonKernel
def _penalize_kernel(
    logits_ptr: tl.tensor,
    penalties_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    biased_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    guesses_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    new_ptr: tl.tensor,
    biased_stride: int,
    num_rows: int,
    num_columns: int,
    vocab_size: int,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PROMPT: tl.constexpr,
) -> None:
    """One program per block of columns, row and request."""
    batch, row = tl.program_id(2).to(tl.int64), tl.program_id(1)
    row_of_all = batch * num_rows + row
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    repetition = tl.load(penalties_ptr + batch * 3).to(tl.float32)
    presence = tl.load(penalties_ptr + batch * 3 + 1).to(tl.float32)
    frequency = tl.load(penalties_ptr + batch * 3 + 2).to(tl.float32)
    slot = tl.load(slots_ptr + batch)
    has_bias = tl.load(biased_ptr + slot * biased_stride) != 0
    token = tl.load(token_ids_ptr + column, mask=inside, other=0)
    count = tl.load(counts_ptr + batch * vocab_size + token, mask=inside, other=0)
    for i in tl.static_range(DEPTH):
        count += (tl.load(guesses_ptr + row_of_all * DEPTH + i) == token).to(tl.int32)
    logit = tl.load(logits_ptr + row_of_all * num_columns + column, mask=inside, other=0.0).to(tl.float32)
    scaled = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
    in_output = count & (PROMPT - 1)
    changed = tl.where(count > 0, scaled, logit) - in_output.to(tl.float32) * frequency
    changed = changed - tl.where(in_output > 0, presence, 0.0)
    bias = tl.load(bias_ptr + slot * vocab_size + token, mask=inside & has_bias, other=0.0)
    tl.store(new_ptr + row_of_all * num_columns + column, changed + bias, mask=inside)
