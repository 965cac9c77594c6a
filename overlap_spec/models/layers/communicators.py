"""What ranks compute together on CPUs, over gloo.

gloo promises no order of its own for sums. So a reduction is a gather, and each rank adds the parts up in the order of
the ranks: results are the same bits on every rank and in every run.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from overlap_spec_kernels import Norm, Normed
from torch import Tensor, distributed

from overlap_spec.models.layers.parallel import reduced_then_added

LOOPBACK = "lo"  # ranks are processes of one machine
TIMEOUT = timedelta(days=7)  # who hangs is the supervisor's to judge, which ends all ranks


class GlooCommunicator:
    """One of several processes; each is given the same `store_path`, a file that is not there before the first.

    Waits until all are connected. Raises: RuntimeError if another one is gone.
    """

    def __init__(self, rank: int, ranks: int, store_path: Path) -> None:
        self.rank = rank
        self.ranks = ranks
        library: Any = distributed  # whose stubs lack half of it
        options = library.ProcessGroupGloo._Options()
        options._devices = [library.ProcessGroupGloo.create_device(interface=LOOPBACK)]
        options._timeout = TIMEOUT
        self._group = library.ProcessGroupGloo(library.FileStore(str(store_path), ranks), rank, ranks, options)

    def all_reduce(self, part: Tensor) -> Tensor:
        first, *others = self._gathered(part)
        for other in others:
            first += other
        return first

    def all_reduce_add(self, part: Tensor, residual: Tensor, norm: Norm) -> Normed:
        return reduced_then_added(self, part, residual, norm)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._gathered(part), dim=-1)

    def _gathered(self, part: Tensor) -> list[Tensor]:
        """The parts of all ranks, in their order."""
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(self.ranks)]
        self._group.allgather([parts], [part]).wait()
        return parts
