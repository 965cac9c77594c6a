"""Selects the best of a draft's candidates as the tree of a window.

EAGLE-2 (Li et al. 2024, arXiv:2406.16858) drafts more nodes than a step verifies, and keeps those with the highest
log_prob, summed from the root down. A child's log_prob is at most its parent's, and a parent comes before its children,
so the kept nodes form a tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, require

_MAX_CANDIDATES = 2048
_FEW_CANDIDATES = 128


class _Ranking(NamedTuple):
    """How candidates are divided among programs."""

    block: int  # candidates that a program ranks
    chunk: int  # candidates that they are compared with at once
    num_warps: int


class SelectedTree(NamedTuple):
    """The selected nodes, best first, parents before children: the arguments of `place_tree`."""

    guesses: Tensor  # [K, B] i64; -1 if fewer candidates have a finite log_prob
    parents: Tensor  # [K, B] i64, window columns: 0 for the root, 1 + i for guess i


def select_tree(log_probs: Tensor, tokens: Tensor, parents: Tensor, num_guesses: int) -> SelectedTree:
    """The num_guesses candidates of the highest log_prob, by log_prob descending; at ties the lower index is better.

    parents[b, c] is the index of c's parent, which is less than c and whose log_prob is no lower; -1: the root. A
    candidate of log_prob -inf is none: its guess is -1.
    Shapes: log_probs [B, C] f32 or f64, no NaN, tokens, parents [B, C] i64, 1 <= num_guesses K <= C <= 2048.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(
        log_probs.dim() == 2 and log_probs.dtype in (torch.float32, torch.float64), "log_probs", "[B, C] f32 or f64"
    )
    require(
        log_probs.is_contiguous() and log_probs.shape[1] <= _MAX_CANDIDATES,
        "log_probs",
        "contiguous, at most 2048 columns",
    )
    for name, value in {"tokens": tokens, "parents": parents}.items():
        require(value.shape == log_probs.shape and value.is_contiguous(), name, "[B, C] as log_probs")
        require(value.dtype == torch.int64, name, "int64")
    require(1 <= num_guesses <= log_probs.shape[1], "num_guesses", "1 to the columns of log_probs")
    run = _select_tree_triton if log_probs.is_cuda else select_tree_reference
    return run(log_probs, tokens, parents, num_guesses)


def select_tree_reference(log_probs: Tensor, tokens: Tensor, parents: Tensor, num_guesses: int) -> SelectedTree:
    order = torch.sort(log_probs, dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order)
    rank.scatter_(1, order, torch.arange(log_probs.shape[1], device=log_probs.device).expand_as(order))
    best = order[:, :num_guesses]
    parent = parents.gather(1, best)
    column = torch.where(parent < 0, 0, rank.gather(1, parent.clamp(min=0)) + 1)
    guesses = tokens.gather(1, best).masked_fill(log_probs.gather(1, best) == -torch.inf, -1)
    return SelectedTree(guesses.t().contiguous(), column.t().contiguous())


def _select_tree_triton(log_probs: Tensor, tokens: Tensor, parents: Tensor, num_guesses: int) -> SelectedTree:
    num_rows, num_candidates = log_probs.shape
    out = SelectedTree(tokens.new_empty(num_guesses, num_rows), tokens.new_empty(num_guesses, num_rows))
    ranking = _Ranking(32, 32, 4) if num_candidates <= _FEW_CANDIDATES else _Ranking(8, 256, 1)
    _select_tree_kernel[(num_rows, ceil_div(num_candidates, ranking.block))](
        log_probs,
        tokens,
        parents,
        *out,
        num_candidates,
        num_guesses,
        num_rows,
        BLOCK_C=ranking.block,
        CHUNK=ranking.chunk,
        num_warps=ranking.num_warps,
        **dependent_launch(log_probs.device),
    )
    return out


@TritonKernel.with_options(do_not_specialize=("num_rows",))
def _select_tree_kernel(
    log_probs_ptr: tl.tensor, tokens_ptr: tl.tensor, parents_ptr: tl.tensor, guesses_ptr: tl.tensor,
    guess_parents_ptr: tl.tensor, num_candidates: int, num_guesses: int, num_rows: int, BLOCK_C: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part of its candidates).

    A candidate's rank is the number of better candidates. A program also counts the ranks of its candidates' parents,
    so nothing is sorted or passed between programs.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = index < num_candidates
    first = row * num_candidates
    wait_for_inputs(PDL)
    log_prob = tl.load(log_probs_ptr + first + index, mask=inside, other=float("-inf"))
    parent = tl.load(parents_ptr + first + index, mask=inside, other=-1).to(tl.int32)
    parent_log_prob = tl.load(log_probs_ptr + first + parent, mask=parent >= 0, other=0.0)
    rank, parent_rank = tl.zeros([BLOCK_C], tl.int32), tl.zeros([BLOCK_C], tl.int32)
    for begin in range(0, num_candidates, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        there = (other < num_candidates)[None, :]
        other_log_prob = tl.load(log_probs_ptr + first + other, mask=other < num_candidates, other=float("-inf"))
        rank += _num_better(log_prob, index, other_log_prob, other, there)
        parent_rank += _num_better(parent_log_prob, parent, other_log_prob, other, there)
    kept = inside & (rank < num_guesses)
    out = rank.to(tl.int64) * num_rows + row
    token = tl.load(tokens_ptr + first + index, mask=kept, other=0)
    tl.store(guesses_ptr + out, tl.where(log_prob == float("-inf"), -1, token), mask=kept)
    tl.store(guess_parents_ptr + out, tl.where(parent < 0, 0, parent_rank + 1).to(tl.int64), mask=kept)


@TritonKernel
def _num_better(
    log_prob: tl.tensor, index: tl.tensor, other_log_prob: tl.tensor, other: tl.tensor, there: tl.tensor
) -> tl.tensor:
    """How many of the others have a higher log_prob, or as high a one at a lower index.

    Shapes: [n], [n], [m], [m], [1, m] -> [n].
    """
    equal = (other_log_prob[None, :] == log_prob[:, None]) & (other[None, :] < index[:, None])
    better = ((other_log_prob[None, :] > log_prob[:, None]) | equal) & there
    return tl.sum(better.to(tl.int32), axis=1)
