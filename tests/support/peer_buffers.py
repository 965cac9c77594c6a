"""Several ranks' buffers in one process, for tests of reductions between them."""

from collections.abc import Sequence

import torch
from overlap_spec_kernels.all_reduce import PROGRAMS, PeerBuffers
from torch import Tensor

UNCAPPED = 1 << 40  # a flag that no launch waits for


def buffers_of(ranks: int, capacity: int, device: str = "cpu", shared: bool = False) -> list[Tensor]:
    """One buffer for each rank, of zeros. `shared`: with processes that are forked later."""
    sizes = [PeerBuffers.num_bytes(ranks, capacity)] * ranks
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]
    return [buffer.share_memory_() for buffer in buffers] if shared else buffers


def peers_of(rank: int, buffers: Sequence[Tensor], capacity: int) -> PeerBuffers:
    """As that rank addresses them."""
    device = buffers[0].device
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device)
    return PeerBuffers(rank, addresses, torch.zeros(PROGRAMS, dtype=torch.int64, device=device), capacity)


def flags_of(buffer: Tensor, ranks: int) -> Tensor:
    """Shapes: [PROGRAMS, ranks] i64, a view."""
    return buffer[: PROGRAMS * ranks * 8].view(torch.int64).view(PROGRAMS, ranks)


def parts_of(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Parts whose sum is another one in any other order of ranks, in bfloat16 too.

    -2^24, a, 2^24, b: a is rounded to whole numbers below 2^24 and to even ones above, and b not at all. Ranks 0 and 1
    may be exchanged, as sums commute.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=generator) for _ in range(ranks)]
    if ranks > 2:
        parts[0], parts[1], parts[2] = torch.full(shape, -(2.0**24)), 4 * parts[1].abs(), torch.full(shape, 2.0**24)
    return [part.to(dtype) for part in parts]
