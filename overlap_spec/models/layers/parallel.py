"""What several devices compute together."""

from dataclasses import dataclass
from typing import Protocol

import torch
from overlap_spec_kernels import Norm, Normed, add_rms_norm
from torch import Tensor

from overlap_spec.models.layers.linear import AnyLinear


class Communicator(Protocol):
    """What ranks compute together. All call the same operations with the same shapes in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum over ranks, added in the order of the ranks: the same bits on each. Shapes: [..] -> [..]."""

    def all_gather(self, part: Tensor) -> Tensor:
        """All ranks' columns side by side, in the order of the ranks. Shapes: [T, N] -> [T, ranks N]."""

    def all_reduce_add(self, part: Tensor, residual: Tensor, norm: Norm) -> Normed:
        """The residual and the sum over ranks, on their way into `norm`. Shapes: part, residual [T, H]."""


def reduced_then_added(communicator: Communicator, part: Tensor, residual: Tensor, norm: Norm) -> Normed:
    """`Communicator.all_reduce_add` in two operations."""
    rows, values = add_rms_norm(communicator.all_reduce(part), residual, norm.weight, norm.eps)
    return Normed(values, rows)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the devices that a layer is divided among.

    `communicator`: None for one rank alone, and where a test adds up the parts by itself.
    """

    rank: int = 0
    ranks: int = 1
    communicator: Communicator | None = None

    def columns(self, size: int) -> slice:
        """This rank's part of so many columns, which divide by the ranks."""
        assert size % self.ranks == 0, f"{size} columns do not divide by {self.ranks} ranks"
        part = size // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)


WHOLE = Rank()  # a layer that is not divided


@dataclass(frozen=True, slots=True)
class RowParallelLinear(AnyLinear):
    """One shard of a linear whose input columns are divided: a shard's result is a part of the sum over all shards.

    The shards must be summed before the residual is added and the next norm begins: where ranks can, in one operation
    (`all_reduce_add`). At most one shard has a bias.
    """

    shard: AnyLinear  # [O, I / n]
    communicator: Communicator  # sums up over the shards

    @property
    def out_features(self) -> int:
        return self.shard.out_features

    @property
    def in_features(self) -> int:
        return self.shard.in_features

    @property
    def num_bytes(self) -> int:
        return self.shard.num_bytes

    @property
    def device(self) -> torch.device:
        return self.shard.device

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.shard.compute_dtype

    def rows(self, ids: Tensor | slice) -> "RowParallelLinear":
        return RowParallelLinear(self.shard.rows(ids), self.communicator)

    def partial(self, x: Tensor | Normed) -> Tensor:
        """This shard's part of the sum. Shapes: [T, I / n] -> [T, O]."""
        return self.shard(x)

    def __call__(self, x: Tensor | Normed) -> Tensor:
        return self.communicator.all_reduce(self.partial(x))

    def add(self, x: Tensor, residual: Tensor, norm: Norm) -> Normed:
        return self.communicator.all_reduce_add(self.partial(x), residual, norm)
