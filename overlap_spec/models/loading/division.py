"""Which part of each tensor a rank takes, by the tensor's name. What is not named here is taken whole by every rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from overlap_spec.models.layers.embedding import communicator_of
from overlap_spec.models.layers.linear import AnyLinear
from overlap_spec.models.layers.parallel import WHOLE, Rank, RowParallelLinear

EXPERTS = "experts."  # have a division of their own while a mixture is taken (`dividing`)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Ranges of one dimension of a tensor, side by side, then zeros."""

    dim: int  # of a weight; a bias has dimension 0 alone
    whole: int  # size in the file
    spans: tuple[slice, ...]
    padding: int = 0

    @property
    def size(self) -> int:
        """Rows or columns, with the zeros."""
        size: int = sum(span.stop - span.start for span in self.spans) + self.padding
        return size

    def in_blocks(self, size: int) -> "Part":
        """The same of blocks of so many rows or columns, at which it begins and ends."""
        spans = tuple(slice(span.start // size, -(-span.stop // size)) for span in self.spans)
        return Part(self.dim, -(-self.whole // size), spans)

    def shape_in_file(self, shape: Shape) -> Shape:
        """That of the whole tensor, by that of the part."""
        assert shape[self.dim] == self.size, f"a rank has {self.size} of {self.whole}, asked for {shape[self.dim]}"
        return (*shape[: self.dim], self.whole, *shape[self.dim + 1 :])

    def read(self, take: Callable[[tuple[slice, ...]], Tensor]) -> Tensor:
        """The part, from what gives slices of the tensor."""
        before = (slice(None),) * self.dim
        found = [take((*before, span)) for span in self.spans]
        part = found[0] if len(found) == 1 else torch.cat(found, self.dim)
        if not self.padding:
            return part
        return F.pad(part, (0, 0) * (part.dim() - 1 - self.dim) + (0, self.padding))


@dataclass(frozen=True, slots=True)
class Division:
    """How a checkpoint is divided for one rank."""

    rank: Rank
    parts: Mapping[str, Part]  # of weights and biases, by the last part of the linear's name
    vocabulary: Part = Part(0, 0, ())
    of_experts: bool = False  # names are those of experts, and else of everything but experts
    scales: Mapping[str, Part] = field(default_factory=dict)  # of weights in few bits, by the same names
    scale: str = ""  # the end of the names of scales; "": there are none

    def part_of(self, name: str) -> Part | None:
        """A tensor's part by its canonical name; None: all of it."""
        if (EXPERTS in name) is not self.of_experts:
            return None
        if self.scale and name.endswith(self.scale):
            return self.scales.get(linear_of(name.removesuffix(self.scale)))
        part = self.parts.get(linear_of(name))
        return None if part is not None and part.dim and name.endswith(".bias") else part

    def is_added_elsewhere(self, name: str) -> bool:
        """Whether this is the bias of a sum over ranks, which the first of them adds."""
        return self.rank.rank > 0 and name.endswith(".bias") and self._is_sum(linear_of(name), name)

    def joined(self, linear: AnyLinear, names: Sequence[str]) -> AnyLinear:
        """A linear that sums over ranks, if these are divided by their columns and there is something to sum with."""
        if self.rank.communicator is None or not any(self._is_sum(linear_of(name), name) for name in names):
            return linear
        return RowParallelLinear(linear, communicator_of(self.rank))

    def _is_sum(self, last: str, name: str) -> bool:
        return EXPERTS not in name and last in self.parts and self.parts[last].dim == 1


class Divisible(Protocol):
    """A checkpoint, or random weights."""

    division: Division | None


@contextmanager
def dividing(weights: Divisible, rank: Rank, parts: Mapping[str, Part], of_experts: bool = False) -> Iterator[None]:
    """Take parts of a layer's tensors in this block; the names are the layer's alone. One rank takes all of them."""
    before = weights.division
    if rank.ranks > 1:
        weights.division = Division(rank, parts, of_experts=of_experts)
    try:
        yield
    finally:
        weights.division = before


def sharing(division: Division | None) -> Rank:
    """The rank that layers are divided for after they are taken."""
    return WHOLE if division is None else division.rank


def linear_of(name: str) -> str:
    """`layers.0.self_attn.q_proj.weight` -> `q_proj`."""
    return name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def equal_part(rank: Rank, size: int, dim: int = 0) -> Part:
    """One of as many equal parts as there are ranks."""
    return Part(dim, size, (rank.columns(size),))


def both_halves(rank: Rank, size: int, dim: int = 0) -> Part:
    """One of as many equal parts of two tensors of this size, which stand one behind the other in one."""
    span = rank.columns(size)
    return Part(dim, 2 * size, (span, moved(span, size)))


def moved(span: slice, by: int) -> slice:
    """The same range further on."""
    return slice(span.start + by, span.stop + by)


def vocabulary_part(rank: Rank, size: int) -> Part:
    """Rows of tokens: every rank has equally many, the last ones with zeros."""
    each = -(-size // rank.ranks)
    start, stop = min(rank.rank * each, size), min((rank.rank + 1) * each, size)
    return Part(0, size, (slice(start, stop),), each - (stop - start))
