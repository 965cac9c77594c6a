"""Draws a token for each row of what its filters keep, mostly without looking for where they end.

The token of the whole row is drawn first. If the filters keep it, it is also the best of what they keep, and that takes
one look at the row: it is kept if little enough is before it (`filter_cutoff.py`). Only the other rows are searched for
their cutoff, and draw again; with top_p 0.9 that is one row in ten.
"""

import torch
from torch import Tensor

from overlap_spec_kernels.launch import runs_triton
from overlap_spec_kernels.logits.filter_cutoff import Filters, filter_cutoff_reference, search_cutoff
from overlap_spec_kernels.logits.gumbel_argmax import Draws, draw_columns, gumbel_argmax_reference


def filtered_draw(
    logits: Tensor, positions: Tensor, temperature: Tensor, seed: Tensor, token_ids: Tensor, filters: Filters
) -> Tensor:
    """`gumbel_argmax` of what `filter_cutoff` keeps, with their arguments. Sync: never.

    Shapes: logits [B, R, N] f32 or f64, positions [B, R] i64, .. -> [B, R] i64.
    """
    run = _filtered_draw_triton if runs_triton(logits) else filtered_draw_reference
    return run(Draws(logits, positions, temperature, seed, token_ids), filters)


def filtered_draw_reference(draws: Draws, filters: Filters) -> Tensor:
    cutoff = filter_cutoff_reference(draws.logits, draws.temperature, filters)
    return gumbel_argmax_reference(*draws, cutoff)


def _filtered_draw_triton(draws: Draws, filters: Filters) -> Tensor:
    out = torch.empty(draws.logits.shape[:2], dtype=torch.int64, device=draws.logits.device)
    draw_columns(draws, out)
    search = search_cutoff(draws.logits, draws.temperature, filters, out)
    return draw_columns(draws, out, search.cutoff, search.settled)
