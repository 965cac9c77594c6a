"""The thinking budget: reasoning that has used it up is closed, exactly at that token, inside an accepted run too.

    <think> t1 t2 .. tB </think>          the budget is B tokens; the closing marker is written token by token
            ^ counted from here: after the opening marker, or where the output begins if the prompt has written it

Like every processor this depends on what is before a row and on nothing else: the step that closes the reasoning looks
for a closing marker in the history and in the guesses before the row.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from overlap_spec_kernels import BUDGET_WIDTH, force_columns, reasoning_end
from torch import Tensor

from overlap_spec.sampling.context import DrawContext

MARKER = (BUDGET_WIDTH - 4) // 2  # tokens of a marker, at most
NO_BUDGET = (-1, *[0] * (BUDGET_WIDTH - 1))


@dataclass(frozen=True)
class ThinkingBudgets:
    """A row for each slot."""

    rows: Tensor  # [S, 4 + 2 * 8] i64, as `reasoning_end` reads them

    @staticmethod
    def allocate(num_rows: int, device: torch.device) -> "ThinkingBudgets":
        return ThinkingBudgets(torch.tensor(NO_BUDGET, device=device).repeat(num_rows, 1))

    def end_reasoning(self, logits: Tensor, context: DrawContext) -> Tensor:
        """Leave nothing but the marker where it is due, in place. Sync: never. Shapes: [B, R, N] -> [B, R, N]."""
        history, sampling = context.history, context.sampling
        store, budgets = sampling.processors.pool.rows_of(history.page_table), self.rows[sampling.slots]
        places = context.positions.contiguous(), context.guesses.contiguous()
        forced = reasoning_end(store, history.roots, *places, budgets, sampling.output_from)
        force_columns(logits.view(-1, logits.shape[2]), context.columns_of(forced).view(-1))
        return logits


def packed_budget(tokens: int, is_open: bool, opening: Iterable[int], closing: Iterable[int]) -> list[int]:
    """The row of a slot."""
    begins, ends = list(opening), list(closing)
    markers = [*begins, *[-1] * (MARKER - len(begins)), *ends, *[-1] * (MARKER - len(ends))]
    return [tokens, int(is_open), len(begins), len(ends), *markers]
