"""Adds the children of a level's nodes to the candidates of a draft's tree, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require

_BLOCK = 128


class Candidates(NamedTuple):
    """All nodes that a draft has proposed, level by level: a parent comes before its children."""

    log_probs: Tensor  # [B, C] f32 or f64: the log of the product of probabilities from the root down
    tokens: Tensor  # [B, C] i64
    parents: Tensor  # [B, C] i64, indices of candidates; -1: the root

    @classmethod
    def allocate(cls, num_rows: int, num_candidates: int, dtype: torch.dtype, device: torch.device) -> Candidates:
        """Allocate uninitialised tensors."""
        size = (num_rows, num_candidates)
        tokens, parents = (torch.empty(size, dtype=torch.int64, device=device) for _ in range(2))
        return cls(torch.empty(size, dtype=dtype, device=device), tokens, parents)


def add_children(
    candidates: Candidates, first: int, logs: Tensor, columns: Tensor, ids: Tensor, log_probs: Tensor, index: Tensor
) -> None:
    """Write the c children of each of R nodes into candidates first .. first + R * c - 1, node by node, in place.

    A child's log_prob is its parent's plus the log of its own probability; its token is ids[column]. log_probs and
    index are those of the parents: index is a parent's candidate, -1 for the root.
    Shapes: logs [B, R, c] of the type of candidates.log_probs, columns [B, R, c] i64, ids [V] i64, log_probs [B, R] f32
    or f64, index [B, R] i64. Raises: ValueError naming the argument. Sync: never.
    """
    require(logs.dim() == 3 and logs.is_contiguous(), "logs", "[B, R, c], contiguous")
    require(logs.dtype == candidates.log_probs.dtype, "logs", "the dtype of the candidates' log_probs")
    require(columns.shape == logs.shape and columns.is_contiguous(), "columns", "[B, R, c] as logs")
    require(columns.dtype == torch.int64, "columns", "int64")
    require(ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_contiguous(), "ids", "[V] int64")
    require(log_probs.shape == logs.shape[:2] and log_probs.is_contiguous(), "log_probs", "[B, R], contiguous")
    require(log_probs.dtype in (torch.float32, torch.float64), "log_probs", "float32 or float64")
    require(index.shape == logs.shape[:2] and index.is_contiguous(), "index", "[B, R], contiguous")
    require(index.dtype == torch.int64, "index", "int64")
    require(all(part.is_contiguous() for part in candidates), "candidates", "contiguous")
    (num_rows, num_candidates), (_, num_nodes, num_children) = candidates.tokens.shape, logs.shape
    require(num_rows == logs.shape[0], "candidates", "B rows")
    require(0 <= first <= num_candidates - num_nodes * num_children, "first", "room for all children")
    run = _add_children_triton if logs.is_cuda else add_children_reference
    run(candidates, first, logs, columns, ids, log_probs, index)


def add_children_reference(
    candidates: Candidates, first: int, logs: Tensor, columns: Tensor, ids: Tensor, log_probs: Tensor, index: Tensor
) -> None:
    here = slice(first, first + logs.shape[1] * logs.shape[2])
    candidates.log_probs[:, here] = (log_probs[:, :, None] + logs).flatten(1)
    candidates.tokens[:, here] = ids[columns].flatten(1)
    candidates.parents[:, here] = index[:, :, None].expand_as(columns).flatten(1)


def _add_children_triton(
    candidates: Candidates, first: int, logs: Tensor, columns: Tensor, ids: Tensor, log_probs: Tensor, index: Tensor
) -> None:
    num_slots, num_nodes, num_children = logs.shape
    _add_children_kernel[(num_slots, ceil_div(num_nodes * num_children, _BLOCK))](
        *candidates,
        logs,
        columns,
        ids,
        log_probs,
        index,
        candidates.tokens.shape[1],
        first,
        num_nodes,
        num_children,
        BLOCK=_BLOCK,
        num_warps=_BLOCK // 32,
        **dependent_launch(logs.device, num_slots),
    )


@TritonKernel
def _add_children_kernel(
    candidate_log_prob_ptr: tl.tensor, candidate_tokens_ptr: tl.tensor, candidate_parents_ptr: tl.tensor,
    logs_ptr: tl.tensor, columns_ptr: tl.tensor, ids_ptr: tl.tensor, log_prob_ptr: tl.tensor, index_ptr: tl.tensor,
    num_candidates: int, first: int, num_nodes: int, num_children: int,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part of its children)."""
    row = tl.program_id(0).to(tl.int64)
    child = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = child < num_nodes * num_children
    wait_for_inputs(PDL)
    source = row * num_nodes * num_children + child
    node = row * num_nodes + child // num_children
    target = row * num_candidates + first + child
    log = tl.load(logs_ptr + source, mask=inside, other=0.0)
    log_probs = tl.load(log_prob_ptr + node, mask=inside, other=0.0).to(log.dtype)
    column = tl.load(columns_ptr + source, mask=inside, other=0)
    tl.store(candidate_log_prob_ptr + target, log_probs + log, mask=inside)
    tl.store(candidate_tokens_ptr + target, tl.load(ids_ptr + column, mask=inside, other=0), mask=inside)
    tl.store(candidate_parents_ptr + target, tl.load(index_ptr + node, mask=inside, other=0), mask=inside)
