"""The residual on its way into a norm.

An RMSNorm needs a sum over a whole row, which no program of a linear that writes the row has. So its work is divided:
the kernel that writes the residual also writes it times the norm's weight, and sums of its squares; the kernel that
reads it multiplies its own result, which is linear in the row, by the scale

    norm(v) = scale(v) * (v * weight)        scale(v) = 1 / sqrt(mean(v^2) + eps)
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """An RMSNorm. Shapes: weight [H]."""

    weight: Tensor
    eps: float


class Normed(NamedTuple):
    """A residual and its norm, which is `weighted` where there are no `squares`."""

    values: Tensor  # [T, H], the residual
    weighted: Tensor  # [T, H], times the norm's weight
    squares: Tensor | None = None  # [parts, T] f32: sums of squares of parts of each row of `values`
    eps: float = 0.0
    projected: Tensor | None = None  # [T, O]: what the next linear makes of it, where one kernel computes both

    def normalised(self) -> Tensor:
        """The norm itself, in the residual's dtype. Shapes: -> [T, H]."""
        if self.squares is None:
            return self.weighted
        scale = torch.rsqrt(self.squares.sum(0) / self.values.shape[1] + self.eps)
        return (self.weighted * scale[:, None]).to(self.values.dtype)


def rows_of(x: Tensor | Normed) -> Tensor:
    """What a linear reads of `x`. Shapes: -> [T, H]."""
    return x.weighted if isinstance(x, Normed) else x


def normalised(x: Tensor | Normed) -> Tensor:
    """The rows with the norm's scale applied. Shapes: -> [T, H]."""
    return x.normalised() if isinstance(x, Normed) else x
