"""Ranks over gloo: sums in the order of the ranks, and gathered columns."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from support.peer_buffers import parts_of

from overlap_spec.models.layers.communicators import GlooCommunicator

RANKS, SHAPE = 4, (3, 40)


def test_sums_have_the_order_of_the_ranks_and_gathers_too(tmp_path: Path) -> None:
    """The same bits on every rank, in another order others. A part is left as it was."""
    parts = parts_of(RANKS, SHAPE, torch.float32)
    given = [part.clone() for part in parts]

    def run(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        communicator = GlooCommunicator(rank, RANKS, tmp_path / "store")
        return communicator.all_reduce(parts[rank]), communicator.all_gather(parts[rank])

    with ThreadPoolExecutor(RANKS) as ranks:
        results = list(ranks.map(run, range(RANKS)))
    expected = given[0] + given[1] + given[2] + given[3]
    assert not torch.equal(expected, given[3] + given[2] + given[1] + given[0]), "the test could not fail"
    for total, gathered in results:
        assert torch.equal(total, expected) and torch.equal(gathered, torch.cat(given, dim=1))
    assert all(torch.equal(part, before) for part, before in zip(parts, given, strict=True))
