"""What ranks compute together, each of which has a part of a layer: `Communicator`, and the two that there are.

On GPUs of one host it is by our reductions for few bytes, by NCCL for many. Every form gives the bits of the sum in the
order of the ranks. NCCL promises no order. Two ranks have only one sum; of more, parts are exchanged through NCCL, and
each rank adds up its own before all are gathered. All operations stand in captured graphs, whose results lie in the
graph's own memory. Each rank runs them one after another: `PeerBuffers` holds for one stream at a time.

On CPUs it is over gloo, which promises no order of its own for sums. So a reduction is a gather, and each rank adds the
parts up in the order of the ranks: results are the same bits on every rank and in every run.
"""

import gc
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from overlap_spec_kernels import (
    PROGRAMS,
    REDUCED_DTYPES as DTYPES,
    Norm,
    Normed,
    PeerBuffers,
    add_rms_norm,
    all_reduce_reference,
    one_shot_all_gather,
    one_shot_all_reduce,
    one_shot_all_reduce_add,
    two_shot_all_reduce,
)
from torch import Tensor, distributed

from overlap_spec.config import refuse_multicast
from overlap_spec.errors import ConfigError
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

    def add(self, x: Tensor, residual: Tensor, norm: Norm, take: bool = False) -> Normed:
        return self.communicator.all_reduce_add(self.partial(x), residual, norm)


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


CAPACITY = 4 << 20  # bytes of an operand of ours
# Up to how many bytes a sum is one-shot, and up to how many two-shot, by the number of ranks; from there on NCCL.
# Two ranks read as much in one shot as in two, and are measured (benchmarks/results/h200/tp2-*.json). Limits of
# four and eight are estimates: benchmarks/reductions.py --ranks 4 measures them.
LIMITS = {2: (2 << 20, 2 << 20), 4: (256 << 10, 4 << 20), 8: (128 << 10, 4 << 20)}
GATHER_LIMIT = 4 << 20  # bytes of a rank's columns


class Form(Enum):
    """How a sum is computed."""

    ONE_SHOT = "one-shot"
    TWO_SHOT = "two-shot"
    NCCL = "NCCL"


def form_of(num_bytes: int, ranks: int) -> Form:
    """What is fastest for a sum of so many bytes."""
    one_shot, two_shot = LIMITS[ranks]
    if num_bytes <= one_shot:
        return Form.ONE_SHOT
    return Form.TWO_SHOT if num_bytes <= two_shot else Form.NCCL


class SymmetricCommunicator:
    """One of several processes, each with a GPU of its own, which all see each other's memory.

    Each is given the same `store_path`, a file that is not there before the first. Waits until all are connected.
    Raises: ConfigError naming a rank whose GPU does not see the memory of another.
    """

    def __init__(self, rank: int, ranks: int, store_path: Path) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        refuse_multicast()  # before NCCL and symmetric memory look
        self.rank = rank
        self.ranks = ranks
        self._library: Any = distributed  # whose stubs lack half of it
        store = self._library.FileStore(str(store_path), ranks)
        self._library.init_process_group(
            "nccl", store=store, rank=rank, world_size=ranks, device_id=device, timeout=TIMEOUT
        )
        symmetric: Any = import_module("torch.distributed._symmetric_memory")
        num_bytes = PeerBuffers.num_bytes(ranks, CAPACITY)
        self._buffer: Tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._buffer.zero_()  # the flags, before another rank signals
        try:
            self._handle: Any = symmetric.rendezvous(self._buffer, self._library.group.WORLD)
        except RuntimeError as error:
            raise ConfigError("tp_size", f"rank {rank} maps no memory of the other ranks: {error}") from error
        self._library.barrier()  # behind the zeros of all ranks
        addresses = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)
        epochs = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self.peers = PeerBuffers(rank, addresses, epochs, CAPACITY)

    def all_reduce(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        form = form_of(part.nbytes, self.ranks)
        if part.dtype not in DTYPES:
            form = Form.NCCL
        if form is Form.NCCL:
            return self.nccl_all_reduce(part)
        return (one_shot_all_reduce if form is Form.ONE_SHOT else two_shot_all_reduce)(part, self.peers)

    def all_reduce_add(self, part: Tensor, residual: Tensor, norm: Norm) -> Normed:
        if part.dtype in DTYPES and form_of(part.nbytes, self.ranks) is Form.ONE_SHOT:
            return one_shot_all_reduce_add(part.contiguous(), residual, norm, self.peers)
        return reduced_then_added(self, part, residual, norm)

    def all_gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        if part.dtype in DTYPES and part.nbytes <= GATHER_LIMIT:
            return one_shot_all_gather(part, self.peers)
        return self.nccl_all_gather(part)

    def nccl_all_reduce(self, part: Tensor) -> Tensor:
        """The sum through NCCL alone, of any size."""
        if self.ranks == 2:
            total = part.clone()
            self._library.all_reduce(total)
            return total
        size = -(-part.numel() // self.ranks)
        sent = part.new_zeros(self.ranks * size)
        sent[: part.numel()] = part.view(-1)
        exchanged = torch.empty_like(sent)
        self._library.all_to_all_single(exchanged, sent)
        own = all_reduce_reference(exchanged.view(self.ranks, size).unbind())
        self._library.all_gather_into_tensor(sent, own)
        return sent[: part.numel()].view_as(part)

    def nccl_all_gather(self, part: Tensor) -> Tensor:
        """Through NCCL alone, of any size."""
        rows, columns = part.shape
        gathered = part.new_empty((self.ranks * rows, columns))
        self._library.all_gather_into_tensor(gathered, part)
        return gathered.view(self.ranks, rows, columns).transpose(0, 1).reshape(rows, self.ranks * columns)

    def close(self) -> None:
        """Leave the others. Captured graphs are gone by then: NCCL waits for those that have operations of its own."""
        gc.collect()
        self._library.destroy_process_group()
