"""Logits that are no numbers, for the ops that draw and judge: what they are given, and what each must find."""

import torch
from overlap_spec_kernels import NO_TOKEN
from torch import Tensor

NAN, INF = torch.nan, torch.inf


def drawing_rows(columns: int, temperature: float, place: torch.device) -> tuple[tuple[Tensor, ...], Tensor]:
    """Arguments of `gumbel_argmax`, five slots of one row, and where nothing can be drawn: all slots but the first."""
    logits = torch.randn(5, 1, columns)
    logits[1] = NAN
    logits[2] = -INF
    logits[3, :, ::2], logits[3, :, 1::2] = NAN, -INF  # what a mask makes of NaN
    logits[4, :, columns // 2] = INF
    positions, seeds = torch.arange(5)[:, None], torch.arange(5)
    temperatures = torch.full((5,), temperature, dtype=torch.float64)
    arguments = logits, positions, temperatures, seeds, torch.arange(columns)
    nothing = torch.tensor([False, True, True, True, True])
    return tuple(each.to(place) for each in arguments), nothing


def marked(drawn: Tensor, every: int) -> Tensor:
    """Drawn tokens of which every so manieth is `NO_TOKEN`."""
    places = torch.arange(drawn.numel(), device=drawn.device).view_as(drawn)
    return drawn.masked_fill(places % every == every - 1, NO_TOKEN)


def ranked_rows(columns: int, dtype: torch.dtype, place: torch.device) -> Tensor:
    """Rows for `top_tokens`: sound, all NaN (of either sign), NaN but for three columns."""
    logits = torch.randn(4, columns, dtype=dtype)
    logits[1] = NAN
    logits[2] = -logits[1]
    logits[3] = NAN
    logits[3, [1, columns // 2, columns - 1]] = torch.tensor([2.0, 3.0, 1.0], dtype=dtype)
    return logits.to(place)


def check_ranked(log_probs: Tensor, columns: Tensor, size: int) -> None:
    """Every column exists once, and what is NaN has the log-prob of what is forbidden."""
    assert ((columns >= 0) & (columns < size)).all()
    assert all(len(set(row)) == len(row) for row in columns.tolist())
    assert not log_probs.isnan().any() and (log_probs[1:3] == -INF).all()
    assert columns[3, :3].tolist() == [size // 2, 1, size - 1]
