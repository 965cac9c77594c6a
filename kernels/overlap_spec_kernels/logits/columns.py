"""Columns of tokens: a draft's logits may have fewer columns than the target has tokens, in an order of their own."""

import torch
from torch import Tensor

from overlap_spec_kernels.limits import NO_TOKEN


def largest_columns(logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """The column of each row's largest logit, of equal ones the first; `NO_TOKEN` where that is NaN or infinite.

    With `ids` its id instead, and some id where it has none: what guesses with it is wrong, and nothing else is.
    Shapes: logits [.., N], ids [N] i64 -> [..] i64. Sync: never.
    """
    values, columns = logits.max(-1)
    columns = torch.where(values.abs() < torch.inf, columns, NO_TOKEN)
    return columns if ids is None else ids[columns.clamp(min=0)]


def columns_of(tokens: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """The column of each token, N of what is no token and has none. Sync: never.

    Shapes: tokens i64 of any shape, token_ids [N] i64 -> as tokens.
    """
    num_columns = len(token_ids)
    columns = torch.full((vocab_size + 1,), num_columns, device=token_ids.device)  # the last one is of what is no token
    columns.scatter_(0, token_ids, torch.arange(num_columns, device=token_ids.device))
    known = (tokens >= 0) & (tokens < vocab_size)
    return columns[tokens.masked_fill(~known, vocab_size)]


def forbid_tokens(logits: Tensor, tokens: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    """-inf for these tokens, in place; what is no token, or none of the columns', changes nothing. Sync: never.

    Shapes: logits [B, R, N], tokens [B, R, n] i64, token_ids [N] i64 -> logits.
    """
    columns = columns_of(tokens, token_ids, vocab_size)
    missing = columns == len(token_ids)
    # The smaller of two values: so a column may be named twice, and what is missing names one without effect.
    values = torch.where(missing, torch.inf, -torch.inf).to(logits.dtype)
    return logits.scatter_reduce_(2, columns.masked_fill(missing, 0), values, "amin")
