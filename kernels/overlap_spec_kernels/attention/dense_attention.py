"""Attention of the rows of one request to keys side by side: what the references do with what they have gathered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """softmax(q K^T * scale) V of the keys that each row sees.

    `seen`: booleans, or what is added to scores; None: each row sees every key. `sinks`: the logit of each head that
    takes part in its softmax and adds nothing (Xiao et al. 2023, arXiv:2309.17453; gpt-oss learns it).
    Shapes: q [R, nq, d], k, v [n, nkv, d], seen [R, n], sinks [nq] -> [R, nq, d].
    """
    if sinks is not None:
        k, v = (F.pad(keys, (0, 0, 0, 0, 0, 1)) for keys in (k, v))  # its product with any query is zero
        seen = _with_sinks(seen, sinks.to(q.dtype), q.shape[0], k.shape[0] - 1)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))  # [1, heads, rows, d]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _with_sinks(seen: Tensor | None, sinks: Tensor, num_rows: int, num_keys: int) -> Tensor:
    """What is added to the scores of the keys and of one more, the sink. Shapes: -> [nq, R, n + 1]."""
    added = sinks.new_zeros(num_rows, num_keys)
    if seen is not None:
        added = added.masked_fill_(~seen, -torch.inf) if seen.dtype == torch.bool else seen
    rows = added.expand(len(sinks), -1, -1), sinks[:, None, None].expand(-1, num_rows, 1)
    return torch.cat(rows, dim=2)
