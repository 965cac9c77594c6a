"""Mixtures of experts: a router chooses a few of a layer's experts for each row, and their results are added up.

    x ----> router ----> k experts and their weights
    x ----> those experts, each a gated MLP ----> sum in the order in which they were chosen, the best first
    x ----> a shared expert, in some models ----> added to that

A row's result has the same bits whatever rows are beside it, and however many.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from overlap_spec_kernels import (
    Biases,
    ExpertWeight,
    Gate,
    Grouping,
    Norm as KernelNorm,
    Normed,
    Routing,
    best_of_groups,
    experts_add,
    experts_mlp,
    in_tiles,
    normalised,
    route,
    sum_of_experts,
)
from overlap_spec_kernels.experts.route import Common, Rows, rows_to_route, written
from overlap_spec_kernels.norm.silu_mul import mul_by_share
from torch import Tensor

from overlap_spec.models.layers.linear import make_linear
from overlap_spec.models.layers.mlp import GatedMLP, gated_mlp
from overlap_spec.models.layers.norm import Norm, RMSNorm, WideRMSNorm
from overlap_spec.models.layers.parallel import Communicator
from overlap_spec.models.work import ForwardWork, count_bytes, product_work


class Choice(Protocol):
    """How a router chooses experts and weighs them. Of equal experts it chooses those of lower index.

    Logits are not rounded to the model's type: in 16 bits many would be equal.
    """

    @property
    def top_k(self) -> int:
        """Experts of a row."""

    def __call__(self, x: Rows, weight: Tensor, common: Common | None = None) -> Routing:
        """`common`: the last one of every row. Shapes: x [T, H], weight [E, H]. Sync: never."""


@dataclass(frozen=True, slots=True)
class MostProbable:
    """Softmax over all experts, of which a row takes the `top_k` most probable."""

    top_k: int
    normalised: bool  # a row's weights add up to 1: the softmax of its chosen experts alone
    bias: Tensor | None = None  # [E], of logits

    def __call__(self, x: Rows, weight: Tensor, common: Common | None = None) -> Routing:
        """See `Choice`."""
        return route(x, weight, self.top_k, self.normalised, self.bias, common)


@dataclass(frozen=True, slots=True)
class BestOfGroups:
    """Experts are chosen by scores, and by a correction that moves the choice but not the weights (DeepSeek-V3)."""

    top_k: int
    normalised: bool  # a row's weights add up to 1 before they are scaled
    grouping: Grouping
    correction: Tensor | None = None  # [E] f32 or f64

    def __call__(self, x: Rows, weight: Tensor, common: Common | None = None) -> Routing:
        """See `Choice`."""
        return best_of_groups(x, weight, self.top_k, self.normalised, self.grouping, self.correction, common)


@dataclass(frozen=True, slots=True)
class Router:
    """The weight of a router, and how it chooses."""

    weight: Tensor  # [E, H]
    choice: Choice

    @property
    def num_experts(self) -> int:
        """Experts E to choose from."""
        return self.weight.shape[0]

    @property
    def work(self) -> ForwardWork:
        """What it reads and computes."""
        return product_work(count_bytes(self), self.weight.numel())

    def __call__(self, x: Rows, common: Common | None = None) -> Routing:
        """Shapes: x [T, H]. Sync: never."""
        return self.choice(x, self.weight, common)


class Experts(Protocol):
    """The experts of a layer. Of several ranks each has a part of every expert's inner columns."""

    @property
    def work(self) -> ForwardWork:
        """What one expert reads and computes for a row. All are alike."""

    @property
    def common(self) -> Common | None:
        """One of them that all rows have: a routing has it last."""

    def __call__(self, x: Rows, routing: Routing) -> Tensor:
        """The sum over each row's experts; of several ranks, this rank's part of it. Shapes: x [T, H] -> [T, H]."""

    def add(self, x: Rows, routing: Routing, residual: Tensor, norm: Norm, shared: Tensor | None = None) -> Normed:
        """The same sum, that of a shared expert added, with a residual, and `norm` of it. Shapes: all [T, H]."""


@dataclass(frozen=True, slots=True)
class SeparateExperts:
    """Experts on a CPU, each with linears of its own, in any form."""

    experts: tuple[GatedMLP, ...]

    @property
    def work(self) -> ForwardWork:
        return self.experts[0].work

    @property
    def common(self) -> Common | None:
        return None

    def __call__(self, x: Rows, routing: Routing) -> Tensor:
        """See `Experts`. Sync: reads on the host which experts rows have."""
        return sum_of_experts(written(x), routing, len(self.experts), self._compute)

    def add(self, x: Rows, routing: Routing, residual: Tensor, norm: Norm, shared: Tensor | None = None) -> Normed:
        """See `Experts`. Sync: as `__call__`."""
        return norm.enter(residual + with_shared(self(x, routing), shared))

    def _compute(self, expert: int, rows: Tensor) -> Tensor:
        return self.experts[expert](Normed(rows, rows))


def separated(gate_up: Tensor, down: Tensor, limit: float | None = None) -> SeparateExperts:
    """Those of two stacks. `limit`: see `BoundedMLP`. Shapes: [E, 2I, H], gate first, [E, H, I]."""
    pairs = zip(map(make_linear, gate_up), map(make_linear, down), strict=True)
    return SeparateExperts(tuple(gated_mlp(*pair, limit) for pair in pairs))


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts on a GPU, all in two weights: of the model's type, or in 8 or 4 bits.

    The last one may be a shared expert, so that its products are no launches of their own.
    """

    gate_up: ExpertWeight  # [E, 2I, H], gate first
    down: ExpertWeight  # [E, H, I]
    biases: Biases | None = None
    clamp: Gate | None = None  # of gate and up; None: silu(gate) * up
    common: Common | None = None  # the last expert, if all rows have it

    @property
    def work(self) -> ForwardWork:
        num_experts, size, inner = self.down.shape
        num_weights = 3 * size * inner + (0 if self.biases is None else sum(each[0].numel() for each in self.biases))
        return product_work((count_bytes(self) - count_bytes(self.common)) // num_experts, num_weights)

    def __call__(self, x: Rows, routing: Routing) -> Tensor:
        """See `Experts`. Sync: never on CUDA."""
        return experts_mlp(x, self.gate_up, self.down, routing, self.biases, self.clamp)

    def add(self, x: Rows, routing: Routing, residual: Tensor, norm: Norm, shared: Tensor | None = None) -> Normed:
        """See `Experts`: one kernel sums, adds and normalises. Sync: never on CUDA."""
        if not isinstance(norm, RMSNorm | WideRMSNorm):
            return norm.enter(residual + with_shared(self(x, routing), shared))
        of_sum = KernelNorm(norm.weight, norm.eps)
        return experts_add(x, self.gate_up, self.down, routing, residual, of_sum, self.biases, self.clamp, shared)


def with_shared(routed: Tensor, shared: Tensor | None) -> Tensor:
    """The sum of a row's experts and the one that all rows have. Shapes: [T, H]."""
    return routed if shared is None else routed + shared


def distinct_experts(routings: Sequence[Tensor], num_experts: int) -> Tensor:
    """How many experts of a layer some row has chosen, summed over layers. Static shapes. Sync: never.

    Expert `num_experts` is one that all rows have. Shapes: each [T, k] i64, the same for all layers -> [] i64.
    """
    experts = torch.stack([routing.reshape(-1) for routing in routings])
    read = torch.zeros(len(routings), num_experts + 1, dtype=torch.bool, device=experts.device)
    return read.scatter_(1, experts, True)[:, :num_experts].sum()


@dataclass(slots=True)
class Noted:
    """The experts that a mixture's rows had in the forward that runs, if they are counted."""

    is_wanted: bool = False
    experts: Tensor | None = None  # [T, k] i64


class ExpertReads:
    """Counts on the device, within decode steps, how many distinct experts layers read. Rows of padding read some, too.

    `sums` [2] i64: experts, and the layers that read them, since the start.
    """

    def __init__(self, num_experts: int, noted: Sequence[Noted], device: torch.device) -> None:
        self.num_experts = num_experts
        self.sums = torch.zeros(2, dtype=torch.int64, device=device)
        self._noted = noted

    def begin(self, is_counted: bool) -> None:
        """A forward begins. Of prompts, which have nearly all experts, nothing is counted, and nothing kept."""
        for each in self._noted:
            each.is_wanted = is_counted

    def add_up(self) -> None:
        """The forward's layers are launched. Sync: never."""
        routings = [each.experts for each in self._noted if each.experts is not None]
        for each in self._noted:
            each.experts = None
        if routings:
            self.sums[0].add_(distinct_experts(routings, self.num_experts))
            self.sums[1].add_(len(routings))


@dataclass(frozen=True, slots=True)
class GatedExpert(GatedMLP):
    """A shared expert whose weight is the sigmoid of a number that the row gives (Qwen3-Next)."""

    weight: Tensor  # [1, H]

    @property
    def work(self) -> ForwardWork:
        return self.gate_up.work + self.down.work + product_work(self.weight.nbytes, self.weight.numel())

    def __call__(self, x: Normed) -> Tensor:
        return mul_by_share(self.down(self._gated(x)), normalised(x), self.weight)


@dataclass(frozen=True, slots=True)
class MixtureMLP:
    """A mixture in the place of a layer's MLP. Every rank has the whole router."""

    router: Router
    experts: Experts
    communicator: Communicator | None = None  # sums up over the ranks, if there are several
    shared: GatedMLP | None = None  # an expert of every row, with weight 1; a rank has a part of it too
    noted: Noted = field(default_factory=Noted, compare=False)

    @property
    def work(self) -> ForwardWork:
        """What a forward reads at least: the experts of one row. More rows may have others."""
        each, chosen = self.experts.work, self.router.choice.top_k + (self.experts.common is not None)
        routed = self.router.work + ForwardWork(chosen * each.weight_bytes, chosen * each.row_flop)
        return routed if self.shared is None else routed + self.shared.work

    def __call__(self, x: Normed) -> Tensor:
        """Shapes: [T, H] -> [T, H]."""
        return self._partial(x) if self.communicator is None else self.communicator.all_reduce(self._partial(x))

    def add(self, x: Normed, norm: Norm) -> Normed:
        """See `MLP`."""
        if self.communicator is not None:
            if isinstance(norm, RMSNorm):
                return self.communicator.all_reduce_add(self._partial(x), x.values, norm)
            return norm.enter(x.values + self(x))
        rows, of_shared = self._prepared(x)
        routing = self._route(rows)
        return self.experts.add(rows, routing, x.values, norm, of_shared)

    def _partial(self, x: Normed) -> Tensor:
        """This rank's part of the sum. Shapes: [T, H] -> [T, H]."""
        rows, of_shared = self._prepared(x)
        routing = self._route(rows)
        return with_shared(self.experts(rows, routing), of_shared)

    def _prepared(self, x: Normed) -> tuple[Rows, Tensor | None]:
        """The normalised rows, which the router writes, and what the shared expert makes of them. Shapes: [T, H]."""
        rows = rows_to_route(x, self.router.num_experts)
        return rows, None if self.shared is None else self._of_shared(self.shared, x, written(rows))

    def _route(self, rows: Rows) -> Routing:
        """Shapes: [T, H] -> experts and weights [T, k]."""
        routing = self.router(rows, self.experts.common)
        if self.noted.is_wanted:
            self.noted.experts = routing.experts
        return routing

    def _of_shared(self, shared: GatedMLP, x: Normed, rows: Tensor) -> Tensor:
        """Shapes: rows [T, H], normalised x -> [T, H]."""
        if rows.device.type != "cpu":
            return shared(x)
        return in_tiles(lambda tile: shared(Normed(tile, tile)), rows, rows.shape[1])
