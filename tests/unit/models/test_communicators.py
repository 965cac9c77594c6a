"""Ranks over gloo: sums in the order of the ranks, and gathered columns."""

from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from itertools import permutations
from operator import add
from pathlib import Path

import torch

from overlap_spec.models.layers.parallel import GlooCommunicator

RANKS, SHAPE = 4, (3, 40)


def test_sums_have_the_order_of_the_ranks_and_gathers_too(tmp_path: Path) -> None:
    """The same bits on every rank, others in every other order of additions. A part is left as it was."""
    parts = list(torch.randn(RANKS, *SHAPE, generator=torch.Generator().manual_seed(5)))
    given = [part.clone() for part in parts]

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        communicator = GlooCommunicator(rank, RANKS, tmp_path / "store")
        return communicator.all_reduce(parts[rank]), communicator.all_gather(parts[rank])

    with ThreadPoolExecutor(RANKS) as ranks:
        results = list(ranks.map(run, range(RANKS)))
    expected = given[0] + given[1] + given[2] + given[3]
    for total, gathered in results:
        assert torch.equal(total, expected) and torch.equal(gathered, torch.cat(given, dim=1))
    assert all(torch.equal(part, before) for part, before in zip(parts, given, strict=True))
    orders = [order for order in permutations(range(RANKS)) if order not in ((0, 1, 2, 3), (1, 0, 2, 3))]
    others = [reduce(add, (given[rank] for rank in order)) for order in orders]
    others.append((given[0] + given[1]) + (given[2] + given[3]))
    assert not any(torch.equal(expected, other) for other in others), "the test could not fail"
