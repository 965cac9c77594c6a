"""The next level of a draft's tree: the best of the latest children, with their masks and features, in one launch.

nodes of the level before    0           1            mask, features
their children               0  1  2     3  4  5      log_probs, tokens
the best two                    1           4         their index; mask and features of nodes 0 and 1
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl, wait_for_inputs
from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require
from overlap_spec_kernels.tree.select_tree import _num_better

_MAX_CHILDREN = 512  # children of all nodes of a level
_MAX_TOP = 32
_BLOCK_F = 512  # elements of each feature row that a program copies
_COMPARED_AT_ONCE = 32


class ExpandedLevel(NamedTuple):
    """The k best children of each row, best first; of equal children the lower index first."""

    tokens: Tensor  # [B * k] i64
    log_probs: Tensor  # [B, k], in the given type
    indices: Tensor  # [B, k] i64, each child's index plus `first`
    mask: Tensor  # [B, k, words] i64: the parent's mask with the child's own bits
    features: Tensor  # [B * k, n]: the parent's features


def expand_tree(
    log_probs: Tensor, tokens: Tensor, mask: Tensor, features: Tensor, own_bits: Tensor, first: int = 0
) -> ExpandedLevel:
    """The k best of the R * c children of R nodes: child i belongs to node i // c, and has index first + i.

    log_probs and tokens may be columns of a wider tensor; both then have the same row stride. own_bits: the bits that
    each node of the next level adds to its parent's mask.
    Shapes: log_probs [B, R * c] f32 or f64, no NaN, tokens [B, R * c] i64, mask [B, R, words] i64, features [B * R, n],
    own_bits [k, words] i64; k <= R * c <= 512, k <= 32.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(
        log_probs.dim() == 2 and log_probs.dtype in (torch.float32, torch.float64), "log_probs", "[B, R * c] f32 or f64"
    )
    require(
        log_probs.stride(1) == 1 and log_probs.shape[1] <= _MAX_CHILDREN,
        "log_probs",
        "contiguous rows, at most 512 columns",
    )
    require(
        tokens.shape == log_probs.shape and tokens.stride() == log_probs.stride(), "tokens", "[B, R * c] as log_probs"
    )
    require(tokens.dtype == torch.int64, "tokens", "int64")
    require(mask.dim() == 3 and mask.shape[0] == log_probs.shape[0] and mask.is_contiguous(), "mask", "[B, R, words]")
    require(
        mask.dtype == torch.int64 and log_probs.shape[1] % mask.shape[1] == 0, "mask", "int64, R nodes of c children"
    )
    require(features.dim() == 2 and features.stride(1) == 1, "features", "[B * R, n], contiguous rows")
    require(features.shape[0] == mask.shape[0] * mask.shape[1], "features", "a row for each node")
    require(own_bits.dim() == 2 and own_bits.shape[1] == mask.shape[2], "own_bits", "[k, words]")
    require(own_bits.dtype == torch.int64 and own_bits.is_contiguous(), "own_bits", "int64, contiguous")
    require(1 <= own_bits.shape[0] <= min(log_probs.shape[1], _MAX_TOP), "own_bits", "1 to 32 rows, and to R * c")
    run = _expand_tree_triton if log_probs.is_cuda else expand_tree_reference
    return run(log_probs, tokens, mask, features, own_bits, first)


def expand_tree_reference(
    log_probs: Tensor, tokens: Tensor, mask: Tensor, features: Tensor, own_bits: Tensor, first: int = 0
) -> ExpandedLevel:
    num_rows, num_nodes, num_words = mask.shape
    topk = own_bits.shape[0]
    log_probs, order = torch.sort(log_probs, dim=1, descending=True, stable=True)
    log_probs, order = log_probs[:, :topk].contiguous(), order[:, :topk]
    parent = order // (tokens.shape[1] // num_nodes)
    node = torch.arange(num_rows, device=log_probs.device)[:, None] * num_nodes + parent
    return ExpandedLevel(
        tokens=tokens.gather(1, order).flatten(),
        log_probs=log_probs,
        indices=order + first,
        mask=mask.view(-1, num_words)[node] | own_bits,
        features=features[node.flatten()],
    )


def _expand_tree_triton(
    log_probs: Tensor, tokens: Tensor, mask: Tensor, features: Tensor, own_bits: Tensor, first: int = 0
) -> ExpandedLevel:
    (num_slots, num_children), (_, num_nodes, num_words), topk = log_probs.shape, mask.shape, own_bits.shape[0]
    size = features.shape[1]
    out = ExpandedLevel(
        tokens=tokens.new_empty(num_slots * topk),
        log_probs=log_probs.new_empty(num_slots, topk),
        indices=tokens.new_empty(num_slots, topk),
        mask=mask.new_empty(num_slots, topk, num_words),
        features=features.new_empty(num_slots * topk, size),
    )
    _expand_tree_kernel[(num_slots, max(ceil_div(size, _BLOCK_F), 1))](
        log_probs,
        tokens,
        mask,
        features,
        own_bits,
        *out,
        log_probs.stride(0),
        first,
        num_children,
        num_nodes,
        num_words,
        features.stride(0),
        size,
        TOPK=topk,
        BLOCK_C=next_power_of_2(num_children),
        BLOCK_K=next_power_of_2(topk),
        BLOCK_F=_BLOCK_F,
        CHUNK=_COMPARED_AT_ONCE,
        num_warps=4,
        **dependent_launch(log_probs.device, num_slots * topk),
    )
    return out


@TritonKernel
def _expand_tree_kernel(
    log_prob_ptr: tl.tensor, tokens_ptr: tl.tensor, mask_ptr: tl.tensor, features_ptr: tl.tensor,
    own_bits_ptr: tl.tensor, best_tokens_ptr: tl.tensor, best_log_prob_ptr: tl.tensor, indices_ptr: tl.tensor,
    best_mask_ptr: tl.tensor, best_features_ptr: tl.tensor,
    row_stride: int, first: int, num_children: int, num_nodes: int, num_words: int, feature_stride: int, size: int,
    TOPK: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_F: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row, part of the features). All rank the children; the first also writes the small outputs."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_C)
    best = tl.arange(0, BLOCK_K)
    kept = best < TOPK
    wait_for_inputs(PDL)
    log_prob_ptr += row * row_stride
    tokens_ptr += row * row_stride
    log_probs = tl.load(log_prob_ptr + index, mask=index < num_children, other=float("-inf"))
    rank = tl.zeros([BLOCK_C], tl.int32)
    for begin in range(0, num_children, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_log_prob = tl.load(log_prob_ptr + other, mask=other < num_children, other=float("-inf"))
        rank += _num_better(log_probs, index, other_log_prob, other, (other < num_children)[None, :])
    order = tl.sum(tl.where(rank[:, None] == best[None, :], index[:, None], 0), axis=0)
    parent = row * num_nodes + order // (num_children // num_nodes)
    out = row * TOPK + best
    if tl.program_id(1) == 0:
        tl.store(best_tokens_ptr + out, tl.load(tokens_ptr + order, mask=kept, other=0), mask=kept)
        tl.store(best_log_prob_ptr + out, tl.load(log_prob_ptr + order, mask=kept, other=0.0), mask=kept)
        tl.store(indices_ptr + out, (first + order).to(tl.int64), mask=kept)
        for word in range(num_words):
            above = tl.load(mask_ptr + parent * num_words + word, mask=kept, other=0)
            own = tl.load(own_bits_ptr + best * num_words + word, mask=kept, other=0)
            tl.store(best_mask_ptr + out * num_words + word, above | own, mask=kept)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    copied = kept[:, None] & (column < size)[None, :]
    features = tl.load(features_ptr + (parent * feature_stride)[:, None] + column[None, :], mask=copied)
    tl.store(best_features_ptr + (out * size)[:, None] + column[None, :], features, mask=copied)
