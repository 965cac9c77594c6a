"""The choice of a router whose experts stand in groups (DeepSeek-V2, V3): scores, the best groups, their best experts.

The last kernel of the router's (`route.py`) chooses so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from overlap_spec_kernels.experts.route import (
    Common,
    Rows,
    add_common,
    chosen_by,
    logits_of_row,
    ranked,
    require_common,
    require_router,
    router_logits_reference,
    row_of_program,
    with_common,
    written,
)
from overlap_spec_kernels.experts.sum_of_experts import Routing
from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel, next_power_of_2, require, runs_triton
from overlap_spec_kernels.norm.silu_mul import sigmoid

TINY = 1e-20  # added to a sum of scores, as published: it may be zero


def softmax_scores(logits: Tensor) -> Tensor:
    """The part of each expert in a row's softmax. Shapes: [T, E] -> the same."""
    return logits.softmax(1)


def sigmoid_scores(logits: Tensor) -> Tensor:
    """The sigmoid of each expert's logit. Shapes: [T, E] -> the same."""
    return sigmoid(logits)


@dataclass(frozen=True, slots=True)
class Grouping:
    """How experts that stand in groups are scored and chosen (DeepSeek).

    A group is rated by the sum of its best scores, and a row chooses among the experts of the best groups.
    """

    score: Callable[[Tensor], Tensor]  # of a row's logits: `sigmoid_scores` or `softmax_scores`
    num_groups: int = 1
    kept_groups: int = 1  # of which a row chooses
    rated_by: int = 1  # the best scores of a group that are added up
    scale: float = 1.0  # factor of all weights


def best_of_groups(
    x: Rows, weight: Tensor, top_k: int, normalised: bool, grouping: Grouping, correction: Tensor | None = None,
    common: Common | None = None,
) -> Routing:  # fmt: skip
    """A row's `top_k` experts of highest score within its best groups; of equal ones those of lower index.

    `correction`: is added to scores for the choice, not for the weights. `normalised`: a row's weights add up to 1
    before they are scaled. A row that is NaN has the first experts. A row's result has the same bits whatever rows are
    beside it.
    Shapes: x [T, H], weight [E, H], correction [E] -> [T, k] twice, k = top_k and `common`; E <= 1024. Raises:
    ValueError naming the argument. Sync: never.
    """
    require_router(x, weight)
    num_experts = weight.shape[0]
    require(1 <= top_k <= num_experts, "top_k", "1 to the number of experts")
    require(grouping.score in (sigmoid_scores, softmax_scores), "grouping", "a known score")
    require(num_experts % grouping.num_groups == 0, "grouping", "groups of equal size")
    fits = correction is None or (correction.shape == weight.shape[:1] and correction.is_contiguous())
    require(fits, "correction", "[E], contiguous")
    require_common(written(x), common)
    if runs_triton(weight):
        return _best_of_groups_triton(x, weight, top_k, normalised, grouping, correction, common)
    return best_of_groups_reference(written(x), weight, top_k, normalised, grouping, correction, common)


def best_of_groups_reference(
    x: Tensor, weight: Tensor, top_k: int, normalised: bool, grouping: Grouping, correction: Tensor | None = None,
    common: Common | None = None,
) -> Routing:  # fmt: skip
    scores = grouping.score(router_logits_reference(x, weight))
    rated = _of_best_groups(scores if correction is None else scores + correction, grouping)
    experts = rated.sort(dim=1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = scores.gather(1, experts)
    if normalised:
        weights = weights / (weights.sum(1, keepdim=True) + TINY)
    return with_common(Routing(experts, weights * grouping.scale), x, common)


def _of_best_groups(rated: Tensor, grouping: Grouping) -> Tensor:
    """Experts of other groups have -inf. Shapes: [T, E] -> the same."""
    kept, count = grouping.kept_groups, grouping.num_groups
    if kept == count:
        return rated
    by_group = rated.unflatten(1, (count, -1))
    ratings = by_group.topk(grouping.rated_by, dim=2).values.sum(2)
    left_out = ratings.sort(dim=1, descending=True, stable=True).indices[:, kept:]
    mask = torch.zeros_like(ratings, dtype=torch.bool).scatter_(1, left_out, True)
    masked: Tensor = by_group.masked_fill(mask[:, :, None], -torch.inf)
    return masked.flatten(1)


def _best_of_groups_triton(
    x: Rows, weight: Tensor, top_k: int, normalised: bool, grouping: Grouping, correction: Tensor | None = None,
    common: Common | None = None,
) -> Routing:  # fmt: skip
    is_whole = grouping.kept_groups == grouping.num_groups
    return chosen_by(
        _best_of_groups_kernel,
        x,
        weight,
        top_k,
        (weight if correction is None else correction, grouping.scale),
        common,
        NORMALISED=normalised,
        SIGMOID=grouping.score is sigmoid_scores,
        CORRECTED=correction is not None,
        GROUPS=1 if is_whole else grouping.num_groups,
        KEPT=1 if is_whole else grouping.kept_groups,
        RATED_BY=grouping.rated_by,
        TINY=TINY,
        BLOCK_G=next_power_of_2(grouping.num_groups),
    )


@TritonKernel.with_options(do_not_specialize=("num_rows", "common"))
def _best_of_groups_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, partial_ptr: tl.tensor, x_stride: int, num_rows: int,
    squares_ptr: tl.tensor, rows_ptr: tl.tensor, eps: float, correction_ptr: tl.tensor, scale: float,
    experts_ptr: tl.tensor, weights_ptr: tl.tensor, share_ptr: tl.tensor, common: int, SIZE_K: tl.constexpr,
    EXPERTS: tl.constexpr, PARTS: tl.constexpr, SHARE: tl.constexpr, SQUARES: tl.constexpr, BLOCK_S: tl.constexpr,
    TOP_K: tl.constexpr, COMMON: tl.constexpr, EARLY: tl.constexpr, NORMALISED: tl.constexpr, SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, RATED_BY: tl.constexpr, TINY: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The choice of a row; NaN is before all others, as torch sorts it. Programs: see `row_of_program`."""
    row = row_of_program(
        x_ptr, weight_ptr, partial_ptr, x_stride, num_rows, squares_ptr, rows_ptr, eps, experts_ptr, SIZE_K, EXPERTS,
        PARTS, SHARE, SQUARES, BLOCK_S, EARLY, BLOCK_K, PDL,
    )  # fmt: skip
    if row >= 0:
        first = add_common(
            x_ptr, x_stride, row, num_rows, squares_ptr, eps, experts_ptr, weights_ptr, share_ptr, common, SIZE_K,
            TOP_K, COMMON, SQUARES, BLOCK_S,
        )  # fmt: skip
        logits = logits_of_row(partial_ptr, row, num_rows, EXPERTS, PARTS, SHARE, BLOCK)
        expert = tl.arange(0, BLOCK)
        known = expert < EXPERTS
        if SIGMOID:
            scores = 1.0 / (1.0 + tl.exp(-logits))
        else:
            highest = tl.max(tl.where(known & (logits == logits), logits, float("-inf")), axis=0)
            scores = tl.where(known, tl.exp(logits - highest), 0.0)
            scores = scores / tl.sum(scores, axis=0)
        order = scores
        if CORRECTED:
            order += tl.load(correction_ptr + expert, mask=known, other=0.0).to(tl.float32)
        order = tl.where(order == order, order, float("inf"))
        order = tl.where(known, order, float("-inf"))
        if GROUPS > 1:
            group = expert // (EXPERTS // GROUPS)
            order = _among_best_groups(order, group, expert, GROUPS, KEPT, RATED_BY, BLOCK, BLOCK_G)
        index, rank = ranked(order, TOP_K, BLOCK)
        is_chosen = rank < TOP_K
        tl.store(experts_ptr + first + rank, index.to(tl.int64), mask=is_chosen)
        weights = tl.gather(scores, index, 0)
        if NORMALISED:
            weights = weights / (tl.sum(tl.where(is_chosen, weights, 0.0), axis=0) + TINY)
        tl.store(weights_ptr + first + rank, weights * scale, mask=is_chosen)


@TritonKernel
def _among_best_groups(
    rated: tl.tensor, group: tl.tensor, expert: tl.tensor, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    RATED_BY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Experts of all but the KEPT best groups have -inf. `group`: of each expert. Shapes: [BLOCK]."""
    each = tl.arange(0, BLOCK_G)
    ratings = tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32)
    for index in range(GROUPS):
        own = tl.where(group == index, rated, float("-inf"))
        rating = 0.0
        for _ in range(RATED_BY):
            highest = tl.max(own, axis=0)
            rating += highest
            first = tl.min(tl.where(own == highest, expert, BLOCK), axis=0)
            own = tl.where(expert == first, float("-inf"), own)
        ratings = tl.where(each == index, rating, ratings)
    kept = group < 0
    for _ in range(KEPT):
        best = tl.min(tl.where(ratings == tl.max(ratings, axis=0), each, BLOCK_G), axis=0)
        kept = kept | (group == best)
        ratings = tl.where(each == best, float("-inf"), ratings)
    return tl.where(kept, rated, float("-inf"))
