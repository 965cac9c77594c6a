"""What the written-out draft heads are made of, in plain torch: norm, rotary embedding, attention of one request.

Shapes: T rows, N heads of size D, H hidden.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Shapes: [T, H] -> [T, H]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Shapes: [T, H] -> [T, H]."""
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


class Attention:
    """Causal attention of one layer, and the K/V of the rows so far. `window`: keys that a row sees; None: all."""

    def __init__(self, head_dim: int, rope_theta: float, window: int | None = None) -> None:
        self._head_dim = head_dim
        self._theta = rope_theta
        self._window = window
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        """Rows at positions start.., heads side by side: [T, N * D] each -> [T, N * D].

        K/V from `start` on is replaced.
        """
        q, k, v = (x.view(len(x), -1, self._head_dim).transpose(0, 1) for x in (q, k, v))
        q, k = self._rope(q, start), self._rope(k, start)
        if self._keys is not None and self._values is not None:
            k, v = torch.cat((self._keys[:, :start], k), 1), torch.cat((self._values[:, :start], v), 1)
        self._keys, self._values = k, v
        group = q.shape[0] // k.shape[0]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(start)
        if self._window is not None:
            mask = mask.triu(start - self._window + 1)
        attended = F.scaled_dot_product_attention(
            q, k.repeat_interleave(group, 0), v.repeat_interleave(group, 0), attn_mask=mask
        )
        return attended.transpose(0, 1).reshape(q.shape[1], -1)

    def _rope(self, x: Tensor, start: int) -> Tensor:
        d = self._head_dim
        inverse = 1.0 / self._theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
        angles = torch.arange(start, start + x.shape[1], dtype=torch.float32)[:, None] * inverse
        cos, sin = torch.cat([angles.cos()] * 2, -1).to(x), torch.cat([angles.sin()] * 2, -1).to(x)
        return x * cos + torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1) * sin
