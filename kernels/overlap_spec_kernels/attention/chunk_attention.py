"""Causal attention of one long chunk of a prompt, by dense attention (cuDNN's on a GPU) over gathered keys.

A mask that is neither absent nor square costs dense kernels half of their speed. So keys are cut where both parts are
as they like them, and the parts are merged:

    keys          | 0 ..                     in whole units | rest |  the chunk's own  | zeros |
    rows          no mask, at most `most_keys` at a time    |  causal, square                  |
                                                            | empty rows | the chunk   | empty |

Empty rows make the second part square; their results are left out. They, and zeros after the last key, also round sizes
up: a library prepares a plan for each shape, so there must be few shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.attention.gather_keys import gather_keys
from overlap_spec_kernels.attention.kv_format import NO_SCALES, KVScales, fits_cache
from overlap_spec_kernels.attention.merge_parts import AttentionPart, merge_parts
from overlap_spec_kernels.launch import ceil_div, require, runs_triton

_HOPPER = (9, 0)  # measured there; the paged kernel is slow against its matrix units
_MAX_HEAD_DIM = 256


class ChunkCuts(NamedTuple):
    """How rows and keys are cut."""

    row_unit: int = 512  # rows of a part: a multiple
    key_unit: int = 1024  # keys without a mask: a multiple
    most_keys: int = 32768  # that are gathered at once

    def prefixes(self, start: int) -> list[tuple[int, int]]:
        """First key and number of keys of each part without a mask."""
        end = start - start % self.key_unit
        firsts = range(0, end, self.most_keys)
        return [(first, min(self.most_keys, end - first)) for first in firsts]

    def rows(self, num_rows: int) -> int:
        """Rounded up to whole units."""
        return ceil_div(num_rows, self.row_unit) * self.row_unit

    def side(self, empty: int, num_rows: int) -> int:
        """Rows and keys of the square part, whose first rows are empty."""
        return self.rows(empty + self.rows(num_rows))

    def most_gathered(self, num_rows: int, num_positions: int) -> int:
        """Keys that a chunk of at most so many rows gathers at once."""
        return max(self.side(self.key_unit - 1, num_rows), min(self.most_keys, num_positions))


CUTS = ChunkCuts()
_TRIAL = ChunkCuts(128, 128, 128)


def takes_long_chunks(num_heads: int, dtype: torch.dtype, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `chunk_attention` is fast for heads of this dtype and such caches on their device.

    Sync: tries it, and waits for it. The trial compiles what a later call may need, for this page size.
    """
    (_, page_size, _, dim), device = k_cache.shape, k_cache.device
    if not runs_triton(k_cache) or dtype.itemsize != 2 or dim > _MAX_HEAD_DIM or dim % 8:
        return False
    if torch.cuda.get_device_capability(device) < _HOPPER:
        return False
    q = torch.zeros(_TRIAL.row_unit, num_heads, dim, dtype=dtype, device=device)
    starts = (_TRIAL.most_keys, 3 * _TRIAL.most_keys)  # parts are merged in another dtype where there are several
    pages = torch.zeros(ceil_div(starts[-1] + len(q), page_size), dtype=torch.int32, device=device)
    try:
        for start in starts:
            chunk_attention(q, k_cache, v_cache, pages, start, 1.0, _TRIAL)
        torch.cuda.synchronize(device)
    except RuntimeError:  # no cuDNN, or one without this
        return False
    return True


def chunk_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    pages: Tensor,
    start: int,
    scale: float,
    cuts: ChunkCuts = CUTS,
    scales: KVScales = NO_SCALES,
) -> Tensor:
    """softmax(q K^T * scale) V of the rows at positions start.. of one request, each to keys 0..its own position.

    What `paged_attention` computes; parts are rounded to q's dtype before they are merged in float32. The keys of the
    rows are in the cache. Page-table entries beyond the last row's position are never followed.
    Shapes: q [n, nq, d], contiguous, caches [num_pages, page_size, nkv, d], pages [P] i32 -> [n, nq, d]. Raises:
    ValueError naming the argument. Sync: never.
    """
    num_rows = q.shape[0]
    require(q.dim() == 3 and q.is_contiguous(), "q", "[n, nq, d], contiguous")
    require(q.shape[1] % k_cache.shape[2] == 0, "q", "a multiple of the cache's heads")
    require(fits_cache(q.dtype, k_cache), "k_cache", "the dtype of q, or 8 bits")
    require(q.shape[2] == k_cache.shape[3], "k_cache", "the head dimension of q")
    keys, scale = _Keys(k_cache, v_cache, pages), scale * scales.k
    prefixes = cuts.prefixes(start)
    seen = sum(num_keys for _, num_keys in prefixes)
    empty = start - seen  # rows before the chunk's
    square = _placed(q, empty, cuts.side(empty, num_rows))
    part = keys.attended(square, seen, start + num_rows, scale, causal=True).of_rows(empty, num_rows)
    rows = square[empty : empty + cuts.rows(num_rows)]
    for first, num_keys in prefixes:
        end = first + num_keys
        other = keys.attended(rows, first, end, scale, causal=False).of_rows(0, num_rows)
        part = merge_parts(part, other, q.dtype if end == seen else part.lse.dtype)
    return part.out if scales.v == 1.0 else part.out * scales.v


class _Keys(NamedTuple):
    """Where the keys of one request are."""

    k_cache: Tensor
    v_cache: Tensor
    pages: Tensor

    def attended(self, q: Tensor, first: int, end: int, scale: float, causal: bool) -> AttentionPart:
        """Attention to the keys first..end - 1: of every row to each, or if causal to as many as the row's number."""
        num_keys = q.shape[0] if causal else end - first
        k, v = gather_keys(self.k_cache, self.v_cache, self.pages, first, end, num_keys, q.dtype)
        return (_cudnn_attention if runs_triton(q) else _dense_attention_reference)(q, k, v, scale, causal)


def _placed(q: Tensor, first: int, num_rows: int) -> Tensor:
    """q at rows first.. of `num_rows`, the others zero; q itself if there are no others."""
    if q.shape[0] == num_rows:
        return q
    placed = q.new_zeros((num_rows, *q.shape[1:]))
    placed[first : first + q.shape[0]] = q
    return placed


def _dense_attention_reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> AttentionPart:
    """Shapes: q [n, nq, d], k, v [m, nkv, d], m = n if causal."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    q, k, v = (tensor.transpose(0, 1).to(wide) for tensor in (q, k, v))  # [heads, rows, d]
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * scale
    if causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 0)
    return AttentionPart(out.transpose(0, 1).to(dtype), scores.logsumexp(-1))


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> AttentionPart:
    heads = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))  # [1, heads, rows, d]
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(*heads, None, True, 0.0, causal, False, scale=scale)
    return AttentionPart(out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[0]))
