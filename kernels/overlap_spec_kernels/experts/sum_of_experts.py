"""The sum over each row's experts, expert by expert, as a CPU computes it: for any form of their weights.

A row's result has the same bits whatever rows are beside it, and however many: products are of tiles of `TILE` rows,
the last one padded, and a row's sum has one order.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4  # rows of a product: on a CPU so many take as long as one


class Routing(NamedTuple):
    """The experts of each row, in the order in which they were chosen: the best first."""

    experts: Tensor  # [T, k] i64
    weights: Tensor  # [T, k] f32 (f64 of a float64 model)


def sum_of_experts(x: Tensor, routing: Routing, num_experts: int, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sum of `compute(expert, rows)` over each row's experts, in the order of its routing.

    Products and sums are operations of their own, each rounded, in the type of the weights.
    Shapes: x [T, H], compute [TILE, H] -> [TILE, H]; -> [T, H]. Sync: waits for the routing.
    """
    (num_rows, top_k), size = routing.experts.shape, x.shape[1]
    results = x.new_empty(num_rows * top_k, size)
    for expert, places in expert_rows(routing.experts, num_experts):
        results[places] = in_tiles(functools.partial(compute, expert), x[places // top_k], size)
    by_place = results.view(num_rows, top_k, size)
    total = routing.weights[:, :1] * by_place[:, 0]
    for place in range(1, top_k):
        total = total + routing.weights[:, place, None] * by_place[:, place]
    return total.to(x.dtype)


def expert_rows(experts: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Every expert that some row has, ascending, and its places among the T * k, ascending.

    Shapes: experts [T, k] i64 -> [n] i64 each. Sync: waits for `experts`.
    """
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    places = flat.argsort(stable=True).split(counts)
    return ((expert, rows) for expert, rows in enumerate(places) if counts[expert])


def in_tiles(compute: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """`compute` of `TILE` rows at a time. Shapes: x [T, I], compute [TILE, I] -> [TILE, size]; -> [T, size]."""
    results = x.new_empty(len(x), size)
    for begin in range(0, len(x), TILE):
        tile = x[begin : begin + TILE]
        missing = TILE - len(tile)
        results[begin : begin + TILE] = compute(F.pad(tile, (0, 0, 0, missing)))[: len(tile)]
    return results
