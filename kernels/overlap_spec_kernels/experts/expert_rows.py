"""Which rows have which experts of a mixture, read on the host: for what multiplies expert by expert, on a CPU."""

from collections.abc import Iterator

import torch
from torch import Tensor


def expert_rows(experts: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Every expert that some row has, ascending, and its places among the T * k, ascending.

    Shapes: experts [T, k] i64 -> [n] i64 each. Sync: waits for `experts`.
    """
    flat = experts.flatten()
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    places = flat.argsort(stable=True).split(counts)
    return ((expert, rows) for expert, rows in enumerate(places) if counts[expert])
