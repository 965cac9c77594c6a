"""Reductions between ranks on GPUs: several ranks of one GPU on streams of their own, and two GPUs in two processes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from overlap_spec_kernels.all_reduce import (
    PeerBuffers,
    all_gather_reference,
    all_reduce_add_reference,
    all_reduce_reference,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_add,
    two_shot_all_reduce,
)
from overlap_spec_kernels.norm.normed import Norm
from reductions import exit_states
from support.peer_buffers import UNCAPPED, buffers_of, flags_of, parts_of, peers_of
from support.reducing_ranks import run_rank
from torch import Tensor

CAPACITY = 1 << 20
REPLAYS = 100
RESIDUAL = 1.5
Operation = Callable[[Tensor, PeerBuffers], Tensor]


def added(part: Tensor, peers: PeerBuffers) -> Tensor:
    """The sum and a residual, times the weight of a norm."""
    return one_shot_all_reduce_add(part, torch.full_like(part, RESIDUAL), norm_like(part), peers).weighted


def norm_like(part: Tensor) -> Norm:
    return Norm(torch.linspace(0.5, 2, part.shape[-1], device=part.device).to(part.dtype), 1e-5)


def added_reference(parts: Sequence[Tensor]) -> Tensor:
    return all_reduce_add_reference(parts, torch.full_like(parts[0], RESIDUAL), norm_like(parts[0])).weighted


OPERATIONS: dict[str, Operation] = {
    "one-shot": one_shot_all_reduce,
    "two-shot": two_shot_all_reduce,
    "gather": one_shot_all_gather,
    "added": added,
}
REFERENCES = dict.fromkeys(("one-shot", "two-shot"), all_reduce_reference) | {
    "gather": all_gather_reference,
    "added": added_reference,
}


def replayed(
    operation: Operation, parts: Sequence[Tensor], all_peers: list[PeerBuffers], buffers: list[Tensor]
) -> list[Tensor]:
    """Results of all ranks. Shapes: parts [REPLAYS, T, N] of each rank -> [REPLAYS, ..] of each rank.

    Nothing is allocated or loaded while a rank waits: that would wait for it in turn.
    """
    for peers in all_peers:
        for buffer in buffers:
            flags_of(buffer, len(buffers)).fill_(UNCAPPED)
        operation(parts[0][0].clone(), peers)
    torch.cuda.synchronize()
    for each in (*buffers, *(peers.epochs for peers in all_peers)):
        each.zero_()
    runs = [captured(operation, part, peers) for part, peers in zip(parts, all_peers, strict=True)]
    torch.cuda.synchronize()
    for replay in range(REPLAYS):
        for rank, (graph, stream, _, _) in enumerate(runs):
            with torch.cuda.stream(stream):
                if replay % 7 == rank:
                    torch.cuda._sleep(300_000)
                graph.replay()
    torch.cuda.synchronize()
    return [history for _, _, _, history in runs]


def captured(
    operation: Operation, parts: Tensor, peers: PeerBuffers
) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream, Tensor, Tensor]:
    """A graph of one rank that takes the next part at each replay, and keeps its result.

    Its count of replays must live as long as it does: freed memory would become another rank's count.
    """
    at = torch.zeros(1, dtype=torch.int64, device="cuda")
    wide = peers.ranks if operation is one_shot_all_gather else 1
    history = torch.zeros((*parts.shape[:2], wide * parts.shape[2]), dtype=parts.dtype, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = operation(parts.index_select(0, at)[0], peers)
        history.index_copy_(0, at, result[None])
        at += 1
    return graph, stream, at, history


@pytest.mark.parametrize("shape", [(1, 4096), (3, 1000), (16, 8192)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", OPERATIONS)
def test_ranks_on_streams(name: str, ranks: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Bits of the reference on each rank, though ranks are late in turns. Another order of ranks is noticed."""
    buffers = buffers_of(ranks, CAPACITY, "cuda")
    peers = [peers_of(rank, buffers, CAPACITY) for rank in range(ranks)]
    parts = [part.cuda() for part in parts_of(ranks, (REPLAYS, *shape), dtype)]
    expected = REFERENCES[name](parts)
    for found in replayed(OPERATIONS[name], parts, peers, buffers):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_wrong_order_of_ranks_is_noticed(dtype: torch.dtype) -> None:
    """Ranks whose numbers are turned around are in step, and add up in another order."""
    ranks, shape = 4, (3, 1000)
    buffers = buffers_of(ranks, CAPACITY, "cuda")
    turned = [peers_of(ranks - 1 - rank, buffers[::-1], CAPACITY) for rank in range(ranks)]
    parts = [part.cuda() for part in parts_of(ranks, (REPLAYS, *shape), dtype)]
    for found in replayed(one_shot_all_reduce, parts, turned, buffers):
        assert torch.equal(found, all_reduce_reference(parts[::-1]))
        assert not torch.equal(found, all_reduce_reference(parts))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that one process sees: run it without -n")
def test_two_gpus(tmp_path: Path) -> None:
    """All sizes, captured, NCCL beside ours: the reference's bits on both."""
    states = exit_states(run_rank, 2, str(tmp_path))
    assert states == [0, 0], "None: a rank waits for ever"
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == ["", ""]
