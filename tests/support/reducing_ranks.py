"""One rank of a test of reductions between GPUs, in a process of its own."""

from collections.abc import Callable
from pathlib import Path

import torch
from overlap_spec_kernels.all_reduce import all_gather_reference, all_reduce_add_reference, all_reduce_reference
from overlap_spec_kernels.norm.normed import Norm
from torch import Tensor

from overlap_spec.models.layers.parallel import Form, SymmetricCommunicator, form_of
from support.peer_buffers import parts_of

SHAPES = ((1, 4096), (2, 4096), (32, 4096), (3, 1000), (128, 8192), (8192, 4096), (1, 7))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REPLAYS = 20


def run_rank(rank: int, ranks: int, directory: str) -> None:
    """All sizes, captured and replayed. Writes what was wrong, a line each, to a file of its own."""
    torch.cuda.set_device(rank)
    communicator = SymmetricCommunicator(rank, ranks, Path(directory) / "store")
    wrong = [line for dtype in DTYPES for shape in SHAPES for line in compared(communicator, shape, dtype)]
    torch.cuda.synchronize()
    communicator.close()
    (Path(directory) / f"rank-{rank}").write_text("\n".join(wrong))


def compared(communicator: SymmetricCommunicator, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """What differs from the references, which are computed from the parts of all ranks."""
    rank, ranks = communicator.rank, communicator.ranks
    residual = torch.full(shape, 1.5, dtype=dtype, device="cuda")
    norm = Norm(torch.linspace(0.5, 2, shape[-1], device="cuda").to(dtype), 1e-5)
    operations: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": communicator.all_reduce,
        "NCCL sum": communicator.nccl_all_reduce,
        "gather": communicator.all_gather,
    }
    part = torch.zeros(shape, dtype=dtype, device="cuda")
    if form_of(part.nbytes, ranks) is Form.ONE_SHOT:  # of more the sum is added afterwards, in another rounding
        operations["added"] = lambda part: communicator.all_reduce_add(part, residual, norm).weighted
    for run in operations.values():  # loads kernels, and connects NCCL
        run(part)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = {name: run(part) for name, run in operations.items()}
    wrong = []
    for replay in range(REPLAYS):
        parts = [each.cuda() for each in parts_of(ranks, shape, dtype, seed=replay)]
        part.copy_(parts[rank])
        if replay % ranks == rank:
            torch.cuda._sleep(2_000_000)
        graph.replay()
        for name, result in results.items():
            expected = all_gather_reference(parts) if name == "gather" else all_reduce_reference(parts)
            if name == "added":
                expected = all_reduce_add_reference(parts, residual, norm).weighted
            if not torch.equal(result, expected):
                wrong.append(f"{name} {shape} {dtype} replay {replay}")
    return wrong
