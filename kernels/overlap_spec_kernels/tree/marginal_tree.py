"""The best nodes of a tree whose levels are independent of each other, in one launch.

A draft that guesses a block at once gives one distribution for each level, whatever the path to it. So the tree of all
paths through the k best tokens of each level is known, and is not written down: the best nodes are found best first
(DDTree's construction, Ringel, Romano 2026, arXiv:2604.12989). Every column of the window has one child waiting, the
best that it has not got yet, and the best of all that wait is the next column.

    column 0 (root)   a b c ..        a taken: b waits in its place, and the best child of a waits for the new column
    column 1 (a)      aa ab ac ..
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, dependent_launch, next_power_of_2, require
from overlap_spec_kernels.limits import MAX_TREE_WIDTH
from overlap_spec_kernels.tree.select_tree import SelectedTree


def marginal_tree(logs: Tensor, columns: Tensor, ids: Tensor, num_guesses: int) -> SelectedTree:
    """The num_guesses nodes of the highest sum of logs from the root down, best first, parents before children.

    A node of level l is one of the k tokens ids[columns[l]] after a node of level l - 1. Of equal sums the one with the
    earlier parent is better, of siblings the one with the lower rank. A node of -inf is none: its guess is -1.
    Shapes: logs [L, B, k] f32 or f64, at most 0 and descending, no NaN, columns [L, B, k] i64, ids [V] i64,
    1 <= num_guesses K <= 63 -> guesses, parents [K, B]. Raises: ValueError naming the argument. Sync: never.
    """
    require(logs.dim() == 3 and logs.is_contiguous(), "logs", "[L, B, k], contiguous")
    require(logs.dtype in (torch.float32, torch.float64), "logs", "float32 or float64")
    require(columns.shape == logs.shape and columns.is_contiguous(), "columns", "[L, B, k] as logs")
    require(columns.dtype == torch.int64, "columns", "int64")
    require(ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_contiguous(), "ids", "[V] int64")
    require(1 <= num_guesses < MAX_TREE_WIDTH, "num_guesses", "1 to 63")
    run = _marginal_tree_triton if logs.is_cuda else marginal_tree_reference
    return run(logs, columns, ids, num_guesses)


def marginal_tree_reference(logs: Tensor, columns: Tensor, ids: Tensor, num_guesses: int) -> SelectedTree:
    _, num_rows, topk = logs.shape
    logs, columns = F.pad(logs, (0, 1, 0, 0, 0, 1), value=-torch.inf), F.pad(columns, (0, 1, 0, 0, 0, 1))
    row = torch.arange(num_rows, device=logs.device)
    above = logs.new_zeros(num_rows, num_guesses + 1)  # of each window column: its own sum of logs
    level, rank = (columns.new_zeros(above.shape) for _ in range(2))  # of the child that waits
    waiting = torch.full_like(above, -torch.inf)
    waiting[:, 0] = logs[0, :, 0]
    guesses, parents = (columns.new_empty(num_guesses, num_rows) for _ in range(2))
    for guess in range(num_guesses):
        best = waiting.amax(1)
        parent = (waiting == best[:, None]).int().argmax(1)
        at, own = level[row, parent], rank[row, parent]
        guesses[guess] = ids[columns[at, row, own]].masked_fill(best == -torch.inf, -1)
        parents[guess] = parent
        rank[row, parent] = (own + 1).clamp(max=topk)
        waiting[row, parent] = above[row, parent] + logs[at, row, rank[row, parent]]
        above[:, guess + 1], level[:, guess + 1] = best, at + 1
        waiting[:, guess + 1] = best + logs[at + 1, row, 0]
    return SelectedTree(guesses, parents)


def _marginal_tree_triton(logs: Tensor, columns: Tensor, ids: Tensor, num_guesses: int) -> SelectedTree:
    num_levels, num_rows, topk = logs.shape
    out = SelectedTree(columns.new_empty(num_guesses, num_rows), columns.new_empty(num_guesses, num_rows))
    _marginal_tree_kernel[(num_rows,)](
        logs,
        columns,
        ids,
        *out,
        num_levels,
        num_rows,
        topk,
        num_guesses,
        BLOCK=next_power_of_2(num_guesses),
        num_warps=1,
        **dependent_launch(logs.device, num_rows),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_levels", "num_rows", "topk", "num_guesses"))
def _marginal_tree_kernel(
    logs_ptr: tl.tensor, columns_ptr: tl.tensor, ids_ptr: tl.tensor, guesses_ptr: tl.tensor,
    guess_parents_ptr: tl.tensor, num_levels: int, num_rows: int, topk: int, num_guesses: int,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """One program, of one warp, per row."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)  # of the window, as a parent
    level, rank = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    wait_for_inputs(PDL)
    first = tl.load(logs_ptr + row * topk)
    waiting = tl.where(column == 0, first, float("-inf"))
    above = tl.zeros([BLOCK], first.dtype)  # the sum of logs of each column
    for guess in range(num_guesses):
        best = tl.max(waiting, axis=0)
        parent = tl.min(tl.where(waiting == best, column, BLOCK), axis=0)
        here, found = column == parent, best > float("-inf")
        at, own = tl.sum(tl.where(here, level, 0), axis=0), tl.sum(tl.where(here, rank, 0), axis=0)
        siblings = (at * num_rows + row) * topk
        token = tl.load(ids_ptr + tl.load(columns_ptr + siblings + own, mask=found, other=0))
        out = guess * num_rows + row
        tl.store(guesses_ptr + out, tl.where(found, token, -1))
        tl.store(guess_parents_ptr + out, parent.to(tl.int64))
        next_log = tl.load(logs_ptr + siblings + own + 1, mask=found & (own + 1 < topk), other=float("-inf"))
        below = siblings + num_rows * topk
        child_log = tl.load(logs_ptr + below, mask=found & (at + 1 < num_levels), other=float("-inf"))
        is_new = column == guess + 1
        waiting = tl.where(here, above + next_log, waiting)
        waiting = tl.where(is_new, best + child_log, waiting)
        rank = tl.where(here, own + 1, rank)
        level = tl.where(is_new, at + 1, level)
        above = tl.where(is_new, best, above)
