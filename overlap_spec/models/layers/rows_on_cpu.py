"""Rows of a forward as the attention kernel of a CPU takes them."""

import torch
from overlap_spec_kernels import NearKeys
from torch import Tensor

from overlap_spec.models.interfaces import RowBatch


def starts_on_cpu(rows: RowBatch) -> Tensor:
    """Where each request's rows begin; rows of trees are uniform. Shapes: -> [B + 1] i32."""
    if rows.row_starts is not None:
        return rows.row_starts
    return torch.arange(len(rows.page_table) + 1, dtype=torch.int32) * (len(rows.positions) // len(rows.page_table))


def near_keys(rows: RowBatch) -> NearKeys | None:
    """What rows of trees attend to, for a CPU's kernel; None of sequences."""
    if (tree := rows.tree) is None:
        return None
    parts = (tree.prefix, tree.cache_rows, tree.positions, tree.mask)
    return NearKeys(*(part.contiguous() for part in parts))
