"""Draws one token per row from logits.

Order per row: logit processors (`stages.py`); p = softmax(logits / T); top_k, top_p and min_p each computed on p,
without renormalising in between, which end at a cutoff (`filter_cutoff`); argmax(logits / T + g) over what is left
(`filtered_draw`).
Greedy rows take the argmax of the processed logits. Rows are independent: a row's token does not depend on the batch it
is in.
"""

from collections.abc import Callable

import torch
from overlap_spec_kernels import (
    Draws,
    Filters,
    filter_cutoff,
    filtered_draw,
    gumbel_argmax,
    kept_columns,
    largest_columns,
    noisy_logits,
)
from torch import Tensor

from overlap_spec.models.interfaces import LazyLogits
from overlap_spec.sampling.context import DrawContext, Sampling

Draw = Callable[[Tensor, Tensor, Sampling, Tensor], Tensor]  # `draw_columns`, or the same compiled
SLICE = 1 << 22  # logits drawn from at once: bounds the float64 workspace to a few hundred MiB
GUESS_SLICE = SLICE * 8  # on a GPU, where `drawn_from` takes a tenth of a verifier's memory: no more launches than that


def draw_after(lazy_logits: LazyLogits, context: DrawContext, draw: Draw | None = None) -> Tensor:
    """Draw the token after each row. Greedy requests alone need no logits. Sync: never.

    Where the target's largest logit is NaN or infinite, `NO_TOKEN`, which ends the request; for a draft's, any token:
    its guess is judged like another.
    `draw`: what draws from processed logits, if not `draw_columns` or, for a draft, `guess_columns`.
    Shapes: logits of B * R rows -> token ids [B, R] i64.
    """
    ids = None if context.of_target else context.token_ids  # the target's columns are its tokens
    if not context.sampling.needs_logits:
        return lazy_logits.argmax(ids).view(context.rows.shape)
    logits = processed_logits(lazy_logits, context)
    draw = draw or (draw_columns if context.of_target else guess_columns)
    columns = draw(logits, context.positions, context.sampling, context.token_ids)
    return columns if ids is None else ids[columns]  # `NO_TOKEN` is negative, and counts from the last id


def processed_logits(lazy_logits: LazyLogits, context: DrawContext) -> Tensor:
    """Logits as every processor leaves them. Shapes: logits of B * R rows -> [B, R, N]."""
    logits = lazy_logits.compute().view(*context.rows.shape, -1)
    return context.sampling.processors.apply(logits, context)


def draw_columns(logits: Tensor, positions: Tensor, sampling: Sampling, token_ids: Tensor) -> Tensor:
    """Draw the token at `positions` for each row, from processed logits; `NO_TOKEN` where none can be. Sync: never.

    `token_ids` are the target's ids of the columns, so that a draft with a smaller vocabulary meets the
    same noise as the target (drafter-invariant coupling, Daliri, Musco, Suresh 2024, arXiv:2408.07978).
    Shapes: logits [B, R, N], positions [B, R] i64, token_ids [N] i64 -> columns [B, R] i64, in 0..N-1.
    """
    return _draw(logits, positions, sampling, token_ids, exact=True)


def guess_columns(logits: Tensor, positions: Tensor, sampling: Sampling, token_ids: Tensor) -> Tensor:
    """`draw_columns` for a guess, which on a GPU is not always one that the filters keep."""
    return _draw(logits, positions, sampling, token_ids, exact=False)


def _draw(logits: Tensor, positions: Tensor, sampling: Sampling, token_ids: Tensor, exact: bool) -> Tensor:
    if not sampling.work.sampled:
        return largest_columns(logits)
    draws = Draws(logits.contiguous(), positions, sampling.temperature, sampling.seed, token_ids)
    return filtered_draw(draws, _filters(sampling)[1], exact) if sampling.work.filtered else gumbel_argmax(*draws)


def drawn_from(logits: Tensor, positions: Tensor, sampling: Sampling, token_ids: Tensor, part: slice) -> Tensor:
    """What `draw_columns` takes the largest of, for the slots in `part`; of a greedy slot the logits. Sync: never.

    Shapes: see `draw_columns` -> [b, R, N] f64.
    """
    of_slots, (temperature, filters) = logits[part].contiguous(), _filters(sampling, part)
    cutoff = filter_cutoff(of_slots, temperature, filters) if sampling.work.filtered else None
    return noisy_logits(Draws(of_slots, positions[part], temperature, sampling.seed[part], token_ids), cutoff)


def slices(logits: Tensor, at_once: int = SLICE) -> list[slice]:
    """Slots to be drawn for at once. Shapes: logits [B, R, N]."""
    batch, rows, columns = logits.shape
    step = max(1, at_once // (rows * columns))
    return [slice(b, b + step) for b in range(0, batch, step)]


def log_weights(logits: Tensor, sampling: Sampling, part: slice) -> Tensor:
    """What is drawn from at temperature > 0, up to a constant: -inf for what the filters drop.

    Shapes: logits [B, R, N] -> [b * R, N] f64 for the slots in `part`.
    """
    rows, columns = logits.shape[1:]
    temperature = sampling.temperature[part].clamp(min=1e-6)  # greedy rows are replaced by the caller
    scaled = logits[part].reshape(-1, columns).double() / _per_row(temperature, rows)
    if not sampling.work.filtered:
        return scaled
    cutoff = filter_cutoff(logits[part].contiguous(), *_filters(sampling, part))
    return scaled.masked_fill(~kept_columns(logits[part], cutoff).view_as(scaled), -torch.inf)


def _filters(sampling: Sampling, part: slice = slice(None)) -> tuple[Tensor, Filters]:
    """The temperature and the filters of the slots in `part`."""
    filters = Filters(sampling.top_k[part], sampling.top_p[part], sampling.min_p[part])
    return sampling.temperature[part], filters


def _per_row(values: Tensor, rows: int) -> Tensor:
    """Shapes: [b] -> [b * rows, 1]."""
    return values.repeat_interleave(rows)[:, None]
