"""A part of `process_logits`: the next token of a closing marker, where a request's reasoning has used up its budget.

Reasoning begins with the output, or after the opening marker if the output begins with that. If it is not closed within
its budget of tokens, the closing marker follows, token by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel
from overlap_spec_kernels.logits.guesses_before import token_before

MARKER = 8  # tokens of a marker, at most
# Columns of a budget: tokens (-1: no budget), whether the output begins inside the reasoning, the lengths of the
# opening and of the closing marker, and their tokens.
BUDGET_WIDTH = 4 + 2 * MARKER


def closing_tokens(tokens: Tensor, positions: Tensor, budgets: Tensor, output_from: Tensor) -> Tensor:
    """The token that each row has to draw, -1 where any may be drawn. Sync: never.

    Shapes: tokens before each row by position, -1 from its own on, [B, R, T] i64, budgets [B, 4 + 2 * 8] i64,
    output_from [B] i64 -> [B, R] i64.
    """
    budget, is_open, opening_len, closing_len = budgets[:, :4, None].unbind(1)
    opening, closing = budgets[:, None, 4 : 4 + MARKER], budgets[:, None, 4 + MARKER :]
    each = torch.arange(MARKER, device=tokens.device)
    first = tokens.gather(2, (output_from[:, None, None] + each).expand(*positions.shape, -1))
    opens = ((first == opening) | (each >= opening_len[:, :, None])).all(2) & (opening_len > 0)
    begin = output_from[:, None] + torch.where(opens, opening_len, 0)
    end = begin + budget
    num_positions = tokens.shape[2] - MARKER
    here = torch.arange(num_positions, device=tokens.device)
    closes = torch.ones_like(tokens[:, :, :num_positions], dtype=torch.bool)
    for index in range(MARKER):
        token = tokens[:, :, index : index + num_positions]
        closes &= (token == closing[:, :, index, None]) | (index >= closing_len)[:, :, None]
    inside = (here >= begin[:, :, None]) & (here + closing_len[:, :, None] <= end[:, :, None])
    offset = positions - end
    due = (budget >= 0) & ((is_open > 0) | opens) & (offset >= 0) & (offset < closing_len)
    forced = closing.expand(*positions.shape, -1).gather(2, offset.clamp(0, MARKER - 1)[:, :, None])[:, :, 0]
    return torch.where(due & ~(closes & inside).any(2), forced, -1)


@TritonKernel
def closing_token(
    budget_ptr: tl.tensor, pool_ptr: tl.tensor, pages_ptr: tl.tensor, ends_ptr: tl.tensor, root: tl.tensor,
    position: tl.tensor, output_from: tl.tensor, MARKER: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The same of one row. The history is read only where the budget ends: elsewhere any token may be drawn."""
    budget, is_open = tl.load(budget_ptr), tl.load(budget_ptr + 1)
    opening_len, closing_len = tl.load(budget_ptr + 2), tl.load(budget_ptr + 3)
    forced = tl.full((), -1, tl.int64)
    used = position - output_from
    if (budget >= 0) & (used >= budget) & (used < budget + opening_len + closing_len):
        each = tl.arange(0, MARKER)
        first = token_before(pool_ptr, pages_ptr, ends_ptr, output_from + each, root, position, PAGE_SIZE)
        other = (first != tl.load(budget_ptr + 4 + each)) & (each < opening_len)
        opens = (tl.sum(other.to(tl.int32)) == 0) & (opening_len > 0)
        begin = output_from + tl.where(opens, opening_len, 0)
        end = begin + budget
        offset = position - end
        if (opens | (is_open > 0)) & (offset >= 0) & (offset < closing_len):
            num_closed = 0
            for start in range(begin, end - closing_len + 1, BLOCK):
                here = start + tl.arange(0, BLOCK)
                closes = here + closing_len <= end
                for index in tl.static_range(MARKER):
                    token = token_before(pool_ptr, pages_ptr, ends_ptr, here + index, root, position, PAGE_SIZE)
                    wanted = tl.load(budget_ptr + 4 + MARKER + index)
                    closes = closes & ((token == wanted) | (index >= closing_len))
                num_closed += tl.sum(closes.to(tl.int32))
            if num_closed == 0:
                forced = tl.load(budget_ptr + 4 + MARKER + offset)
    return forced
