"""How K and V lie in a cache: in the model's dtype, or divided by a scale and rounded to 8 bits.

A value is rounded once, when it is written: x / scale, clamped to the format's range, so that no finite value becomes
infinite or NaN. Every row attends to rounded values, also the one that has just written them. So what a row attends to
does not depend on how a prompt was cut or on which rows share a step.

Kernels read stored values as they are: k's scale is a factor of the products with queries, v's of the output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from overlap_spec_kernels.language import tl
from overlap_spec_kernels.launch import TritonKernel

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


class KVScales(NamedTuple):
    """What a layer's stored keys and values are multiplied by. 1 where the cache has the model's dtype."""

    k: float = 1.0
    v: float = 1.0


NO_SCALES = KVScales()


def fits_cache(dtype: torch.dtype, cache: Tensor) -> bool:
    """Whether heads of this dtype can be kept in such a cache."""
    return cache.dtype == dtype or cache.dtype in EIGHT_BITS


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x as a cache of this dtype holds it; NaN stays NaN."""
    if x.dtype == dtype:
        return x
    bound = torch.finfo(dtype).max
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) * (1.0 / scale)
    return wide.clamp_(-bound, bound).to(dtype)


def write_rows(cache: Tensor, cache_rows: Tensor, x: Tensor, scale: float) -> None:
    """Put heads into their cache rows. Shapes: cache [num_pages, page_size, nkv, d], cache_rows [T], x [T, nkv, d]."""
    rows, values = cache.view(-1, *x.shape[1:]), stored(x, cache.dtype, scale)
    if rows.dtype in EIGHT_BITS:  # which torch does not index
        rows, values = rows.view(torch.uint8), values.view(torch.uint8)
    rows.index_copy_(0, cache_rows, values)


@TritonKernel
def to_cache(x: tl.tensor, inverse_scale: float, dtype: tl.constexpr) -> tl.tensor:
    """`stored` in a kernel."""
    if x.dtype != dtype:
        bound: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
        x = tl.clamp(x.to(tl.float32) * inverse_scale, -bound, bound, propagate_nan=tl.PropagateNan.ALL).to(dtype)
    return x
