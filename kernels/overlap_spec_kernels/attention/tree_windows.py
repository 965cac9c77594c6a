"""Attention of the windows of small trees in one launch: rotates q and k, writes k and v, attends.

Columns of a tree lie in the cache one after another, behind the prefix, though each has the position of its depth. So
the kernel for short contexts, which has the new rows in its shared memory, takes their windows as those of chains. It
sees which columns a row attends to by a bit mask, where a chain's rows attend to those before them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overlap_spec_kernels.attention.rope_kv_write import rope_kv_write_reference
from overlap_spec_kernels.attention.short_decode import Step, Tree, attend, parts_of, takes
from overlap_spec_kernels.attention.tree_attention import tree_attention_reference
from overlap_spec_kernels.launch import require, runs_triton
from overlap_spec_kernels.norm.norm_heads import HeadNorms, norm_heads_reference


def takes_trees(step: Step, window: int | None, sinks: Tensor | None = None) -> bool:
    """Whether one launch is meant for it. Shapes and types alone decide: a captured step has one kernel."""
    if not runs_triton(step.qkv) or (window is not None and window < step.capacity):
        return False
    return all(takes(part, None, sinks) for part in parts_of(step))


def tree_windows(
    step: Step, prefix: Tensor, mask: Tensor, scale: float, read_before_wait: bool = False,
    norms: HeadNorms | None = None,
) -> Tensor:  # fmt: skip
    """Write the rows' rotated k and v behind the prefix; softmax(q K^T * scale) V over the prefix and some columns.

    Row r of request b has place prefix[b] + r, and sees column c, c <= r, if bit c of mask[b, r, 0] is set.
    read_before_wait, norms: of `decode_attention`; prefix and mask are read as positions are.
    Shapes: step of `decode_attention`, prefix [B] i64, mask [B, W, 1] i64 -> [T, nq * d]. Raises: ValueError naming the
    argument. Sync: never on CUDA.
    """
    num_requests = len(step.page_table)
    require(prefix.shape == (num_requests,) and prefix.dtype == torch.int64, "prefix", "[B] int64")
    require(mask.shape == (num_requests, step.width, 1) and mask.dtype == torch.int64, "mask", "[B, W, 1] int64")
    require(prefix.is_contiguous() and mask.is_contiguous(), "mask", "contiguous, as prefix")
    if takes_trees(step, None):
        return attend(parts_of(step), scale, read_before_wait, norms, tree=Tree(prefix, mask))
    return tree_windows_reference(step, prefix, mask, scale, norms)


def tree_windows_reference(
    step: Step, prefix: Tensor, mask: Tensor, scale: float, norms: HeadNorms | None = None
) -> Tensor:
    """`rope_kv_write`, then `tree_attention`. Sync: reads prefix, mask and positions on the host."""
    (_, page_size, kv_heads, head_dim), width = step.k_cache.shape, step.width
    if norms is not None:
        norm_heads_reference(step.qkv, norms.query, norms.key, kv_heads, norms.eps)
    heads = step.qkv.unflatten(1, (-1, head_dim))
    q, k, v = heads.split((heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    places = prefix[:, None] + torch.arange(width, device=prefix.device)
    rows = step.page_table.gather(1, places // page_size).long() * page_size + places % page_size
    caches = step.k_cache, step.v_cache
    q = rope_kv_write_reference(q, k, v, step.cos_sin, step.positions, rows.flatten(), *caches)
    attended = tree_attention_reference(q, *caches, step.page_table, prefix, rows, mask, step.positions, scale)
    return attended.flatten(1)
