"""The next level of a draft's tree: the best of the children made last, and what their rows need, in one launch.

Not here: making children (`top_tokens`, `add_children`), what is kept of all levels (`select_tree`).

    nodes of the level before    0           1            mask, features
    their children               0  1  2     3  4  5      worth, tokens
    the best two                    1           4         their index; mask and features of nodes 0 and 1
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.launch import TritonKernel, ceil_div, dependent_launch, next_power_of_2, require
from overlap_spec_kernels.tree.select_tree import _num_better

if TYPE_CHECKING:
    import triton.language as tl

_MAX_CHILDREN = 512  # of all nodes of a level
_MAX_TOP = 32
_BLOCK_F = 512  # numbers of each feature row that a program copies
_COMPARED_AT_ONCE = 32


class ExpandedLevel(NamedTuple):
    """The k best children of each row, best first; of equal ones the lower index first."""

    tokens: Tensor  # [B * k] i64
    worth: Tensor  # [B, k], as it was
    indices: Tensor  # [B, k] i64, which children they are, counted from `first`
    mask: Tensor  # [B, k, words] i64: their parent's, and their own bits
    features: Tensor  # [B * k, n]: their parent's


def expand_tree(
    worth: Tensor, tokens: Tensor, mask: Tensor, features: Tensor, own_bits: Tensor, first: int = 0
) -> ExpandedLevel:
    """The k best of the R * c children of R nodes: child i is one of node i // c, and has index first + i.

    worth and tokens may be columns of something wider, as wide for both.
    Shapes: worth [B, R * c] f32 or f64, no NaN, tokens [B, R * c] i64, mask [B, R, words] i64, features [B * R, n],
    own_bits [k, words] i64, what each of the next nodes adds to its parent's mask; k <= R * c <= 512, k <= 32.
    Raises: ValueError naming the argument. Sync: never.
    """
    require(worth.dim() == 2 and worth.dtype in (torch.float32, torch.float64), "worth", "[B, R * c] f32 or f64")
    require(worth.stride(1) == 1 and worth.shape[1] <= _MAX_CHILDREN, "worth", "contiguous rows, at most 512 columns")
    require(tokens.shape == worth.shape and tokens.stride() == worth.stride(), "tokens", "[B, R * c] as worth")
    require(tokens.dtype == torch.int64, "tokens", "int64")
    require(mask.dim() == 3 and mask.shape[0] == worth.shape[0] and mask.is_contiguous(), "mask", "[B, R, words]")
    require(mask.dtype == torch.int64 and worth.shape[1] % mask.shape[1] == 0, "mask", "int64, R nodes of c children")
    require(features.dim() == 2 and features.stride(1) == 1, "features", "[B * R, n], contiguous rows")
    require(features.shape[0] == mask.shape[0] * mask.shape[1], "features", "a row for each node")
    require(own_bits.dim() == 2 and own_bits.shape[1] == mask.shape[2], "own_bits", "[k, words]")
    require(own_bits.dtype == torch.int64 and own_bits.is_contiguous(), "own_bits", "int64, contiguous")
    require(1 <= own_bits.shape[0] <= min(worth.shape[1], _MAX_TOP), "own_bits", "1 to 32 rows, and to R * c")
    run = _expand_tree_triton if worth.is_cuda else expand_tree_reference
    return run(worth, tokens, mask, features, own_bits, first)


def expand_tree_reference(
    worth: Tensor, tokens: Tensor, mask: Tensor, features: Tensor, own_bits: Tensor, first: int = 0
) -> ExpandedLevel:
    num_rows, num_nodes, num_words = mask.shape
    topk = own_bits.shape[0]
    worth, order = torch.sort(worth, dim=1, descending=True, stable=True)
    worth, order = worth[:, :topk].contiguous(), order[:, :topk]
    parent = order // (tokens.shape[1] // num_nodes)
    node = torch.arange(num_rows, device=worth.device)[:, None] * num_nodes + parent
    return ExpandedLevel(
        tokens=tokens.gather(1, order).flatten(),
        worth=worth,
        indices=order + first,
        mask=mask.view(-1, num_words)[node] | own_bits,
        features=features[node.flatten()],
    )


def _expand_tree_triton(
    worth: Tensor, tokens: Tensor, mask: Tensor, features: Tensor, own_bits: Tensor, first: int = 0
) -> ExpandedLevel:
    (num_slots, num_children), (_, num_nodes, num_words), topk = worth.shape, mask.shape, own_bits.shape[0]
    size = features.shape[1]
    out = ExpandedLevel(
        tokens=tokens.new_empty(num_slots * topk),
        worth=worth.new_empty(num_slots, topk),
        indices=tokens.new_empty(num_slots, topk),
        mask=mask.new_empty(num_slots, topk, num_words),
        features=features.new_empty(num_slots * topk, size),
    )
    _expand_tree_kernel[(num_slots, max(ceil_div(size, _BLOCK_F), 1))](
        worth,
        tokens,
        mask,
        features,
        own_bits,
        *out,
        worth.stride(0),
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
        **dependent_launch(worth.device, num_slots * topk),
    )
    return out


@TritonKernel
def _expand_tree_kernel(
    worth_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    mask_ptr: tl.tensor,
    features_ptr: tl.tensor,
    own_bits_ptr: tl.tensor,
    best_tokens_ptr: tl.tensor,
    best_worth_ptr: tl.tensor,
    indices_ptr: tl.tensor,
    best_mask_ptr: tl.tensor,
    best_features_ptr: tl.tensor,
    row_stride: int,
    first: int,
    num_children: int,
    num_nodes: int,
    num_words: int,
    feature_stride: int,
    size: int,
    TOPK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_F: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Program (row, part of the features); all rank the children, the first also writes what is small."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_C)
    best = tl.arange(0, BLOCK_K)
    kept = best < TOPK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    worth_ptr += row * row_stride
    tokens_ptr += row * row_stride
    worth = tl.load(worth_ptr + index, mask=index < num_children, other=float("-inf"))
    rank = tl.zeros([BLOCK_C], tl.int32)
    for begin in range(0, num_children, CHUNK):
        other = begin + tl.arange(0, CHUNK)
        other_worth = tl.load(worth_ptr + other, mask=other < num_children, other=float("-inf"))
        rank += _num_better(worth, index, other_worth, other, (other < num_children)[None, :])
    order = tl.sum(tl.where(rank[:, None] == best[None, :], index[:, None], 0), axis=0)
    parent = row * num_nodes + order // (num_children // num_nodes)
    out = row * TOPK + best
    if tl.program_id(1) == 0:
        tl.store(best_tokens_ptr + out, tl.load(tokens_ptr + order, mask=kept, other=0), mask=kept)
        tl.store(best_worth_ptr + out, tl.load(worth_ptr + order, mask=kept, other=0.0), mask=kept)
        tl.store(indices_ptr + out, (first + order).to(tl.int64), mask=kept)
        for word in range(num_words):
            above = tl.load(mask_ptr + parent * num_words + word, mask=kept, other=0)
            own = tl.load(own_bits_ptr + best * num_words + word, mask=kept, other=0)
            tl.store(best_mask_ptr + out * num_words + word, above | own, mask=kept)
    column = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    copied = kept[:, None] & (column < size)[None, :]
    features = tl.load(features_ptr + (parent * feature_stride)[:, None] + column[None, :], mask=copied)
    tl.store(best_features_ptr + (out * size)[:, None] + column[None, :], features, mask=copied)
