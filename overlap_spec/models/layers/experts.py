"""Mixtures of experts: a router chooses a few of a layer's experts for each row, and their results are added up.

    x ----> router ----> k experts and their weights
    x ----> those experts, each a gated MLP ----> sum in the order of the weights, largest first

A row's result has the same bits whatever rows are beside it, and however many.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from overlap_spec_kernels import Biases, Clamp, Normed, Routing, experts_mlp, normalised, route, sum_of_experts
from torch import Tensor

from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import Norm
from overlap_spec.models.work import ForwardWork, product_work


@dataclass(frozen=True, slots=True)
class Router:
    """Softmax over all experts, of which a row takes the `top_k` most probable.

    Logits are not rounded to the model's type: in 16 bits many would be equal.
    """

    weight: Tensor  # [E, H]
    top_k: int
    normalised: bool  # a row's weights add up to 1: the softmax of its chosen experts alone
    bias: Tensor | None = None  # [E], of logits

    @property
    def num_experts(self) -> int:
        """Experts E to choose from."""
        return self.weight.shape[0]

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        of_bias = 0 if self.bias is None else self.bias.nbytes
        return product_work(self.weight.nbytes + of_bias, self.weight.numel())

    def __call__(self, x: Tensor) -> Routing:
        """Shapes: x [T, H]. Sync: never."""
        return route(x, self.weight, self.top_k, self.normalised, self.bias)


class Experts(Protocol):
    """The experts of a layer. Of several ranks each has a part of every expert's inner columns."""

    @property
    def work(self) -> ForwardWork:
        """What one expert reads and computes for a row. All are alike."""
        ...

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """The sum over each row's experts; of several ranks, this rank's part of it. Shapes: x [T, H] -> [T, H]."""
        ...


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Experts on a CPU, each with linears of its own, in any form."""

    experts: tuple[GatedMLP, ...]

    @property
    def work(self) -> ForwardWork:
        return self.experts[0].work

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """See `Experts`. Sync: reads on the host which experts rows have."""
        return sum_of_experts(x, routing, len(self.experts), self._compute)

    def _compute(self, expert: int, rows: Tensor) -> Tensor:
        return self.experts[expert](Normed(rows, rows))


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts on a GPU, all in two tensors of the model's type."""

    gate_up: Tensor  # [E, 2I, H], gate first
    down: Tensor  # [E, H, I]
    biases: Biases | None = None
    clamp: Clamp | None = None  # of gate and up; None: silu(gate) * up

    @property
    def work(self) -> ForwardWork:
        num_weights = self.gate_up[0].numel() + self.down[0].numel()
        num_biases = 0 if self.biases is None else sum(each[0].numel() for each in self.biases)
        return product_work((num_weights + num_biases) * self.down.itemsize, num_weights + num_biases)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """See `Experts`. Sync: never on CUDA."""
        return experts_mlp(x, self.gate_up, self.down, routing, self.biases, self.clamp)


def alone(part: Tensor) -> Tensor:
    """The sum over all ranks where there is one."""
    return part


@dataclass(frozen=True, slots=True)
class MixtureMLP:
    """A mixture in the place of a layer's MLP. Every rank has the whole router."""

    router: Router
    experts: Experts
    all_reduce: Callable[[Tensor], Tensor] = alone  # the sum of this over all ranks. Shapes: [T, H] -> [T, H]

    @property
    def work(self) -> ForwardWork:
        """What a forward reads at least: the experts of one row. More rows may have others."""
        each, chosen = self.experts.work, self.router.top_k
        return self.router.work + ForwardWork(chosen * each.weight_bytes, chosen * each.row_flop)

    def __call__(self, x: Normed) -> Tensor:
        """Shapes: [T, H] -> [T, H]."""
        rows = normalised(x)
        return self.all_reduce(self.experts(rows, self.router(rows)))

    def add(self, x: Normed, norm: Norm) -> Normed:
        """See `MLP`."""
        return norm.enter(x.values + self(x))
