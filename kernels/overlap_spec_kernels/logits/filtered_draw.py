"""Draws a token for each row of what its filters keep, mostly without looking for where they end.

The token of the whole row is drawn first. If the filters keep it, it is also the best of what they keep; whether they
do takes one look at the row. If not, nothing after it is kept either, so the best of what is before it comes next:

    columns in order   |  kept  ..  cutoff  ..  second draw  ..  first draw  ..  |     largest logit first

With top_p 0.9 one row in ten draws again, and one in a hundred a third time. What is left after that is searched for
its cutoff (`filter_cutoff.py`), as are rows of a small top_k at once: that search is short.
"""

import torch
from torch import Tensor

from overlap_spec_kernels.launch import runs_triton
from overlap_spec_kernels.logits.filter_cutoff import CutoffSearch, Filters, RowState, filter_cutoff_reference
from overlap_spec_kernels.logits.gumbel_argmax import Draws, Skipped, draw_columns, gumbel_argmax_reference

_MANY_ROWS = 16  # of so many one may well be left over after two draws


def filtered_draw(draws: Draws, filters: Filters, exact: bool = True) -> Tensor:
    """`gumbel_argmax` of what `filter_cutoff` keeps. Sync: never.

    `exact`: otherwise the kernels may draw a column that is not kept, in about one of a hundred rows: good enough for a
    guess, and half of the launches.

    Shapes: logits [B, R, N] f32 or f64, positions [B, R] i64, .. -> [B, R] i64.
    """
    if not runs_triton(draws.logits):
        return filtered_draw_reference(draws, filters)
    return _exact_triton(draws, filters) if exact else _guess_triton(draws, filters)


def filtered_draw_reference(draws: Draws, filters: Filters) -> Tensor:
    cutoff = filter_cutoff_reference(draws.logits, draws.temperature, filters)
    return gumbel_argmax_reference(*draws, cutoff)


def _exact_triton(draws: Draws, filters: Filters) -> Tensor:
    out = torch.empty(draws.logits.shape[:2], dtype=torch.int64, device=draws.logits.device)
    draw_columns(draws, out, top_k=filters.top_k)
    search = CutoffSearch(draws.logits, draws.temperature, filters)
    search.begin(out)
    for _ in range(2 if out.numel() > _MANY_ROWS else 1):
        draw_columns(draws, out, search.before, Skipped(search.states, RowState.SEARCHED))
        search.begin(out)
    return draw_columns(draws, out, search.finish(), Skipped(search.states, RowState.SETTLED))


def _guess_triton(draws: Draws, filters: Filters) -> Tensor:
    out = torch.empty(draws.logits.shape[:2], dtype=torch.int64, device=draws.logits.device)
    draw_columns(draws, out)
    search = CutoffSearch(draws.logits, draws.temperature, filters)
    search.begin(out)
    return draw_columns(draws, out, search.before, Skipped(search.states, RowState.SEARCHED))
