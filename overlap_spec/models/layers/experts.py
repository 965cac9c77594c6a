"""Mixtures of experts: a router chooses a few of a layer's experts for each row, and their results are added up.

    x ----> router ----> k experts and their weights
    x ----> those experts, each a gated MLP ----> sum in the order of the weights, largest first

A row's result is the same bits whatever rows are beside it, and however many: products are of tiles of `TILE` rows,
the last one padded, and a row's sum has one order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from overlap_spec_kernels import Normed, expert_rows, normalised
from torch import Tensor

from overlap_spec.models.layers.mlp import GatedMLP
from overlap_spec.models.layers.norm import Norm, wide_dtype
from overlap_spec.models.work import ForwardWork, product_work

TILE = 4  # rows of a product: on a CPU so many take as long as one (`make_linear`)


class Routing(NamedTuple):
    """The experts of each row, largest weight first."""

    experts: Tensor  # [T, k] i64
    weights: Tensor  # [T, k], float32 or wider


@dataclass(frozen=True, slots=True)
class Router:
    """Softmax over all experts, of which a row takes the `top_k` most probable; of equal ones those of lower index.

    Logits are not rounded to the model's type: in 16 bits many would be equal.
    """

    weight: Tensor  # [E, H]
    top_k: int
    normalised: bool  # a row's weights add up to 1: the softmax of its chosen experts alone

    @property
    def num_experts(self) -> int:
        """Experts E to choose from."""
        return self.weight.shape[0]

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        return product_work(self.weight.nbytes, self.weight.numel())

    def __call__(self, x: Tensor) -> Routing:
        """Shapes: x [T, H]. Sync: never."""
        wide = wide_dtype(x.dtype)
        weight = self.weight.to(wide)
        logits = in_tiles(lambda tile: F.linear(tile, weight), x.to(wide), self.num_experts)
        ranked = logits.softmax(1).sort(dim=1, descending=True, stable=True)
        weights, experts = ranked.values[:, : self.top_k], ranked.indices[:, : self.top_k]
        if self.normalised:
            weights = weights / weights.sum(1, keepdim=True)
        return Routing(experts, weights)


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, each a gated MLP. Of several ranks each has a part of every expert's inner columns."""

    experts: tuple[GatedMLP, ...]

    @property
    def work(self) -> ForwardWork:
        """What one expert reads and computes for a row. All are alike."""
        return self.experts[0].work

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """The sum over each row's experts; of several ranks, this rank's part of it.

        Shapes: x [T, H] -> [T, H]. Sync: reads on the host which experts rows have, so it runs on a CPU alone.
        """
        (num_rows, top_k), size = routing.experts.shape, x.shape[1]
        results = x.new_empty(num_rows * top_k, size)
        for expert, places in expert_rows(routing.experts, len(self.experts)):
            results[places] = in_tiles(_call(self.experts[expert]), x[places // top_k], size)
        return _weighted_sum(results.view(num_rows, top_k, size), routing.weights).to(x.dtype)


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


def in_tiles(compute: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """`compute` of `TILE` rows at a time. Shapes: x [T, I], compute [TILE, I] -> [TILE, size]; -> [T, size]."""
    results = x.new_empty(len(x), size)
    for begin in range(0, len(x), TILE):
        tile = x[begin : begin + TILE]
        missing = TILE - len(tile)
        results[begin : begin + TILE] = compute(F.pad(tile, (0, 0, 0, missing)))[: len(tile)]
    return results


def _call(expert: GatedMLP) -> Callable[[Tensor], Tensor]:
    return lambda rows: expert(Normed(rows, rows))


def _weighted_sum(results: Tensor, weights: Tensor) -> Tensor:
    """Products and sums are operations of their own, each rounded. Shapes: [T, k, H], [T, k] -> [T, H]."""
    total = weights[:, :1] * results[:, 0]
    for place in range(1, weights.shape[1]):
        total = total + weights[:, place, None] * results[:, place]
    return total
