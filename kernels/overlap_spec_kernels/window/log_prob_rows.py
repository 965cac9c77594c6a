"""The log-probs of a step's tokens as rows of (log-prob, token id) pairs, in one launch after `top_tokens`.

    row   own | k most probable tokens | M listed tokens of the slot        2 (1 + k + M) doubles

A log-prob is a logit less the row's log total, in the logits' type, for every pair alike: so a token's own log-prob and
its entry among the most probable are the same number. Doubles hold it, and a token id, without rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require, runs_triton
from overlap_spec_kernels.tree.top_tokens import TopTokens


def log_prob_rows(
    logits: Tensor, top: TopTokens, tokens: Tensor, slots: Tensor, listed: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Pairs of each of N tokens, N / B in a row for each slot. An id of -1 has a log-prob without meaning.

    `rows`: the row of `logits` that each token was drawn from; None: row i for token i. `listed`: ids by slot, -1 for
    none. Shapes: logits [R, V] f32 or f64, top of the same rows, tokens, rows [N] i64, slots [B] i64, listed [S, M] i64
    -> [N, 2 (1 + k + M)] f64. Raises: ValueError naming the argument. Sync: never.
    """
    require(logits.dim() == 2 and logits.dtype == top.log_probs.dtype, "logits", "[R, V] of the type of top")
    require(logits.stride(1) == 1 and len(top.log_totals) == len(logits), "logits", "contiguous rows, those of top")
    integers = {"tokens": tokens, "slots": slots} | ({} if rows is None else {"rows": rows})
    for name, value in integers.items():
        require(value.dim() == 1 and value.dtype == torch.int64 and value.is_contiguous(), name, "1-d, int64")
    require(len(slots) > 0 and len(tokens) % len(slots) == 0, "tokens", "as many for each slot")
    require(len(tokens) == len(logits) if rows is None else len(tokens) == len(rows), "tokens", "one for each row")
    require(listed.dim() == 2 and listed.dtype == torch.int64 and listed.is_contiguous(), "listed", "[S, M] int64")
    run = _log_prob_rows_triton if runs_triton(logits) else log_prob_rows_reference
    return run(logits, top, tokens, slots, listed, rows)


def log_prob_rows_reference(
    logits: Tensor, top: TopTokens, tokens: Tensor, slots: Tensor, listed: Tensor, rows: Tensor | None = None
) -> Tensor:
    rows = torch.arange(len(tokens), device=tokens.device) if rows is None else rows
    own, others = tokens[:, None], listed[slots].repeat_interleave(len(tokens) // len(slots), 0)

    def log_probs(ids: Tensor) -> Tensor:
        return logits[rows[:, None], ids.clamp(min=0)] - top.log_totals[rows, None]

    values = torch.cat((log_probs(own), top.log_probs[rows], log_probs(others)), 1)
    ids = torch.cat((own, top.columns[rows], others), 1)
    return torch.stack((values.double(), ids.double()), 2).flatten(1)


def _log_prob_rows_triton(
    logits: Tensor, top: TopTokens, tokens: Tensor, slots: Tensor, listed: Tensor, rows: Tensor | None = None
) -> Tensor:
    num_top, num_listed = top.columns.shape[1], listed.shape[1]
    out = torch.empty(len(tokens), 2 * (1 + num_top + num_listed), dtype=torch.float64, device=logits.device)
    _log_prob_rows_kernel[(len(tokens),)](
        logits,
        *top,
        tokens,
        slots,
        listed,
        tokens if rows is None else rows,
        out,
        logits.stride(0),
        len(tokens) // len(slots),
        GIVEN_ROWS=rows is not None,
        K=num_top,
        M=num_listed,
        BLOCK=next_power_of_2(1 + num_top + num_listed),
        num_warps=1,
        **dependent_launch(logits.device, len(logits)),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("tokens_per_slot",))
def _log_prob_rows_kernel(
    logits_ptr: tl.tensor, top_ptr: tl.tensor, columns_ptr: tl.tensor, log_totals_ptr: tl.tensor, tokens_ptr: tl.tensor,
    slots_ptr: tl.tensor, listed_ptr: tl.tensor, rows_ptr: tl.tensor, out_ptr: tl.tensor,
    row_stride: int, tokens_per_slot: int,
    GIVEN_ROWS: tl.constexpr, K: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program per token, one lane per pair."""
    index = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    is_top, is_listed = (pair > 0) & (pair <= K), (pair > K) & (pair <= K + M)
    wait_for_inputs(PDL)
    row = index
    if GIVEN_ROWS:
        row = tl.load(rows_ptr + index)
    slot = tl.load(slots_ptr + index // tokens_per_slot)
    token = tl.load(listed_ptr + slot * M + pair - 1 - K, mask=is_listed, other=-1)
    token = tl.where(pair == 0, tl.load(tokens_ptr + index), token)
    named = ((pair == 0) | is_listed) & (token >= 0)
    logit = tl.load(logits_ptr + row * row_stride + token, mask=named, other=0.0)
    top_place = row * K + pair - 1
    log_prob = tl.where(
        is_top, tl.load(top_ptr + top_place, mask=is_top, other=0.0), logit - tl.load(log_totals_ptr + row)
    )
    token = tl.where(is_top, tl.load(columns_ptr + top_place, mask=is_top, other=-1), token)
    out_ptr += (index * (1 + K + M) + pair) * 2
    inside = pair <= K + M
    tl.store(out_ptr, log_prob.to(tl.float64), mask=inside)
    tl.store(out_ptr + 1, token.to(tl.float64), mask=inside)
