"""Gated MLPs: `down(act(gate(x)) * up(x))`, gate and up as one linear."""

from dataclasses import dataclass
from typing import Protocol

import torch
from overlap_spec_kernels import Clamp, Normed, clamped_mul, gelu_mul
from overlap_spec_kernels.norm.silu_mul import silu
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.work import ForwardWork


class MLP(Protocol):
    """The MLP of a layer. It owns its weights."""

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""

    def __call__(self, x: Normed) -> Tensor:
        """Shapes: [T, H] -> [T, H]."""

    def add(self, x: Normed, norm: Norm) -> Normed:
        """The sum with the residual that it reads, which it may overwrite, and `norm` of it. Shapes: [T, H]."""


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """A gated MLP with SiLU."""

    gate_up: AnyLinear  # [2I, H], gate first
    down: AnyLinear  # [H, I]

    @property
    def work(self) -> ForwardWork:
        return self.gate_up.work + self.down.work

    def __call__(self, x: Normed) -> Tensor:
        return self.down(self._gated(x))

    def add(self, x: Normed, norm: Norm) -> Normed:
        return norm.join(self.down, self._gated(x), x.values, take=True)

    def _gated(self, x: Normed) -> Tensor:
        """Shapes: [T, H] -> [T, I]."""
        return self.gate_up.gated(x)


@dataclass(frozen=True, slots=True)
class GeluMLP(GatedMLP):
    """A gated MLP with GELU in its tanh form."""

    def _gated(self, x: Normed) -> Tensor:
        return gelu_mul(self.gate_up(x))


@dataclass(frozen=True, slots=True)
class BoundedMLP(GatedMLP):
    """A gated MLP with SiLU, whose activation and up projection are bounded (Step-3.5)."""

    limit: float  # silu(gate) <= limit, -limit <= up <= limit

    def _gated(self, x: Normed) -> Tensor:
        """In float32 or wider, rounded once."""
        both = self.gate_up(x)
        gate, up = both.to(torch.promote_types(both.dtype, torch.float32)).chunk(2, dim=1)
        return (silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)).to(both.dtype)


def gated_mlp(gate_up: AnyLinear, down: AnyLinear, limit: float | None = None) -> GatedMLP:
    """`limit`: see `BoundedMLP`; None or 0: nothing is bounded."""
    return BoundedMLP(gate_up, down, limit) if limit else GatedMLP(gate_up, down)


@dataclass(frozen=True, slots=True)
class ClampedMLP(GatedMLP):
    """A gated MLP whose gate and up projections are bounded (gpt-oss)."""

    clamp: Clamp

    def _gated(self, x: Normed) -> Tensor:
        return clamped_mul(self.gate_up(x), self.clamp)
